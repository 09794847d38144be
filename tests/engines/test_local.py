"""The local engine from outside: who waits, who joins, what a version change does, and true stamps.

That every token is the right one is shown in test_equality.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engines.kit import (
    MAX_TOKENS,
    NEVER,
    STOP,
    VOCABULARY,
    assert_drawn_from,
    canary_of,
    decoder,
    logprobs_of,
    write,
)
from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.local import LocalEngine
from trace_async.errors import EngineError


def request(
    name: str, prefix: list[int], *, max_tokens: int = 5, seed: int = 0, greedy: bool = False
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prefix_ids=np.array(prefix, np.int32), max_tokens=max_tokens, seed=seed, greedy=greedy
    )


def with_engine(
    body: Callable[[LocalEngine], Awaitable[None]],
    *,
    model: PreTrainedModel | None = None,
    config: EngineConfig | None = None,
    version: int = 0,
    stop_id: int = STOP,
) -> None:
    async def main() -> None:
        engine = LocalEngine(
            model or decoder("llama"),
            base=Path(),
            config=config or EngineConfig(),
            stop_ids=(stop_id,),
            pad_id=0,
            max_tokens=MAX_TOKENS,
            version=version,
        )
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            try:
                await body(engine)
            finally:
                running.cancel()

    asyncio.run(main())


async def until(engine: LocalEngine, count: str, least: float) -> None:
    """Returns when the engine has counted so far; the test's own deadline ends a wait for nothing."""
    while engine.counters()[count] < least:  # noqa: ASYNC110  the engine tells nobody of a single token
        await asyncio.sleep(0.001)


async def load(engine: LocalEngine, version: int, model: PreTrainedModel, folder: Path) -> None:
    weights = write(model, folder / f"{version}.safetensors")
    await engine.load(version=version, epoch=0, weights=weights, canary=canary_of(model), adapter=None)


def assert_says(model: PreTrainedModel, ask: GenerateRequest, found: Generation, *, temperature: float = 1.0) -> None:
    assert_drawn_from(
        model,
        tokens=np.concatenate((ask.prefix_ids, found.token_ids)),
        start=len(ask.prefix_ids),
        logprobs=found.logprobs,
        seed=ask.seed,
        greedy=ask.greedy,
        temperature=temperature,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_growing_tree_of_ragged_requests_is_drawn_from_the_model(temperature: float) -> None:
    model = decoder("llama")
    rng = np.random.default_rng(3)

    async def grow(engine: LocalEngine, prefix: list[int], depth: int, name: str) -> None:
        ask = request(name, prefix, max_tokens=int(rng.integers(1, 6)), seed=crc32(name.encode()))
        found = await engine.generate(ask)
        assert_says(model, ask, found, temperature=temperature)
        assert (found.version_min, found.version_max, found.kv_version_min) == (7, 7, 7)
        if depth < 3:
            reply = rng.integers(2, VOCABULARY, size=int(rng.integers(0, 4))).tolist()
            async with asyncio.TaskGroup() as group:
                for child in range(2):
                    group.create_task(
                        grow(engine, prefix + found.token_ids.tolist() + reply, depth + 1, f"{name}.{child}")
                    )

    async def body(engine: LocalEngine) -> None:
        async with asyncio.TaskGroup() as group:
            for tree in range(3):
                group.create_task(grow(engine, rng.integers(2, VOCABULARY, size=3 + 4 * tree).tolist(), 0, f"t{tree}"))
        assert engine.counters()["reused_tokens"] > 0

    with_engine(body, model=model, config=EngineConfig(max_batch=5, temperature=temperature), version=7)


def test_drawn_tokens_follow_the_models_distribution() -> None:
    model = decoder("llama")
    expected = logprobs_of(model, np.array([5, 9, 2], np.int32))[-1].exp().numpy()

    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", [5, 9, 2], max_tokens=1, seed=i) for i in range(3000)]
        found = await asyncio.gather(*(engine.generate(ask) for ask in asks))
        counts = np.bincount([int(f.token_ids[0]) for f in found], minlength=VOCABULARY)
        expected_counts = expected * len(asks)
        often = expected_counts > 5
        chi_square = ((counts - expected_counts)[often] ** 2 / expected_counts[often]).sum()
        assert chi_square < often.sum() + 5 * np.sqrt(2 * often.sum())

    with_engine(body, model=model, config=EngineConfig(max_batch=256))


def test_drain_finishes_requests_in_flight_on_the_old_weights_and_new_ones_wait(tmp_path: Path) -> None:
    old, new = decoder("llama", seed=0), decoder("llama", seed=1)

    async def body(engine: LocalEngine) -> None:
        before, after = request("before", [3, 4, 5], max_tokens=90, seed=1), request("after", [3, 4, 5], seed=2)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(engine.generate(before))
            await until(engine, "forward_passes", 1)
            loading = group.create_task(load(engine, 3, new, tmp_path))
            await asyncio.sleep(0)
            second = group.create_task(engine.generate(after))
        assert loading.done()
        assert_says(decoder("llama", seed=0), before, first.result())
        assert (first.result().version_min, first.result().version_max) == (2, 2)
        assert_says(new, after, second.result())
        assert (second.result().version_min, second.result().kv_version_min) == (3, 3)

    with_engine(body, model=old, version=2, stop_id=NEVER)


def test_continue_goes_on_under_the_new_weights_with_recomputed_keys_and_says_so(tmp_path: Path) -> None:
    old, new = decoder("llama", seed=0), decoder("llama", seed=1)

    async def body(engine: LocalEngine) -> None:
        ask = request("across", [3, 4, 5], max_tokens=150, seed=5)
        weights = write(new, tmp_path / "new")
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(engine.generate(ask))
            await until(engine, "forward_passes", 1)
            group.create_task(engine.load(version=9, epoch=0, weights=weights, canary=canary_of(new), adapter=None))
        found = answer.result()
        assert (found.version_min, found.version_max, found.kv_version_min) == (2, 9, 2)
        # Every token is explained by the old or the new weights, oldest first, with nothing in between.
        tokens = np.concatenate((ask.prefix_ids, found.token_ids))
        scores = [logprobs_of(model, tokens) for model in (decoder("llama", seed=0), new)]
        steps = range(len(ask.prefix_ids), len(tokens))
        gaps = np.array([[abs(float(s[t - 1, tokens[t]]) - found.logprobs[t - 3]) for t in steps] for s in scores])
        assert gaps.min(axis=0).max() < 1e-4
        newest = gaps.argmin(axis=0)
        assert newest[0] == 0
        assert newest[-1] == 1
        assert (np.diff(newest) >= 0).all()

    with_engine(body, model=old, version=2, config=EngineConfig(on_update="continue"), stop_id=NEVER)


def test_a_cancelled_request_leaves_the_batch_and_the_others_are_untouched() -> None:
    model = decoder("llama")

    async def body(engine: LocalEngine) -> None:
        keep, drop = request("keep", [3, 4], max_tokens=150, seed=4), request("drop", [3, 5], max_tokens=150, seed=1)
        async with asyncio.TaskGroup() as group:
            kept = group.create_task(engine.generate(keep))
            dropped = group.create_task(engine.generate(drop))
            await until(engine, "sampled_tokens", 2)
            dropped.cancel()
        assert_says(model, keep, kept.result())
        counts = engine.counters()
        assert counts["active"] == 0
        assert counts["sampled_tokens"] < 300

    with_engine(body, model=model, stop_id=NEVER)


def test_a_request_longer_than_the_limit_is_refused_before_it_starts() -> None:
    async def body(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match=f"exceed {MAX_TOKENS}.*max_context_tokens"):
            await engine.generate(request("long", [2] * (MAX_TOKENS - 4)))

    with_engine(body)


def test_closing_the_engine_answers_everyone_who_waits() -> None:
    async def main() -> None:
        engine = LocalEngine(
            decoder("llama"),
            base=Path(),
            config=EngineConfig(),
            stop_ids=(STOP,),
            pad_id=0,
            max_tokens=MAX_TOKENS,
            version=0,
        )
        async with asyncio.timeout(20), asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            waiting = [asyncio.ensure_future(engine.generate(request(f"w{i}", [3], max_tokens=40))) for i in range(4)]
            await asyncio.sleep(0)
            running.cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(r, EngineError | Generation) for r in results)
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("late", [3]))

    asyncio.run(main())


def test_stop_reason_tells_a_stop_token_from_the_length_limit() -> None:
    async def body(engine: LocalEngine) -> None:
        for seed in range(20):
            found = await engine.generate(request(f"s{seed}", [3, 8], max_tokens=3, seed=seed))
            assert (found.stop is StopReason.STOP) == (int(found.token_ids[-1]) == STOP)

    with_engine(body)


def test_the_event_loop_turns_while_the_engine_computes() -> None:
    """Between two tokens and within one: nothing keeps the loop for as long as a forward pass takes."""

    async def body(engine: LocalEngine) -> None:
        turns = 0
        asking = asyncio.ensure_future(
            asyncio.gather(
                *(engine.generate(request(f"r{i}", [3, 4 + i % 8], max_tokens=100, seed=i)) for i in range(32))
            )
        )
        while not asking.done():
            await asyncio.sleep(0)
            turns += 1
        passes = engine.counters()["forward_passes"]
        assert passes >= 100
        assert turns > 10 * passes

    with_engine(body, stop_id=NEVER)


def test_torch_works_in_one_thread_of_its_own() -> None:
    seen: set[str] = set()

    class Telling(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.weight = inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.add(threading.current_thread().name)
            found: torch.Tensor = self.inner(x)
            return found

    model = decoder("mistral")  # computed the general way, through its modules
    model.lm_head = Telling(model.lm_head)

    async def body(engine: LocalEngine) -> None:
        seen.clear()  # the start-up probe works where the engine is built
        await asyncio.gather(*(engine.generate(request(f"r{i}", [3, 4])) for i in range(5)))
        assert len(seen) == 1
        assert threading.current_thread().name not in seen

    with_engine(body, model=model)
