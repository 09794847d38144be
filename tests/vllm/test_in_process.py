"""vLLM in this process, float32, a tied policy, updates in flight: one engine for these tests, killed in the last."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.vllm.kit import (
    CONTEXT,
    NEVER,
    START_S,
    EngineHost,
    canary_of,
    gap,
    hosted_engine,
    logits_of,
    request,
    save_version,
    tied_model,
    until,
    vllm_processes,
)
from trace_async.config import EngineConfig
from trace_async.core.types import Canary, GenerateRequest, Generation, StopReason
from trace_async.engines.vllm_engine import VllmEngine
from trace_async.errors import EngineError, PolicyError

OLD, NEW = 0, 1
"""Seeds of two policies."""

FLOAT32_GAP = 1e-3
"""Far below what other weights give, far above what was measured: see docs/vllm.md."""

PREFIX = [3, 4, 5, 6, 7, 8, 9] * 6


@dataclass(slots=True)
class World:
    """An engine, and two policies that it is given again and again under ever newer versions."""

    host: EngineHost
    folder: Path
    models: tuple[torch.nn.Module, torch.nn.Module]
    canaries: tuple[Canary, Canary]
    versions: Iterator[int]
    held: int = -1

    async def load(self, seed: int, *, canary: Canary | None = None) -> int:
        """Has the engine load a policy; the version it was given."""
        version, weights = next(self.versions), self.folder / f"{seed}.safetensors"
        known = canary or self.canaries[seed]
        await self.host.engine.load(version=version, epoch=1, weights=weights, canary=known, adapter=None)
        self.held = seed
        return version


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("policy")
    models = tied_model(OLD), tied_model(NEW)
    models[OLD].save_pretrained(folder / "start")
    for seed, model in enumerate(models):
        save_version(model, folder / f"{seed}.safetensors")
    canaries = canary_of(models[OLD]), canary_of(models[NEW])
    with hosted_engine(folder / "start", EngineConfig(on_update="continue", max_batch=8)) as host:
        yield World(host, folder, models, canaries, count(1))
    assert not vllm_processes()


@pytest.fixture
def old(world: World) -> World:
    """The engine holds the old policy, proven."""
    if world.host.engine.version < 0 or world.held != OLD:
        world.host.do(lambda _: world.load(OLD), deadline_s=START_S)
    return world


def long_requests(*, greedy: bool = False) -> list[GenerateRequest]:
    """Requests that take a second or more."""
    tokens = CONTEXT - 50
    return [request(f"long {i}", [*PREFIX, 10 + i], max_tokens=tokens, seed=i, greedy=greedy) for i in range(6)]


async def ask_all(engine: VllmEngine, asks: list[GenerateRequest]) -> list[Generation]:
    async with asyncio.TaskGroup() as group:
        answers = [group.create_task(engine.generate(ask)) for ask in asks]
    return [answer.result() for answer in answers]


async def under_way(engine: VllmEngine) -> None:
    """Returns when whatever was asked just before has some twenty tokens: a request for so many is answered."""
    await engine.generate(request("beside", PREFIX, max_tokens=20))


async def all_under_way(engine: VllmEngine, asks: list[GenerateRequest]) -> list[asyncio.Task[Generation]]:
    """Those of the requests that are in flight and have some twenty tokens."""
    answers = [asyncio.get_running_loop().create_task(engine.generate(ask)) for ask in asks]
    await under_way(engine)
    pending = [answer for answer in answers if not answer.done()]
    assert pending
    return pending


def test_at_temperature_zero_the_tokens_are_those_of_transformers(old: World) -> None:
    asks = [request(f"g{i}", [*PREFIX, 20 + i], max_tokens=24, greedy=True) for i in range(8)]
    for ask, answer in zip(asks, old.host.do(lambda engine: ask_all(engine, asks)), strict=True):
        tokens = [*ask.prefix_ids.tolist(), *answer.token_ids.tolist()]
        best = logits_of(old.models[OLD], tokens)[len(ask.prefix_ids) - 1 : -1].argmax(-1).tolist()
        assert answer.token_ids.tolist() == best
        assert gap(old.models[OLD], ask, answer).max() < FLOAT32_GAP


def test_log_probabilities_of_sampled_tokens_are_those_of_transformers(old: World) -> None:
    asks = [request(f"s{i}", [*PREFIX, 30 + i], max_tokens=60, seed=i) for i in range(8)]
    answers = old.host.do(lambda engine: ask_all(engine, asks))
    gaps = np.concatenate([gap(old.models[OLD], ask, answer) for ask, answer in zip(asks, answers, strict=True)])
    sys.stdout.write(
        f"float32: {gaps.size} tokens, {gaps.mean():.1e} nats apart on average, {gaps.max():.1e} at worst\n"
    )
    assert gaps.max() < FLOAT32_GAP
    assert all(answer.version_min == answer.version_max == answer.kv_version_min for answer in answers)
    assert {answer.version_max for answer in answers} == {old.host.engine.version}


def test_a_seed_gives_the_same_tokens_whoever_else_is_in_the_batch_and_other_seeds_give_others(old: World) -> None:
    ask = request("seeded", PREFIX, max_tokens=40, seed=7)
    others = [request(f"other {i}", [*PREFIX, i], max_tokens=40, seed=i) for i in range(3, 9)]
    alone = old.host.do(lambda engine: engine.generate(ask))
    among = old.host.do(lambda engine: ask_all(engine, [*others, ask]))[-1]
    assert alone.token_ids.tolist() == among.token_ids.tolist()
    other = old.host.do(lambda engine: engine.generate(request("x", PREFIX, max_tokens=40, seed=8)))
    assert other.token_ids.tolist() != alone.token_ids.tolist()


def test_prefixes_are_shared_within_a_version(old: World) -> None:
    before = old.host.engine.counters()["reused_tokens"]
    fresh = [11, 12, 13, 14] * 20
    for i in range(2):
        old.host.do(lambda engine, i=i: engine.generate(request(f"p{i}", [*fresh, i], max_tokens=2)))  # type: ignore[misc]
    assert old.host.engine.counters()["reused_tokens"] - before == 64  # whole blocks of 32


def test_a_stop_token_ends_the_turn_and_belongs_to_it(old: World) -> None:
    asks = [request(f"stop {i}", PREFIX, max_tokens=CONTEXT - 50, seed=i) for i in range(16)]
    answers = old.host.do(lambda engine: ask_all(engine, asks))
    stopped = [answer for answer in answers if answer.stop is StopReason.STOP]
    assert stopped
    assert all(answer.token_ids[-1] == NEVER and NEVER not in answer.token_ids[:-1] for answer in stopped)
    limited = [answer for answer in answers if answer.stop is StopReason.LENGTH]
    assert all(len(answer.token_ids) == CONTEXT - 50 and NEVER not in answer.token_ids for answer in limited)


def test_a_request_that_does_not_fit_the_context_is_refused_before_vllm_is_asked(old: World) -> None:
    before = old.host.engine.counters()["requests"]
    with pytest.raises(EngineError, match=rf"request big: 470 prefix tokens \+ 11 .* {CONTEXT} .*max_context_tokens"):
        old.host.do(lambda engine: engine.generate(request("big", [5] * 470, max_tokens=11)))
    fits = old.host.do(lambda engine: engine.generate(request("fits", [5] * 470, max_tokens=10, seed=1)))
    assert 1 <= len(fits.token_ids) <= 10
    assert old.host.engine.counters()["requests"] == before + 1


def test_a_cancelled_request_is_aborted_in_vllm(old: World) -> None:
    async def body(engine: VllmEngine) -> float:
        asks = await all_under_way(engine, long_requests(greedy=True))
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        assert all(ask.cancelled() for ask in asks)
        assert engine.counters()["active"] == 0
        # A full context's worth of places is free again at once: the cancelled ones do not run on in vLLM.
        await ask_all(engine, [request(f"after {i}", PREFIX, max_tokens=2, seed=i) for i in range(8)])
        assert engine._front is not None
        return float(engine._front._llm.get_num_unfinished_requests())

    assert old.host.do(body) == 0


def test_requests_in_flight_go_on_under_new_weights_and_their_stamps_say_so(old: World) -> None:
    asks = long_requests()

    async def body(engine: VllmEngine) -> tuple[list[Generation], int, int]:
        before = engine.version
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(engine.generate(ask)) for ask in asks]
            await under_way(engine)
            after = await old.load(NEW)
        return [answer.result() for answer in answers], before, after

    answers, before, after = old.host.do(body)
    mixed = 0
    for ask, answer in zip(asks, answers, strict=True):
        by_old = gap(old.models[OLD], ask, answer) < FLOAT32_GAP
        by_new = gap(old.models[NEW], ask, answer) < FLOAT32_GAP
        swap = int(by_old.argmin()) if not by_old.all() else len(by_old)  # tokens before it match the old policy
        assert by_old[:swap].all()
        assert by_new[swap:].all(), "a token after the update matches neither policy"
        newest = before if swap == len(by_old) else after
        assert (answer.version_min, answer.version_max, answer.kv_version_min) == (before, newest, before)
        mixed += 0 < swap < len(by_old)
    assert mixed >= 2


def test_the_prefix_cache_holds_nothing_of_old_weights_after_an_update(old: World) -> None:
    ask = request("again", [21, 22, 23, 24] * 20, max_tokens=16, greedy=True)
    old.host.do(lambda engine: engine.generate(ask))
    old.host.do(lambda _: old.load(NEW))
    before = old.host.engine.counters()["reused_tokens"]
    answer = old.host.do(lambda engine: engine.generate(ask))
    assert old.host.engine.counters()["reused_tokens"] == before
    assert gap(old.models[NEW], ask, answer).max() < FLOAT32_GAP


def test_an_update_with_the_same_weights_changes_no_token_of_requests_in_flight(old: World) -> None:
    asks = long_requests()

    async def body(engine: VllmEngine) -> tuple[list[Generation], list[Generation]]:
        undisturbed = await ask_all(engine, asks)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(engine.generate(ask)) for ask in asks]
            await under_way(engine)
            await old.load(OLD)
        return undisturbed, [answer.result() for answer in answers]

    undisturbed, disturbed = old.host.do(body)
    assert any(answer.version_min < answer.version_max for answer in disturbed)
    assert [a.token_ids.tolist() for a in disturbed] == [a.token_ids.tolist() for a in undisturbed]


def test_a_version_whose_canary_does_not_agree_fences_the_engine_and_nothing_it_sampled_gets_out(old: World) -> None:
    asks, canary, before = long_requests(), old.canaries[OLD], old.host.engine.version

    async def body(engine: VllmEngine) -> list[object]:
        answers = await all_under_way(engine, asks)
        with pytest.raises(PolicyError, match=r"version \d+ does not act: .* nats"):
            await old.load(NEW, canary=canary)
        assert engine.version == -1
        waiting = asyncio.get_running_loop().create_task(engine.generate(request("late", PREFIX, max_tokens=2)))
        failures = await asyncio.gather(*answers, return_exceptions=True)
        assert not waiting.done()
        version = await old.load(NEW)
        assert (await waiting).version_min == version
        return list(failures)

    ends = old.host.do(body)
    early = [end for end in ends if isinstance(end, Generation)]  # done before vLLM was paused
    refused = [end for end in ends if isinstance(end, EngineError) and "refused" in str(end)]
    assert refused
    assert len(early) + len(refused) == len(ends)
    assert all(end.version_min == end.version_max == before for end in early)


def test_a_file_that_does_not_fit_is_refused_and_the_old_weights_stay_in_use(old: World, tmp_path: Path) -> None:
    state = {name: tensor.clone() for name, tensor in old.models[NEW].state_dict().items()}
    del state["model.norm.weight"], state["lm_head.weight"]
    unfit = save_version(state, tmp_path / "unfit.safetensors")
    version = old.host.engine.version
    ask = request("still", PREFIX, max_tokens=8, greedy=True)

    async def body(engine: VllmEngine) -> Generation:
        known = old.canaries[NEW]
        with pytest.raises(PolicyError, match=r"version 900: the weights do not fit.*model\.norm\.weight"):
            await engine.load(version=900, epoch=1, weights=unfit, canary=known, adapter=None)
        return await engine.generate(ask)

    answer = old.host.do(body)
    assert answer.version_min == answer.version_max == version == old.host.engine.version
    assert gap(old.models[OLD], ask, answer).max() < FLOAT32_GAP


def test_a_load_that_is_cancelled_while_weights_are_replaced_leaves_a_fence(old: World) -> None:
    async def body(engine: VllmEngine) -> None:
        replacing = asyncio.get_running_loop().create_task(old.load(NEW))
        await until(lambda: engine.version < 0 or replacing.done())
        replacing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await replacing
        assert engine.version == -1
        version = await old.load(OLD)
        assert (await engine.generate(request("then", PREFIX, max_tokens=2))).version_min == version

    old.host.do(body)


def test_a_killed_engine_process_fails_what_is_in_flight_and_is_started_again_behind_a_fence(old: World) -> None:
    asks = long_requests()

    async def body(engine: VllmEngine) -> None:
        answers = await all_under_way(engine, asks)
        before = vllm_processes()
        next(process for process in before if "EngineCor" in process.name()).kill()
        failures = await asyncio.gather(*answers, return_exceptions=True)
        assert all(isinstance(failure, EngineError) for failure in failures)
        waiting = asyncio.get_running_loop().create_task(engine.generate(request("late", PREFIX, max_tokens=2)))
        await engine.lost.wait()
        assert engine.version == -1
        engine.lost.clear()
        version = await old.load(NEW)
        assert (await waiting).version_min == version
        assert not set(vllm_processes()) & set(before)
        assert engine.counters()["restarts"] == 1

    old.host.do(body, deadline_s=START_S)
