"""What a run is doing right now: the content of RUN/status.json, and the names of what is stuck.

Owns the wording. Invariants: every live lease is listed with who holds it and how long, oldest first; a tree that its
actor reports stands beside it with node, phase and waiting time; no progress for `STALL_S` is said at the next look and
again every `STALL_S`, so within 60 s for any heartbeat under 30 s. Pure: reads records, changes none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from trace_async.coordination.coordinator import Coordinator
from trace_async.coordination.leases import Counts
from trace_async.coordination.slots import Slot, SlotState
from trace_async.core.types import ActorStatus, TreePhase

STALL_S = 30.0
"""A step on two cores takes a second; half a minute without a group or a step deserves a look."""

_NAMED_LEASES = 8  # in one stall report; status.json has them all


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPhase:
    """What the train loop is at."""

    phase: str  # wait, train, observe, publish, checkpoint, stop, export
    since_s: float
    step: int  # steps made
    version: int  # newest published
    epoch: int


def make_status(
    phase: LearnerPhase,
    coordinator: Coordinator,
    actors: Mapping[str, ActorStatus],
    *,
    now_s: float,
    updated_unix_s: float,
) -> dict[str, object]:
    """The content of status.json; times ending in `_s` are ages in seconds."""
    counts = coordinator.reconcile()
    trees = _trees(actors)
    return {
        "updated_unix_s": updated_unix_s,
        "phase": phase.phase,
        "phase_s": now_s - phase.since_s,
        "step": phase.step,
        "version": phase.version,
        "epoch": phase.epoch,
        "permits": {"in_use": counts.committed_roots, "max": coordinator.max_permits},
        "shelf": {"groups": counts.shelved, "roots": counts.shelved_roots},
        "counters": {"issued": counts.issued, "live": counts.live, "planned": counts.planned, **counts.finished},
        "actors": [_actor(member.actor_id, coordinator, actors, now_s) for member in coordinator.fleet],
        "leases": [_lease(slot, trees, now_s) for slot in coordinator.slots if slot.attempt >= 0],
    }


class StallWatch:
    """Notices that nothing moves."""

    def __init__(self, now_s: float) -> None:
        self._moved_s = now_s
        self._named_s = now_s

    def move(self, now_s: float) -> None:
        """A group was accepted, a step was made, or an actor came: the run moves."""
        self._moved_s = self._named_s = now_s

    def is_due(self, now_s: float) -> bool:
        """True once per STALL_S without a move."""
        due = now_s - self._named_s >= STALL_S
        if due:
            self._named_s = now_s
        return due

    def still_s(self, now_s: float) -> float:
        """Seconds since the last move."""
        return now_s - self._moved_s


def name_stall(
    phase: LearnerPhase,
    coordinator: Coordinator,
    actors: Mapping[str, ActorStatus],
    *,
    now_s: float,
    still_s: float,
) -> str:
    """Why nothing moves, as far as the learner can see: its own phase, actors, permits, the oldest live leases."""
    counts = coordinator.reconcile()
    lines = [
        f"nothing moved for {still_s:.0f} s: learner in phase {phase.phase} for {now_s - phase.since_s:.0f} s after "
        f"step {phase.step}, version {phase.version}; {_permits(counts, coordinator)}"
    ]
    members = list(coordinator.fleet)
    if not any(member.joined for member in members):
        lines.append("no actor is connected: start one, or look into its log")
    lines += [
        f"actor {member.actor_id}: version {member.version}, {member.held_roots} of {member.capacity_roots} roots, "
        f"last heard {now_s - member.last_seen_s:.1f} s ago"
        for member in members
    ]
    trees = _trees(actors)
    waiting = [slot for slot in coordinator.slots if slot.attempt >= 0 and slot.state is not SlotState.SHELVED]
    lines += [_describe(slot, trees, now_s) for slot in waiting[:_NAMED_LEASES]]
    if len(waiting) > _NAMED_LEASES:
        lines.append(f"... and {len(waiting) - _NAMED_LEASES} more leases")
    return "\n  ".join(lines)


def _permits(counts: Counts, coordinator: Coordinator) -> str:
    return (
        f"{counts.committed_roots} of {coordinator.max_permits} permits in use, {counts.shelved_roots} roots on the "
        f"shelf, {counts.planned} trees wait for an actor"
    )


def _trees(actors: Mapping[str, ActorStatus]) -> dict[str, TreePhase]:
    return {tree.lease_id: tree for status in actors.values() for tree in status.trees}


def _actor(
    actor_id: str, coordinator: Coordinator, actors: Mapping[str, ActorStatus], now_s: float
) -> dict[str, object]:
    member = coordinator.fleet.get(actor_id)
    assert member is not None
    status = actors.get(actor_id)
    return {
        "actor_id": actor_id,
        "host": status.host if status is not None else None,
        "pid": status.pid if status is not None else None,
        "version": member.version,
        "capacity_roots": member.capacity_roots,
        "held_roots": member.held_roots,
        "silent_s": now_s - member.last_seen_s,
        "counters": {key: _known(value) for key, value in status.counters.items()} if status is not None else {},
    }


def _lease(slot: Slot, trees: Mapping[str, TreePhase], now_s: float) -> dict[str, object]:
    tree = trees.get(slot.lease_id)
    return {
        "lease_id": slot.lease_id,
        "prompt_id": slot.task.task_id,
        "state": slot.state.value,
        "actor_id": slot.holders.get(slot.attempt),
        "roots": slot.budget.roots,
        "continuations": slot.budget.continuations,
        "attempt": slot.attempt,
        "age_s": now_s - slot.events[-1].time_s,  # in this state
        "tree": {key: _known(value) for key, value in asdict(tree).items()} if tree is not None else None,
    }


def _known(value: object) -> object:
    """JSON has no NaN; what is not known is null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _describe(slot: Slot, trees: Mapping[str, TreePhase], now_s: float) -> str:
    who = slot.holders.get(slot.attempt, "nobody")
    tree = trees.get(slot.lease_id)
    said = (
        f"node {tree.node_id} in phase {tree.phase} for {tree.waiting_s:.1f} s, {tree.turns} turns so far"
        if tree is not None
        else "its actor says nothing about it"
    )
    age_s = now_s - slot.events[-1].time_s
    return f"lease {slot.lease_id} of prompt {slot.task.task_id}, {slot.state.value} {age_s:.0f} s with {who}: {said}"
