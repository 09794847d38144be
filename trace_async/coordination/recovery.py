"""Brings a lease table that comes from a checkpoint up to what the ledger saw after it.

The ledger writes every issue, arrival and end at once; the checkpoint is older. Invariants: a group on the ledger's
shelf is on the table's shelf afterwards, unless the checkpoint already has its weights in it; a lease that the ledger
saw end is not live; of the attempts at one tree that the ledger calls live only the newest stays so, however a crash
parted the issue of one from the end of another; nothing is issued under an id that was used. Pure: records in, table
changed.

`recover` enters everything at once. In lockstep, rounds that the checkpoint does not know wait in an `Early` until they
are planned again, by the version that planned them: part of such a round may never have been leased, and nothing of it
may be leased before that version is back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from trace_async.coordination.leases import REJECTED, Ended, LeaseTable
from trace_async.coordination.slots import LeaseId, Slot, SlotState, parse_lease_id, place_of
from trace_async.core.types import Lease
from trace_async.errors import InvariantError


class LedgerView(NamedTuple):
    """What the ledger holds, after it was rewound to the checkpoint's step."""

    live: Sequence[Lease]  # issued, without a group
    shelved: Sequence[Lease]  # with a group that waits to be consumed


class Recovered(NamedTuple):
    """What came of it."""

    num_rounds: int  # rounds planned, including those planned after the checkpoint
    over: list[Ended]  # leases that the ledger holds as live or shelved, and should not


def recover(table: LeaseTable, ledger: LedgerView, *, known_rounds: int, now_s: float, expires_s: float) -> Recovered:
    """Enters the ledger's leases. `known_rounds`: rounds planned at the checkpoint; `expires_s`: grace for live ones.

    A tree of a known round that is not in the table was finished before the checkpoint. That the ledger holds a lease
    of it all the same happens when the machine lost the ledger's last commits but not the checkpoint.
    Raises: InvariantError when the table has a group on its shelf that the ledger has not.
    """
    finished_before = []
    # a slot that was planned at the checkpoint may have been issued since, under an id that a later epoch gave it
    bases = {place_of(base): base for leases in ledger for _, (base, *_) in map(_parse, leases)}
    table.rename_planned(lambda base: bases.get(place_of(base), base))
    num_rounds = known_rounds
    for leases, has_group in ((ledger.shelved, True), (ledger.live, False)):
        for lease, lease_id in sorted(map(_parse, leases), key=lambda pair: pair[1][1:]):
            num_rounds = max(num_rounds, lease_id.round_number + 1)
            if table.get(lease_id.base) is None and lease_id.round_number < known_rounds:
                finished_before.append(lease)
            elif has_group:
                table.recover_group(lease, lease_id, now_s=now_s)
            else:
                table.recover_lease(lease, lease_id, now_s=now_s, expires_s=expires_s)
    _drop_ended(table, ledger, now_s)
    table.take_ended()  # the ends that this made: the ledger knows them, or they are found here
    return Recovered(num_rounds, _over(table, [*finished_before, *ledger.live]))


class Early:
    """Leases of rounds that are not planned yet, by their ids."""

    def __init__(self) -> None:
        self._live: dict[str, Lease] = {}
        self._shelved: dict[str, Lease] = {}

    @staticmethod
    def split(ledger: LedgerView, *, known_rounds: int) -> tuple[LedgerView, Early]:
        """What `recover` may enter, and the rest."""
        early = Early()
        now: list[list[Lease]] = []
        for leases, rest in zip(ledger, (early._live, early._shelved), strict=True):
            later = {lease.lease_id for lease, lease_id in map(_parse, leases) if lease_id.round_number >= known_rounds}
            rest |= {lease.lease_id: lease for lease in leases if lease.lease_id in later}
            now.append([lease for lease in leases if lease.lease_id not in later])
        return LedgerView(*now), early

    @property
    def live(self) -> Collection[str]:
        """Ids of leases without a group, to look at."""
        return self._live.keys()

    @property
    def shelved(self) -> Collection[str]:
        """Ids of leases whose groups wait for their round."""
        return self._shelved.keys()

    def arrived(self, lease_id: str) -> bool:
        """A group came in; True when it is of a lease that waits here without one."""
        lease = self._live.pop(lease_id, None)
        if lease is None:
            return False
        self._shelved[lease_id] = lease
        return True

    def enter(self, table: LeaseTable, round_number: int, *, now_s: float) -> None:
        """The round was planned and its slots are in the table: they get back their groups, ids and attempts.

        Leases that do not fit the new plan, or whose place another attempt has taken, are over. Those without a group
        are leased again at the next look, because whoever may have held them was told to stop.
        """
        ledger = LedgerView(*(_take_round(leases, round_number) for leases in (self._live, self._shelved)))
        planned = {place_of(slot.base): slot for slot in table if slot.round_number == round_number}
        fitting = LedgerView(*([lease for lease in leases if _fits(lease, planned)] for leases in ledger))
        bases = {place_of(base): base for leases in fitting for _, (base, *_) in map(_parse, leases)}
        table.rename_planned(lambda base: bases.get(place_of(base), base))
        for lease, lease_id in map(_parse, fitting.shelved):
            table.recover_group(lease, lease_id, now_s=now_s)
        for lease, lease_id in map(_parse, fitting.live):
            table.recover_lease(lease, lease_id, now_s=now_s, expires_s=now_s)
        kept = {lease.lease_id for leases in fitting for lease in leases}
        for ended in _over(table, fitting.live):
            table.end(ended)
        for lease in (lease for leases in ledger for lease in leases if lease.lease_id not in kept):
            table.end(Ended(lease.lease_id, f"round {round_number} was planned again without it"))


def _take_round(leases: dict[str, Lease], round_number: int) -> list[Lease]:
    """The leases of one round, oldest attempt first; they leave `leases`."""
    taken = [pair for pair in map(_parse, leases.values()) if pair[1].round_number == round_number]
    for lease, _ in taken:
        del leases[lease.lease_id]
    return [lease for lease, _ in sorted(taken, key=lambda pair: pair[1][1:])]


def _fits(lease: Lease, planned: dict[str, Slot]) -> bool:
    _, lease_id = _parse(lease)
    slot = planned.get(place_of(lease_id.base))
    return slot is not None and (slot.task.task_id, slot.budget) == (lease.prompt_id, lease.budget)


def _drop_ended(table: LeaseTable, ledger: LedgerView, now_s: float) -> None:
    live, shelved = ({lease.lease_id for lease in leases} for leases in ledger)
    for slot in table:
        if slot.state is SlotState.SHELVED:
            if slot.group_id not in shelved:
                raise InvariantError(
                    f"group {slot.group_id} waits to be consumed in the checkpoint and the ledger does not have it; "
                    "ledger and checkpoint are of different runs, or the ledger was rolled back"
                )
        elif slot.attempt >= 0 and slot.lease_id not in live:
            table.finish(slot, REJECTED, "rejected before the restart", now_s=now_s)


def _over(table: LeaseTable, leases: Sequence[Lease]) -> list[Ended]:
    """Those whose tree has ended, whose tree's group is here, or whose tree has a newer attempt; each once."""
    over: dict[str, str] = {}
    for lease, lease_id in map(_parse, leases):
        slot = table.get(lease_id.base)
        if slot is None:
            over[lease.lease_id] = "its tree was finished before the checkpoint"
        elif slot.state is SlotState.SHELVED or slot.lease_id != lease.lease_id:
            over[lease.lease_id] = f"{slot.group_id or slot.lease_id} took its place before the restart"
    return [Ended(lease_id, reason) for lease_id, reason in over.items()]


def _parse(lease: Lease) -> tuple[Lease, LeaseId]:
    parsed = parse_lease_id(lease.lease_id)
    if parsed is None:
        raise InvariantError(f"the ledger holds lease {lease.lease_id!r}, which no coordinator made")
    return lease, parsed
