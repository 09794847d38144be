"""Whatever comes, goes and changes, each token is the one that an unbatched, uncached model draws.

Drives the engine's worker side by hand, so that every order of arrivals, cancellations and weight swaps can happen
between any two tokens.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from tests.engines.kit import FAST, MAX_TOKENS, OTHERS, STOP, VOCABULARY, assert_drawn_from, canary_of, decoder
from trace_async.core.types import GenerateRequest
from trace_async.engines import llama_decoder
from trace_async.engines.batched_model import BatchedModel
from trace_async.engines.llama_decoder import LlamaDecoder
from trace_async.engines.rows import Row
from trace_async.engines.sampler import Running, Sampler

MAX_ROWS = 6
VERSIONS = 3


@cache
def version_of(kind: str, version: int) -> PreTrainedModel:
    return decoder(kind, seed=version)


def make_sampler(kind: str, *, temperature: float, cache_bytes: int) -> Sampler:
    model = BatchedModel(
        decoder(kind, seed=0),
        pad_id=0,
        temperature=temperature,
        dtype="float32",
        max_rows=MAX_ROWS,
        max_tokens=MAX_TOKENS,
        prefix_cache_bytes=cache_bytes,
    )
    assert isinstance(model.decoder, LlamaDecoder) == (kind in FAST)
    return Sampler(model, stop_ids=(STOP,), dtype="float32", version=0)


@dataclass
class World:
    """A sampler, the requests in its batch, and who sampled which token."""

    kind: str
    temperature: float
    cache_bytes: int
    loop: asyncio.AbstractEventLoop
    rng: np.random.Generator
    active: list[Running] = field(default_factory=list)
    told_by: dict[Running, list[int]] = field(default_factory=dict)
    contexts: list[list[int]] = field(default_factory=list)  # from which further requests grow

    def __post_init__(self) -> None:
        self.sampler = make_sampler(self.kind, temperature=self.temperature, cache_bytes=self.cache_bytes)
        self.contexts.append(self.rng.integers(2, VOCABULARY, 5).tolist())

    def arrive(self, place: int, keep: int, extra: int, max_tokens: int) -> None:
        """A request on a prefix of something that was seen before, with a few tokens of its own."""
        context = self.contexts[place % len(self.contexts)]
        prefix = context[: max(1, keep % (len(context) + 1))] + self.rng.integers(2, VOCABULARY, extra).tolist()
        prefix = prefix[: MAX_TOKENS - max_tokens]
        seed = int(self.rng.integers(1 << 40))
        request = GenerateRequest(
            request_id=f"r{seed}",
            prefix_ids=np.array(prefix, np.int32),
            max_tokens=max_tokens,
            seed=seed,
            greedy=seed % 7 == 0,
        )
        row = Row(tokens=list(prefix), num_prefix=len(prefix), seed=seed, greedy=request.greedy)
        running = Running(request, row, self.loop.create_future(), 0.0)
        if len(self.active) < MAX_ROWS:
            self.active.append(running)
            self.told_by[running] = []
            self.contexts.append(prefix)

    def cancel(self, place: int) -> None:
        if self.active:
            self.check(self.active.pop(place % len(self.active)))

    def swap(self, version: int) -> None:
        new = version_of(self.kind, version)
        tensors = {name: tensor.clone() for name, tensor in new.state_dict().items()}
        with torch.inference_mode():
            self.sampler.take_over(tensors, version, canary_of(new))

    def token(self) -> None:
        if not self.active:
            return
        self.sampler.advance(self.active, interrupted=lambda: True)
        for running in self.active:
            self.told_by[running].append(self.sampler.version)
        for running in [running for running in self.active if running.stop is not None]:
            self.active.remove(running)
            self.check(running)
            self.contexts.append(list(running.row.tokens))

    def check(self, running: Running) -> None:
        """Each stretch of tokens under one version is what that version alone says; so are the stamps."""
        row, versions = running.row, self.told_by[running]
        assert len(row.logprobs) == len(versions) == len(row.tokens) - row.num_prefix
        first = 0
        while first < len(versions):
            end = first
            while end < len(versions) and versions[end] == versions[first]:
                end += 1
            start = row.num_prefix + first
            assert_drawn_from(
                version_of(self.kind, versions[first]),
                tokens=np.array(row.tokens[: row.num_prefix + end], np.int32),
                start=start,
                logprobs=np.array(row.logprobs[first:end], np.float32),
                seed=row.seed,
                greedy=row.greedy,
                first=first,
                temperature=self.temperature,
            )
            first = end
        if versions:
            stamps = (running.version_min, running.version_max, running.kv_version_min)
            assert stamps == (min(versions), max(versions), min(versions))


STEPS = st.one_of(
    st.tuples(
        st.just("arrive"),
        st.integers(0, 99),
        st.integers(0, 99),
        st.sampled_from([0, 1, 3, 9, 70]),
        st.sampled_from([1, 2, 5, 40]),
    ),
    st.tuples(st.just("arrive"), st.integers(0, 99), st.just(-1), st.integers(0, 2), st.integers(1, 9)),
    st.tuples(st.just("token")),
    st.tuples(st.just("token")),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("swap"), st.integers(0, VERSIONS - 1)),
)


def play(kind: str, steps: list[tuple[object, ...]], *, seed: int, temperature: float, cache_bytes: int) -> World:
    loop = asyncio.new_event_loop()
    world = World(kind, temperature, cache_bytes, loop, np.random.default_rng(seed))
    for name, *arguments in steps:
        getattr(world, str(name))(*arguments)
    while world.active:
        world.token()
    loop.close()
    return world


CASES = given(
    steps=st.lists(STEPS, min_size=4, max_size=40),
    seed=st.integers(0, 1 << 20),
    temperature=st.sampled_from([1.0, 0.6]),
    cache_bytes=st.sampled_from([0, 3000, 1 << 20]),
)


@pytest.mark.parametrize("kind", FAST + OTHERS)
@CASES
@settings(max_examples=12, deadline=None)
def test_each_token_is_the_one_that_the_model_alone_draws(
    kind: str, steps: list[tuple[object, ...]], seed: int, temperature: float, cache_bytes: int
) -> None:
    world = play(kind, steps, seed=seed, temperature=temperature, cache_bytes=cache_bytes)
    assert world.sampler.counts["prefix_bytes"] <= cache_bytes


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_so_it_is_where_passes_are_cut_every_few_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_decoder, "_MAX_PASS_TOKENS", 7)

    @CASES
    @settings(max_examples=5, deadline=None)
    def check(steps: list[tuple[object, ...]], seed: int, temperature: float, cache_bytes: int) -> None:
        play(kind, steps, seed=seed, temperature=temperature, cache_bytes=cache_bytes)

    check()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@CASES
@settings(max_examples=150, deadline=None)
def test_so_it_is_in_many_more_orders(
    kind: str, steps: list[tuple[object, ...]], seed: int, temperature: float, cache_bytes: int
) -> None:
    play(kind, steps, seed=seed, temperature=temperature, cache_bytes=cache_bytes)
