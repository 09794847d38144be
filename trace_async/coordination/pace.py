"""When a round may be planned, which version its trees wait for, and what a step consumes: two rules.

`Flowing` keeps everybody busy: a step takes what is oldest on the shelf as soon as it is a round's worth, and a lease
goes out as soon as its age is sure to stay in bounds. `Lockstep` gives up speed so that nothing depends on timing:
round r is planned and sampled by version max(0, r - max_age_steps) exactly and is all that the step from version r
consumes.
Pure: tables are read, never changed. Never knows actors or the clock.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from trace_async.config import CoordinatorConfig
from trace_async.coordination.leases import LeaseTable
from trace_async.coordination.slots import Slot, SlotState
from trace_async.core.staleness import permits_left


class Outlook(NamedTuple):
    """Where the run stands."""

    version: int  # newest published; steps made
    next_round: int  # rounds planned
    wanted_roots: int  # that the rest of the run will consume


class Pace(Protocol):
    """One rule."""

    def may_plan(self, table: LeaseTable, outlook: Outlook) -> bool:
        """Whether the next round may be planned now, if there is an actor for it."""
        ...

    def allowed_lag(self, roots_ahead: int) -> int:
        """Versions an actor may be behind, for a tree that is consumed when `roots_ahead` roots have been."""
        ...

    def next_batch(self, table: LeaseTable, outlook: Outlook) -> list[Slot] | None:
        """What the next step consumes, in order; None while it has to wait."""
        ...


def make_pace(config: CoordinatorConfig, *, roots_per_step: int) -> Pace:
    """The configured rule."""
    rule = Lockstep if config.lockstep else Flowing
    return rule(max_age_steps=config.max_age_steps, roots_per_step=roots_per_step)


class Flowing:
    """The default."""

    def __init__(self, *, max_age_steps: int, roots_per_step: int) -> None:
        self._max_age_steps = max_age_steps
        self._roots_per_step = roots_per_step
        self._max_permits = (max_age_steps + 1) * roots_per_step

    def may_plan(self, table: LeaseTable, outlook: Outlook) -> bool:
        """A whole round fits the permits, and the rest of the run needs more than what is under way."""
        committed = table.committed_roots
        return committed < outlook.wanted_roots and self._roots_per_step <= permits_left(committed, self._max_permits)

    def allowed_lag(self, roots_ahead: int) -> int:
        """The age bound, less the steps that come before the tree's own."""
        return self._max_age_steps - roots_ahead // self._roots_per_step

    def next_batch(self, table: LeaseTable, outlook: Outlook) -> list[Slot] | None:
        """The oldest on the shelf, at least `roots_per_step` roots.

        Fewer only when everything under way is there and no round may be planned, so that waiting would be for ever.
        """
        all_here = table.shelved_roots == table.committed_roots and not self.may_plan(table, outlook)
        if table.shelved_roots < self._roots_per_step and not all_here:
            return None
        batch: list[Slot] = []
        roots = 0
        for slot in table:
            if slot.state is SlotState.SHELVED and roots < self._roots_per_step:
                batch.append(slot)
                roots += slot.budget.roots
        return batch or None


class Lockstep:
    """Round r is of version max(0, r - max_age_steps) and the step from version r; nothing is sampled meanwhile."""

    def __init__(self, *, max_age_steps: int, roots_per_step: int) -> None:
        self._max_age_steps = max_age_steps
        self._roots_per_step = roots_per_step

    def may_plan(self, table: LeaseTable, outlook: Outlook) -> bool:
        """The version that has to sample the round is the newest, and the run will come to its step."""
        ahead = outlook.next_round - outlook.version
        return ahead <= self._max_age_steps and ahead * self._roots_per_step < outlook.wanted_roots

    def allowed_lag(self, roots_ahead: int) -> int:
        """None: a lease waits until its actor has confirmed the newest version."""
        return 0

    def next_batch(self, table: LeaseTable, outlook: Outlook) -> list[Slot] | None:
        """The round of this version once every round that may be out is on the shelf.

        Trees that were rejected are missing from it; a round without any tree left is an empty step.
        """
        slots = list(table)
        if self.may_plan(table, outlook) or any(slot.state is not SlotState.SHELVED for slot in slots):
            return None
        if outlook.next_round <= outlook.version:
            return None  # the run is over
        return [slot for slot in slots if slot.round_number <= outlook.version]
