"""Which requests are under way at a server: at most so many, in order of arrival, none while the door is closed.

Owns the places and the bounded queue in front of them. Invariants: whoever is let in leaves by the same context
manager, however it ends; a request that waits has not been sent. Never: sends anything, or knows what a version is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from trace_async.errors import EngineError


@dataclass(slots=True, eq=False)
class Flight:
    """One request under way."""

    request_id: str
    doomed: str = ""  # why its answer must not be passed on, whatever it says


class Door:
    """Closed at first."""

    def __init__(self, *, places: int, max_waiting: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._num_places = places
        self._max_waiting = max_waiting
        self._waiting = 0
        self._flights: set[Flight] = set()
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._shut = False
        self._busy_s = self._idle_s = 0.0
        self._since_s = time.perf_counter()

    @property
    def is_open(self) -> bool:
        """Whether requests are let in."""
        return self._open.is_set()

    def open(self) -> None:
        """Let requests in."""
        self._open.set()

    def close(self) -> None:
        """Let nobody in until `open`; whoever is in goes on."""
        if not self._shut:
            self._open.clear()

    def shut(self) -> None:
        """For good: whoever waits or comes later fails."""
        self._shut = True
        self._open.set()

    def doom(self, reason: str) -> None:
        """The answers of everybody who is in now will be refused."""
        for flight in self._flights:
            flight.doomed = flight.doomed or reason

    async def emptied(self) -> None:
        """Nobody is in. Woken by the last one to leave; each has its own deadline."""
        await self._empty.wait()

    def counters(self) -> Mapping[str, float]:
        """`busy_s` with requests under way, `idle_s` without, and the gauges `waiting` and `active` (requests)."""
        self._tick()
        gauges = {"waiting": float(self._waiting), "active": float(len(self._flights))}
        return {"busy_s": self._busy_s, "idle_s": self._idle_s, **gauges}

    @asynccontextmanager
    async def passage(self, request_id: str) -> AsyncIterator[Flight]:
        """Be let in, in order of arrival; woken by one that leaves, by `open` or `shut`; the caller has the deadline.

        Raises EngineError when too many wait already, and when the door is or gets shut.
        """
        if self._waiting >= self._max_waiting:
            raise EngineError(
                f"request {request_id}: {self._waiting} requests wait already, {self._max_waiting // self._num_places} "
                "for each place in the batch; lower actor.max_live_roots or raise engine.max_batch"
            )
        self._waiting += 1
        try:
            await self._enter(request_id)
        finally:
            self._waiting -= 1
        flight = Flight(request_id)  # no await since the last look at the door
        self._tick()
        self._flights.add(flight)
        self._empty.clear()
        try:
            yield flight
        finally:
            self._tick()
            self._flights.discard(flight)
            if not self._flights:
                self._empty.set()
            self._places.release()

    async def _enter(self, request_id: str) -> None:
        await self._places.acquire()
        try:
            while not self._open.is_set():
                await self._open.wait()
            if self._shut:
                raise EngineError(f"request {request_id}: the engine is closed")
        except BaseException:
            self._places.release()
            raise

    def _tick(self) -> None:
        now_s = time.perf_counter()
        spent_s, self._since_s = now_s - self._since_s, now_s
        if self._flights:
            self._busy_s += spent_s
        else:
            self._idle_s += spent_s
