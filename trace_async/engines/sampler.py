"""The engine's worker side: which requests go into a forward pass, prefix reuse, version stamps, new weights.

Invariants: everything here is touched by one thread only; key/values of old weights are never used under new ones.
Never: asyncio, waiting requests, or when weights change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.batched_model import BatchedModel, Row
from trace_async.engines.prefix_cache import PrefixCache


@dataclass(slots=True, eq=False)
class Running:
    """One request in the batch; its row is touched by the worker thread only."""

    request: GenerateRequest
    row: Row
    answer: asyncio.Future[Generation]
    submitted_s: float
    kv_version: int = 0  # oldest version that computed any of the row's key/values
    version_min: int = -1
    version_max: int = -1
    kv_version_min: int = -1
    stop: StopReason | None = None


class Sampler:
    """A model, its version, and the key/values of earlier prefixes. `model` must have been probed."""

    def __init__(self, model: BatchedModel, *, stop_ids: Sequence[int], prefix_cache_bytes: int, version: int) -> None:
        self.version = version
        self.counts = dict.fromkeys(("forward_passes", "sampled_tokens", "computed_tokens", "reused_tokens"), 0.0)
        """computed: tokens that went through the model; reused: prefix tokens whose key/values were in the cache."""
        self._model = model
        self._stop_ids = frozenset(stop_ids)
        self._cache = PrefixCache(max_bytes=prefix_cache_bytes)

    def take_over(self, tensors: Mapping[str, torch.Tensor], version: int, active: Sequence[Running]) -> None:
        """Use new weights. Whatever is raised leaves a model that is neither version and must not be used again."""
        self._model.take_over(tensors)
        self.version = version
        self._cache.clear()
        for running in active:
            running.row.keys_values, running.row.computed = None, 0

    def advance(self, active: Sequence[Running]) -> None:
        """One token for every active request that is not waiting for a twin's prefix."""
        ready, openings = self._ready(active)
        for batch in _alike(ready):
            self.counts["computed_tokens"] += sum(running.row.num_pending for running in batch)
            self._model.advance([running.row for running in batch])
            self.counts["forward_passes"] += 1
            self.counts["sampled_tokens"] += len(batch)
            for running in batch:
                self._stamp(running)
        for running in openings:
            self._remember(running.row, len(running.row.prefix) - 1)
        for running in ready:
            if running.stop is not None:
                self._remember(running.row, running.row.computed)

    def _ready(self, active: Sequence[Running]) -> tuple[list[Running], list[Running]]:
        """Requests to compute now, and those among them whose whole prefix is new.

        Of several requests with the same new prefix one goes first; the others find its key/values one pass later.
        Where the cache cannot keep that prefix, all go at once.
        """
        ready: list[Running] = []
        openings: dict[tuple[int, ...], Running] = {}
        for running in active:
            if running.row.keys_values is None:
                self._look_up(running)
                if running.row.computed == 0 and self._keeps(len(running.row.prefix) - 1):
                    if tuple(running.row.tokens) in openings:
                        continue
                    openings[tuple(running.row.tokens)] = running
            ready.append(running)
        return ready, list(openings.values())

    def _look_up(self, running: Running) -> None:
        tokens = np.asarray(running.row.tokens, np.int32)
        # The last token is always computed: its logits are what the next token is drawn from.
        hit = self._cache.longest(tokens, max_length=len(tokens) - 1)
        if hit is not None:
            running.row.keys_values, running.row.computed = hit.keys_values, hit.length
            self.counts["reused_tokens"] += hit.length
        running.kv_version = self.version

    def _keeps(self, length: int) -> bool:
        return 0 < length * self._model.token_bytes <= self._cache.max_bytes

    def _remember(self, row: Row, length: int) -> None:
        if length > 0 and row.keys_values is not None:
            self._cache.store(np.asarray(row.tokens[:length], np.int32), row.keys_values[:, :, :, :length])

    def _stamp(self, running: Running) -> None:
        row, first = running.row, len(running.row.sampled) == 1
        running.version_min = self.version if first else min(running.version_min, self.version)
        running.version_max = max(running.version_max, self.version)
        running.kv_version_min = running.kv_version if first else min(running.kv_version_min, running.kv_version)
        if row.sampled[-1] in self._stop_ids:
            running.stop = StopReason.STOP
        elif len(row.sampled) >= running.request.max_tokens:
            running.stop = StopReason.LENGTH


def _alike(ready: list[Running]) -> list[list[Running]]:
    """Requests whose padded forward passes waste little: pending counts within a factor of two."""
    batches: dict[int, list[Running]] = {}
    for running in ready:
        batches.setdefault((running.row.num_pending - 1).bit_length(), []).append(running)
    return list(batches.values())
