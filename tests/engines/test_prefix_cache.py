"""The store of prefixes alone: against a plain dictionary, its bound in bytes, and who goes first."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from trace_async.engines.prefix_cache import PrefixCache

TOKEN_BYTES = 4


def values_of(tokens: list[int]) -> torch.Tensor:
    """Key/values [1, 1, 1, tokens, 1] that are a function of each token's whole past, as real ones are."""
    past = [float(hash(tuple(tokens[: end + 1])) % 100_003) for end in range(len(tokens))]
    return torch.tensor(past, dtype=torch.float32).view(1, 1, 1, -1, 1)


def found(cache: PrefixCache, tokens: list[int]) -> torch.Tensor:
    return torch.cat([torch.empty(1, 1, 1, 0, 1), *cache.longest(tokens)], dim=3)


SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=25)


@given(stored=SEQUENCES, asked=SEQUENCES)
def test_the_longest_stored_prefix_is_found_to_the_token(stored: list[list[int]], asked: list[list[int]]) -> None:
    cache = PrefixCache(max_bytes=1 << 20)
    known: set[tuple[int, ...]] = set()
    for tokens in stored:
        cache.store(tokens, values_of(tokens))
        known |= {tuple(tokens[: end + 1]) for end in range(len(tokens))}
    assert len(cache) == len(known)
    assert cache.num_bytes == TOKEN_BYTES * len(known)
    for tokens in asked:
        longest = max((end for end in range(len(tokens) + 1) if tuple(tokens[:end]) in known), default=0)
        assert torch.equal(found(cache, tokens), values_of(tokens[:longest]))


@given(stored=SEQUENCES, limit=st.integers(0, 12))
def test_the_bound_holds_after_every_store_and_what_is_left_is_right(stored: list[list[int]], limit: int) -> None:
    cache = PrefixCache(max_bytes=TOKEN_BYTES * limit)
    for tokens in stored:
        cache.store(tokens, values_of(tokens))
        assert cache.num_bytes == TOKEN_BYTES * len(cache) <= cache.max_bytes
        if len(tokens) <= limit:
            assert torch.equal(found(cache, tokens), values_of(tokens))  # the newest is never what goes
    for tokens in stored:
        kept = found(cache, tokens)
        assert torch.equal(kept, values_of(tokens[: kept.shape[3]]))


def test_the_least_recently_used_leaf_goes_first_and_inner_prefixes_outlive_their_leaves() -> None:
    cache = PrefixCache(max_bytes=TOKEN_BYTES * 8)
    prompt = [1, 1]
    for branch in ([2, 2], [3, 3], [4, 4]):
        cache.store([*prompt, *branch], values_of([*prompt, *branch]))
    cache.longest([*prompt, 2, 2])  # used again: now the branch of 3 is the oldest
    cache.store([9, 9], values_of([9, 9]))
    assert cache.longest([*prompt, 3, 3])[-1].shape[3] == 2  # only the prompt is left of it
    assert found(cache, [*prompt, 2, 2]).shape[3] == found(cache, [*prompt, 4, 4]).shape[3] == 4
    for other in range(20, 23):
        cache.store([other] * 2, values_of([other] * 2))
    assert found(cache, prompt).shape[3] == 2 or found(cache, [*prompt, 4, 4]).shape[3] == 0


def test_a_tree_that_grows_outlives_one_that_does_not() -> None:
    cache = PrefixCache(max_bytes=TOKEN_BYTES * 12)
    done, alive = [1, 1, 1, 1], [2, 2, 2, 2]
    cache.store(done, values_of(done))
    cache.store(alive, values_of(alive))
    for turn in range(3, 12):
        cache.store([*alive, turn, turn], values_of([*alive, turn, turn]))
    assert found(cache, alive).shape[3] == 4
    assert found(cache, done).shape[3] == 0


def test_tokens_over_the_bound_are_not_kept_and_push_nothing_out() -> None:
    cache = PrefixCache(max_bytes=TOKEN_BYTES * 3)
    cache.store([1, 2], values_of([1, 2]))
    cache.store([5, 6, 7, 8], values_of([5, 6, 7, 8]))
    assert len(cache) == 2
    assert found(cache, [1, 2, 3]).shape[3] == 2


def test_a_stored_prefix_does_not_change_when_the_slot_it_came_from_does() -> None:
    cache = PrefixCache(max_bytes=1 << 10)
    slot = values_of([1, 2, 3])
    expected = slot.clone()
    cache.store([1, 2, 3], slot)
    slot.zero_()
    assert torch.equal(found(cache, [1, 2, 3]), expected)


def test_cleared_it_knows_nothing() -> None:
    cache = PrefixCache(max_bytes=1 << 10)
    cache.store([1, 2, 3], values_of([1, 2, 3]))
    cache.clear()
    assert (len(cache), cache.num_bytes, cache.longest([1, 2, 3])) == (0, 0, [])
    assert np.isclose(cache.max_bytes, 1 << 10)
