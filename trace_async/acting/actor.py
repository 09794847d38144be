"""Holds leases, grows their trees, ships the groups, follows policy versions, and leaves in order.

Owns: one task per live tree, and keeps new ones behind the fence of `versions`. Declares what it needs of a channel;
imports no torch. Tasks, all under the one TaskGroup of `run`:

    channel     carries everything; from the learner and back
    engine      the engine's own loop
    leases      consumes leases, produces tree tasks; waits for a lease, a proven version, room · woken by the channel,
                versions, an ended tree
    versions    consumes notices, produces loaded versions; waits for a newer notice or a loss · woken by the channel,
                the engine
    watch       names nodes that wait too long; woken by the clock
    stop        waits for the learner's Stop; woken by the channel
    LEASE_ID    one tree until its group is acknowledged; waits as `expansion` says, then for the Ack

Invariants: no tree starts while the actor is fenced, and the learner is told so; live root rollouts stay within
`max_live_roots` unless one lease alone exceeds it; a lease ends here in exactly one of acknowledged, returned,
released; counters only grow.
Never: samples, decides who grows, judges a group, retries a tree.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trace_async.acting.expansion import GrowthParts, grow_tree
from trace_async.acting.story import Tally, TreeStory, name_stalls
from trace_async.acting.versions import Fetcher, VersionedEngine, VersionFollower, VersionRoad
from trace_async.core.group import cut_group
from trace_async.core.types import ROOT, ActorStatus, Group, Json, Lease
from trace_async.errors import InvariantError, Recoverable, WireError
from trace_async.transport.wire import Ack, Hello

log = logging.getLogger(__name__)


class Channel(VersionRoad, Protocol):
    """What an actor needs of its end of the road; `channel.ActorChannel` says what each does."""

    stopped: asyncio.Event

    async def run(self) -> None: ...

    async def next_lease(self) -> Lease: ...

    async def ship(self, group: Group) -> Ack: ...

    def return_leases(self, lease_ids: Sequence[str], reason: str) -> None: ...

    async def say_bye(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _LiveTree:
    story: TreeStory
    epoch: int  # of the version it started with: if turns of a later epoch follow, the older one is the safe stamp
    task: asyncio.Task[None] | None = None

    @property
    def lease(self) -> Lease:
        return self.story.lease


class Actor:
    """One actor process's work, from its first Hello to its Bye."""

    def __init__(  # noqa: PLR0913 - everything an actor is put together from, all of it names
        self,
        *,
        actor_id: str,
        channel: Channel,
        engine: VersionedEngine,
        fetcher: Fetcher,
        load_predictor: Callable[[Json, int], None],
        parts: GrowthParts,
        environment: str,
        clock: Callable[[], float],
        drain_s: float,
        max_live_roots: int,
    ) -> None:
        """`load_predictor` gets the predictor's parameters that came with a version, and the version."""
        self._actor_id = actor_id
        self._channel = channel
        self._engine = engine
        self._parts = parts
        self._environment = environment
        self._clock = clock
        self._drain_s = drain_s
        self._max_live_roots = max_live_roots
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._started_s = clock()
        self._live: dict[str, _LiveTree] = {}
        self._held: Lease | None = None  # taken and not yet started
        self._tally = Tally()
        self._groups = self._refused_groups = self._returned_leases = 0
        self._draining = asyncio.Event()
        self._may_start = asyncio.Event()  # something changed that a held lease waits for
        self._idle = asyncio.Event()
        self._idle.set()
        self._versions = VersionFollower(
            road=channel, engine=engine, fetcher=fetcher, load_predictor=load_predictor, on_loaded=self._may_start.set
        )

    async def run(self) -> None:
        """Work until `drain` is called or the learner says Stop, then leave; cancellation leaves at once.

        Raises an ExceptionGroup with whatever broke.
        """
        async with asyncio.TaskGroup() as group:
            works = {
                "channel": self._channel.run(),
                "engine": self._engine.run(),
                "leases": self._take_leases(group),
                "versions": self._versions.run(),
                "watch": name_stalls(self._stories, clock=self._clock, who=f"actor {self._actor_id}"),
            }
            tasks = [group.create_task(_without_end(name, work), name=name) for name, work in works.items()]
            tasks.append(group.create_task(self._heed_stop(), name="stop"))
            await self._draining.wait()
            await self._finish_trees()
            if not await self._channel.say_bye():
                log.warning("actor %s: the learner did not hear the Bye", self._actor_id)
            for task in tasks:
                task.cancel()

    # ---- what others ask or tell; any time, on the loop ----------------------------------------------------------

    def drain(self) -> None:
        """Take no more leases, give back what has not started, finish the live trees within `drain_s`, leave."""
        if not self._draining.is_set():
            log.info("actor %s: draining %d live trees", self._actor_id, len(self._live))
            self._draining.set()
            if self._held is not None:
                self._give_back([self._held.lease_id], "the actor is leaving")
                self._held = None
                self._may_start.set()

    def release(self, lease_ids: Iterable[str], reason: str) -> None:
        """The learner does not want these any more."""
        for lease_id in lease_ids:
            log.info("actor %s: lease %s released: %s", self._actor_id, lease_id, reason)
            if self._held is not None and self._held.lease_id == lease_id:
                self._held = None
            if lease_id in self._live:
                self._abandon(lease_id)
        self._may_start.set()

    def hello(self) -> Hello:
        """Who this is and which leases it holds."""
        held = () if self._held is None else (self._held.lease_id,)
        return Hello(
            actor_id=self._actor_id,
            host=self._host,
            pid=self._pid,
            capacity_roots=self._max_live_roots,
            live_leases=(*self._live, *held),
        )

    def status(self) -> ActorStatus:
        """Where every live tree stands, longest-waiting first, and what was done so far."""
        phases = [story.phase() for story in self._stories()]
        return ActorStatus(
            actor_id=self._actor_id,
            host=self._host,
            pid=self._pid,
            version=-1 if self._versions.fenced else self._versions.version,
            epoch=self._versions.epoch,
            live_roots=self._live_roots(),
            counters=self._counters(),
            trees=tuple(sorted(phases, key=lambda phase: -phase.waiting_s)),
        )

    # ---- leases and trees ----------------------------------------------------------------------------------------

    async def _take_leases(self, group: asyncio.TaskGroup) -> None:
        while True:
            lease = await self._channel.next_lease()
            if lease.lease_id in self._live:
                continue  # told twice
            if self._draining.is_set():
                self._give_back([lease.lease_id], "the actor is leaving")
                continue
            self._held = lease
            while self._held is lease and not self._has_room(lease):
                self._may_start.clear()
                await self._may_start.wait()
            if self._held is lease:  # neither released nor given back meanwhile
                self._held = None
                self._start(lease, group)

    def _has_room(self, lease: Lease) -> bool:
        live_roots = self._live_roots()
        return not self._versions.fenced and (not live_roots or live_roots + lease.budget.roots <= self._max_live_roots)

    def _start(self, lease: Lease, group: asyncio.TaskGroup) -> None:
        live = _LiveTree(TreeStory(lease, clock=self._clock, tally=self._tally), self._versions.epoch)
        self._live[lease.lease_id] = live
        self._idle.clear()
        live.task = group.create_task(self._tend(live), name=lease.lease_id)
        # A callback and not a `finally`: a task that is cancelled before its first step never enters its coroutine.
        live.task.add_done_callback(lambda _: self._forget(live))

    async def _tend(self, live: _LiveTree) -> None:
        lease = live.lease
        try:
            tree = await grow_tree(lease, parts=self._parts, story=live.story)
            finished = cut_group(
                tree, lease=lease, actor_id=self._actor_id, environment=self._environment, epoch=live.epoch
            )
            live.story.enter(ROOT, "ship")
            ack = await self._channel.ship(finished)
        except (Recoverable, WireError) as error:
            # The lease fails as a whole, without a tree or with one that cannot travel. The learner counts attempts.
            log.warning("actor %s: lease %s failed: %s", self._actor_id, lease.lease_id, error)
            self._forget(live)
            self._give_back([lease.lease_id], f"{type(error).__name__}: {error}")
            return
        self._groups += 1
        if not ack.accepted:
            self._refused_groups += 1
            log.info("actor %s: group %s was not wanted: %s", self._actor_id, ack.group_id, ack.reason)

    def _abandon(self, lease_id: str) -> None:
        live = self._live[lease_id]
        self._forget(live)
        assert live.task is not None, f"tree {lease_id} is live, so it has a task"
        live.task.cancel()

    def _forget(self, live: _LiveTree) -> None:
        if self._live.get(live.lease.lease_id) is live:
            del self._live[live.lease.lease_id]
            self._may_start.set()
            if not self._live:
                self._idle.set()

    def _give_back(self, lease_ids: Sequence[str], reason: str) -> None:
        self._returned_leases += len(lease_ids)
        self._channel.return_leases(lease_ids, reason)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _heed_stop(self) -> None:
        await self._channel.stopped.wait()
        log.info("actor %s: the learner says stop", self._actor_id)
        if self._draining.is_set():
            return  # both were interrupted; what grows still counts, and a run at its end has released it before
        self.drain()
        for lease_id in list(self._live):
            self._abandon(lease_id)

    async def _finish_trees(self) -> None:
        try:
            async with asyncio.timeout(self._drain_s):
                await self._idle.wait()
        except TimeoutError:
            left = list(self._live)
            log.warning("actor %s: %d trees unfinished after %g s", self._actor_id, len(left), self._drain_s)
            for lease_id in left:
                self._abandon(lease_id)
            self._give_back(left, f"unfinished after {self._drain_s:g} s of draining")

    # ---- gauges --------------------------------------------------------------------------------------------------

    def _stories(self) -> list[TreeStory]:
        return [live.story for live in self._live.values()]

    def _live_roots(self) -> int:
        return sum(live.lease.budget.roots for live in self._live.values())

    def _counters(self) -> dict[str, float]:
        return {
            **self._engine.counters(),
            **self._versions.counters(),
            "turns": self._tally.turns,
            "invalid_turns": self._tally.invalid_turns,
            "sampled_tokens": self._tally.sampled_tokens,
            "failed_nodes": self._tally.failed_nodes,
            "groups": self._groups,
            "refused_groups": self._refused_groups,
            "returned_leases": self._returned_leases,
            "wall_s": self._clock() - self._started_s,
        }


async def _without_end(name: str, work: Coroutine[Any, Any, None]) -> None:
    """A loop that returns is as broken as one that raises; the process must not live on without it."""
    await work
    raise InvariantError(f"the actor's {name} loop ended by itself")
