"""Sampling with a vLLM server in another process: token ids over HTTP; token ids, log-probabilities and versions back.

Invariants
    - An answer is passed on only if every token of it was sampled by weights that were proven here: what the server
      says of each token is compared with the labels of canaried loads. A server that was restarted says "default".
    - While nothing is proven (before the first load, after a failed one, when the server is away or came back with
      other weights) requests wait and are not sent; their callers have the deadlines.
    - `drain`: requests under way finish on the old weights. `continue`: the server keeps them, throws their key/values
      away and goes on under the new weights; what they bring is held until the canary has spoken.
    - A load ends with proven weights, with the old ones in use (nothing was replaced yet), or fenced, and then the
      server is told to stop and to give up what is under way.

A request is given up by closing its connection. Tasks: none but `run`; requests and loads live in their callers'.
Never: text, a chat template, a retry of a request, or the server's process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trace_async.config import EngineConfig
from trace_async.core.types import Adapter, Canary, GenerateRequest, Generation
from trace_async.engines.vllm_common import Load, cache_salt, check_length, read_stamps
from trace_async.engines.vllm_server_answer import Answer, generate_body, labels_of, read_answer
from trace_async.engines.vllm_server_checks import Expected, check_server
from trace_async.engines.vllm_server_door import Door
from trace_async.engines.vllm_server_fence import Fence
from trace_async.engines.vllm_server_http import ServerFailure, ServerGone, ServerLate, VllmHttp
from trace_async.engines.vllm_server_update import RefusedWeights, prove, take_over
from trace_async.errors import EngineError

_LOG = logging.getLogger(__name__)

HEALTH_S = 5.0
"""How often the server is asked which weights it holds; each answer says so too."""

RETRY_S = 1.0
"""Pause between two looks for a server that is away."""

GONE_AFTER_S = 600.0
"""A server that was away for so long does not come back; the actor ends."""

_CLEANUP_DEADLINE_S = 5.0
_WAITING_PER_PLACE = 1024
"""Requests that may wait for each place at the server; an actor's max_live_roots keeps its trees far below that."""


class VllmServerEngine:
    """One server, which nobody else uses. `run` must be running for anything to be answered or loaded."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        expected: Expected,
        stop_ids: Sequence[int],
        base: Path,
        start: Load | None = None,
    ) -> None:
        """`base`: the start policy's folder, as the server sees it; `start`: what `run` loads first, if anything."""
        self._config = config
        self._expected = expected
        self._stop_ids = tuple(stop_ids)
        self._base = base
        self._start = start
        self._http = VllmHttp(config.server_url, max_requests=config.max_batch)
        self._fence = Fence(
            Door(places=config.max_batch, max_waiting=_WAITING_PER_PLACE * config.max_batch), on_lost=self._look_again
        )
        self.lost = self._fence.lost
        self._num_loads = 0
        self._updating = asyncio.Lock()
        self._control = asyncio.Lock()  # one of update and search at a time: a search resumes the server
        self._up = asyncio.Event()  # the server is there and was checked
        self._suspect = asyncio.Event()  # something looks wrong; have a look now
        self._closed = False
        self._counts = dict.fromkeys(("requests", "sampled_tokens", "reused_tokens", "server_absences"), 0.0)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 while none are proven or the server is away."""
        return self._fence.version if self._up.is_set() else -1

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        return {**self._counts, "refused_answers": float(self._fence.num_refused), **self._fence.door.counters()}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; waits for a place at the server. Raises EngineError when it cannot be answered."""
        if self._closed:
            raise EngineError(f"request {request.request_id}: the engine is closed")
        check_length(request, max_model_tokens=self._expected.max_tokens)
        submitted_s = time.perf_counter()
        async with self._fence.door.passage(request.request_id) as flight:
            answer = await self._ask(request)
            await self._fence.admit(labels_of(answer.spans), flight)
        stamps = read_stamps(answer.spans, num_tokens=len(answer.token_ids), request_id=request.request_id)
        self._counts["requests"] += 1
        self._counts["sampled_tokens"] += len(answer.token_ids)
        self._counts["reused_tokens"] += answer.cached_tokens
        return Generation(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            version_min=stamps.version_min,
            version_max=stamps.version_max,
            kv_version_min=stamps.kv_version_min,
            stop=answer.stop,
            generate_s=time.perf_counter() - submitted_s,
        )

    async def _ask(self, request: GenerateRequest) -> Answer:
        salt = self._salt(self._fence.acting)
        body = generate_body(request, temperature=self._config.temperature, stop_ids=self._stop_ids, salt=salt)
        try:
            reply = await self._http.generate(body, deadline_s=self._config.request_deadline_s)
        except ServerGone as error:
            self._miss(error)
            raise EngineError(f"request {request.request_id}: {error}") from error
        except ServerFailure as error:
            self._suspect.set()
            raise EngineError(f"request {request.request_id}: {error}") from error
        return read_answer(reply, request_id=request.request_id, vocabulary_size=self._expected.vocabulary_size)

    def _salt(self, label: str | None) -> str:
        return cache_salt(label or "none", load=self._num_loads)

    # -- loading

    async def load(self, *, version: int, epoch: int, weights: Path, canary: Canary, adapter: Adapter | None) -> None:
        """Have the server take over these weights; returns when they act and the canary agrees.

        Waits for its turn, for the server to be there (woken by `run`), and in `drain` for requests under way; a server
        that goes away meanwhile is waited for and asked again. Raises PolicyError when the file is refused (the old
        weights stay) or the canary does not agree, EngineError when the server fails otherwise; then it is fenced.
        """
        load = Load(version=version, epoch=epoch, weights=weights, canary=canary, adapter=adapter)
        async with self._updating:
            while True:
                await self._up.wait()
                if self._closed:
                    raise EngineError(f"version {version}: the engine is closed")
                try:
                    async with self._control:
                        return await self._update(load)
                except (ServerGone, ServerLate) as error:
                    self._miss(error)

    async def _update(self, load: Load) -> None:
        started_s = time.perf_counter()
        fence, drains = self._fence, self._config.on_update == "drain"
        fence.door.close()
        with fence.candidate(load.label):
            try:
                if drains:
                    await fence.door.emptied()
                await self._http.pause("wait" if drains else "keep")
                with fence.down(load.label, unless=RefusedWeights):
                    await take_over(self._http, load, base=self._base)
                    self._num_loads += 1
                await prove(self._http, load, dtype=self._config.dtype, salt=self._salt(load.label))
            except BaseException as error:
                await self._give_up(load, error)
                raise
            fence.prove(load.label, load.version)
        if self._up.is_set():  # else the search opens it
            fence.door.open()
        _LOG.info("%s holds %s after %.2f s", self._http.url, load.label, time.perf_counter() - started_s)

    async def _give_up(self, load: Load, error: BaseException) -> None:
        """Old weights that were not replaced go on; else nothing under way may get out, and the server shall stop.

        Within a deadline, also when cancelled; a server that does not answer is found again by `run`.
        """
        try:
            if self._fence.acting is not None:
                await self._http.resume(deadline_s=_CLEANUP_DEADLINE_S)
                self._fence.door.open()
                return
            reason = f"version {load.version} was not proven: {type(error).__name__}: {error}"
            _LOG.warning("%s is fenced: %s", self._http.url, reason)
            self._fence.forget(reason)
            await self._http.pause("abort", deadline_s=_CLEANUP_DEADLINE_S)
        except ServerFailure as failure:
            self._miss(failure)

    # -- watching

    async def run(self) -> None:
        """Consumes the server's word about its weights, produces the fence; woken by a failed call and each HEALTH_S.

        Raises ConfigError for a server that will not do, EngineError for one that is away for GONE_AFTER_S; what the
        start policy's load raises, if there is one.
        """
        async with self._http:
            try:
                async with asyncio.TaskGroup() as group:
                    if self._start is not None:
                        group.create_task(self._load_start(self._start), name="start policy")
                    while True:
                        await self._find()
                        await self._watch()
            finally:
                self._closed = True
                self._fence.close()
                self._up.set()  # wakes a load, which then fails

    async def _load_start(self, start: Load) -> None:
        await self.load(
            version=start.version,
            epoch=start.epoch,
            weights=start.weights,
            canary=start.canary,
            adapter=start.adapter,
        )

    async def _find(self) -> None:
        """Looks until the server is there and will do; then its weights are the acting ones, or are lost."""
        since_s, said = time.monotonic(), False
        while True:
            try:
                async with self._control:
                    await check_server(self._http, self._expected)
                    self._fence.compare(await self._http.label())
                break
            except ServerFailure as error:
                away_s = time.monotonic() - since_s
                if away_s > GONE_AFTER_S:
                    raise EngineError(f"the vLLM server has been away for {away_s:.0f} s: {error}") from error
                if not said:
                    _LOG.warning("waiting for the vLLM server: %s", error)
                    said = True
            await asyncio.sleep(RETRY_S)  # a process elsewhere that starts wakes nobody
        self._suspect.clear()
        self._up.set()
        if self._fence.acting is not None and not self._updating.locked():
            self._fence.door.open()

    async def _watch(self) -> None:
        """Returns when the server must be looked for again."""
        while self._up.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(HEALTH_S):
                    await self._suspect.wait()
            self._suspect.clear()
            if self._updating.locked():
                continue  # it asks the server itself
            async with self._updating:
                try:
                    self._fence.compare(await self._http.label())
                except ServerFailure as error:
                    self._miss(error)

    def _miss(self, failure: ServerFailure) -> None:
        """The server does not answer: nothing more is sent until it was found, and no trees are begun meanwhile."""
        if self._up.is_set() and not self._closed:
            self._fence.lost.set()
            _LOG.warning("the vLLM server is away: %s", failure)
            self._counts["server_absences"] += 1
            self._fence.door.close()
        self._look_again()

    def _look_again(self) -> None:
        """It may come back with other weights and other flags."""
        if not self._closed:
            self._up.clear()
            self._suspect.set()
