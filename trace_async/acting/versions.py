"""Follows policy versions: fetches what the learner announces, has the engine load and prove it, confirms.

Owns the version and epoch that an actor's engine holds, and the fence in front of new trees. Invariants: newest wins,
epoch first; nothing is confirmed that the engine has not proven; while the newest version that was tried is not loaded,
or the engine has lost its weights, the actor is fenced; a version that cannot be had is tried again a bounded number of
times and then ends the actor. Declares what it needs of an engine and a channel. Never samples; imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from trace_async.acting.turns import Engine
from trace_async.core.types import Adapter, Canary, Json, VersionNotice
from trace_async.errors import EngineError, PolicyError
from trace_async.publication.staging import FetchedVersion

log = logging.getLogger(__name__)

FETCH_DEADLINE_S = 600.0
"""For one attempt at bringing and verifying a version; the next one goes on with the chunks that came."""

LOAD_DEADLINE_S = 900.0
"""For an engine to start, to drain and to swap its weights; past it the engine counts as dead and the process ends."""

ATTEMPTS = 8
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
GIVE_UP_S = 90.0
"""What ends the actor: so many failures in a row, whatever versions they are of, and so many seconds of them, in which
a learner or an engine that was restarted is back. The pauses in between are each twice the last, which takes that long;
newer versions cut them short."""


class VersionedEngine(Engine, Protocol):
    """An engine whose weights can be replaced; stamps each turn with the versions that sampled it.

    While it is fenced (before the first load, after one that left nothing proven, after a loss) requests wait.
    """

    lost: asyncio.Event
    """Set by the engine when its weights are gone; whoever loads the next ones clears it before."""

    @property
    def version(self) -> int:
        """Of the weights in use; -1 while it is fenced."""
        ...

    async def load(self, *, version: int, epoch: int, weights: Path, canary: Canary, adapter: Adapter | None) -> None:
        """Sample with the weights of this safetensors file from now on; the file stays until this returns or raises.

        Returns when the canary has proven that they act. Raises PolicyError or EngineError when they do not.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Monotone counters, e.g. engine_busy_s, engine_idle_s."""
        ...

    async def run(self) -> None:
        """The engine's own loop, until cancelled."""
        ...


class VersionRoad(Protocol):
    """The part of an actor's channel that carries versions."""

    async def wait_newer(self, version: int, epoch: int) -> VersionNotice:
        """The newest notice, as soon as it is newer than this version of this epoch."""
        ...

    def confirm(self, version: int, epoch: int) -> None:
        """Tell that the engine samples with this version."""
        ...


class Fetcher(Protocol):
    """What `publication.staging.Stager` does."""

    async def fetch(self, notice: VersionNotice) -> FetchedVersion:
        """The announced version, verified. Raises PolicyError when it cannot be had."""
        ...


class VersionFollower:
    """Keeps one engine and one predictor at the newest version."""

    def __init__(
        self,
        *,
        road: VersionRoad,
        engine: VersionedEngine,
        fetcher: Fetcher,
        load_predictor: Callable[[Json, int], None],
        on_loaded: Callable[[], None],
    ) -> None:
        """`load_predictor` gets what was fetched and its version; `on_loaded` is called when the fence is down."""
        self.version, self.epoch = -1, -1  # last confirmed; before the first
        self._behind = True  # nothing is proven, or a newer version was tried in vain
        self._road = road
        self._engine = engine
        self._fetcher = fetcher
        self._load_predictor = load_predictor
        self._on_loaded = on_loaded
        self._counts = dict.fromkeys(("failed_loads", "engine_losses"), 0.0)

    @property
    def fenced(self) -> bool:
        """Whether new trees must wait."""
        return self._behind or self._engine.lost.is_set()

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start."""
        return self._counts

    async def run(self) -> None:
        """Consumes notices, produces loaded versions, until cancelled; woken by the channel and by the engine's loss.

        Raises: PolicyError or EngineError when ATTEMPTS in a row, and GIVE_UP_S, have failed; TimeoutError when the
        engine does not load within LOAD_DEADLINE_S; whatever else engine and predictor raise.
        """
        failures, since_s = 0, 0.0
        loop = asyncio.get_running_loop()
        while True:
            notice = await self._next_notice()
            try:
                await self._follow(notice)
            except (PolicyError, EngineError) as error:
                self._behind = True
                self._counts["failed_loads"] += 1
                since_s = since_s if failures else loop.time()
                failures += 1
                if failures >= ATTEMPTS and loop.time() - since_s >= GIVE_UP_S:
                    raise
                log.warning("version %d of epoch %d is tried again: %s", notice.version, notice.epoch, error)
                await self._pause(notice, min(FIRST_PAUSE_S * 2 ** min(failures - 1, ATTEMPTS), LAST_PAUSE_S))
            else:
                failures = 0

    async def _next_notice(self) -> VersionNotice:
        """What to load next: something newer or, behind the fence, the newest whatever it is."""
        if not self.fenced:
            async with asyncio.TaskGroup() as group:
                newer = group.create_task(self._road.wait_newer(self.version, self.epoch))
                lost = group.create_task(self._engine.lost.wait())
                await asyncio.wait((newer, lost), return_when=asyncio.FIRST_COMPLETED)
                newer.cancel()
                lost.cancel()
        return await self._road.wait_newer(*((-1, -1) if self.fenced else (self.version, self.epoch)))

    async def _follow(self, notice: VersionNotice) -> None:
        """From a notice to its confirmation."""
        fetched = await self._fetch(notice)
        if self._engine.lost.is_set():
            self._behind = True
            self._counts["engine_losses"] += 1
            log.warning("the engine has lost its weights; it gets version %d of epoch %d", notice.version, notice.epoch)
            self._engine.lost.clear()
        async with asyncio.timeout(LOAD_DEADLINE_S):
            await self._engine.load(
                version=notice.version,
                epoch=notice.epoch,
                weights=fetched.weights,
                canary=fetched.manifest.canary,
                adapter=fetched.manifest.adapter,
            )
        if self._engine.lost.is_set():
            raise EngineError(f"the engine lost version {notice.version} as soon as it was loaded")
        self._load_predictor(fetched.predictor, notice.version)
        self.version, self.epoch = notice.version, notice.epoch
        self._behind = False
        self._road.confirm(notice.version, notice.epoch)
        self._on_loaded()

    async def _fetch(self, notice: VersionNotice) -> FetchedVersion:
        try:
            async with asyncio.timeout(FETCH_DEADLINE_S):
                return await self._fetcher.fetch(notice)
        except TimeoutError as error:
            raise PolicyError(
                f"version {notice.version} of epoch {notice.epoch} was not here after {FETCH_DEADLINE_S:g} s"
            ) from error

    async def _pause(self, failed: VersionNotice, seconds: float) -> None:
        """Before the next attempt; something newer ends it at once."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._road.wait_newer(failed.version, failed.epoch)
