"""Follows policy versions: fetches what the learner announces, has the engine load it, confirms.

Owns the version and epoch that an actor's engine holds. Invariants: newest wins, epoch first; nothing is confirmed that
is not loaded; a version that cannot be read or loaded is tried again a bounded number of times and then ends the actor.
Declares what it needs of an engine and a channel. Never samples; imports no torch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Protocol

from trace_async.acting.turns import Engine
from trace_async.core.types import Json, VersionNotice
from trace_async.errors import PolicyError
from trace_async.policy import FetchedVersion

log = logging.getLogger(__name__)

LOAD_DEADLINE_S = 300.0
"""For an engine to drain and swap its weights; past it the engine counts as dead and the process ends."""

FETCH_ATTEMPTS = 5
FETCH_RETRY_S = 5.0
"""A file may be retired between its notice and its reading; then a newer notice is on its way."""


class VersionedEngine(Engine, Protocol):
    """An engine whose weights can be replaced; stamps each turn with the versions that sampled it."""

    async def load(self, *, version: int, epoch: int, weights: bytes) -> None:
        """Sample with the weights of this safetensors file from now on. Raises PolicyError when they cannot be used."""
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


class VersionFollower:
    """Keeps one engine and one predictor at the newest version."""

    def __init__(
        self,
        *,
        road: VersionRoad,
        engine: VersionedEngine,
        fetch: Callable[[VersionNotice], FetchedVersion],
        load_predictor: Callable[[Json, int], None],
        on_loaded: Callable[[], None],
    ) -> None:
        """`fetch` runs in a thread and raises PolicyError; `load_predictor` gets what it fetched, and the version."""
        self.version, self.epoch = -1, -1  # before the first
        self._road = road
        self._engine = engine
        self._fetch = fetch
        self._load_predictor = load_predictor
        self._on_loaded = on_loaded

    async def run(self) -> None:
        """Consumes notices, produces loaded versions, until cancelled; waits for a newer notice, woken by the channel.

        Raises: PolicyError when none could be read and loaded FETCH_ATTEMPTS times in a row; TimeoutError when the
        engine does not load within LOAD_DEADLINE_S; whatever else engine and predictor raise.
        """
        misses = 0
        while True:
            notice = await self._road.wait_newer(self.version, self.epoch)
            try:
                predictor = await self._load(notice)
            except PolicyError as error:
                misses += 1
                if misses == FETCH_ATTEMPTS:
                    raise
                log.warning("version %d of epoch %d is tried again: %s", notice.version, notice.epoch, error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(FETCH_RETRY_S):
                        await self._road.wait_newer(notice.version, notice.epoch)
                continue
            misses = 0
            self._load_predictor(predictor, notice.version)
            self.version, self.epoch = notice.version, notice.epoch
            self._road.confirm(notice.version, notice.epoch)
            self._on_loaded()

    async def _load(self, notice: VersionNotice) -> Json:
        """Has the engine load the weights; the predictor's parameters, which are not in use yet."""
        weights, predictor = await asyncio.to_thread(self._fetch, notice)
        async with asyncio.timeout(LOAD_DEADLINE_S):
            await self._engine.load(version=notice.version, epoch=notice.epoch, weights=weights)
        return predictor
