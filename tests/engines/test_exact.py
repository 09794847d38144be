"""With one place in the batch and no prefix cache, a request's numbers are a function of the request: to the bit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from tests.engines.kit import MAX_TOKENS, STOP, VOCABULARY, decoder
from trace_async.core.types import GenerateRequest
from trace_async.engines.batched_model import BatchedModel
from trace_async.engines.rows import Row
from trace_async.engines.sampler import Running, Sampler


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


def make_sampler(kind: str) -> Sampler:
    model = BatchedModel(
        decoder(kind, seed=0),
        pad_id=0,
        temperature=0.9,
        dtype="float32",
        max_rows=1,
        max_tokens=MAX_TOKENS,
        prefix_cache_bytes=0,
    )
    return Sampler(model, stop_ids=(STOP,), dtype="float32", version=0)


def answer(sampler: Sampler, prefix: list[int], *, seed: int, loop: asyncio.AbstractEventLoop, often: bool) -> Row:
    """One request to its end; `often`: with an interruption after every token, as other requests cause them."""
    request = GenerateRequest(
        request_id=str(seed), prefix_ids=np.array(prefix, np.int32), max_tokens=12, seed=seed, greedy=False
    )
    row = Row(tokens=list(prefix), num_prefix=len(prefix), seed=seed, greedy=False)
    running = Running(request, row, loop.create_future(), 0.0)
    while running.stop is None:
        sampler.advance([running], interrupted=lambda: often)
    return row


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "gemma2"])
def test_whatever_was_asked_before_the_same_request_gets_the_same_bits(
    kind: str, loop: asyncio.AbstractEventLoop
) -> None:
    draw = np.random.default_rng(0)
    asked = [(draw.integers(2, VOCABULARY, length).tolist(), length) for length in (1, 5, 23, 64, 90, 140)]
    alone = {
        length: answer(make_sampler(kind), prefix, seed=length, loop=loop, often=False) for prefix, length in asked
    }
    for number in range(2):
        sampler = make_sampler(kind)
        for place in draw.permutation(len(asked)).tolist():
            prefix, length = asked[place]
            row = answer(sampler, prefix, seed=length, loop=loop, often=number % 2 == 1)
            assert row.tokens == alone[length].tokens
            assert row.logprobs == alone[length].logprobs, f"{length} prefix tokens"
