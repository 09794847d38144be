"""The learner's ear and mouth: words of actors become coordinator moves and ledger entries; leases go out.

Owns the shelf. Invariants: a group is durable before its Ack; the shelf holds exactly what the coordinator counts
as shelved, so permits bound it, and after a restart in lockstep also groups that wait for their round; a group that
this run could not train is refused before the ledger has it, or it would end every later start too; a lease is in the
ledger before it is sent; only `run` sends leases and releases, so a handler never meets itself. Never awaits in a
handler, judges ages or credit, or reads the trainer's version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from trace_async.coordination.coordinator import Coordinator
from trace_async.coordination.slots import Arrival
from trace_async.core.types import ActorStatus, Group, GroupVerdict, Lease, VersionNotice
from trace_async.errors import InvariantError
from trace_async.learning.bounds import Bounds
from trace_async.learning.measures import Rates
from trace_async.learning.spread import Spread
from trace_async.learning.status import StallWatch
from trace_async.ledger import Ledger
from trace_async.transport import wire

log = logging.getLogger(__name__)


class Outbox(Protocol):
    """The part of `channel_learner.LearnerChannel` that sends to one actor."""

    def send(self, actor_id: str, message: wire.LearnerMessage) -> bool:
        """Queue a message; False when the actor is not here (any more)."""
        ...


class Intake:
    """`channel_learner.ChannelHandler`, and the sending that follows from it."""

    def __init__(
        self,
        coordinator: Coordinator,
        ledger: Ledger,
        *,
        shelf: dict[str, Group],
        bounds: Bounds,
        greet: Callable[[VersionNotice | None], wire.Welcome],
        roots_of_run: int,
        roots_per_step: int,
        clock: Callable[[], float],
    ) -> None:
        """`greet` makes the Welcome; `roots_of_run` is what all steps of the run consume together."""
        self._coordinator = coordinator
        self._ledger = ledger
        self._bounds = bounds
        self._greet = greet
        self._roots_of_run = roots_of_run
        self._roots_per_step = roots_per_step
        self._closed = False
        self._clock = clock
        self._due = asyncio.Event()
        self.confirmed = (
            asyncio.Event()
        )  # every live actor has something newer than before: wakes the train loop's retire
        self.changed = asyncio.Event()  # there may be a batch, or there never will be: wakes the train loop
        self.shelf = shelf
        self.statuses: dict[str, ActorStatus] = {}
        self.notice: VersionNotice | None = None
        self.rates = Rates(clock())
        self.spread = Spread()
        self.watch = StallWatch(clock())

    async def run(self, outbox: Outbox) -> None:
        """Sends leases and releases; waits until something may have changed what is due.

        Woken by every handler that frees permits, capacity or a fence, by `publish`, `consume` and `tick`.
        """
        while True:
            await self._due.wait()
            self._due.clear()
            self.send_due(outbox)

    def send_due(self, outbox: Outbox) -> None:
        """Enters what changed into the ledger, then tells actors; whoever ends the run calls it once more."""
        leases: list[tuple[str, Lease]] = []
        if self.notice is not None and (wanted := self.wanted_roots) > 0:
            leases = self._coordinator.next_leases(self._clock(), version=self.notice.version, wanted_roots=wanted)
        if leases:
            self._ledger.issue(*(lease for _, lease in leases))
        for ended in self._coordinator.take_ended():
            self._ledger.reject(ended.lease_id, ended.reason)
            self.shelf.pop(ended.lease_id, None)  # of a round that was planned again without it
        for release in self._coordinator.take_releases():
            outbox.send(release.actor_id, wire.Release(lease_ids=(release.lease_id,), reason=release.reason))
        for actor_id, lease in leases:
            # an actor that has just gone is reported gone, and its leases are given to others
            outbox.send(actor_id, wire.LeaseMessage(lease=lease))

    # ---- what the learner says -----------------------------------------------------------------------------------

    @property
    def wanted_roots(self) -> int:
        """Roots that the rest of the run will consume; 0 before a version is published and after `close`."""
        if self._closed or self.notice is None:
            return 0
        return max(0, self._roots_of_run - self.notice.version * self._roots_per_step)

    def close(self) -> None:
        """No lease leaves any more."""
        self._closed = True

    def publish(self, notice: VersionNotice) -> None:
        """Actors are to sample with this version."""
        self.notice = notice
        self.spread.publish(notice.version, now_s=self._clock())
        self._due.set()

    def consume(self, verdicts: Mapping[str, GroupVerdict], *, step: int) -> None:
        """A step has used these groups; they leave the shelf."""
        self._ledger.mark_consumed(step, verdicts)
        self._coordinator.consumed(verdicts, step=step, now_s=self._clock())
        for group_id in verdicts:
            del self.shelf[group_id]
        self.watch.move(self._clock())
        self._due.set()

    def tick(self) -> None:
        """Time has passed: gives up on the silent and the overdue."""
        if given_up := self._coordinator.expire(self._clock()):
            why = self._coordinator.story(given_up[0])[-1].detail
            log.warning("%d leases are given up: %s (%s), ...", len(given_up), given_up[0], why)
        self._changed()

    def release_all(self, outbox: Outbox, reason: str) -> None:
        """Actors need not finish what they hold."""
        for member in self._coordinator.fleet:
            if member.held:
                outbox.send(member.actor_id, wire.Release(lease_ids=tuple(member.held), reason=reason))

    # ---- what actors say -----------------------------------------------------------------------------------------

    def on_hello(self, hello: wire.Hello) -> wire.Welcome:
        """An actor arrived or came back."""
        self._coordinator.join(
            hello.actor_id, capacity_roots=hello.capacity_roots, live_leases=hello.live_leases, now_s=self._clock()
        )
        self.watch.move(self._clock())
        self._changed()
        return self._greet(self.notice)

    def on_group(self, actor_id: str, group: Group) -> wire.Ack:
        """A group arrived, perhaps again."""
        if (wrong := self._fault(group)) is not None:
            log.warning("group %s from %s is refused: %s", group.group_id, actor_id, wrong)
            self._coordinator.returned(actor_id, [group.lease_id], self._clock(), reason=f"refused: {wrong}")
            self._changed()
            return wire.Ack(group_id=group.group_id, accepted=False, reason=wrong)
        arrival = self._coordinator.group_arrived(group.lease_id, self._clock())
        if arrival is Arrival.ACCEPT:
            self._shelve(group)
            return wire.Ack(group_id=group.group_id, accepted=True)
        if arrival is Arrival.DUPLICATE and group.group_id in self.shelf:
            return wire.Ack(group_id=group.group_id, accepted=True, reason="it was here already")
        reason = "its tree was finished before" if arrival is Arrival.DUPLICATE else "this run never issued that lease"
        log.info("group %s from %s is not needed: %s", group.group_id, actor_id, reason)
        return wire.Ack(group_id=group.group_id, accepted=False, reason=reason)

    def on_heartbeat(self, status: ActorStatus) -> bool:
        """An actor lives; False when it was given up meanwhile."""
        known = self._coordinator.heartbeat(status.actor_id, self._clock(), version=status.version, epoch=status.epoch)
        if known:
            self.statuses[status.actor_id] = status
            self._versions_changed()
        return known

    def on_confirm(self, actor_id: str, version: int, epoch: int) -> None:
        """An actor samples with this version."""
        self._coordinator.confirm(actor_id, version=version, epoch=epoch)
        self._versions_changed()

    def on_return(self, actor_id: str, lease_ids: tuple[str, ...], reason: str) -> None:
        """An actor gives leases back."""
        self._coordinator.returned(actor_id, lease_ids, self._clock(), reason=reason)
        self._changed()

    def on_bye(self, actor_id: str) -> None:
        """An actor left in order."""
        self._leave(actor_id, "said bye")

    def on_gone(self, actor_id: str) -> None:
        """An actor is unreachable, silent, or does not read."""
        self._leave(actor_id, "is gone")

    # ---- inside --------------------------------------------------------------------------------------------------

    def _leave(self, actor_id: str, reason: str) -> None:
        lost = self._coordinator.leave(actor_id, self._clock(), reason=reason)
        self.statuses.pop(actor_id, None)
        if lost:
            log.warning("actor %s %s with %d leases: %s", actor_id, reason, len(lost), ", ".join(lost[:4]))
        self._versions_changed()
        self._changed()

    def _fault(self, group: Group) -> str | None:
        slot = self._coordinator.slot_of(group.lease_id)
        if group.group_id != group.lease_id:
            return f"its lease is {group.lease_id}"
        if slot is not None and (group.prompt_id, group.budget) != (slot.task.task_id, slot.budget):
            return (
                f"it is of prompt {group.prompt_id} with {group.budget}, leased was {slot.task.task_id} {slot.budget}"
            )
        return self._bounds.fault(group, newest_version=-1 if self.notice is None else self.notice.version)

    def _shelve(self, group: Group) -> None:
        frames = wire.encode_group(group)
        if not self._ledger.receive(group.group_id, frames):
            raise InvariantError(f"the ledger has group {group.group_id} already, the coordinator did not expect that")
        self.shelf[group.group_id] = group
        self.rates.receive(group, num_bytes=sum(map(len, frames)))
        self.watch.move(self._clock())
        self._changed()

    def _versions_changed(self) -> None:
        versions = [member.version for member in self._coordinator.fleet if member.joined]
        if self.spread.look(versions, now_s=self._clock()):
            self.confirmed.set()
        self._due.set()

    def _changed(self) -> None:
        self._due.set()
        self.changed.set()
