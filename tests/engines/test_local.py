"""The local engine against an unbatched, uncached reference: same tokens, same log-probabilities, true stamps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.batched_model import load_weights, uniform
from trace_async.engines.local import LocalEngine
from trace_async.engines.prefix_cache import PrefixCache
from trace_async.errors import EngineError, PolicyError

VOCABULARY = 24
STOP = 1


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


def first_pass(model: LlamaForCausalLM) -> asyncio.Event:
    """Set once the engine's thread has made a forward pass."""
    happened, loop = asyncio.Event(), asyncio.get_running_loop()

    def tell(*_: object) -> None:
        loop.call_soon_threadsafe(happened.set)

    model.register_forward_hook(tell)
    return happened


def reference(
    model: LlamaForCausalLM, request: GenerateRequest, temperature: float = 1.0
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
    model: LlamaForCausalLM | None = None,
    config: EngineConfig | None = None,
    version: int = 0,
) -> None:
    async def main() -> None:
        engine = LocalEngine(
            model or tiny_model(), config=config or EngineConfig(), stop_ids=(STOP,), pad_id=0, version=version
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
        ask = request(name, prefix, max_tokens=int(rng.integers(1, 6)), seed=abs(hash(name)) % 997)
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


def save(model: LlamaForCausalLM, path: Path) -> Path:
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path)
    return path


def test_drain_finishes_requests_in_flight_on_the_old_weights_and_new_ones_wait(tmp_path: Path) -> None:
    old, new = tiny_model(0), tiny_model(1)
    weights = save(new, tmp_path / "w.safetensors")

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


def test_continue_goes_on_under_the_new_weights_with_recomputed_keys_and_says_so(tmp_path: Path) -> None:
    old, new = tiny_model(0), tiny_model(1)
    weights = save(new, tmp_path / "w.safetensors")

    async def body(engine: LocalEngine) -> None:
        passed = first_pass(old)
        ask = request("across", [3, 4, 5], max_tokens=30, seed=5)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(engine.generate(ask))
            await passed.wait()
            group.create_task(engine.load(version=9, epoch=0, weights=weights))
        found = answer.result()
        if len(found.token_ids) < 3:
            pytest.skip("this seed stops before the swap")
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

    with_engine(body, model=old, version=2, config=EngineConfig(on_update="continue"))


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in tiny_model(1).state_dict().items()}
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "w.safetensors")
    (tmp_path / "torn.safetensors").write_bytes((tmp_path / "w.safetensors").read_bytes()[:500])

    async def body(engine: LocalEngine) -> None:
        with pytest.raises(PolicyError, match=r"model\.norm\.weight"):
            await engine.load(version=3, epoch=0, weights=tmp_path / "w.safetensors")
        with pytest.raises(PolicyError, match="safetensors"):
            await engine.load(version=3, epoch=0, weights=tmp_path / "torn.safetensors")
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
        engine = LocalEngine(tiny_model(), config=EngineConfig(), stop_ids=(STOP,), pad_id=0)
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


def test_the_prefix_cache_keeps_its_byte_bound_and_finds_the_longest_prefix() -> None:
    cache = PrefixCache(max_bytes=4 * 10)
    for length in (2, 3, 4):
        cache.store(np.arange(length, dtype=np.int32), torch.zeros(length))
    assert cache.num_bytes == 4 * 9
    hit = cache.longest(np.array([0, 1, 2, 9], np.int32), max_length=3)
    assert hit is not None
    assert hit.length == 3
    assert cache.longest(np.array([5, 1], np.int32), max_length=2) is None
    cache.store(np.array([7, 7], np.int32), torch.zeros(2))  # over the bound: the least recently used (2 tokens) goes
    assert cache.longest(np.array([0, 1], np.int32), max_length=2) is None
    assert cache.num_bytes == 4 * 9


def test_load_weights_names_what_does_not_fit(tmp_path: Path) -> None:
    save_file({"other": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(PolicyError, match=r"unexpected \['other'\]"):
        load_weights(tiny_model(), tmp_path / "x.safetensors")
