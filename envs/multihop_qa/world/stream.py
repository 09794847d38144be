"""Random draws that are the same on every platform and for ever: SHAKE-128 in counter mode, one stream a name.

Only integers and IEEE multiplications; no generator of a library whose methods may change between releases.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_BLOCK = 256
"""Draws made at a time."""


class Stream:
    """Independent of every other stream with another (seed, name); draws depend on earlier draws of this one alone."""

    __slots__ = ("_block", "_key", "_left")

    def __init__(self, seed: int, name: str) -> None:
        self._key = f"{seed}/{name}/".encode()
        self._block = 0
        self._left: list[int] = []

    def bits(self) -> int:
        """64 random bits."""
        if not self._left:
            data = hashlib.shake_128(self._key + str(self._block).encode()).digest(8 * _BLOCK)
            self._left = list(struct.unpack(f"<{_BLOCK}Q", data))
            self._block += 1
        return self._left.pop()

    def below(self, limit: int) -> int:
        """Uniform in 0..limit-1; `limit` far below 2**64."""
        return (self.bits() * limit) >> 64

    def chance(self, rate: float) -> bool:
        """True with probability `rate`."""
        return self.bits() < rate * 2.0**64

    def pick(self, items: Sequence[T]) -> T:
        """Each item equally likely."""
        return items[self.below(len(items))]

    def pick_skewed(self, items: Sequence[T]) -> T:
        """Earlier items more often: the chance of place i falls about as 1 / sqrt(i)."""
        fraction = (self.bits() >> 11) / 2.0**53
        return items[int(fraction * fraction * len(items))]

    def sample(self, items: Sequence[T], number: int) -> list[T]:
        """`number` different items in random order (all when there are fewer)."""
        pool = list(items)
        number = min(number, len(pool))
        for place in range(number):
            other = place + self.below(len(pool) - place)
            pool[place], pool[other] = pool[other], pool[place]
        return pool[:number]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """All items in random order."""
        return self.sample(items, len(items))
