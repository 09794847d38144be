"""An in-process vLLM whose engine hangs: deadlines hold, and nothing goes on unproven."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from trace_async.config import EngineConfig
from trace_async.core.types import Canary
from trace_async.engines import vllm_engine
from trace_async.engines.vllm_engine import VllmEngine
from trace_async.engines.vllm_process import Launch


class HangingFront:
    """Answers nothing that is asked."""

    is_gone = False

    async def pause(self) -> None:
        await asyncio.Event().wait()

    resume = abort_all = pause


def test_a_load_that_is_cut_short_ends_although_vllm_does_not_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "_ABORT_DEADLINE_S", 0.05)

    async def main() -> None:
        launch = Launch(folder=Path("/nowhere"), config=EngineConfig(kind="vllm"), max_tokens=64)
        engine = VllmEngine(launch, stop_ids=(1,), version=0)
        engine._front, engine._version = HangingFront(), 0  # type: ignore[assignment]
        engine._up.set()
        async with asyncio.timeout(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await engine.load(
                        version=1, epoch=1, weights=Path("w"), canary=Canary(prompts=(), logprobs=()), adapter=None
                    )
        assert engine.version == -1

    asyncio.run(main())
