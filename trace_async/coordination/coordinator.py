"""Who grows which tree: leases, permits and pace, as a state machine without clock or sockets.

One authority for the data cursor, the budget and the age bound. Invariants, re-derived by `reconcile`:
    - issued = trained + flat + stale + broken + rejected + live, counted in trees;
    - roots that are planned or issued and not yet consumed never exceed `max_permits`;
    - of the attempts at one tree at most one group is accepted;
    - a lease goes to an actor only if, were groups to come in order, none of its turns would be over the age bound.

The last, unless `coordinator.lockstep` is set (see `pace.py`): groups are consumed oldest first, at least
`roots_per_step` roots a step. A lease behind U unconsumed roots is therefore trained by the step after the next
floor(U / roots_per_step), and the actor samples with the version it has confirmed or a newer one; the sum of both lags
must not exceed `max_age_steps`. The oldest lease that waits may start on the newest version unless the roots before it
fill a batch, so no run waits for what may not start. Trees that are overtaken can be older, which is why the learner
judges every turn again.

Never waits, decides about credit, or keeps groups. Times are seconds of any monotone clock, handed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trace_async.config import CoordinatorConfig, TreeConfig
from trace_async.coordination.fleet import Fleet, Member, Release
from trace_async.coordination.leases import REJECTED, Counts, Ended, LeaseTable
from trace_async.coordination.pace import Outlook, make_pace
from trace_async.coordination.recovery import Early, LedgerView, recover
from trace_async.coordination.rounds import RoundPlanner
from trace_async.coordination.slots import (
    Arrival,
    Event,
    Slot,
    SlotState,
    make_base,
    make_lease,
    parse_lease_id,
    place_of,
)
from trace_async.core.types import GroupVerdict, Json, Lease, Score, TreeBudget
from trace_async.errors import InvariantError


class Coordinator:
    """Leases out rounds of trees and follows each to its end."""

    def __init__(
        self, planner: RoundPlanner, *, config: CoordinatorConfig, tree: TreeConfig, seed: int, epoch: int
    ) -> None:
        self._planner = planner
        self._config = config
        self._tree = tree
        self._seed = seed
        self._epoch = epoch
        self._next_round = 0
        self._table = LeaseTable()
        self._fleet = Fleet()
        self._pace = make_pace(config, roots_per_step=tree.roots_per_step)
        self._early = Early()
        self.max_permits = (config.max_age_steps + 1) * tree.roots_per_step
        self._ceiling = self.max_permits  # above max_permits only while a restart's surplus is worked off

    # ---- actors --------------------------------------------------------------------------------------------------

    def join(self, actor_id: str, *, capacity_roots: int, live_leases: Iterable[str], now_s: float) -> None:
        """An actor says what it can hold and what it holds; both sides agree on its leases afterwards.

        What it no longer holds is leased again; what it holds and should not is released.
        """
        member = self._fleet.join(actor_id, capacity_roots=capacity_roots, now_s=now_s)
        claimed = set(live_leases)
        for lease_id in [lease_id for lease_id in member.held if lease_id not in claimed]:
            self._lose(lease_id, f"{actor_id} does not hold it any more", now_s)
        for lease_id in sorted(claimed.difference(member.held)):
            if not self._reclaim(member, lease_id, now_s):
                self._fleet.release(actor_id, lease_id, "leased to another, finished, or not of this run")

    def heartbeat(self, actor_id: str, now_s: float, *, version: int, epoch: int) -> bool:
        """False when the actor is not known and must say hello first; `version` of `epoch` is what its engine holds."""
        member = self._fleet.get(actor_id)
        if member is None or not member.joined:
            return False
        member.last_seen_s, member.version = now_s, version if epoch == self._epoch else -1
        return True

    def confirm(self, actor_id: str, *, version: int, epoch: int) -> None:
        """The actor samples with this version from now on."""
        member = self._fleet.get(actor_id)
        if member is not None and epoch == self._epoch:
            member.version = version

    def leave(self, actor_id: str, now_s: float, *, reason: str = "left") -> list[str]:
        """The actor is gone; returns the leases that it held, which are leased again or rejected."""
        member = self._fleet.get(actor_id)
        if member is None:
            return []
        lost = list(member.held)
        for lease_id in lost:
            self._lose(lease_id, f"{actor_id} {reason}", now_s)
        self._fleet.remove(actor_id)
        return lost

    def returned(self, actor_id: str, lease_ids: Iterable[str], now_s: float, *, reason: str = "returned") -> None:
        """The actor gives leases back unfinished."""
        member = self._fleet.get(actor_id)
        for lease_id in lease_ids:
            if member is not None and lease_id in member.held:
                self._lose(lease_id, f"{actor_id}: {reason}", now_s)

    # ---- leases --------------------------------------------------------------------------------------------------

    def next_leases(self, now_s: float, *, version: int, wanted_roots: int) -> list[tuple[str, Lease]]:
        """Leases to send now, oldest tree first, with the actor each goes to.

        Plans a new round when nothing is queued, an actor could take it, and the pace allows it; `wanted_roots` is what
        the rest of the run will consume, `version` the newest published.
        """
        issued: list[tuple[str, Lease]] = []
        deadline_s = self._config.lease_deadline_s
        while True:
            slot = self._table.next_queued()
            if slot is None:
                may_plan = self._pace.may_plan(self._table, self._outlook(version, wanted_roots))
                if not (may_plan and self._has_taker(version)):
                    return issued
                self._plan(version, now_s)
                continue
            lag = self._pace.allowed_lag(self._table.roots_before(slot))
            member = self._fleet.pick(roots=slot.budget.roots, version=version, allowed_lag=lag, slot=slot)
            if member is None:
                return issued  # the oldest goes first, or a large tree would wait for ever behind small ones
            self._table.issue(slot, member.actor_id, now_s=now_s, deadline_s=deadline_s)
            self._fleet.hold(member, slot, slot.attempt)
            issued.append((member.actor_id, make_lease(slot, seed=self._seed, version=version, deadline_s=deadline_s)))

    def group_arrived(self, lease_id: str, now_s: float) -> Arrival:
        """Judges a group by its lease; an accepted one ends every other attempt at its tree."""
        parsed = parse_lease_id(lease_id)
        if parsed is None:
            return Arrival.UNKNOWN
        slot = self._table.get(parsed.base)
        if slot is None:
            if self._early.arrived(lease_id):
                return Arrival.ACCEPT
            planned = parsed.epoch <= self._epoch and parsed.round_number < self._next_round
            return Arrival.DUPLICATE if planned or lease_id in self._early.shelved else Arrival.UNKNOWN
        if parsed.attempt > slot.attempt:
            return Arrival.UNKNOWN
        if slot.state is SlotState.SHELVED:
            return Arrival.DUPLICATE
        self._fleet.unhold(slot, parsed.attempt)
        self._fleet.release_holders(slot, f"{lease_id} came first")
        self._table.shelve(slot, lease_id, now_s=now_s)
        return Arrival.ACCEPT

    def next_batch(self, *, version: int, wanted_roots: int) -> list[str] | None:
        """Leases whose groups the next step consumes, in order; None while it has to wait, as the pace says.

        The groups stay on the shelf until `consumed`.
        """
        batch = self._pace.next_batch(self._table, self._outlook(version, wanted_roots))
        return None if batch is None else [slot.group_id for slot in batch]

    def consumed(self, verdicts: Mapping[str, GroupVerdict], *, step: int, now_s: float) -> None:
        """A step has used these groups; their permits are free."""
        for lease_id, verdict in verdicts.items():
            slot, _ = self._find(lease_id)
            if slot is None or slot.group_id != lease_id:
                raise InvariantError(f"step {step} consumed group {lease_id}, which is not on the shelf")
            self._table.finish(slot, verdict.name.lower(), f"step {step}", now_s=now_s)

    def expire(self, now_s: float) -> list[str]:
        """Gives up on silent actors and overdue leases; returns the leases that are leased again or rejected."""
        given_up: list[str] = []
        for member in self._fleet.silent_since(now_s - self._config.dead_after_s):
            given_up += self.leave(member.actor_id, now_s, reason=f"silent for {now_s - member.last_seen_s:.1f} s")
        for slot in self._table:
            if slot.state is SlotState.LIVE and slot.expires_s <= now_s:
                given_up.append(slot.lease_id)
                self._give_up(slot, "not finished in time", now_s)  # its holder may still finish it
        return given_up

    def take_releases(self) -> list[Release]:
        """Releases to send, each once."""
        return self._fleet.take_releases()

    def take_ended(self) -> list[Ended]:
        """Leases that ended without a group to train, each once."""
        return self._table.take_ended()

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> Json:
        """Cursor, leases and counters, as JSON."""
        return {"next_round": self._next_round, "planner": self._planner.state(), "table": self._table.state()}

    def load(self, state: Json, *, live: Sequence[Lease], shelved: Sequence[Lease], now_s: float) -> list[Ended]:
        """Continue from what `state` returned, brought up to what the ledger saw after it.

        `live`: issued leases without a group; actors have `dead_after_s` to claim them. `shelved`: leases whose groups
        wait to be consumed. Returns those of both that are over: their trees were finished before `state` and must not
        be trained again, or another attempt has taken their place.
        """
        self._planner.load(state["planner"])
        self._table.load(state["table"], now_s=now_s, deadline_s=self._config.lease_deadline_s)
        self._next_round = int(state["next_round"])
        expires_s = now_s + self._config.dead_after_s
        ledger = LedgerView(live, shelved)
        if self._config.lockstep:
            ledger, self._early = Early.split(ledger, known_rounds=self._next_round)
        recovered = recover(self._table, ledger, known_rounds=self._next_round, now_s=now_s, expires_s=expires_s)
        # the ids that planned slots have may have been issued and rejected after the checkpoint
        self._table.rename_planned(lambda base: f"{self._epoch}-{place_of(base)}")
        for _ in range(self._next_round, recovered.num_rounds):
            self._planner.skip()
        self._next_round = recovered.num_rounds
        for slot in self._table:
            holders, slot.holders = slot.holders, {}
            if slot.state is not SlotState.SHELVED:
                for attempt, actor_id in holders.items():
                    self._fleet.hold(self._fleet.expect(actor_id, now_s=now_s), slot, attempt)
        self._ceiling = max(self.max_permits, self._table.committed_roots)
        return recovered.over

    @property
    def fleet(self) -> Fleet:
        """The actors, to look at."""
        return self._fleet

    @property
    def slots(self) -> list[Slot]:
        """The unfinished trees, oldest first, to look at."""
        return list(self._table)

    @property
    def early(self) -> Early:
        """Leases of rounds that a restart has not planned again yet, to look at."""
        return self._early

    def slot_of(self, lease_id: str) -> Slot | None:
        """The unfinished tree of a lease, to look at."""
        return self._find(lease_id)[0]

    def story(self, lease_id: str) -> tuple[Event, ...]:
        """What happened to a lease's tree, all attempts, oldest first; empty when unknown or long finished."""
        parsed = parse_lease_id(lease_id)
        return self._table.story(parsed.base) if parsed is not None else ()

    def reconcile(self) -> Counts:
        """Trees and permits, counted anew; raises InvariantError with the ids when an invariant does not hold."""
        counts = self._table.reconcile()
        self._ceiling = max(self.max_permits, min(self._ceiling, counts.committed_roots))
        if counts.committed_roots > self._ceiling:
            raise InvariantError(f"{counts.committed_roots} roots are out, permits are {self._ceiling}")
        holders = {(a, f"{slot.base}.{attempt}") for slot in self._table for attempt, a in slot.holders.items()}
        if disputed := holders ^ self._fleet.holdings():
            raise InvariantError(f"slots and actors disagree on who holds {sorted(disputed)}")
        return counts

    # ---- rules ---------------------------------------------------------------------------------------------------

    def _outlook(self, version: int, wanted_roots: int) -> Outlook:
        return Outlook(version=version, next_round=self._next_round, wanted_roots=wanted_roots)

    def _has_taker(self, version: int) -> bool:
        lag = self._pace.allowed_lag(self._table.committed_roots)
        return self._fleet.pick(roots=1, version=version, allowed_lag=lag) is not None

    def _plan(self, version: int, now_s: float) -> None:
        number = self._next_round
        for index, draft in enumerate(self._planner.plan(number)):
            slot = Slot(
                base=make_base(epoch=self._epoch, round_number=number, index=index),
                round_number=number,
                task=draft.task,
                visit=draft.visit,
                budget=TreeBudget(roots=draft.roots, continuations=draft.roots * self._tree.continuations_per_root),
                root_score=Score(success=draft.success, predictor_version=version, strength=draft.strength),
            )
            self._table.add(slot, now_s=now_s)
        self._early.enter(self._table, number, now_s=now_s)
        self._next_round += 1

    def _find(self, lease_id: str) -> tuple[Slot | None, int]:
        parsed = parse_lease_id(lease_id)
        return (self._table.get(parsed.base), parsed.attempt) if parsed is not None else (None, -1)

    def _reclaim(self, member: Member, lease_id: str, now_s: float) -> bool:
        slot, attempt = self._find(lease_id)
        if slot is None or slot.state is SlotState.SHELVED or attempt != slot.attempt or attempt in slot.holders:
            return False
        self._table.reclaim(slot, member.actor_id, now_s=now_s, deadline_s=self._config.lease_deadline_s)
        self._fleet.hold(member, slot, attempt)
        return True

    def _lose(self, lease_id: str, reason: str, now_s: float) -> None:
        slot, attempt = self._find(lease_id)
        assert slot is not None, f"{lease_id} is held, but finished or never issued"
        self._fleet.unhold(slot, attempt)
        if slot.state is SlotState.LIVE and attempt == slot.attempt:
            self._give_up(slot, reason, now_s)

    def _give_up(self, slot: Slot, reason: str, now_s: float) -> None:
        if slot.attempt + 1 < self._config.max_attempts:
            self._table.requeue(slot, reason, now_s=now_s)
            return
        reason = f"attempt {slot.attempt + 1} of {self._config.max_attempts}: {reason}"
        self._fleet.release_holders(slot, reason)
        self._table.finish(slot, REJECTED, reason, now_s=now_s)
