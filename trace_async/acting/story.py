"""The story of a live tree: what each of its nodes waits for, what it has cost, and which of its waits are too long.

Owns the gauges that `status`, `trace-async where` and the log read. Invariants: from its making to its tree's end a
story names at least one waiting node; counters only grow; a wait is named once. Never changes what it watches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CoroutineType, FrameType
from typing import Any, NamedTuple

from trace_async.acting.turns import Started
from trace_async.core.types import ROOT, Lease, TreePhase, Turn

log = logging.getLogger(__name__)

STALL_S = 30.0
"""A node that waits longer in one phase is named; with a look every half of it, within 45 s."""


class Waiting(NamedTuple):
    """One node and what it waits for."""

    node_id: int
    phase: str
    since_s: float


@dataclass(slots=True)
class Tally:
    """What an actor's trees have cost since it started; only grows."""

    turns: int = 0
    invalid_turns: int = 0
    sampled_tokens: int = 0
    failed_nodes: int = 0


class TreeStory:
    """Where each node of one live tree stands; read by the actor at any time.

    From its making to its tree's end some node always waits; node ROOT waits for the prompt to open and for the last
    environments to close.
    """

    def __init__(self, lease: Lease, *, clock: Callable[[], float], tally: Tally) -> None:
        self.lease = lease
        self.started_s = clock()
        self.turns = 0
        self._clock = clock
        self._tally = tally
        self._named: set[Waiting] = set()
        self._waiting = {ROOT: ("environment", self.started_s)}  # node id -> phase, since when

    def enter(self, node_id: int, phase: str) -> None:
        """`node_id` waits for `phase` from now on."""
        self._waiting[node_id] = (phase, self._clock())

    def leave(self, node_id: int) -> None:
        """`node_id` waits no more; after the last one it is the prompt's turn again, until its tree's task wakes."""
        self._waiting.pop(node_id, None)
        if not self._waiting:
            self.enter(ROOT, "environment")

    def waiting(self) -> list[Waiting]:
        """Nodes that wait, longest first."""
        waiting = [Waiting(node_id, phase, since_s) for node_id, (phase, since_s) in self._waiting.items()]
        return sorted(waiting, key=lambda one: one.since_s)

    def played(self, turn: Turn) -> None:
        """A turn was recorded."""
        self.turns += 1
        self._tally.turns += 1
        self._tally.invalid_turns += not turn.valid
        self._tally.sampled_tokens += turn.action_ids.size

    def failed(self) -> None:
        """A node failed."""
        self._tally.failed_nodes += 1

    def phase(self) -> TreePhase:
        """Where the tree stands: its longest-waiting node."""
        now_s, longest = self._clock(), self.waiting()[0]
        return TreePhase(
            lease_id=self.lease.lease_id,
            prompt_id=self.lease.prompt_id,
            phase=longest.phase,
            node_id=longest.node_id,
            age_s=now_s - self.started_s,
            waiting_s=now_s - longest.since_s,
            turns=self.turns,
        )

    def new_stalls(self) -> list[Waiting]:
        """Waits that are longer than STALL_S and were not in an earlier answer."""
        now_s = self._clock()
        stalls = [w for w in self.waiting() if now_s - w.since_s > STALL_S and w not in self._named]
        self._named.update(stalls)
        return stalls


async def name_stalls(stories: Callable[[], Iterable[TreeStory]], *, clock: Callable[[], float], who: str) -> None:
    """Log every stall of the live trees, once, until cancelled; woken by the clock."""
    while True:
        await asyncio.sleep(STALL_S / 2.0)
        for story in list(stories()):
            for stall in story.new_stalls():
                lease_id = story.lease.lease_id
                log.warning(
                    "%s: tree %s node %d waits in phase %s for %.0f s (the tree is %.0f s old) at %s",
                    who,
                    lease_id,
                    stall.node_id,
                    stall.phase,
                    clock() - stall.since_s,
                    clock() - story.started_s,
                    _where(lease_id if stall.node_id == ROOT else node_name(lease_id, stall.node_id)),
                )


def node_name(lease_id: str, node_id: int) -> str:
    """The name of a node's task and request, in logs, errors and at the engine."""
    return f"{lease_id}/{node_id}"


def _where(task_name: str) -> str:
    """The innermost line that the task of this name waits at."""
    frame: FrameType | None = None
    awaited: Any = next((task.get_coro() for task in asyncio.all_tasks() if task.get_name() == task_name), None)
    while awaited is not None:
        if isinstance(awaited, Started):
            awaited = awaited.call
        if not isinstance(awaited, CoroutineType):
            break
        frame, awaited = awaited.cr_frame or frame, awaited.cr_await
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
