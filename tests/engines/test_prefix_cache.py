"""The prefix cache alone: its bound in bytes, and which entry a lookup finds."""

from __future__ import annotations

import numpy as np
import torch

from trace_async.engines.prefix_cache import PrefixCache


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


def test_an_entry_over_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    cache = PrefixCache(max_bytes=4 * 3)
    cache.store(np.array([1, 2], np.int32), torch.zeros(2))
    cache.store(np.array([5, 6, 7, 8], np.int32), torch.zeros(4))
    assert len(cache) == 1
    assert cache.longest(np.array([1, 2], np.int32), max_length=2) is not None
