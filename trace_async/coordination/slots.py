"""One planned tree as the learner sees it, and the ids of its leases.

A slot stands for one tree to be grown, through all its attempts; each issue to an actor is a lease of its own with the
id `BASE.ATTEMPT`, BASE being `EPOCH-ROUND-INDEX`. Records and their JSON; the moves are in `leases.py`.
"""

from __future__ import annotations

import math
import re
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from trace_async.core.types import Group, Json, Lease, Score, Task, TreeBudget

_EVENTS_KEPT = 64  # per slot; attempts are few, but an actor may say hello again without bound

_ID = re.compile(r"(?P<base>(?P<epoch>\d{1,9})-(?P<round>\d{1,9})-(?P<index>\d{1,9}))\.(?P<attempt>\d{1,9})", re.ASCII)


class LeaseId(NamedTuple):
    """The parts of a lease id."""

    base: str
    epoch: int  # in which the round was planned
    round_number: int
    attempt: int


def parse_lease_id(text: str) -> LeaseId | None:
    """The parts of an id that a coordinator made; None for any other text."""
    match = _ID.fullmatch(text)
    if match is None:
        return None
    return LeaseId(match["base"], int(match["epoch"]), int(match["round"]), int(match["attempt"]))


def make_base(*, epoch: int, round_number: int, index: int) -> str:
    """The id that all attempts of a tree share; the epoch keeps a restarted run from using an id again."""
    return f"{epoch}-{round_number:05d}-{index:03d}"


def place_of(base: str) -> str:
    """Round and index alone: the same tree, whatever epoch gave it its id."""
    return base.partition("-")[2]


class SlotState(Enum):
    """Where a tree stands, seen from the learner."""

    QUEUED = "queued"  # waits for an actor, for the first time or again
    LIVE = "live"  # the newest attempt is with an actor
    SHELVED = "shelved"  # its group is here and not yet consumed


class Arrival(Enum):
    """What a group that comes in is worth."""

    ACCEPT = "accept"
    DUPLICATE = "duplicate"  # its tree is on the shelf or finished already
    UNKNOWN = "unknown"  # this run never issued such a lease


class Event(NamedTuple):
    """One line of a slot's story."""

    time_s: float
    what: str
    detail: str


@dataclass(slots=True, kw_only=True)
class Slot:
    """One tree to be grown. Mutated by LeaseTable only."""

    base: str
    round_number: int
    task: Task
    visit: int
    budget: TreeBudget
    root_score: Score
    number: int = -1  # order of planning, given by the table: the lower, the older
    state: SlotState = SlotState.QUEUED
    attempt: int = -1  # the newest attempt; -1 before the first issue
    holders: dict[int, str] = field(default_factory=dict)  # attempt -> actor that may still work on it
    expires_s: float = float("inf")  # deadline of the newest attempt
    group_id: str = ""  # lease whose group is on the shelf
    events: deque[Event] = field(default_factory=lambda: deque(maxlen=_EVENTS_KEPT))

    @property
    def lease_id(self) -> str:
        """Id of the newest attempt."""
        return f"{self.base}.{self.attempt}"


def make_lease(slot: Slot, *, seed: int, version: int, deadline_s: float) -> Lease:
    """The lease of a slot's newest attempt."""
    return Lease(
        lease_id=slot.lease_id,
        prompt_id=slot.task.task_id,
        task=slot.task,
        budget=slot.budget,
        seed=seed,
        round_index=slot.visit,
        attempt=slot.attempt,
        issued_version=version,
        deadline_s=deadline_s,
        root_score=slot.root_score,
    )


def lease_of_group(group: Group) -> Lease:
    """What a group tells about its lease: all but the task, which nobody needs once the group is here."""
    parsed = parse_lease_id(group.lease_id)
    return Lease(
        lease_id=group.lease_id,
        prompt_id=group.prompt_id,
        task=Task(group.prompt_id, {}),
        budget=group.budget,
        seed=0,
        round_index=0,
        attempt=parsed.attempt if parsed is not None else 0,
        issued_version=0,
        deadline_s=0.0,
        root_score=group.root_score,
    )


def slot_of_lease(lease: Lease, lease_id: LeaseId) -> Slot:
    """A slot made anew from one of its leases; QUEUED, without a number, not yet issued."""
    return Slot(
        base=lease_id.base,
        round_number=lease_id.round_number,
        task=lease.task,
        visit=lease.round_index,
        budget=lease.budget,
        root_score=lease.root_score,
    )


def slot_state(slot: Slot) -> Json:
    """A slot as JSON, without its story."""
    return {
        "base": slot.base,
        "round": slot.round_number,
        "task": [slot.task.task_id, slot.task.data],
        "visit": slot.visit,
        "budget": [slot.budget.roots, slot.budget.continuations],
        "score": _score_state(slot.root_score),
        "state": slot.state.value,
        "attempt": slot.attempt,
        "holders": {str(attempt): actor_id for attempt, actor_id in slot.holders.items()},
        "group_id": slot.group_id,
    }


def slot_from(entry: Json) -> Slot:
    """The slot of a `slot_state`, still QUEUED and without a number."""
    return Slot(
        base=entry["base"],
        round_number=entry["round"],
        task=Task(*entry["task"]),
        visit=entry["visit"],
        budget=TreeBudget(roots=entry["budget"][0], continuations=entry["budget"][1]),
        root_score=_score_from(entry["score"]),
        attempt=entry["attempt"],
        holders={int(attempt): actor_id for attempt, actor_id in entry["holders"].items()},
        group_id=entry["group_id"],
    )


def _score_state(score: Score) -> list[float | None]:
    strength = None if math.isnan(score.strength) else score.strength
    return [score.success, score.predictor_version, strength]


def _score_from(entry: list[Any]) -> Score:
    success, predictor_version, strength = entry
    return Score(
        success=success, predictor_version=predictor_version, strength=math.nan if strength is None else strength
    )
