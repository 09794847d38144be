"""What one actor has to say to its learner and has heard from it: the actor's end of the road without its socket.

Owns the groups that are not acknowledged yet, the leases that nobody took yet, the newest welcome and notice, and what
is due on the present connection. Invariants: a group stays due, connection after connection, until an Ack names it;
every connection opens with Hello, whose live leases include waiting leases and unacknowledged groups; whatever else is
said is repeated (heartbeat, confirm) or made up for by the next Hello (return, bye), so any single message may be
lost. Newest notice wins, by epoch first. Never awaits, sends or reads a clock: the time is passed in.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from trace_async.core.types import ActorStatus, Group, Lease, VersionNotice
from trace_async.errors import InvariantError, WireError
from trace_async.transport import wire

MAX_WAITING_LEASES = 4096
"""The learner sends no more than the actor's capacity; beyond this they go back instead of piling up."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Parcel:
    """A group on its way and who wants its acknowledgement."""

    frames: wire.Frames
    on_ack: Callable[[wire.Ack], None]
    sent_at: float | None = None  # on the present connection; None = due now


class ActorRoad:
    """Say with `put_group`, `confirm`, `note`; what to send comes out of `due`; what arrives goes into `hear`."""

    def __init__(
        self,
        *,
        hello: Callable[[], wire.Hello],
        status: Callable[[], ActorStatus],
        on_release: Callable[[tuple[str, ...], str], None],
        incarnation: str,
        resend_s: float,
    ) -> None:
        self._hello = hello
        self._status = status
        self._on_release = on_release
        self._incarnation = incarnation
        self._resend_s = resend_s
        self._confirmed: tuple[int, int] | None = None
        self._hello_due = self._confirm_due = self._heartbeat_due = False
        self._notes: deque[wire.ActorMessage] = deque()
        self.connected = False
        self.welcomed = False  # on the present connection
        self.parcels: dict[str, Parcel] = {}
        self.leases: dict[str, Lease] = {}
        self.welcome: wire.Welcome | None = None
        self.notice: VersionNotice | None = None
        self.stop_reason: str | None = None
        self.farewell = False
        self.num_resent = 0

    def connect(self) -> None:
        """A new connection: Hello is due and nothing else until the Welcome."""
        self.connected, self.welcomed, self._hello_due, self._heartbeat_due = True, False, True, False
        self._notes.clear()

    def disconnect(self) -> None:
        """The connection is gone with whatever was on it."""
        self.connected = self.welcomed = False

    def put_group(self, group: Group, on_ack: Callable[[wire.Ack], None]) -> None:
        """Enter a group for delivery; `on_ack` is called once. InvariantError when it is on its way already."""
        if group.group_id in self.parcels:
            raise InvariantError(f"group {group.group_id} is being shipped already")
        self.parcels[group.group_id] = Parcel(wire.encode_group(group), on_ack)

    def confirm(self, version: int, epoch: int) -> None:
        """The engine's version; said now and on every connection."""
        self._confirmed = (version, epoch)
        self._confirm_due = True

    def return_leases(self, lease_ids: Sequence[str], reason: str) -> None:
        """Give leases back; between connections silently, as the next Hello does not list them."""
        for lease_id in lease_ids:
            self.leases.pop(lease_id, None)
        self._note(wire.Return(actor_id=self.actor_id, lease_ids=tuple(lease_ids), reason=reason))

    def say_bye(self) -> None:
        """Take leave of this connection's learner."""
        self._note(wire.Bye(actor_id=self.actor_id))

    @property
    def actor_id(self) -> str:
        """The id under which this actor goes."""
        return self._hello().actor_id

    @property
    def route(self) -> bytes:
        """The routing id of every connection of this process."""
        return wire.routing_id(self.actor_id, self._incarnation)

    def tick(self, now_s: float) -> None:
        """A heartbeat is due, and so is every group that went unacknowledged for too long."""
        self._heartbeat_due = True
        for parcel in self.parcels.values():
            if parcel.sent_at is not None and now_s - parcel.sent_at > self._resend_s:
                parcel.sent_at = None
                self.num_resent += 1

    def due(self, clock: Callable[[], float]) -> Iterator[wire.Frames]:
        """What to send now, each marked as said when taken; state may change while the caller sends one."""
        if self._hello_due:
            self._hello_due = False
            yield wire.encode(self._greeting())
        if not self.welcomed:
            return
        if self._confirm_due and self._confirmed:
            self._confirm_due = False
            version, epoch = self._confirmed
            yield wire.encode(wire.Confirm(actor_id=self.actor_id, version=version, epoch=epoch))
        if self._heartbeat_due:
            self._heartbeat_due = False
            yield wire.encode(wire.Heartbeat(status=self._status()))
        for parcel in list(self.parcels.values()):
            if parcel.sent_at is None:
                parcel.sent_at = clock()
                yield parcel.frames
        while self._notes:
            yield wire.encode(self._notes.popleft())

    def hear(self, message: wire.LearnerMessage) -> None:
        """Take in what the learner said; WireError when it will never understand this actor."""
        match message:
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Refuse():
                self._on_refuse(message)
            case wire.LeaseMessage(lease=lease) if len(self.leases) < MAX_WAITING_LEASES:
                self.leases[lease.lease_id] = lease
            case wire.LeaseMessage(lease=lease):
                self.return_leases((lease.lease_id,), f"{MAX_WAITING_LEASES} leases are waiting already")
            case wire.Ack(group_id=group_id):
                if parcel := self.parcels.pop(group_id, None):
                    parcel.on_ack(message)
            case wire.Notice(notice=notice):
                self._on_notice(notice)
            case wire.Release(lease_ids=lease_ids, reason=reason):
                for lease_id in lease_ids:
                    self.leases.pop(lease_id, None)
                self._on_release(lease_ids, reason)
            case wire.Stop(reason=reason):
                self.stop_reason = reason
            case wire.Farewell():
                self.farewell = True

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self.welcome = welcome
        self.welcomed = True
        self._on_notice(welcome.notice)
        self._confirm_due = True
        for parcel in self.parcels.values():
            parcel.sent_at = None

    def _on_refuse(self, refuse: wire.Refuse) -> None:
        if not refuse.hello_again:
            raise WireError(f"the learner refuses actor {self.actor_id}: {refuse.reason}")
        if self.welcomed:  # else a Hello is under way and this answers something older
            logger.warning("the learner refuses: %s; saying hello again", refuse.reason)
            self.welcomed = False
            self._hello_due = True

    def _on_notice(self, notice: VersionNotice | None) -> None:
        known = self.notice
        if notice and (known is None or (notice.epoch, notice.version) > (known.epoch, known.version)):
            self.notice = notice

    def _greeting(self) -> wire.Hello:
        hello = self._hello()
        live = dict.fromkeys((*hello.live_leases, *self.leases, *self.parcels))  # a group's id is its lease's
        return replace(hello, live_leases=tuple(live), incarnation=self._incarnation)

    def _note(self, message: wire.ActorMessage) -> None:
        if self.connected:
            self._notes.append(message)
