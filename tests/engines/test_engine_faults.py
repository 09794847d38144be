"""What the local engine does when passes fail, nothing can be kept, memory is short or too many requests wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.engines.kit import MAX_TOKENS, NEVER, VOCABULARY, decoder
from tests.engines.test_local import assert_says, request, with_engine
from trace_async.config import EngineConfig
from trace_async.engines.local import LocalEngine
from trace_async.errors import EngineError


def break_passes(model: PreTrainedModel, how_often: int) -> None:
    """The next forward passes fail in the last layer's norm, when their keys and values are written in part."""
    left = iter(range(how_often))

    def fail(*_: object) -> None:
        if next(left, None) is not None:
            raise RuntimeError("no such luck")

    model.model.layers[-1].post_attention_layernorm.register_forward_pre_hook(fail)


def test_a_failed_pass_fails_its_requests_and_the_next_ones_are_right() -> None:
    model = decoder("mistral")  # computed the general way, through its modules

    async def body(engine: LocalEngine) -> None:
        await engine.generate(request("before", [3, 4, 5]))
        break_passes(model, 1)
        asks = [request(f"r{i}", [3, 4, 5, i], seed=i) for i in range(3)]
        failed = await asyncio.gather(*(engine.generate(ask) for ask in asks), return_exceptions=True)
        assert [type(error) for error in failed] == [EngineError] * 3
        assert all("request r" in str(error) and "no such luck" in str(error) for error in failed)
        for ask in asks:
            assert_says(model, ask, await engine.generate(ask))

    with_engine(body, model=model)


def test_passes_that_fail_again_and_again_end_the_engine() -> None:
    model = decoder("mistral")

    async def main() -> None:
        engine = LocalEngine(
            model, base=Path(), config=EngineConfig(), stop_ids=(NEVER,), pad_id=0, max_tokens=MAX_TOKENS, version=0
        )
        break_passes(model, 99)
        running = asyncio.ensure_future(engine.run())
        async with asyncio.timeout(20):
            for name in ("one", "two", "three"):
                with pytest.raises(EngineError, match=name):
                    await engine.generate(request(name, [3]))
            with pytest.raises(RuntimeError, match="no such luck"):
                await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("late", [3]))

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("cache_bytes", [0, 700, 1 << 20])
def test_twins_are_computed_once_whether_their_prefix_can_be_kept_or_not(kind: str, cache_bytes: int) -> None:
    prefix = [3, 4, 5, 6, 7, 8]

    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", prefix, max_tokens=2, seed=i) for i in range(8)]
        await asyncio.gather(*(engine.generate(ask) for ask in asks))
        counts = engine.counters()
        assert counts["forward_passes"] == 2
        # the own decoder computes each row's last token by itself, so that it can stand beside running rows
        assert counts["computed_tokens"] == (5 + 8 + 8 if kind == "llama" else 6 + 8)

    # a token's key/values: 2 layers x 2 x 2 heads x 8 x 4 bytes = 256
    config = EngineConfig(prefix_cache_bytes=cache_bytes)
    with_engine(body, model=decoder(kind), config=config, stop_id=NEVER)


def test_a_common_beginning_of_new_requests_is_computed_once_though_they_differ_later() -> None:
    common = [3, 4, 5, 6, 7, 8, 9, 10]
    tails: tuple[list[int], ...] = ([11], [11, 12, 13], [11, 12, 14], [15, 16], [])

    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", common + tail, max_tokens=1, seed=i) for i, tail in enumerate(tails)]
        await asyncio.gather(*(engine.generate(ask) for ask in asks))
        # 7 common ones, 10 behind them for all but the last, then "11 12" twice and "15" once; and each row's last one
        assert engine.counters()["computed_tokens"] == 7 + 1 + 2 + 1 + 5

    with_engine(body, stop_id=NEVER)


def test_memory_of_the_batch_and_of_the_store_stays_below_what_was_promised() -> None:
    rng = np.random.default_rng(0)
    token_bytes, max_batch, cache_bytes = 256, 4, 5000

    async def body(engine: LocalEngine) -> None:
        for wave in range(6):
            lengths = rng.integers(1, 100, 9)
            asks = [
                request(f"{wave}.{i}", rng.integers(2, VOCABULARY, n).tolist(), max_tokens=int(rng.integers(1, 60)))
                for i, n in enumerate(lengths)
            ]
            await asyncio.gather(*(engine.generate(ask) for ask in asks))
            counts = engine.counters()
            assert counts["batch_bytes"] <= 2 * (max_batch + 1) * MAX_TOKENS * token_bytes
            assert 0 < counts["prefix_bytes"] <= cache_bytes

    with_engine(body, config=EngineConfig(max_batch=max_batch, prefix_cache_bytes=cache_bytes), stop_id=NEVER)


def test_more_requests_than_may_wait_are_refused_with_the_cure() -> None:
    async def main() -> None:
        engine = LocalEngine(
            decoder("llama"),
            base=Path(),
            config=EngineConfig(max_batch=1),
            stop_ids=(NEVER,),
            pad_id=0,
            max_tokens=MAX_TOKENS,
            version=0,
        )
        waiting = [asyncio.ensure_future(engine.generate(request(f"w{i}", [3]))) for i in range(1024)]
        await asyncio.sleep(0)  # nothing runs: all of them wait
        with pytest.raises(EngineError, match=r"1024 requests wait already.*max_live_roots"):
            await engine.generate(request("one too many", [3]))
        for answer in waiting:
            answer.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())


def test_a_decoder_in_bfloat16_itself_is_near_the_rounded_model() -> None:
    """As on processors that have such arithmetic; here it is only slow."""
    model = decoder("llama").to(torch.bfloat16)  # type: ignore[arg-type]
    exact = decoder("llama")

    async def body(engine: LocalEngine) -> None:
        ask = request("half", [3, 4, 5, 6], max_tokens=8)
        found = await engine.generate(ask)
        tokens = torch.tensor([[*ask.prefix_ids.tolist(), *found.token_ids.tolist()]])
        with torch.inference_mode():
            scores = torch.log_softmax(exact(tokens).logits[0], -1)[3:-1]
        expected = scores.gather(-1, tokens[0, 4:, None])[:, 0].numpy()
        assert np.abs(found.logprobs - expected).mean() < 0.15

    with_engine(body, model=model, config=EngineConfig(dtype="bfloat16"), stop_id=NEVER)
