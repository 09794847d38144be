"""The local engine against an unbatched, uncached reference: same tokens, same log-probabilities, true stamps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from zlib import crc32

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.batched_model import read_weights, uniform
from trace_async.engines.local import LocalEngine
from trace_async.errors import EngineError, PolicyError

VOCABULARY = 24
STOP = 1
NEVER = 99  # no token id


def tiny_model(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.4,  # far from uniform, so that a wrong context shows
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def first_pass(model: PreTrainedModel) -> asyncio.Event:
    """Set once the engine's thread has made a forward pass."""
    happened, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell(*_: object) -> None:
        loop.call_soon_threadsafe(happened.set)

    model.register_forward_hook(tell)
    return happened


def hold_until_weights_are_read(model: PreTrainedModel) -> None:
    """The engine's thread stays in its next forward pass until somebody has compared a file with the model."""
    read = threading.Event()
    model.register_state_dict_pre_hook(lambda *_: read.set())  # type: ignore[no-untyped-call]

    def hold(*_: object) -> None:
        assert read.wait(20)

    model.register_forward_hook(hold)


def reference(
    model: PreTrainedModel, request: GenerateRequest, temperature: float = 1.0
) -> tuple[list[int], list[float]]:
    """One request alone, the whole prefix recomputed for every token."""
    tokens, logprobs = request.prefix_ids.tolist(), []
    sampled: list[int] = []
    with torch.inference_mode():
        while len(sampled) < request.max_tokens and STOP not in sampled:
            logits = model(torch.tensor([tokens])).logits[0, -1].float() / temperature
            distribution = torch.log_softmax(logits, -1)
            cumulative = distribution.double().exp().cumsum(-1)
            draw = uniform(request.seed, len(sampled)) * float(cumulative[-1])
            token = int(distribution.argmax()) if request.greedy else int((cumulative <= draw).sum())
            sampled.append(token)
            tokens.append(token)
            logprobs.append(float(distribution[token]))
    return sampled, logprobs


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
            model or tiny_model(),
            config=config or EngineConfig(),
            stop_ids=(stop_id,),
            pad_id=0,
            max_tokens=64,
            version=version,
        )
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            try:
                await body(engine)
            finally:
                running.cancel()

    asyncio.run(main())


def assert_same(found: Generation, expected: tuple[list[int], list[float]]) -> None:
    assert found.token_ids.tolist() == expected[0]
    np.testing.assert_allclose(found.logprobs, expected[1], atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_growing_tree_of_ragged_requests_equals_the_unbatched_uncached_reference(temperature: float) -> None:
    model = tiny_model()
    rng = np.random.default_rng(3)

    async def grow(engine: LocalEngine, prefix: list[int], depth: int, name: str) -> None:
        ask = request(name, prefix, max_tokens=int(rng.integers(1, 6)), seed=crc32(name.encode()))
        found = await engine.generate(ask)
        assert_same(found, reference(model, ask, temperature))
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


def test_greedy_takes_the_most_likely_token_and_reports_the_sampled_distributions_logprob() -> None:
    model = tiny_model()

    async def body(engine: LocalEngine) -> None:
        ask = request("g", [4, 5, 6], greedy=True)
        assert_same(await engine.generate(ask), reference(model, ask))

    with_engine(body, model=model)


def test_drawn_tokens_follow_the_models_distribution() -> None:
    model = tiny_model()
    with torch.inference_mode():
        expected = torch.softmax(model(torch.tensor([[5, 9, 2]])).logits[0, -1], -1).numpy()

    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", [5, 9, 2], max_tokens=1, seed=i) for i in range(3000)]
        found = await asyncio.gather(*(engine.generate(ask) for ask in asks))
        counts = np.bincount([int(f.token_ids[0]) for f in found], minlength=VOCABULARY)
        expected_counts = expected * len(asks)
        often = expected_counts > 5
        chi_square = ((counts - expected_counts)[often] ** 2 / expected_counts[often]).sum()
        assert chi_square < often.sum() + 5 * np.sqrt(2 * often.sum())

    with_engine(body, model=model, config=EngineConfig(max_batch=256))


def weights_of(model: PreTrainedModel) -> bytes:
    return save({name: tensor.clone() for name, tensor in model.state_dict().items()})


def test_drain_finishes_requests_in_flight_on_the_old_weights_and_new_ones_wait() -> None:
    old, new = tiny_model(0), tiny_model(1)
    weights = weights_of(new)

    async def body(engine: LocalEngine) -> None:
        passed = first_pass(old)
        before, after = request("before", [3, 4, 5], max_tokens=20, seed=1), request("after", [3, 4, 5], seed=2)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(engine.generate(before))
            await passed.wait()
            load = group.create_task(engine.load(version=3, epoch=0, weights=weights))
            await asyncio.sleep(0)
            second = group.create_task(engine.generate(after))
        assert load.done()
        assert_same(first.result(), reference(tiny_model(0), before))
        assert (first.result().version_min, first.result().version_max) == (2, 2)
        assert_same(second.result(), reference(new, after))
        assert (second.result().version_min, second.result().kv_version_min) == (3, 3)

    with_engine(body, model=old, version=2)


def test_continue_goes_on_under_the_new_weights_with_recomputed_keys_and_says_so() -> None:
    old, new = tiny_model(0), tiny_model(1)
    weights = weights_of(new)

    async def body(engine: LocalEngine) -> None:
        passed = first_pass(old)
        hold_until_weights_are_read(old)
        ask = request("across", [3, 4, 5], max_tokens=60, seed=5)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(engine.generate(ask))
            await passed.wait()
            group.create_task(engine.load(version=9, epoch=0, weights=weights))
        found = answer.result()
        assert len(found.token_ids) == 60
        assert (found.version_min, found.version_max, found.kv_version_min) == (2, 9, 2)
        # Every token is explained by the old or the new weights, oldest first, with nothing in between.
        tokens = [*ask.prefix_ids.tolist(), *found.token_ids.tolist()]
        with torch.inference_mode():
            scores = [torch.log_softmax(m(torch.tensor([tokens])).logits[0], -1) for m in (tiny_model(0), new)]
        steps = range(len(ask.prefix_ids), len(tokens))
        gaps = np.array([[abs(float(s[t - 1, tokens[t]]) - found.logprobs[t - 3]) for t in steps] for s in scores])
        assert gaps.min(axis=0).max() < 1e-4
        newest = gaps.argmin(axis=0)
        assert newest[0] == 0
        assert newest[-1] == 1
        assert (np.diff(newest) >= 0).all()

    with_engine(body, model=old, version=2, config=EngineConfig(on_update="continue"), stop_id=NEVER)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay() -> None:
    tensors = {name: tensor.clone() for name, tensor in tiny_model(1).state_dict().items()}
    tensors.pop("model.norm.weight")
    short = save(tensors)

    async def body(engine: LocalEngine) -> None:
        with pytest.raises(PolicyError, match=r"model\.norm\.weight"):
            await engine.load(version=3, epoch=0, weights=short)
        with pytest.raises(PolicyError, match="safetensors"):
            await engine.load(version=3, epoch=0, weights=short[:500])
        ask = request("still", [3, 4])
        found = await engine.generate(ask)
        assert found.version_min == 0
        assert_same(found, reference(tiny_model(0), ask))

    with_engine(body)


def test_a_cancelled_request_leaves_the_batch_and_the_others_are_untouched() -> None:
    model = tiny_model()

    async def body(engine: LocalEngine) -> None:
        passed = first_pass(model)
        keep, drop = request("keep", [3, 4], max_tokens=30, seed=4), request("drop", [3, 5], max_tokens=30, seed=1)
        async with asyncio.TaskGroup() as group:
            kept = group.create_task(engine.generate(keep))
            dropped = group.create_task(engine.generate(drop))
            await passed.wait()
            dropped.cancel()
        assert_same(kept.result(), reference(tiny_model(0), keep))
        assert engine.counters()["active"] == 0

    with_engine(body, model=model)


def test_a_request_longer_than_the_models_positions_is_refused_before_it_starts() -> None:
    async def body(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match="max_context_tokens"):
            await engine.generate(request("long", [2] * 62))

    with_engine(body)


def test_closing_the_engine_answers_everyone_who_waits() -> None:
    async def main() -> None:
        engine = LocalEngine(tiny_model(), config=EngineConfig(), stop_ids=(STOP,), pad_id=0, max_tokens=64)
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


def test_reading_weights_names_what_does_not_fit() -> None:
    with pytest.raises(PolicyError, match=r"unexpected \['other'\]"):
        read_weights(tiny_model(), save({"other": torch.zeros(1)}))
