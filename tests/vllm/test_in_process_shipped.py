"""vLLM in this process with the shipped policy: bfloat16, a temperature, draining updates; how a start ends early."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.vllm.kit import (
    CONTEXT,
    START_S,
    EngineHost,
    canary_of,
    gap,
    hosted_engine,
    logits_of,
    request,
    save_version,
    until,
    vllm_processes,
)
from trace_async.app.wiring import policy_path
from trace_async.config import EngineConfig
from trace_async.core.types import Generation
from trace_async.engines.vllm_engine import VllmEngine
from trace_async.engines.vllm_process import Launch, VllmProcess
from trace_async.errors import PolicyError

TEMPERATURE = 0.7


@dataclass(slots=True)
class World:
    host: EngineHost
    folder: Path
    policy: torch.nn.Module
    files: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder, files = policy_path("builtin:frozenlake-tiny"), tmp_path_factory.mktemp("versions")
    policy: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(dtype="bfloat16", temperature=TEMPERATURE, on_update="drain", max_batch=8)
    before = dict(os.environ)
    with hosted_engine(folder, config, version=0) as host:
        first = request("first", [5, 6, 7], max_tokens=1)
        host.do(lambda engine: engine.generate(first), deadline_s=START_S)
        assert dict(os.environ) == before
        yield World(host, folder, policy.eval(), files)
    assert not vllm_processes()


async def ask_all(engine: VllmEngine, asks: list[Any]) -> list[Generation]:
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(engine.generate(ask)) for ask in asks]
    return [answer.result() for answer in answers]


def opening(seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, 300, size=40)]


def test_the_start_policy_can_be_sampled_without_a_load_under_the_version_it_was_given(world: World) -> None:
    answer = world.host.do(lambda engine: engine.generate(request("a", opening(0), max_tokens=4)))
    assert (answer.version_min, answer.version_max, answer.kv_version_min) == (0, 0, 0)
    assert world.host.engine.version == 0


def test_bfloat16_log_probabilities_lie_where_rounding_puts_them(world: World) -> None:
    asks = [request(f"b{i}", opening(i), max_tokens=60, seed=i) for i in range(16)]
    answers = world.host.do(lambda engine: ask_all(engine, asks))
    gaps = np.concatenate(
        [gap(world.policy, a, b, temperature=TEMPERATURE) for a, b in zip(asks, answers, strict=True)]
    )
    sys.stdout.write(
        f"bfloat16: {gaps.size} tokens, {gaps.mean():.1e} nats apart on average, {gaps.max():.1e} at worst\n"
    )
    assert gaps.mean() < 0.1
    assert gaps.max() < 1.0


def test_greedy_log_probabilities_are_those_of_the_sampled_distribution(world: World) -> None:
    """Also beside sampled requests, among which vLLM computes them in another way."""
    asks = [request(f"g{i}", opening(i), max_tokens=20, greedy=i % 2 == 0) for i in range(8)]
    alone = world.host.do(lambda engine: ask_all(engine, asks[:1]))
    answers = world.host.do(lambda engine: ask_all(engine, asks))
    for ask, answer in [(asks[0], alone[0]), *zip(asks, answers, strict=True)]:
        at_temperature = gap(world.policy, ask, answer, temperature=TEMPERATURE).mean()
        assert at_temperature < 0.1
        assert at_temperature < gap(world.policy, ask, answer, temperature=1.0).mean()
        if ask.greedy:
            tokens = [*ask.prefix_ids.tolist(), *answer.token_ids.tolist()]
            logits = logits_of(world.policy, tokens)[len(ask.prefix_ids) - 1 : -1]
            chosen = logits.gather(-1, torch.tensor(answer.token_ids.tolist())[:, None])[:, 0]
            assert (logits.max(-1).values - chosen).max() < 0.5  # near ties may fall otherwise in bfloat16


def test_requests_in_flight_finish_on_the_old_weights_and_new_ones_wait_for_the_new(world: World) -> None:
    other: Any = AutoModelForCausalLM.from_pretrained(world.folder, dtype=torch.float32)
    with torch.no_grad():
        torch.manual_seed(1)
        for parameter in other.parameters():
            parameter.add_(0.15 * parameter.std() * torch.randn_like(parameter))
    weights, canary = save_version(other.eval(), world.files / "v1.safetensors"), canary_of(other)
    asks = [request(f"d{i}", opening(i), max_tokens=CONTEXT - 60, seed=i) for i in range(4)]

    async def body(engine: VllmEngine) -> tuple[list[Generation], list[Generation]]:
        async with asyncio.TaskGroup() as group:
            old = [group.create_task(engine.generate(ask)) for ask in asks]
            await engine.generate(request("beside", opening(9), max_tokens=10))
            load = group.create_task(engine.load(version=1, epoch=1, weights=weights, canary=canary, adapter=None))
            await asyncio.sleep(0)  # the load has closed the door
            new = [group.create_task(engine.generate(ask)) for ask in asks]
            await load
            assert all(answer.done() for answer in old)
            assert not any(answer.done() for answer in new)
        return [a.result() for a in old], [a.result() for a in new]

    old, new = world.host.do(body)
    for ask, before, after in zip(asks, old, new, strict=True):
        assert (before.version_min, before.version_max, before.kv_version_min) == (0, 0, 0)
        assert (after.version_min, after.version_max, after.kv_version_min) == (1, 1, 1)
        assert gap(world.policy, ask, before, temperature=TEMPERATURE).mean() < 0.15
        assert gap(other, ask, after, temperature=TEMPERATURE).mean() < 0.15


def test_a_start_that_is_cancelled_leaves_no_process(world: World) -> None:
    others = set(vllm_processes())

    async def body(_: VllmEngine) -> None:
        config = EngineConfig(max_batch=2)
        start = asyncio.get_running_loop().create_task(
            VllmProcess.start(Launch(folder=world.folder, config=config, max_tokens=64))
        )
        await until(lambda: bool(set(vllm_processes()) - others) or start.done())
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert set(vllm_processes()) == others

    world.host.do(body, deadline_s=START_S)
    gc.collect()  # vLLM's sockets complain now, not when pytest ends


def test_options_that_vllm_does_not_know_end_the_start_with_their_names(world: World) -> None:
    config = EngineConfig(options={"no_such_option": 1})

    async def body(_: VllmEngine) -> None:
        with pytest.raises(PolicyError, match="no_such_option"):
            await VllmProcess.start(Launch(folder=world.folder, config=config, max_tokens=64))

    world.host.do(body)
