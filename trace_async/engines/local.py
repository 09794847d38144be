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
from functools import partial

import numpy as np
import torch

from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation
from trace_async.engines.batched_model import BatchedModel, Row
from trace_async.engines.sampler import Running, Sampler
from trace_async.errors import EngineError

_LOG = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 3
_WAITING_PER_PLACE = 1024
"""Requests that may wait for each place in the batch; an actor's max_live_roots keeps its trees far below that."""


@dataclass(slots=True, eq=False)
class _Load:
    """A version that waits to be taken over."""

    version: int
    done: asyncio.Future[None]
    tensors: Mapping[str, torch.Tensor] | None = None  # None while they are being read


class LocalEngine:
    """Continuous batching over one transformers model. `run` must be running for anything to be answered."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        config: EngineConfig,
        stop_ids: Sequence[int],
        pad_id: int,
        max_tokens: int,
        version: int = -1,
    ) -> None:
        """`max_tokens`: the longest context that will be asked for. Raises PolicyError for a model it gets wrong."""
        self._model = BatchedModel(model, pad_id=pad_id, temperature=config.temperature)
        self._model.probe(max_tokens=max_tokens)
        self._sampler = Sampler(
            self._model, stop_ids=stop_ids, prefix_cache_bytes=config.prefix_cache_bytes, version=version
        )
        self._config = config
        self._max_waiting = _WAITING_PER_PLACE * config.max_batch
        self._waiting: deque[Running] = deque()
        self._active: list[Running] = []
        self._loads: list[_Load] = []
        self._work = asyncio.Event()
        self._closed = False
        self._counts = dict.fromkeys(("busy_s", "idle_s", "requests"), 0.0)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first `load`."""
        return self._sampler.version

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        gauges = {"waiting": float(len(self._waiting)), "active": float(len(self._active))}
        return {**self._counts, **self._sampler.counts, **gauges}

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
        if len(self._waiting) >= self._max_waiting:
            raise EngineError(
                f"request {request.request_id}: {len(self._waiting)} requests wait already, {_WAITING_PER_PLACE} for "
                "each place in the batch; lower actor.max_live_roots or raise engine.max_batch"
            )
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        row = Row(prefix=request.prefix_ids.tolist(), seed=request.seed, greedy=request.greedy)
        self._waiting.append(Running(request, row, answer, time.perf_counter()))
        self._work.set()
        return await answer  # woken by run(); a cancelled answer leaves the batch before the next forward pass

    async def load(self, *, version: int, epoch: int, weights: bytes) -> None:
        """Take over a version's weights between two forward passes; returns when they are in use.

        `weights` is a whole safetensors file, read at once in a thread of its own; `drain` begins at once too. Raises
        PolicyError, and the old weights stay, when its tensors are not exactly the model's; EngineError when closed.
        """
        if self._closed:
            raise EngineError(f"version {version}: the engine is closed")
        load = _Load(version, asyncio.get_running_loop().create_future())
        self._loads.append(load)
        try:
            load.tensors = await asyncio.to_thread(self._model.read, weights)
            self._work.set()
            await load.done  # woken by run()
        finally:
            if load in self._loads:  # unreadable, or nobody wants it any more: the drain is over
                self._loads.remove(load)
                self._work.set()
        _LOG.debug("engine holds version %d of epoch %d", version, epoch)

    async def run(self) -> None:
        """Consumes requests and loads; produces answers; waits for `_work`, woken by `generate` and `load`.

        Raises whatever interrupts the copying of weights, and what fails several forward passes in a row.
        """
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
                    if loads:
                        await self._take_over(loads, worker)
                    try:
                        await loop.run_in_executor(worker, self._sampler.advance, self._active)
                        failures = 0
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

    async def _take_over(self, loads: list[_Load], worker: ThreadPoolExecutor) -> None:
        """The newest of `loads` stands for all. An error ends the engine: its model may be half old and half new."""
        newest = loads[-1]
        assert newest.tensors is not None
        take_over = partial(self._sampler.take_over, newest.tensors, newest.version, self._active)
        try:
            await asyncio.get_running_loop().run_in_executor(worker, take_over)
        except BaseException as error:
            _settle(loads, EngineError(f"version {newest.version} was not taken over: {error!r}"))
            raise
        _settle(loads)

    # -- on the event loop, between two forward passes

    @property
    def _drains(self) -> bool:
        return self._config.on_update == "drain"

    def _due_loads(self) -> list[_Load]:
        """The versions to take over now: none while one is still being read."""
        self._active = [r for r in self._active if not r.answer.done()]
        if any(load.tensors is None for load in self._loads) or (self._active and self._drains):
            return []
        due, self._loads = self._loads, []
        return due

    def _admit(self) -> None:
        """Fill the batch, unless it is being drained for a new version."""
        while self._waiting and len(self._active) < self._config.max_batch and not (self._loads and self._drains):
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


def _settle(loads: list[_Load], error: Exception | None = None) -> None:
    for load in loads:
        if load.done.done():  # whoever asked was cancelled meanwhile
            continue
        if error is None:
            load.done.set_result(None)
        else:
            load.done.set_exception(error)
