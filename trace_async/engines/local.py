"""Sampling with a transformers model in this process: token ids in; token ids, log-probabilities and versions out.

Invariants
    - One worker thread owns the model, the prefix cache and every request's key/values; the event loop never blocks.
    - Requests join and leave the batch at token granularity; a result does not depend on who else was in the batch
      (up to floating point), because each token is drawn with a number derived from the request's own seed.
    - Log-probabilities are those of the distribution that was sampled: after temperature, nothing truncated, float32.
    - Weights change only between two forward passes. `drain`: requests in flight finish on the old weights and new ones
      wait. `continue`: they go on under the new weights with key/values recomputed, and their stamps say so.
    - An answer is stamped with the versions that sampled it, never with what somebody believed at dispatch.

Never: text, a chat template, or a decision about which version should be used.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.batched_model import BatchedModel, Row
from trace_async.engines.prefix_cache import PrefixCache
from trace_async.errors import EngineError, PolicyError

_LOG = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 3
_COUNTERS = (
    "busy_s",
    "idle_s",
    "forward_passes",
    "requests",
    "sampled_tokens",
    "computed_tokens",  # prefix and sampled tokens that went through the model
    "reused_tokens",  # prefix tokens whose key/values were found in the cache
)


@dataclass(slots=True, eq=False)
class _Running:
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


@dataclass(slots=True, eq=False)
class _Load:
    """A version that waits to be taken over."""

    version: int
    weights: Path
    done: asyncio.Future[None]


class LocalEngine:
    """Continuous batching over one transformers model. `run` must be running for anything to be answered."""

    def __init__(
        self, model: torch.nn.Module, *, config: EngineConfig, stop_ids: Sequence[int], pad_id: int, version: int = -1
    ) -> None:
        self._model = BatchedModel(model, pad_id=pad_id, temperature=config.temperature)
        self._config = config
        self._stop_ids = frozenset(stop_ids)
        self._version = version
        self._waiting: deque[_Running] = deque()
        self._active: list[_Running] = []
        self._loads: list[_Load] = []
        self._work = asyncio.Event()
        self._cache = PrefixCache(max_bytes=config.prefix_cache_bytes)
        self._closed = False
        self._counts = dict.fromkeys(_COUNTERS, 0.0)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first `load`."""
        return self._version

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        return {**self._counts, "waiting": float(len(self._waiting)), "active": float(len(self._active))}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; waits for the batch. Raises EngineError when it cannot be answered."""
        if self._closed:
            raise EngineError(f"request {request.request_id}: the engine is closed")
        length = len(request.prefix_ids)
        if request.max_tokens < 1 or length < 1:
            raise EngineError(f"request {request.request_id}: {length} prefix tokens, max_tokens {request.max_tokens}")
        if length + request.max_tokens > self._model.max_positions:
            raise EngineError(
                f"request {request.request_id}: {length} prefix tokens + {request.max_tokens} new ones exceed the "
                f"model's {self._model.max_positions} positions; lower tree.max_context_tokens"
            )
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        row = Row(prefix=request.prefix_ids.tolist(), seed=request.seed, greedy=request.greedy)
        self._waiting.append(_Running(request, row, answer, time.perf_counter()))
        self._work.set()
        return await answer  # woken by run(); a cancelled answer leaves the batch before the next forward pass

    async def load(self, *, version: int, epoch: int, weights: Path) -> None:
        """Take over a version's weights between two forward passes; returns when they are in use.

        Raises PolicyError when the file's tensors are not exactly the model's; then the old weights stay in use.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append(_Load(version, weights, done))
        self._work.set()
        await done  # woken by run()
        _LOG.debug("engine holds version %d of epoch %d", version, epoch)

    async def run(self) -> None:
        """Consumes requests and loads; produces answers; waits for `_work`, woken by `generate` and `load`."""
        failures = 0
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
            try:
                idle_since = time.perf_counter()
                while True:
                    await self._work.wait()
                    loads = self._due_loads()
                    self._admit()
                    if not loads and not self._active:
                        self._work.clear()
                        continue
                    started = time.perf_counter()
                    self._counts["idle_s"] += started - idle_since
                    try:
                        if loads:
                            await loop.run_in_executor(worker, self._take_over, loads[-1])
                            _settle(loads)
                        await loop.run_in_executor(worker, self._advance)
                        failures = 0
                    except PolicyError as error:
                        _settle(loads, error)
                    except (RuntimeError, MemoryError) as error:  # torch reports every failed kernel as RuntimeError
                        failures += 1
                        self._fail_active(error)
                        if failures >= _MAX_FAILURES_IN_A_ROW:
                            raise
                    idle_since = time.perf_counter()
                    self._counts["busy_s"] += idle_since - started
                    self._answer_finished()
            finally:
                self._close()

    # -- on the event loop, between two forward passes

    def _due_loads(self) -> list[_Load]:
        """The versions to take over now. The newest stands for all that waited with it."""
        self._active = [r for r in self._active if not r.answer.done()]
        if self._active and self._config.on_update == "drain":
            return []
        due, self._loads = self._loads, []
        return due

    def _admit(self) -> None:
        """Fill the batch, unless it is being drained for a new version."""
        while self._waiting and len(self._active) < self._config.max_batch and not self._loads:
            running = self._waiting.popleft()
            if not running.answer.done():
                self._counts["requests"] += 1
                self._active.append(running)

    def _answer_finished(self) -> None:
        now_s = time.perf_counter()
        for running in self._active:
            if running.stop is not None and not running.answer.done():
                running.answer.set_result(
                    Generation(
                        token_ids=np.asarray(running.row.sampled, dtype=np.int32),
                        logprobs=np.asarray(running.row.logprobs, dtype=np.float32),
                        version_min=running.version_min,
                        version_max=running.version_max,
                        kv_version_min=running.kv_version_min,
                        stop=running.stop,
                        generate_s=now_s - running.submitted_s,
                    )
                )
        self._active = [r for r in self._active if r.stop is None]

    def _fail_active(self, error: BaseException) -> None:
        _LOG.warning("a forward pass over %d requests failed: %s", len(self._active), error)
        for running in self._active:
            if not running.answer.done():
                failure = EngineError(f"request {running.request.request_id}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                running.answer.set_exception(failure)
        self._active = []

    def _close(self) -> None:
        self._closed = True
        for running in (*self._active, *self._waiting):
            if not running.answer.done():
                running.answer.set_exception(EngineError(f"request {running.request.request_id}: the engine closed"))
        _settle(self._loads, EngineError("the engine closed before it took over this version"))
        self._active, self._loads = [], []
        self._waiting.clear()

    # -- on the worker thread

    def _take_over(self, load: _Load) -> None:
        self._model.load(load.weights)
        self._version = load.version
        self._cache.clear()
        for running in self._active:
            running.row.keys_values, running.row.computed = None, 0

    def _advance(self) -> None:
        """One token for every active request that is not waiting for a twin's prefix."""
        ready, openings = self._ready()
        for batch in _alike(ready):
            self._counts["computed_tokens"] += sum(running.row.num_pending for running in batch)
            self._model.advance([running.row for running in batch])
            self._counts["forward_passes"] += 1
            self._counts["sampled_tokens"] += len(batch)
            for running in batch:
                self._stamp(running)
        for running in openings:
            self._remember(running.row, len(running.row.prefix) - 1)
        for running in ready:
            if running.stop is not None:
                self._remember(running.row, running.row.computed)

    def _ready(self) -> tuple[list[_Running], list[_Running]]:
        """Requests to compute now, and those among them whose whole prefix is new.

        Of several requests with the same new prefix one goes first; the others find its key/values one pass later.
        """
        ready: list[_Running] = []
        openings: dict[tuple[int, ...], _Running] = {}
        for running in self._active:
            if running.row.keys_values is None:
                self._look_up(running)
                if running.row.computed == 0:
                    if tuple(running.row.tokens) in openings:
                        continue
                    openings[tuple(running.row.tokens)] = running
            ready.append(running)
        return ready, list(openings.values())

    def _look_up(self, running: _Running) -> None:
        tokens = np.asarray(running.row.tokens, np.int32)
        # The last token is always computed: its logits are what the next token is drawn from.
        hit = self._cache.longest(tokens, max_length=len(tokens) - 1)
        if hit is not None:
            running.row.keys_values, running.row.computed = hit.keys_values, hit.length
            self._counts["reused_tokens"] += hit.length
        running.kv_version = self._version

    def _remember(self, row: Row, length: int) -> None:
        if length > 0 and row.keys_values is not None:
            self._cache.store(np.asarray(row.tokens[:length], np.int32), row.keys_values[:, :, :, :length])

    def _stamp(self, running: _Running) -> None:
        row, first = running.row, len(running.row.sampled) == 1
        running.version_min = self._version if first else min(running.version_min, self._version)
        running.version_max = max(running.version_max, self._version)
        running.kv_version_min = running.kv_version if first else min(running.kv_version_min, running.kv_version)
        if row.sampled[-1] in self._stop_ids:
            running.stop = StopReason.STOP
        elif len(row.sampled) >= running.request.max_tokens:
            running.stop = StopReason.LENGTH


def _alike(ready: list[_Running]) -> list[list[_Running]]:
    """Requests whose padded forward passes waste little: pending counts within a factor of two."""
    batches: dict[int, list[_Running]] = {}
    for running in ready:
        batches.setdefault((running.row.num_pending - 1).bit_length(), []).append(running)
    return list(batches.values())


def _settle(loads: list[_Load], error: Exception | None = None) -> None:
    for load in loads:
        if load.done.done():  # whoever asked was cancelled meanwhile
            continue
        if error is None:
            load.done.set_result(None)
        else:
            load.done.set_exception(error)
