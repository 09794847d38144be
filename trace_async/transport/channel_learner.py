"""The learner's end of the road: one ROUTER socket that every actor dials, around the state in `peers.py`.

Owns the socket and the tasks around it. Invariants: one receive loop, which only receives; no actor can make another
wait, because every send is tried without waiting and what does not go stays in that actor's own bounded outbox; an
actor that cannot be reached is reported gone.

    receive  what actors say · woken by the network
    send     outboxes, notices, answers to strangers · woken by send, announce, receive, pulse
    pulse    silent actors, and another try for what did not go · woken by the clock
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

import zmq
import zmq.asyncio

from trace_async.core.types import VersionNotice
from trace_async.errors import ConfigError
from trace_async.transport import wire
from trace_async.transport.peers import ChannelHandler, Peer, Peers

__all__ = ["HIGH_WATER_MARK", "ChannelHandler", "LearnerChannel"]

HIGH_WATER_MARK = 64
"""Messages per actor and direction that ZeroMQ may hold."""
_MISSED_BEATS = 2  # heartbeats an actor may miss before it is called upon
_GRACE_BEATS = 2  # heartbeats an actor without a connection has to dial anew

logger = logging.getLogger(__name__)


class LearnerChannel:
    """The learner's road to all actors; `run` must be running for anything to move."""

    def __init__(
        self,
        bind_address: str,
        *,
        handler: ChannelHandler,
        former_address: str = "",
        heartbeat_s: float = 1.0,
        dead_after_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`heartbeat_s` is the actors' own; `dead_after_s` of silence is death.

        `bind_address` may have port 0: the port of `former_address`, which actors may still dial, or any free one.
        """
        self._bind_address = bind_address
        self._former_address = former_address
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._peers = Peers(handler)
        self._address = ""
        self._ready = asyncio.Event()
        self._outgoing = asyncio.Event()
        self._moved = asyncio.Event()  # set and replaced whenever actors may have come or gone

    @property
    def address(self) -> str:
        """What actors dial, with the real port; empty before `ready`."""
        return self._address

    @property
    def actors(self) -> tuple[str, ...]:
        """Ids of the welcomed actors."""
        return tuple(self._peers.here)

    async def ready(self) -> None:
        """Wait until the socket is bound."""
        await self._ready.wait()

    async def run(self) -> None:
        """Serve until cancelled. Raises ConfigError when the address cannot be bound; the handler's errors come out."""
        context = zmq.asyncio.Context()
        try:
            socket = self._bind(context)
            self._ready.set()
            async with asyncio.TaskGroup() as group:
                for work in (self._receive(socket), self._send(socket), self._pulse()):
                    group.create_task(work)
        finally:
            context.destroy(linger=0)

    def send(self, actor_id: str, message: wire.LearnerMessage) -> bool:
        """Queue a message; False when the actor is not here (any more)."""
        self._outgoing.set()
        return self._peers.queue(actor_id, message)

    def announce(self, notice: VersionNotice) -> None:
        """Tell every actor, now and with each heartbeat, until the next."""
        self._peers.announce(notice)
        self._outgoing.set()

    async def stop(self, reason: str, *, deadline_s: float) -> None:
        """Tell every actor to leave and wait until all have; those who have not by the deadline are logged.

        An actor that says hello from now on is told too.
        """
        self._peers.stop(reason)
        self._outgoing.set()
        try:
            async with asyncio.timeout(deadline_s):
                while self._peers.here:
                    await self._moved.wait()
        except TimeoutError:
            logger.warning("actors %s did not leave within %.1f s", sorted(self.actors), deadline_s)

    def gauges(self) -> Mapping[str, float]:
        """Depth of every queue, and counts since the start."""
        depths = [len(peer.outbox) for peer in self._peers.here.values()]
        return {
            "channel/actors": len(depths),
            "channel/outbox_messages": sum(depths),
            "channel/outbox_max_messages": max(depths, default=0),
            "channel/replies": len(self._peers.replies),
            "channel/received_messages": self._peers.num_received,
            "channel/refused_messages": self._peers.num_refused,
        }

    def _bind(self, context: zmq.asyncio.Context) -> zmq.asyncio.Socket:
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # an absent actor is an error, not silence
        socket.set(zmq.ROUTER_HANDOVER, 1)  # a process that dials anew takes its id over from its dead connection
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        if not self._bind_again(socket):
            try:
                socket.bind(self._bind_address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"cannot listen at {self._bind_address!r}: {error}; choose another coordinator.address"
                ) from error
        self._address = str(socket.get_string(zmq.LAST_ENDPOINT))
        return socket

    def _bind_again(self, socket: zmq.asyncio.Socket) -> bool:
        """Port 0 is the port of the former address when there was one and it is free."""
        place, _, port = self._bind_address.rpartition(":")
        former_port = self._former_address.rpartition(":")[2]
        if port != "0" or not former_port.isdecimal():
            return False
        try:
            socket.bind(f"{place}:{former_port}")
        except zmq.ZMQError as error:
            logger.warning(
                "cannot listen at %s again: %s; actors that were started by hand do not find the new port, start them "
                "again or give coordinator.address a port of its own",
                *(self._former_address, error),
            )
            return False
        return True

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            route, *frames = await socket.recv_multipart()
            self._peers.hear(route, frames, self._clock())
            self._outgoing.set()
            self._moved_on()
            await asyncio.sleep(0)  # a receive that finds a message does not yield; a flood must not starve the loop

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            while self._peers.replies:
                route, frames = self._peers.replies.popleft()
                await _try_send(socket, route, frames)
            for peer in list(self._peers.here.values()):
                await self._send_to(socket, peer)

    async def _send_to(self, socket: zmq.asyncio.Socket, peer: Peer) -> None:
        """Send until nothing is due or the actor's pipe is full; then its next message or the pulse tries again."""
        sent: bool | None = True
        while sent and peer.outbox:
            if sent := await _try_send(socket, peer.route, peer.outbox[0]):
                peer.outbox.popleft()
        if sent and peer.notice_due:
            sent = await _try_send(socket, peer.route, self._peers.notice)
            peer.notice_due = not sent
        if sent is None:
            self._peers.unreachable(peer, self._clock(), grace_s=_GRACE_BEATS * self._heartbeat_s)
            self._moved_on()
        elif sent:
            peer.unreachable_s = None

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            call_after_s = _MISSED_BEATS * self._heartbeat_s
            self._peers.beat(self._clock(), call_after_s=call_after_s, dead_after_s=self._dead_after_s)
            self._outgoing.set()
            self._moved_on()

    def _moved_on(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()


async def _try_send(socket: zmq.asyncio.Socket, route: bytes, frames: wire.Frames) -> bool | None:
    """True when ZeroMQ took the message, False when the peer's pipe is full, None when there is no such peer."""
    try:
        await socket.send_multipart([route, *frames], flags=zmq.DONTWAIT)
    except zmq.Again:
        return False
    except zmq.ZMQError as error:
        if error.errno != zmq.EHOSTUNREACH:
            raise
        return None
    return True
