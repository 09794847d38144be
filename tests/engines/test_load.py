"""New weights in the local engine: proven or fenced, and what each kind of failure leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.engines.kit import NEVER, canary_of, decoder, write
from tests.engines.test_local import assert_says, load, request, until, with_engine
from trace_async.config import EngineConfig
from trace_async.core.types import Canary
from trace_async.engines.local import LocalEngine
from trace_async.errors import EngineError, PolicyError


def test_before_the_first_load_requests_wait_and_then_get_its_weights(tmp_path: Path) -> None:
    new = decoder("llama", seed=1)

    async def body(engine: LocalEngine) -> None:
        ask = request("early", [3, 4])
        async with asyncio.TaskGroup() as group:
            early = group.create_task(engine.generate(ask))
            await asyncio.sleep(0.05)
            assert (engine.version, early.done(), engine.counters()["forward_passes"]) == (-1, False, 0)
            await load(engine, 3, new, tmp_path)
        assert engine.version == early.result().version_min == early.result().kv_version_min == 3
        assert_says(new, ask, early.result())
        assert not engine.lost.is_set()

    with_engine(body, version=-1)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "mistral"])
def test_a_canary_that_disagrees_fences_the_engine_until_another_load_succeeds(kind: str, tmp_path: Path) -> None:
    new, other = decoder(kind, seed=1), decoder(kind, seed=2)
    weights = write(new, tmp_path / "new")

    async def body(engine: LocalEngine) -> None:
        with pytest.raises(PolicyError, match="version 4 does not act"):
            await engine.load(version=4, epoch=0, weights=weights, canary=canary_of(other), adapter=None)
        assert engine.version == -1
        ask = request("waits", [3, 4])
        async with asyncio.TaskGroup() as group:
            waits = group.create_task(engine.generate(ask))
            await asyncio.sleep(0.05)
            assert (waits.done(), engine.counters()["sampled_tokens"]) == (False, 0)
            await engine.load(version=5, epoch=0, weights=weights, canary=canary_of(new), adapter=None)
        assert (waits.result().version_min, engine.version) == (5, 5)
        assert_says(new, ask, waits.result())

    with_engine(body, model=decoder(kind))


def test_requests_in_flight_stand_still_behind_the_fence_and_go_on_with_proven_weights(tmp_path: Path) -> None:
    """None of their tokens is from the weights that were not proven; their stamps do not name that version."""
    old, unproven, new = (decoder("llama", seed=seed) for seed in range(3))
    weights = write(unproven, tmp_path / "unproven")

    async def body(engine: LocalEngine) -> None:
        ask = request("across", [3, 4, 5], max_tokens=150, seed=5)
        async with asyncio.TaskGroup() as group:
            across = group.create_task(engine.generate(ask))
            await until(engine, "forward_passes", 1)
            with pytest.raises(PolicyError, match="does not act"):
                await engine.load(version=4, epoch=0, weights=weights, canary=canary_of(old), adapter=None)
            before = engine.counters()["sampled_tokens"]
            await asyncio.sleep(0.05)
            assert engine.counters()["sampled_tokens"] == before < 150
            await load(engine, 7, new, tmp_path)
        found = across.result()
        assert (found.version_min, found.version_max, found.kv_version_min) == (2, 7, 2)
        assert len(found.token_ids) == 150

    with_engine(body, model=old, version=2, stop_id=NEVER, config=EngineConfig(on_update="continue"))


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    model = decoder("llama")
    short = {name: tensor.clone() for name, tensor in decoder("llama", seed=1).state_dict().items()}
    short.pop("model.norm.weight")
    save_file(short, tmp_path / "short")
    (tmp_path / "cut").write_bytes((tmp_path / "short").read_bytes()[:500])
    save_file({**decoder("llama").state_dict(), "other": torch.zeros(1)}, tmp_path / "long")

    async def body(engine: LocalEngine) -> None:
        for name, complaint in (("short", r"model\.norm\.weight"), ("cut", "cut"), ("long", r"unexpected \['other'\]")):
            with pytest.raises(PolicyError, match=complaint):
                await engine.load(version=3, epoch=0, weights=tmp_path / name, canary=canary_of(model), adapter=None)
        ask = request("still", [3, 4])
        found = await engine.generate(ask)
        assert found.version_min == engine.version == 0
        assert_says(model, ask, found)

    with_engine(body, model=decoder("llama"))


def test_weights_that_fail_half_way_fence_the_engine_and_whoever_loads_is_told(tmp_path: Path) -> None:
    model, new = decoder("llama"), decoder("llama", seed=1)
    whole = model.lm_head.weight

    async def body(engine: LocalEngine) -> None:
        # Storage shared between rows refuses to be written: the copy fails after the tensors before it were copied.
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(1, 32).expand(24, 32), requires_grad=False)
        with pytest.raises(PolicyError, match="version 3 was copied in part only"):
            await load(engine, 3, new, tmp_path)
        assert engine.version == -1
        model.lm_head.weight = whole
        await load(engine, 4, new, tmp_path)
        ask = request("after", [3, 4])
        assert_says(new, ask, await engine.generate(ask))

    with_engine(body, model=model)


def test_a_load_that_nobody_waits_for_any_more_ends_the_drain(tmp_path: Path) -> None:
    model = decoder("llama")
    weights = write(decoder("llama", seed=1), tmp_path / "new")

    async def body(engine: LocalEngine) -> None:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(engine.generate(request("long", [3, 4], max_tokens=150)))
            await until(engine, "forward_passes", 1)
            loading = asyncio.ensure_future(
                engine.load(version=3, epoch=0, weights=weights, canary=canary_of(model), adapter=None)
            )
            await asyncio.sleep(0)
            second = group.create_task(engine.generate(request("second", [3, 4], max_tokens=2)))
            await asyncio.sleep(0)
            loading.cancel()
            await second
            assert not long.done() or engine.counters()["sampled_tokens"] == 152
        assert engine.version == 0

    with_engine(body, model=model, stop_id=NEVER)


def test_of_several_loads_the_newest_stands_for_all(tmp_path: Path) -> None:
    old, new = decoder("llama"), decoder("llama", seed=2)

    async def body(engine: LocalEngine) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.generate(request("long", [3, 4], max_tokens=150)))
            await until(engine, "forward_passes", 1)
            group.create_task(load(engine, 3, decoder("llama", seed=1), tmp_path))
            group.create_task(load(engine, 4, new, tmp_path))
        assert engine.version == 4
        ask = request("after", [3, 4])
        assert_says(new, ask, await engine.generate(ask))

    with_engine(body, model=old, stop_id=NEVER)


def test_no_canary_prompt_is_an_empty_proof(tmp_path: Path) -> None:
    async def body(engine: LocalEngine) -> None:
        weights = write(decoder("llama", seed=1), tmp_path / "new")
        await engine.load(version=1, epoch=0, weights=weights, canary=Canary(prompts=(), logprobs=()), adapter=None)
        assert engine.version == 1

    with_engine(body)


def test_a_closed_engine_refuses_loads_and_requests(tmp_path: Path) -> None:
    engines: list[LocalEngine] = []

    async def body(engine: LocalEngine) -> None:
        engines.append(engine)
        await engine.generate(request("runs", [3]))

    with_engine(body)

    async def late() -> None:
        with pytest.raises(EngineError, match="closed"):
            await engines[0].generate(request("late", [3]))
        with pytest.raises(EngineError, match="closed"):
            await load(engines[0], 4, decoder("llama"), tmp_path)

    asyncio.run(late())


def test_rounded_weights_are_those_that_bfloat16_can_hold(tmp_path: Path) -> None:
    """A processor without bfloat16 arithmetic computes with them in float32; another one in bfloat16."""
    new = decoder("llama", seed=1)
    rounded = decoder("llama", seed=1)
    with torch.no_grad():
        for parameter in rounded.parameters():
            parameter.copy_(parameter.bfloat16())

    async def body(engine: LocalEngine) -> None:
        await load(engine, 3, new, tmp_path)
        ask = request("rounded", [3, 4])
        found = await engine.generate(ask)
        assert_says(rounded, ask, found)
        assert np.isfinite(found.logprobs).all()

    with_engine(body, config=EngineConfig(dtype="bfloat16"))
