"""Who is on the road and what waits for each: the learner's end of the road without its socket.

Owns the welcomed actors, an outbox for each, and the answers to strangers. Invariants: frames are hostile until
decoded, and refused ones change nothing; only the process whose Hello came last under an actor's id, from the routing
id that Hello names, speaks for that actor (an older process is told to stop, a stranger is refused); nothing but Hello
is heard before Hello; every queue is bounded; an actor is reported gone once and must then say hello again. Never
awaits, sends or reads a clock, and decides nothing about leases or groups: the handler does.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

from trace_async.core.types import ActorStatus, Group, VersionNotice
from trace_async.errors import WireError
from trace_async.transport import wire

MAX_OUTBOX = 1024
"""Messages that wait for one actor; leases are bounded by its capacity, so more means that it does not read."""
MAX_REPLIES = 256
"""Answers to strangers that wait, for all of them together; further ones are dropped, a stranger can ask again."""
MAX_FORMER = 16
"""Earlier processes of one id that are remembered, to tell them to stop."""

logger = logging.getLogger(__name__)


class ChannelHandler(Protocol):
    """What the learner does about messages; called on the loop, must not wait. Errors end the channel."""

    def on_hello(self, hello: wire.Hello) -> wire.Welcome:
        """An actor arrived or came back; leases of it that `hello` does not list are lost."""
        ...

    def on_group(self, actor_id: str, group: Group) -> wire.Ack:
        """A group arrived, perhaps again; it must be durable when this returns an Ack."""
        ...

    def on_heartbeat(self, status: ActorStatus) -> bool:
        """An actor lives; False when the learner has given it up, so that it must say hello again."""
        ...

    def on_confirm(self, actor_id: str, version: int, epoch: int) -> None:
        """An actor samples with this version."""
        ...

    def on_return(self, actor_id: str, lease_ids: tuple[str, ...], reason: str) -> None:
        """An actor gives leases back."""
        ...

    def on_bye(self, actor_id: str) -> None:
        """An actor left in order."""
        ...

    def on_gone(self, actor_id: str) -> None:
        """An actor is unreachable, silent, or does not read."""
        ...


@dataclass(slots=True, kw_only=True)
class Peer:
    """A welcomed actor."""

    actor_id: str
    route: bytes
    heard_s: float
    outbox: deque[wire.Frames] = field(default_factory=deque)
    notice_due: bool = False
    unreachable_s: float | None = None  # since when nothing could be sent to it
    former: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_FORMER))  # routes of older processes


class Peers:
    """`hear` what arrives; what to send stands in each peer's outbox, in `notice` and in `replies`."""

    def __init__(self, handler: ChannelHandler) -> None:
        self._handler = handler
        self.here: dict[str, Peer] = {}
        self.replies: deque[tuple[bytes, wire.Frames]] = deque()
        self.notice = wire.encode(wire.Notice(notice=None))
        self._stop: wire.Stop | None = None
        self.num_received = 0
        self.num_refused = 0

    def hear(self, route: bytes, frames: wire.Frames, now_s: float) -> None:
        """Take in what came from `route`; frames that do not follow the schema are refused and forgotten."""
        self.num_received += 1
        try:
            message = wire.decode_from_actor(frames)
            actor_id = wire.speaker(message)
            if not route.startswith(f"{actor_id}/".encode()):
                raise WireError(f"{type(message).__name__} in the name of {actor_id!r} came from {route[:40]!r}")
        except WireError as error:
            self._refuse(route, str(error), hello_again=False)
            return
        peer = self.here.get(actor_id)
        if peer and route in peer.former:
            self._stop_older(route, actor_id)
        elif isinstance(message, wire.Hello):
            self._on_hello(route, message, now_s)
        elif peer and route == peer.route:
            peer.heard_s = now_s
            self._on_message(peer, message)
        else:
            self._refuse(route, f"{actor_id} is not known here (any more)", hello_again=True)

    def queue(self, actor_id: str, message: wire.LearnerMessage) -> bool:
        """Put a message in an actor's outbox; False when the actor is not here (any more)."""
        peer = self.here.get(actor_id)
        if peer is None:
            return False
        if len(peer.outbox) >= MAX_OUTBOX:
            self.lose(peer, f"{MAX_OUTBOX} messages wait for it and it does not read")
            return False
        peer.outbox.append(wire.encode(message))
        return True

    def announce(self, notice: VersionNotice) -> None:
        """The newest notice is due to everybody."""
        self.notice = wire.encode(wire.Notice(notice=notice))
        for peer in self.here.values():
            peer.notice_due = True

    def stop(self, reason: str) -> None:
        """Every actor is told to leave, those who are here and whoever says hello later."""
        self._stop = wire.Stop(reason=reason)
        for actor_id in list(self.here):
            self.queue(actor_id, self._stop)

    def beat(self, now_s: float, *, call_after_s: float, dead_after_s: float) -> None:
        """Call upon actors silent for `call_after_s` (a dead one then shows as unreachable), give up on silent ones."""
        for peer in list(self.here.values()):
            silent_s = now_s - peer.heard_s
            if silent_s > dead_after_s:
                self.lose(peer, f"it is silent for {silent_s:.1f} s")
            elif silent_s > call_after_s:
                peer.notice_due = True

    def unreachable(self, peer: Peer, now_s: float, *, grace_s: float) -> None:
        """There is no connection to the actor: it has `grace_s` to dial anew, then it is gone."""
        peer.unreachable_s = now_s if peer.unreachable_s is None else peer.unreachable_s
        if now_s - peer.unreachable_s >= grace_s:
            self.lose(peer, "it is unreachable")

    def lose(self, peer: Peer, reason: str) -> None:
        """The actor is gone."""
        if self.here.get(peer.actor_id) is peer:
            logger.warning("actor %s is gone: %s", peer.actor_id, reason)
            del self.here[peer.actor_id]
            self._handler.on_gone(peer.actor_id)

    def _on_message(self, peer: Peer, message: wire.ActorMessage) -> None:
        match message:
            case wire.GroupMessage(group=group):
                self.queue(peer.actor_id, self._handler.on_group(peer.actor_id, group))
            case wire.Heartbeat(status=status):
                peer.notice_due = True
                if not self._handler.on_heartbeat(status):
                    self.lose(peer, "the learner has given it up")
                    self._refuse(peer.route, f"{peer.actor_id} was given up here", hello_again=True)
            case wire.Confirm(version=version, epoch=epoch):
                self._handler.on_confirm(peer.actor_id, version, epoch)
            case wire.Return(lease_ids=lease_ids, reason=reason):
                self._handler.on_return(peer.actor_id, lease_ids, reason)
            case wire.Bye():
                del self.here[peer.actor_id]
                self._reply(peer.route, wire.Farewell())
                self._handler.on_bye(peer.actor_id)

    def _on_hello(self, route: bytes, hello: wire.Hello, now_s: float) -> None:
        if route != wire.routing_id(hello.actor_id, hello.incarnation):
            self._refuse(route, f"Hello of {hello.actor_id}/{hello.incarnation} came from another", hello_again=False)
            return
        peer = Peer(actor_id=hello.actor_id, route=route, heard_s=now_s)
        if before := self.here.get(hello.actor_id):
            peer.former.extend(before.former)
            if before.route != route:
                peer.former.append(before.route)
                self._stop_older(before.route, hello.actor_id)
        self.here[hello.actor_id] = peer
        logger.info("actor %s of %s pid %d says hello", hello.actor_id, hello.host, hello.pid)
        peer.outbox.appendleft(wire.encode(self._handler.on_hello(hello)))  # before any lease the handler queued
        if self._stop is not None:  # it may have been away, or have lost its connection, when the others were told
            peer.outbox.append(wire.encode(self._stop))

    def _stop_older(self, route: bytes, actor_id: str) -> None:
        logger.warning("two processes go under the id %s; the older is told to stop", actor_id)
        self._reply(route, wire.Stop(reason=f"a newer process has taken the id {actor_id}"))

    def _refuse(self, route: bytes, reason: str, *, hello_again: bool) -> None:
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:  # the 1st, 2nd, 4th, 8th, ...: a flood must not fill the log
            logger.warning("refused frames from %r (%d so far): %s", route[:40], self.num_refused, reason)
        self._reply(route, wire.Refuse(reason=reason, hello_again=hello_again))

    def _reply(self, route: bytes, message: wire.LearnerMessage) -> None:
        if len(self.replies) < MAX_REPLIES:
            self.replies.append((route, wire.encode(message)))
