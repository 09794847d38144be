"""Sampling with vLLM in this process: token ids in; token ids, log-probabilities and versions out.

Invariants
    - An answer is passed on only if vLLM says of every token that weights sampled it which were proven here.
    - While nothing is proven (before the first load, after a failed one, after vLLM's engine process was lost) requests
      wait and are not sent; their callers have the deadlines.
    - Weights change while generation is paused and every key/value has been thrown away. `drain`: requests in flight
      finish first. `continue`: they go on under the new weights with key/values recomputed; what they bring is held
      until the canary has spoken.
    - A load ends with proven weights, with the old ones in use (the file was refused), or fenced.

Tasks: none but `run`; requests and loads live in their callers'. Never: text, a chat template, a retry of a request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from trace_async.canary import check_canary
from trace_async.core.types import Adapter, Canary, GenerateRequest, Generation
from trace_async.engines.vllm_common import Load, cache_salt, check_length, check_options, read_stamps, version_label
from trace_async.engines.vllm_front import Answer, EngineGone, VllmFront
from trace_async.engines.vllm_process import Launch, VllmProcess
from trace_async.engines.vllm_server_door import Door, Flight
from trace_async.errors import EngineError, PolicyError

_LOG = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Ends of vLLM's process in a row that are made good; the next one ends `run`."""

STEADY_S = 600.0
"""A process that lived so long starts that count anew."""

_ABORT_DEADLINE_S = 10.0
_WAITING_PER_PLACE = 1024


class VllmEngine:
    """One vLLM engine of this process's own. `run` must be running for anything to be answered or loaded."""

    def __init__(self, launch: Launch, *, stop_ids: Sequence[int], version: int = -1) -> None:
        """`version`: what the start policy's weights are called; -1: nothing is sampled before the first load.

        Raises ConfigError for engine.options that are refused.
        """
        check_options(launch.config.options)
        self.lost = asyncio.Event()
        self._launch = launch
        self._stop_ids = tuple(stop_ids)
        self._start_version = version
        places = launch.config.max_batch
        self._door = Door(places=places, max_waiting=_WAITING_PER_PLACE * places)
        self._front: VllmFront | None = None
        self._up = asyncio.Event()  # `_front` can be asked, or the engine is closed
        self._judged = asyncio.Event()  # no weights are in use whose canary has not spoken
        self._judged.set()
        self._updating = asyncio.Lock()
        self._version = -1
        self._proven: set[str] = set()  # labels of weights proven since the last fence
        self._salt = ""
        self._num_loads = 0
        self._loaded = False  # a published version was copied over the start policy's weights
        self._closed = False
        names = ("requests", "sampled_tokens", "computed_tokens", "reused_tokens", "restarts")
        self._counts = dict.fromkeys(names, 0.0)

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 while none are proven."""
        return self._version

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        return {**self._counts, **self._door.counters()}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; waits for a place. Raises EngineError when it cannot be answered."""
        if self._closed:
            raise EngineError(f"request {request.request_id}: the engine is closed")
        check_length(request, max_model_tokens=self._launch.max_tokens)
        submitted_s = time.perf_counter()
        async with self._door.passage(request.request_id) as flight:
            try:
                answer = await self._ask(request)
                await self._judged.wait()  # woken by the load that has replaced the weights
            except EngineError as error:
                if flight.doomed:
                    raise _refusal(flight) from error
                raise
            return self._admit(request, answer, flight, generate_s=time.perf_counter() - submitted_s)

    async def _ask(self, request: GenerateRequest) -> Answer:
        assert self._front is not None  # the door is closed else
        temperature = self._launch.config.temperature
        return await self._front.answer(request, temperature=temperature, stop_ids=self._stop_ids, salt=self._salt)

    def _admit(self, request: GenerateRequest, answer: Answer, flight: Flight, *, generate_s: float) -> Generation:
        name = f"request {request.request_id}"
        if flight.doomed:
            raise _refusal(flight)
        strangers = {label for label, _, _ in answer.spans} - self._proven
        if strangers:
            raise EngineError(f"{name}: answer refused: weights {sorted(strangers)} sampled it, which were not proven")
        stamps = read_stamps(answer.spans, num_tokens=len(answer.token_ids), request_id=name)
        self._counts["requests"] += 1
        self._counts["sampled_tokens"] += len(answer.token_ids)
        self._counts["reused_tokens"] += answer.cached_tokens
        self._counts["computed_tokens"] += len(request.prefix_ids) - answer.cached_tokens
        return Generation(
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            version_min=stamps.version_min,
            version_max=stamps.version_max,
            kv_version_min=stamps.kv_version_min,
            stop=answer.stop,
            generate_s=generate_s,
        )

    # -- loading

    async def load(self, *, version: int, epoch: int, weights: Path, canary: Canary, adapter: Adapter | None) -> None:
        """Have vLLM take over these weights; returns when they act and the canary agrees.

        Waits for its turn and for vLLM to be up, woken by `run`; when vLLM's process ends meanwhile, the next one is
        asked. Raises PolicyError when the file is refused (the old weights stay) or the canary does not agree,
        EngineError when vLLM fails otherwise or has been closed; after all but a refusal the engine is fenced.
        """
        load = Load(version=version, epoch=epoch, weights=weights, canary=canary, adapter=adapter)
        async with self._updating:
            while True:
                await self._up.wait()
                if self._closed or self._front is None:
                    raise EngineError(f"version {version}: the engine is closed")
                try:
                    return await self._update(self._front, load)
                except EngineGone:
                    self._up.clear()  # until `run` has started the next one

    async def _update(self, front: VllmFront, load: Load) -> None:
        before = self._version
        self._door.close()
        started_s = time.perf_counter()
        replacing = False
        try:
            if self._launch.config.on_update == "drain":
                await self._door.emptied()
            await front.pause()
            replacing, self._version = True, -1
            self._loaded = True
            self._judged.clear()
            refusal = await front.replace(load)
            if refusal:
                replacing, self._version = False, before
                raise PolicyError(f"version {load.version}: {refusal}")
            await front.resume()
            await self._prove(front, load)
        except BaseException as error:
            if replacing:
                await self._fence(front, f"version {load.version} was not proven: {error!r}")
            else:
                await self._go_on(front)
            raise
        finally:
            self._judged.set()
            if self._version >= 0 and not front.is_gone:
                self._door.open()
        _LOG.info("vLLM holds %s after %.2f s", load.label, time.perf_counter() - started_s)

    async def _prove(self, front: VllmFront, load: Load) -> None:
        """Score the canary's prompts beside whatever goes on under the new weights, and adopt these."""
        salt = cache_salt(load.label, load=self._num_loads + 1)
        found = [await front.score(prompt, label=load.label, salt=salt) for prompt in load.canary.prompts]
        check_canary(load.canary, found, dtype=self._launch.config.dtype, version=load.version)
        self._adopt(load.version, label=load.label)

    def _adopt(self, version: int, *, label: str) -> None:
        self._num_loads += 1
        self._salt = cache_salt(label, load=self._num_loads)
        self._proven.add(label)
        self._version = version

    async def _go_on(self, front: VllmFront) -> None:
        """The old weights were not touched and sample again; a vLLM that does not resume in time is fenced."""
        try:
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                await front.resume()
        except (EngineError, TimeoutError) as error:
            self._withdraw(f"vLLM did not resume: {error!r}")

    async def _fence(self, front: VllmFront, reason: str) -> None:
        """Nothing that is in flight may get out any more, and vLLM shall stop working on it."""
        _LOG.warning("vLLM is fenced: %s", reason)
        self._withdraw(reason)
        with suppress(EngineError, TimeoutError):  # a vLLM that does not answer is not asked for anything else either
            async with asyncio.timeout(_ABORT_DEADLINE_S):
                await front.abort_all()

    def _withdraw(self, reason: str) -> None:
        self._door.close()
        self._door.doom(reason)
        self._proven.clear()
        self._version = -1

    # -- the process

    async def run(self) -> None:
        """Starts vLLM, and again when its engine process ends; shuts it down. Waits for that end, woken by the process.

        Raises EngineError when it ended once more than `MAX_RESTARTS` times in a row, PolicyError when it cannot start.
        """
        ends = 0
        try:
            while True:
                started_s = time.monotonic()
                process = await VllmProcess.start(self._launch)
                try:
                    await self._serve(process)
                finally:
                    self._up.clear()
                    self._front = None
                    held = self._version >= 0
                    self._withdraw("vLLM's engine process ended")
                    await process.stop()
                ends = ends + 1 if time.monotonic() - started_s < STEADY_S else 1
                if ends > MAX_RESTARTS:
                    raise EngineError(
                        f"vLLM's engine process ended {ends} times in a row; its own words stand in the log"
                    )
                _LOG.warning("vLLM's engine process ended and is started again (%d of %d)", ends, MAX_RESTARTS)
                self._counts["restarts"] += 1
                if held and not self._holds_start and not self._updating.locked():
                    self.lost.set()
        finally:
            self._closed = True
            self._door.shut()
            self._up.set()

    @property
    def _holds_start(self) -> bool:
        """Whether a new process would hold the weights in use: the start policy's."""
        return self._start_version >= 0 and not self._loaded

    async def _serve(self, process: VllmProcess) -> None:
        front = VllmFront(process, base=self._launch.folder.resolve())
        if self._holds_start:
            label = version_label(version=self._start_version, epoch=0)
            with suppress(EngineGone):
                await front.name_weights(label)
                self._adopt(self._start_version, label=label)
                self._door.open()
        self._front = front
        self._up.set()
        await process.ended.wait()


def _refusal(flight: Flight) -> EngineError:
    return EngineError(f"request {flight.request_id}: answer refused: {flight.doomed}")
