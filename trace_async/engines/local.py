"""Sampling with a transformers model in this process: token ids in; token ids, log-probabilities and versions out.

Invariants
    - One worker thread owns the model, the prefix cache and every request's key/values; the event loop never blocks.
    - Requests join and leave the batch at token granularity; a result does not depend on who else was in the batch
      (up to floating point), because each token is drawn with a number derived from the request's own seed.
    - Log-probabilities are those of the distribution that was sampled: after temperature, nothing truncated, float32.
    - Weights change only between two forward passes. `drain`: requests in flight finish on the old weights and new ones
      wait. `continue`: they go on under the new weights with key/values recomputed, and their stamps say so.
    - New weights are proven by the learner's canary before anything is sampled with them. Without proven weights the
      engine is fenced: requests wait.
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
from pathlib import Path

import numpy as np
import torch

from trace_async.config import EngineConfig
from trace_async.core.types import Adapter, Canary, GenerateRequest, Generation
from trace_async.engines.batched_model import BatchedModel
from trace_async.engines.rows import Row
from trace_async.engines.sampler import Running, Sampler
from trace_async.errors import EngineError, PolicyError
from trace_async.weights import read_weights

_LOG = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 3
_WAITING_PER_PLACE = 1024
"""Requests that may wait for each place in the batch; an actor's max_live_roots keeps its trees far below that."""


@dataclass(slots=True, eq=False)
class _Load:
    """A version that waits to be taken over."""

    version: int
    canary: Canary
    done: asyncio.Future[None]
    tensors: Mapping[str, torch.Tensor] | None = None  # None while they are being read


class LocalEngine:
    """Continuous batching over one transformers model. `run` must be running for anything to be answered."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        base: Path,
        config: EngineConfig,
        stop_ids: Sequence[int],
        pad_id: int,
        max_tokens: int,
        version: int = -1,
    ) -> None:
        """`base`: the folder that `model` came from, to which adapters are additions; `max_tokens`: the longest context
        that will be asked for; `version`: of the weights that `model` has, -1 for a fenced engine.

        Raises PolicyError for a model it gets wrong.
        """
        self._model = BatchedModel(
            model,
            pad_id=pad_id,
            temperature=config.temperature,
            dtype=config.dtype,
            max_rows=config.max_batch,
            max_tokens=max_tokens,
            prefix_cache_bytes=config.prefix_cache_bytes,
        )
        self._sampler = Sampler(self._model, stop_ids=stop_ids, dtype=config.dtype, version=version)
        self._base = base
        self._config = config
        self.lost = asyncio.Event()  # never set: the weights live in this process
        self._max_waiting = _WAITING_PER_PLACE * config.max_batch
        self._waiting: deque[Running] = deque()
        self._active: list[Running] = []
        self._loads: list[_Load] = []
        self._work = asyncio.Event()  # somebody wants something of `run`
        self._closed = False
        self._failures = 0  # forward passes in a row
        self._counts = dict.fromkeys(("busy_s", "idle_s", "requests"), 0.0)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 while the engine is fenced, as before its first `load`."""
        return self._sampler.version

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        gauges = {"waiting": float(len(self._waiting)), "active": float(len(self._active))}
        return {**self._counts, **self._sampler.counts, **gauges}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; waits for weights and for the batch. Raises EngineError when it cannot be answered."""
        if self._closed:
            raise EngineError(f"request {request.request_id}: the engine is closed")
        length, limit = len(request.prefix_ids), self._model.max_tokens
        if request.max_tokens < 1 or length < 1:
            raise EngineError(f"request {request.request_id}: {length} prefix tokens, max_tokens {request.max_tokens}")
        if length + request.max_tokens > limit:
            raise EngineError(
                f"request {request.request_id}: {length} prefix tokens + {request.max_tokens} new ones exceed {limit}, "
                "the smaller of tree.max_context_tokens and the model's positions; ask for less, or raise the former"
            )
        if len(self._waiting) >= self._max_waiting:
            raise EngineError(
                f"request {request.request_id}: {len(self._waiting)} requests wait already, {_WAITING_PER_PLACE} for "
                "each place in the batch; lower actor.max_live_roots or raise engine.max_batch"
            )
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        row = Row(tokens=request.prefix_ids.tolist(), num_prefix=length, seed=request.seed, greedy=request.greedy)
        self._waiting.append(Running(request, row, answer, time.perf_counter()))
        self._work.set()
        try:
            return await answer  # woken by run()
        except asyncio.CancelledError:
            self._work.set()  # it leaves the batch before the next forward pass
            raise

    async def load(self, *, version: int, epoch: int, weights: Path, canary: Canary, adapter: Adapter | None) -> None:
        """Take over a version's weights between two forward passes; returns when they act and the canary agrees.

        The file is read at once in a thread of its own; `drain` begins at once too. PolicyError when its tensors are
        not exactly the model's: the old weights stay. PolicyError also when they cannot be copied or the canary does
        not agree: then the engine is fenced until another load succeeds. EngineError when closed.
        """
        if self._closed:
            raise EngineError(f"version {version}: the engine is closed")
        load = _Load(version, canary, asyncio.get_running_loop().create_future())
        self._loads.append(load)
        try:
            load.tensors = await asyncio.to_thread(self._read, weights, adapter)
            self._work.set()
            await load.done  # woken by run()
        finally:
            if load in self._loads:  # unreadable, or nobody wants it any more: the drain is over
                self._loads.remove(load)
            if load.done.done() and not load.done.cancelled():
                load.done.exception()  # the engine closed while this was cancelled: nobody is left to be told
            self._work.set()
        _LOG.debug("engine holds version %d of epoch %d", version, epoch)

    def _read(self, weights: Path, adapter: Adapter | None) -> Mapping[str, torch.Tensor]:
        tensors = read_weights(weights, adapter=adapter, base=self._base)
        self._model.check(tensors)
        return tensors

    async def run(self) -> None:
        """Consumes requests and loads; produces answers; waits for `_work`, woken by `generate` and `load`.

        Raises what fails several forward passes in a row.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
            try:
                idle_since = time.perf_counter()
                while True:
                    self._work.clear()
                    loads = self._due_loads()
                    self._admit()
                    if not loads and (not self._active or self.version < 0):
                        await self._work.wait()
                        continue
                    started = time.perf_counter()
                    self._counts["idle_s"] += started - idle_since
                    if loads:
                        await self._take_over(loads, worker)
                    else:
                        await self._sample(worker)
                    idle_since = time.perf_counter()
                    self._counts["busy_s"] += idle_since - started
                    self._answer_finished()
            finally:
                self._close()

    async def _sample(self, worker: ThreadPoolExecutor) -> None:
        """Tokens for the active requests, until one ends or `_work` is set; raises what fails again and again."""
        advance = partial(self._sampler.advance, self._active, interrupted=self._work.is_set)
        try:
            await asyncio.get_running_loop().run_in_executor(worker, advance)
            self._failures = 0
        except (RuntimeError, MemoryError) as error:  # torch reports every failed kernel as RuntimeError
            self._failures += 1
            self._fail_active(error)
            if self._failures >= _MAX_FAILURES_IN_A_ROW:
                raise

    async def _take_over(self, loads: list[_Load], worker: ThreadPoolExecutor) -> None:
        """The newest of `loads` stands for all; its verdict is theirs."""
        newest = loads[-1]
        assert newest.tensors is not None
        take_over = partial(self._sampler.take_over, newest.tensors, newest.version, newest.canary)
        try:
            await asyncio.get_running_loop().run_in_executor(worker, take_over)
        except PolicyError as error:
            _settle(loads, error)
        except (RuntimeError, MemoryError) as error:  # torch reports every failed copy as RuntimeError
            failure = PolicyError(
                f"version {newest.version} was copied in part only and the engine samples nothing until another one is "
                f"loaded: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            _settle(loads, failure)
        except BaseException as error:
            _settle(loads, EngineError(f"version {newest.version} was not taken over: {error!r}"))
            raise
        else:
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
        """Fill the batch, unless it is being drained for a new version or there are no proven weights."""
        if self.version < 0 or (self._loads and self._drains):
            return
        while self._waiting and len(self._active) < self._config.max_batch:
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
        self._work.set()  # the worker thread looks at it after each token
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
