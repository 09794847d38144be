"""What vLLM does to weights and key/values when nobody guards it, and that our worker extension does not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import torch

from tests.vllm.kit import (
    CONTEXT,
    START_S,
    canary_of,
    logprobs_of,
    request,
    save_version,
    tied_model,
    vllm_processes,
)
from trace_async.canary import check_canary
from trace_async.config import EngineConfig
from trace_async.core.types import Adapter, Canary, FloatArray
from trace_async.engines.vllm_common import Load
from trace_async.engines.vllm_front import Answer, VllmFront
from trace_async.engines.vllm_process import Launch, VllmProcess
from trace_async.errors import PolicyError
from trace_async.weights import HIGH, LOW, PREFIX, write_weights

T = TypeVar("T")

CLOSE = 1e-3
OPENING = [3, 4, 5, 6, 7, 8, 9] * 6


@dataclass(slots=True)
class World:
    """A bare vLLM with our extension, and two policies: `old`, which it was started with, and `new`."""

    runner: asyncio.Runner
    process: VllmProcess
    front: VllmFront
    folder: Path
    old: torch.nn.Module
    new: torch.nn.Module

    def do(self, body: Callable[[], Awaitable[T]]) -> T:
        async def limited() -> T:
            async with asyncio.timeout(60):
                return await body()

        return self.runner.run(limited())

    def load(self, name: str, canary: Canary, *, version: int, adapter: Adapter | None = None) -> Load:
        return Load(version=version, epoch=1, weights=self.folder / name, canary=canary, adapter=adapter)

    async def replace(self, load: Load) -> str:
        """As the engine does it."""
        await self.front.pause()
        refusal = await self.front.replace(load)
        await self.front.resume()
        return refusal

    async def found(self, canary: Canary, *, label: str) -> list[FloatArray]:
        return [await self.front.score(prompt, label=label, salt=label) for prompt in canary.prompts]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("policy")
    old, new = tied_model(0), tied_model(1)
    old.save_pretrained(folder / "start")
    new.save_pretrained(folder / "whole")
    save_version(old, folder / "old.safetensors")
    save_version(new, folder / "new.safetensors")

    async def start() -> VllmProcess:
        async with asyncio.timeout(START_S):
            return await VllmProcess.start(
                Launch(folder=folder / "start", config=EngineConfig(max_batch=8), max_tokens=CONTEXT)
            )

    with asyncio.Runner() as runner:
        process = runner.run(start())
        try:
            yield World(runner, process, VllmFront(process, base=folder / "start"), folder, old, new)
        finally:
            runner.run(process.stop())
            gc.collect()
    assert not vllm_processes()


def test_our_extension_loads_a_tied_policy_whole_and_the_canary_agrees(world: World) -> None:
    canary = canary_of(world.new)
    load = world.load("new.safetensors", canary, version=1)
    assert world.do(lambda: world.replace(load)) == ""
    found = world.do(lambda: world.found(canary, label=load.label))
    check_canary(canary, found, dtype="float32", version=1)
    gaps = np.abs(np.concatenate(found) - np.concatenate(canary.logprobs))
    assert gaps.max() < CLOSE


def test_a_plain_reload_leaves_the_old_head_of_a_tied_policy_and_the_canary_finds_it(world: World) -> None:
    """vLLM's CPU build, 0.32. When this fails, vLLM has been mended; `repack_heads` does no harm then."""
    before, canary = canary_of(world.old), canary_of(world.new)
    assert world.do(lambda: world.replace(world.load("old.safetensors", before, version=2))) == ""

    async def reload() -> list[FloatArray]:
        await world.front.pause()
        await world.process.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(world.folder / "whole")})
        await world.front.name_weights("e1v3")
        await world.front.resume()
        return await world.found(canary, label="e1v3")

    found = world.do(reload)
    with pytest.raises(PolicyError, match=r"version 3 does not act: .*Part of the engine may hold older weights"):
        check_canary(canary, found, dtype="float32", version=3)
    with pytest.raises(PolicyError, match="version 3 does not act"):
        check_canary(canary, found, dtype="bfloat16", version=3)


def test_a_swap_that_keeps_key_values_gives_tokens_of_neither_policy(world: World) -> None:
    """The hazard that pausing with `clear_cache` is for."""
    before, after = canary_of(world.old), world.load("new.safetensors", canary_of(world.new), version=5)
    assert world.do(lambda: world.replace(world.load("old.safetensors", before, version=4))) == ""
    ask = request("in flight", OPENING, max_tokens=CONTEXT - 60, seed=3)

    async def swap() -> Answer:
        async with asyncio.TaskGroup() as group:
            long = group.create_task(world.front.answer(ask, temperature=1.0, stop_ids=(), salt="kept"))
            beside = request("beside", OPENING, max_tokens=20)
            await world.front.answer(beside, temperature=1.0, stop_ids=(), salt="kept")
            await world.process.llm.pause_generation(mode="keep", clear_cache=False)
            await world.process.llm.collective_rpc(
                "load_version", args=(str(after.weights), str(world.folder / "start"), 0, 0.0)
            )
            await world.front.name_weights(after.label)
            await world.front.resume()
        return long.result()

    answer = world.do(swap)
    label, start, end = answer.spans[-1]
    assert label == after.label
    tokens = [*OPENING, *answer.token_ids.tolist()]
    for model in (world.old, world.new):
        gaps = np.abs(answer.logprobs - logprobs_of(model, tokens)[len(OPENING) - 1 :])[start:end]
        assert gaps.mean() > 100 * CLOSE


def test_low_rank_additions_are_merged_with_the_start_policy(world: World) -> None:
    rank, alpha, module = 4, 8.0, "model.layers.1.mlp.down_proj"
    torch.manual_seed(5)
    low, high = torch.randn(rank, 128), torch.randn(128, rank)
    pairs = {f"{PREFIX}{module}{LOW}": low, f"{PREFIX}{module}{HIGH}": high}
    write_weights(world.folder / "adapter.safetensors", pairs, aliases={})
    merged = tied_model(0)
    with torch.no_grad():
        merged.get_submodule(module).weight.add_(alpha / rank * high @ low)
    canary = canary_of(merged)
    load = world.load("adapter.safetensors", canary, version=6, adapter=Adapter(rank=rank, alpha=alpha))
    assert world.do(lambda: world.replace(load)) == ""
    check_canary(canary, world.do(lambda: world.found(canary, label=load.label)), dtype="float32", version=6)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            lambda state: state.pop("model.layers.0.mlp.up_proj.weight"),
            r"missing \['model.layers.0.mlp.up_proj.weight'",
        ),
        (lambda state: state.update({"model.extra": torch.zeros(2)}), r"unexpected \['model.extra'\]"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(64)}),
            r"model.norm.weight \[64\] instead of \[128",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_before_a_tensor_is_copied(
    world: World, change: Callable[[dict[str, torch.Tensor]], object], complaint: str
) -> None:
    canary = canary_of(world.old)
    assert world.do(lambda: world.replace(world.load("old.safetensors", canary, version=7))) == ""
    state = {name: tensor.clone() for name, tensor in world.new.state_dict().items() if name != "lm_head.weight"}
    change(state)
    save_version(state, world.folder / "unfit.safetensors")
    refusal = world.do(lambda: world.replace(world.load("unfit.safetensors", canary, version=8)))
    with pytest.raises(PolicyError, match=complaint):
        raise PolicyError(refusal)
    check_canary(canary, world.do(lambda: world.found(canary, label="e1v7")), dtype="float32", version=7)


def test_a_file_that_is_not_there_is_refused(world: World) -> None:
    load = world.load("nowhere.safetensors", canary_of(world.old), version=9)
    assert "nowhere.safetensors cannot be read as safetensors" in world.do(lambda: world.replace(load))
