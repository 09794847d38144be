"""The engine's worker side: tokens for the requests of the batch, version stamps, new weights and their proof.

Invariants
    - Everything here is touched by one thread only.
    - Key/values of old weights are never used under new ones.
    - Between the first copied weight and the canary's consent `version` is -1 and nothing is sampled.

Never: awaits, answers, requests that wait, or when weights change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from trace_async.canary import check_canary
from trace_async.core.types import Canary, GenerateRequest, Generation, StopReason
from trace_async.engines.batched_model import BatchedModel
from trace_async.engines.rows import Row


@dataclass(slots=True, eq=False)
class Running:
    """One request in the batch; its row is touched by the worker thread only."""

    request: GenerateRequest
    row: Row
    answer: asyncio.Future[Generation]
    submitted_s: float
    kv_version: int = -1  # oldest version that computed any of the row's key/values
    version_min: int = -1
    version_max: int = -1
    kv_version_min: int = -1
    stop: StopReason | None = None


class Sampler:
    """A model and its version; -1 while its weights are not proven."""

    def __init__(self, model: BatchedModel, *, stop_ids: Sequence[int], dtype: str, version: int) -> None:
        self.version = version
        self._model = model
        self._dtype = dtype
        self._stop_ids = frozenset(stop_ids)
        self._members: set[Running] = set()
        self._passes = self._sampled = 0
        self._batch_bytes = self._prefix_bytes = 0  # as they were after the last pass; read from another thread

    @property
    def counts(self) -> dict[str, float]:
        """computed: tokens that went through the model; reused: prefix tokens whose key/values were there already.

        Gauges: bytes of key/values that the running batch and the store of prefixes hold.
        """
        decoder = self._model.decoder
        return {
            "forward_passes": float(self._passes),
            "sampled_tokens": float(self._sampled),
            "computed_tokens": float(decoder.computed_tokens),
            "reused_tokens": float(decoder.reused_tokens),
            "batch_bytes": float(self._batch_bytes),
            "prefix_bytes": float(self._prefix_bytes),
        }

    def take_over(self, tensors: Mapping[str, torch.Tensor], version: int, canary: Canary) -> None:
        """Use new weights, proven by the canary; PolicyError when they do not act. What is raised leaves version -1."""
        self.version = -1
        self._model.take_over(tensors)
        found = [self._model.score(prompt) for prompt in canary.prompts]
        check_canary(canary, found, dtype=self._dtype, version=version)
        self.version = version

    def advance(self, active: Sequence[Running], *, interrupted: Callable[[], bool]) -> None:
        """One token for every active request, and again until one of them ends or somebody wants something else.

        Requests that were active before and are not any more leave. Whatever is raised empties the batch.
        """
        try:
            self._dismiss(self._members.difference(active))
            self._members.update(active)
            ended: list[Running] = []
            while not ended:
                self._step(active)
                ended = [running for running in active if running.stop is not None]
                if interrupted():
                    break
            self._dismiss(ended)
        except BaseException:
            self._model.decoder.clear()  # a pass that broke off may have written half of what it meant to
            self._dismiss(list(self._members))
            raise
        finally:
            decoder = self._model.decoder
            self._batch_bytes, self._prefix_bytes = decoder.row_bytes, decoder.stored_bytes

    def _step(self, active: Sequence[Running]) -> None:
        for running in active:
            if running.row.computed == 0:
                running.kv_version = self.version
        self._model.advance([running.row for running in active])
        self._passes += 1
        self._sampled += len(active)
        for running in active:
            self._stamp(running)

    def _dismiss(self, leaving: Iterable[Running]) -> None:
        for running in leaving:
            self._model.leave(running.row)
            self._members.discard(running)

    def _stamp(self, running: Running) -> None:
        row, version = running.row, self.version
        num_sampled = len(row.logprobs)
        if version != running.version_max or num_sampled == 1:
            first = num_sampled == 1
            running.version_min = version if first else min(running.version_min, version)
            running.version_max = max(running.version_max, version)
            running.kv_version_min = running.kv_version if first else min(running.kv_version_min, running.kv_version)
        if row.tokens[-1] in self._stop_ids:
            running.stop = StopReason.STOP
        elif num_sampled >= running.request.max_tokens:
            running.stop = StopReason.LENGTH
