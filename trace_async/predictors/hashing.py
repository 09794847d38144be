"""Hashed n-grams of token ids, and the embedding bag that reads them.

Three bags for each prefix, each of words and of pairs of words, with one vector per bucket:

    place   words by their place from the start: a prompt is read like a form
    last    words by their place from the end: what was just done and answered
    any     words wherever they stand

A bag is the sum of its vectors over the root of their number, so long and short prefixes are of one scale. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import FloatArray, IntArray

PLACES = 256
"""Words from the start that are known by their place."""
LAST = 16
"""Words from the end that are known by their place."""
ENDS = 512
"""Words kept of either end of a longer prefix; the middle is not read."""
NUM_BAGS = 3

_U64 = NDArray[np.uint64]
_WORD, _BEFORE, _PLACE = (np.uint64(k) for k in (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9))
_MIX1, _MIX2, _SHIFT = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53), np.uint64(33)


class Bag(NamedTuple):
    """Buckets of several rows, one after the other."""

    buckets: NDArray[np.int64]  # [n]
    sizes: NDArray[np.int64]  # [rows], 0 where a row has none


class HashedBags:
    """The input layer of `hashed`: token ids int32 [L] to 3 `dims` numbers."""

    def __init__(self, *, buckets: int, dims: int) -> None:
        self._buckets = buckets
        self._dims = dims

    @property
    def width(self) -> int:
        return NUM_BAGS * self._dims

    @property
    def table_shape(self) -> tuple[int, int] | None:
        return self._buckets, self._dims

    def read(self, rows: Sequence[IntArray]) -> tuple[Bag, ...]:
        """The rows' bags."""
        return hash_rows(rows, self._buckets)

    def forward(self, bags: tuple[Bag, ...], table: FloatArray | None) -> FloatArray:
        """float32 [rows, width]."""
        assert table is not None
        return np.concatenate([_sums(bag, table) * _scale(bag) for bag in bags], axis=1)

    def backward(self, bags: tuple[Bag, ...], gradient: FloatArray) -> FloatArray | None:
        """Gradient of the table for that of `forward`'s answer."""
        found = np.zeros(self._buckets * self._dims)
        for number, bag in enumerate(bags):
            part = gradient[:, number * self._dims : (number + 1) * self._dims] * _scale(bag)
            places = bag.buckets[:, None] * self._dims + np.arange(self._dims)
            found += np.bincount(places.ravel(), np.repeat(part, bag.sizes, axis=0).ravel(), minlength=found.size)
        return np.asarray(found.reshape(self._buckets, self._dims), np.float32)


def clip_row(token_ids: IntArray) -> IntArray:
    """The words that are read of a prefix: both ends of it."""
    if token_ids.size <= 2 * ENDS:
        return token_ids
    return np.concatenate([token_ids[:ENDS], token_ids[-ENDS:]])


def hash_rows(rows: Sequence[IntArray], buckets: int) -> tuple[Bag, Bag, Bag]:
    """The bags place, last and any of each row's token ids."""
    sizes = np.array([row.size for row in rows], np.int64)
    ends = np.cumsum(sizes)
    starts = ends - sizes
    words = np.concatenate([np.empty(0, np.int32), *rows]).astype(np.uint64)
    place = np.arange(words.size) - np.repeat(starts, sizes)
    from_end = np.repeat(sizes, sizes) - place
    before = np.concatenate([np.zeros(1, np.uint64), words[:-1] + np.uint64(1)])[: words.size]
    before[place == 0] = 0
    near, late = place < PLACES, from_end <= LAST
    return (
        Bag(_pairs(words[near], before[near], place[near] + 1, buckets), 2 * np.minimum(sizes, PLACES)),
        Bag(_pairs(words[late], before[late], -from_end[late], buckets), 2 * np.minimum(sizes, LAST)),
        Bag(_pairs(words, before, np.zeros(words.size, np.int64), buckets), 2 * sizes),
    )


def _pairs(words: _U64, before: _U64, place: NDArray[np.int64], buckets: int) -> NDArray[np.int64]:
    """Buckets [2n]: of each word, then of the word with the one before it, both with `place`."""
    alone = words * _WORD + place.astype(np.uint64) * _PLACE
    both = alone + (before + np.uint64(1)) * _BEFORE
    return (_mix(np.stack([alone, both], axis=1).ravel()) % np.uint64(buckets)).astype(np.int64)


def _mix(x: _U64) -> _U64:
    """The finaliser of MurmurHash3 (A. Appleby, public domain): every bit of the answer depends on every bit of x."""
    x = (x ^ (x >> _SHIFT)) * _MIX1
    x = (x ^ (x >> _SHIFT)) * _MIX2
    return np.asarray(x ^ (x >> _SHIFT))


def _scale(bag: Bag) -> FloatArray:
    return np.asarray(1.0 / np.sqrt(np.maximum(bag.sizes, 1)), np.float32)[:, None]


def _sums(bag: Bag, table: FloatArray) -> FloatArray:
    """Sum of the vectors of each row's buckets [rows, dims], added up in order."""
    found = np.zeros((len(bag.sizes), table.shape[1]), np.float32)
    filled = np.flatnonzero(bag.sizes)
    if filled.size:
        starts = (np.cumsum(bag.sizes) - bag.sizes)[filled]
        found[filled] = np.add.reduceat(table[bag.buckets], starts, axis=0)
    return found
