"""The table of leases: every tree that was planned and is not yet trained or rejected.

Owns the moves of a slot:

    (planned) -> QUEUED -> LIVE -> SHELVED -> finished (trained, flat, stale, broken)
                   ^________|          every state -> finished (rejected)
    QUEUED -> SHELVED   the group of an attempt that had been given up came after all
    QUEUED -> LIVE      also when an actor that was thought lost comes back with the newest attempt

Invariants: a slot finishes once; issued = finished + live; roots per round are accounted in one place. Pure: no clock
(times are handed in), no I/O. Never knows capacities, versions or permits.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from trace_async.coordination.slots import Event, LeaseId, Slot, SlotState, slot_from, slot_of_lease, slot_state
from trace_async.core.types import GroupVerdict, Json, Lease
from trace_async.errors import InvariantError

REJECTED = "rejected"
FINISHES = (*(verdict.name.lower() for verdict in GroupVerdict), REJECTED)
"""How a slot can end: the verdicts of the step that consumed its group, or rejection."""

_STORIES_KEPT = 2048  # finished slots whose story can still be asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Slots since the start of the run, and right now."""

    issued: int  # handed to an actor at least once
    finished: dict[str, int]  # by FINISHES
    live: int  # issued and not finished, shelved ones included
    planned: int  # not yet issued
    shelved: int
    committed_roots: int  # permits in use: roots planned or issued, and not yet consumed
    shelved_roots: int


class Ended(NamedTuple):
    """The end of a lease whose group will not be trained."""

    lease_id: str
    reason: str


class LeaseTable:
    """Holds the slots and does their bookkeeping."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}  # in order of `number`
        self._queue: list[tuple[int, str]] = []  # heap of QUEUED slots; entries of other states are skipped
        self._round_roots: Counter[int] = Counter()  # roots not yet consumed
        self._shelved_roots = 0
        self._issued = 0
        self._finished: Counter[str] = Counter()
        self._ended: list[Ended] = []
        self._next_number = 0
        self._stories: OrderedDict[str, tuple[Event, ...]] = OrderedDict()

    def __iter__(self) -> Iterator[Slot]:
        """The unfinished slots, oldest first; a copy, so they may finish on the way."""
        return iter(list(self._slots.values()))

    @property
    def committed_roots(self) -> int:
        """Roots planned or issued, and not yet consumed."""
        return self._round_roots.total()

    @property
    def shelved_roots(self) -> int:
        """Roots whose groups wait to be consumed."""
        return self._shelved_roots

    def roots_before(self, slot: Slot) -> int:
        """Unconsumed roots of all older slots: what is consumed first when groups come in order."""
        roots = 0
        for other in self._slots.values():
            if other is slot:
                break
            roots += other.budget.roots
        return roots

    def get(self, base: str) -> Slot | None:
        """The unfinished slot of that base."""
        return self._slots.get(base)

    def story(self, base: str) -> tuple[Event, ...]:
        """What happened to a slot, oldest first; empty when it is unknown or long finished."""
        slot = self._slots.get(base)
        return tuple(slot.events) if slot is not None else self._stories.get(base, ())

    # ---- moves ---------------------------------------------------------------------------------------------------

    def add(self, slot: Slot, *, now_s: float) -> None:
        """A planned tree; slots are numbered in the order in which they are added."""
        if slot.base in self._slots:
            raise InvariantError(f"lease {slot.base} is planned twice")
        slot.number, self._next_number = self._next_number, self._next_number + 1
        self._slots[slot.base] = slot
        self._round_roots[slot.round_number] += slot.budget.roots
        heapq.heappush(self._queue, (slot.number, slot.base))
        _note(slot, now_s, "planned", f"{slot.budget.roots} roots for prompt {slot.task.task_id}")

    def next_queued(self) -> Slot | None:
        """The oldest slot that waits for an actor."""
        while self._queue:
            slot = self._slots.get(self._queue[0][1])
            if slot is not None and slot.state is SlotState.QUEUED:
                return slot
            heapq.heappop(self._queue)
        return None

    def issue(self, slot: Slot, actor_id: str, *, now_s: float, deadline_s: float) -> None:
        """QUEUED -> LIVE with a new attempt."""
        _expect(slot, SlotState.QUEUED)
        if slot.attempt < 0:
            self._issued += 1
        else:
            self._ended.append(Ended(slot.lease_id, f"leased again: {slot.events[-1].detail}"))
        slot.attempt += 1
        slot.state, slot.expires_s = SlotState.LIVE, now_s + deadline_s
        _note(slot, now_s, "issued", f"{slot.lease_id} to {actor_id}")

    def reclaim(self, slot: Slot, actor_id: str, *, now_s: float, deadline_s: float) -> None:
        """QUEUED or LIVE -> LIVE with the newest attempt, which `actor_id` turns out to hold."""
        _expect(slot, SlotState.QUEUED, SlotState.LIVE)
        slot.state, slot.expires_s = SlotState.LIVE, now_s + deadline_s
        _note(slot, now_s, "reclaimed", f"{slot.lease_id} by {actor_id}")

    def requeue(self, slot: Slot, reason: str, *, now_s: float) -> None:
        """LIVE -> QUEUED; whoever holds the attempt may still finish it."""
        _expect(slot, SlotState.LIVE)
        slot.state = SlotState.QUEUED
        slot.expires_s = float("inf")
        heapq.heappush(self._queue, (slot.number, slot.base))
        _note(slot, now_s, "queued again", reason)

    def shelve(self, slot: Slot, lease_id: str, *, now_s: float) -> None:
        """QUEUED or LIVE -> SHELVED: the group of `lease_id` is here."""
        _expect(slot, SlotState.QUEUED, SlotState.LIVE)
        if lease_id != slot.lease_id:
            self._ended.append(Ended(slot.lease_id, f"{lease_id} came first"))
        slot.state, slot.group_id = SlotState.SHELVED, lease_id
        slot.expires_s = float("inf")
        self._shelved_roots += slot.budget.roots
        _note(slot, now_s, "shelved", f"group {lease_id}")

    def finish(self, slot: Slot, end: str, detail: str, *, now_s: float) -> None:
        """The slot's end, one of FINISHES; it is forgotten except for its story. Only here are permits given back."""
        if end == REJECTED:
            _expect(slot, SlotState.QUEUED, SlotState.LIVE)
            self._ended.append(Ended(slot.lease_id, detail))
        else:
            _expect(slot, SlotState.SHELVED)
            self._shelved_roots -= slot.budget.roots
        _note(slot, now_s, end, detail)
        del self._slots[slot.base]
        self._finished[end] += 1
        self._round_roots[slot.round_number] -= slot.budget.roots
        if not self._round_roots[slot.round_number]:
            del self._round_roots[slot.round_number]
        self._stories[slot.base] = tuple(slot.events)
        if len(self._stories) > _STORIES_KEPT:
            self._stories.popitem(last=False)

    def recover_lease(self, lease: Lease, lease_id: LeaseId, *, now_s: float, expires_s: float) -> None:
        """A lease that was issued and has no group; its tree or its attempt may be news to this table.

        News is LIVE until `expires_s`; nobody is known to hold it.
        """
        slot = self._slots.get(lease_id.base)
        if slot is None:
            slot = slot_of_lease(lease, lease_id)
            self.add(slot, now_s=now_s)
        if lease_id.attempt > slot.attempt and slot.state is not SlotState.SHELVED:
            self._issued += slot.attempt < 0
            slot.attempt = lease_id.attempt
            slot.state, slot.expires_s = SlotState.LIVE, expires_s
            _note(slot, now_s, "recovered", f"{slot.lease_id} was issued after the checkpoint")

    def recover_group(self, lease: Lease, lease_id: LeaseId, *, now_s: float) -> None:
        """A lease whose group waits to be consumed."""
        self.recover_lease(lease, lease_id, now_s=now_s, expires_s=now_s)
        slot = self._slots[lease_id.base]
        if slot.state is not SlotState.SHELVED:
            self.shelve(slot, lease.lease_id, now_s=now_s)
        elif slot.group_id != lease.lease_id:
            raise InvariantError(f"groups {slot.group_id} and {lease.lease_id} of one tree are both on the shelf")

    def rename_planned(self, rename: Callable[[str], str]) -> None:
        """Gives planned slots the bases that `rename` makes of theirs."""
        for slot in self._slots.values():
            if slot.attempt < 0:
                slot.base = rename(slot.base)
        self._slots = {slot.base: slot for slot in self._slots.values()}
        self._queue = sorted((slot.number, slot.base) for slot in self._slots.values())

    def end(self, ended: Ended) -> None:
        """A lease that is in no slot is over."""
        self._ended.append(ended)

    def take_ended(self) -> list[Ended]:
        """Leases that ended without a group to train since the last call: replaced, overtaken or rejected."""
        taken, self._ended = self._ended, []
        return taken

    # ---- truth ---------------------------------------------------------------------------------------------------

    def counts(self) -> Counts:
        """Counted anew from the slots, except for what has left the table."""
        planned = sum(slot.attempt < 0 for slot in self._slots.values())
        shelved = [slot for slot in self._slots.values() if slot.state is SlotState.SHELVED]
        return Counts(
            issued=self._issued,
            finished={end: self._finished[end] for end in FINISHES},
            live=len(self._slots) - planned,
            planned=planned,
            shelved=len(shelved),
            committed_roots=sum(slot.budget.roots for slot in self._slots.values()),
            shelved_roots=sum(slot.budget.roots for slot in shelved),
        )

    def reconcile(self) -> Counts:
        """Raises InvariantError with the ids unless issued = finished + live and the running sums are true."""
        counts = self.counts()
        if counts.issued != sum(counts.finished.values()) + counts.live:
            live = [slot.lease_id for slot in self._slots.values() if slot.attempt >= 0]
            raise InvariantError(f"issued {counts.issued} != finished {counts.finished} + live {len(live)}: {live}")
        sums = (self.committed_roots, self.shelved_roots)
        if sums != (counts.committed_roots, counts.shelved_roots):
            raise InvariantError(f"running sums of roots {sums} are not those of the slots: {counts}")
        return counts

    def state(self) -> Json:
        """Everything but the stories, as JSON."""
        return {
            "slots": [slot_state(slot) for slot in self._slots.values()],
            "issued": self._issued,
            "finished": dict(self._finished),
        }

    def load(self, state: Json, *, now_s: float, deadline_s: float) -> None:
        """Replaces an empty table's content by what `state` returned; live leases get a fresh deadline."""
        assert not self._slots, "load into a table that is in use"
        for entry in state["slots"]:
            slot = slot_from(entry)
            was = SlotState(entry["state"])
            self.add(slot, now_s=now_s)
            if was is SlotState.LIVE:
                slot.state, slot.expires_s = was, now_s + deadline_s
            elif was is SlotState.SHELVED:
                slot.state = was
                self._shelved_roots += slot.budget.roots
        self._issued = int(state["issued"])
        self._finished = Counter({end: int(count) for end, count in state["finished"].items()})


def _note(slot: Slot, now_s: float, what: str, detail: str) -> None:
    slot.events.append(Event(now_s, what, detail))


def _expect(slot: Slot, *states: SlotState) -> None:
    if slot.state not in states:
        raise InvariantError(f"lease {slot.lease_id} is {slot.state.value}, not {[state.value for state in states]}")
