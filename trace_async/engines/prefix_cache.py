"""Key/values of prefixes that were computed before, for one set of weights, bounded in bytes.

An entry's key is its exact token ids, so a hit can never be wrong about what it stands for. The owner clears the
cache whenever the weights change: key/values of old weights under new ones give tokens that match neither policy.

Never: a lock (the engine's one worker thread owns it), a copy on lookup.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import NamedTuple

import torch

from trace_async.core.types import IntArray


class CachedPrefix(NamedTuple):
    """Key/values of the first `length` tokens: float [layers, 2, heads, length, head_dim]."""

    length: int
    keys_values: torch.Tensor


class PrefixCache:
    """Longest-prefix lookup over stored key/values; the least recently used entries go first."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: OrderedDict[bytes, CachedPrefix] = OrderedDict()
        self._lengths: Counter[int] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def longest(self, token_ids: IntArray, *, max_length: int) -> CachedPrefix | None:
        """The longest stored prefix of `token_ids` with at most `max_length` tokens."""
        raw = token_ids.astype("<i4", copy=False).tobytes()
        for length in sorted(self._lengths, reverse=True):
            if length <= max_length and (entry := self._entries.get(raw[: 4 * length])) is not None:
                self._entries.move_to_end(raw[: 4 * length])
                return entry
        return None

    def store(self, token_ids: IntArray, keys_values: torch.Tensor) -> None:
        """Keep key/values of exactly these tokens; evicts until the bound holds again. Too large ones are not kept."""
        if _num_bytes(keys_values) > self.max_bytes:
            return
        key = token_ids.astype("<i4", copy=False).tobytes()
        if key in self._entries:
            self._entries.move_to_end(key)
            return
        entry = CachedPrefix(len(token_ids), keys_values)
        self._entries[key] = entry
        self._lengths[entry.length] += 1
        self.num_bytes += _num_bytes(keys_values)
        while self.num_bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self._forget(oldest)

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self._entries.clear()
        self._lengths.clear()
        self.num_bytes = 0

    def _forget(self, entry: CachedPrefix) -> None:
        self.num_bytes -= _num_bytes(entry.keys_values)
        self._lengths[entry.length] -= 1
        if not self._lengths[entry.length]:
            del self._lengths[entry.length]


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
