"""The actor's end of the road: one DEALER socket that dials the learner, around the state in `road.py`.

Owns the socket and the tasks around it. Invariants: one receive loop, which only receives; a group passed to `ship`
is delivered over any number of connections and learner restarts. Never polls for the network: a lost connection is
reported by the socket's monitor, a silent learner by its missing answers to heartbeats.

    run      one connection after the other · woken by the loss of the last
    receive  what the learner says · woken by the network
    send     what is due · woken by ship, confirm, return_leases, say_bye, receive, pulse
    pulse    heartbeats and overdue groups · woken by the clock
    watch    a connection that broke · woken by the socket's monitor
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import zmq
import zmq.asyncio

from trace_async.core.types import ActorStatus, Group, Lease, VersionNotice
from trace_async.errors import ConfigError
from trace_async.transport import wire
from trace_async.transport.road import ActorRoad

HIGH_WATER_MARK = 64
"""Messages per direction that ZeroMQ may hold; beyond it `send` waits and the outbox gauge shows it."""
MAX_UNACKED = 256
"""Groups under way at a time; further callers of `ship` wait for room."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # between connections on which no welcome came

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Connection:
    """What holds for one socket only."""

    socket: zmq.asyncio.Socket
    lost: asyncio.Future[str]  # why it is over
    heard_at: float

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)


class ActorChannel:
    """One actor's road to its learner; `run` must be running for anything to move."""

    def __init__(
        self,
        address: str,
        *,
        hello: Callable[[], wire.Hello],
        status: Callable[[], ActorStatus],
        heartbeat_s: float = 1.0,
        dead_after_s: float = 10.0,
        resend_s: float = 5.0,
        on_release: Callable[[tuple[str, ...], str], None] = lambda lease_ids, reason: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`hello` and `status` are asked anew each time; `on_release` gets ids and reason, on the loop.

        A learner silent for `dead_after_s` is dialled anew; a group unacknowledged for `resend_s` is sent again.
        """
        self._address = address
        self._heartbeat_s = heartbeat_s
        self._dead_after_s = dead_after_s
        self._clock = clock
        self._road = ActorRoad(
            hello=hello, status=status, on_release=on_release, incarnation=secrets.token_hex(8), resend_s=resend_s
        )
        self._num_connections = 0
        self._room = asyncio.Semaphore(MAX_UNACKED)
        self._outgoing = asyncio.Event()
        self._heard = asyncio.Event()  # set and replaced at every message
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        """Dial, serve, dial again, until cancelled.

        Raises ConfigError for an address that is none, and a group of WireError when the two ends do not speak the same
        schema.
        """
        pause_s = 0.0
        context = zmq.asyncio.Context()
        try:
            while True:
                await asyncio.sleep(pause_s)
                welcomed = await self._serve(context)
                pause_s = 0.0 if welcomed else min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
        finally:
            context.destroy(linger=0)

    async def welcome(self) -> wire.Welcome:
        """The learner's newest Welcome; waits for the first."""
        return await self._until(lambda: self._road.welcome)

    async def next_lease(self) -> Lease:
        """The oldest lease that nobody took yet; the caller's own from here on."""
        lease_id = await self._until(lambda: next(iter(self._road.leases), None))
        return self._road.leases.pop(lease_id)

    async def wait_newer(self, version: int, epoch: int) -> VersionNotice:
        """The newest notice, as soon as it is newer than this version of this epoch."""

        def newer() -> VersionNotice | None:
            notice = self._road.notice
            return notice if notice and (notice.epoch, notice.version) > (epoch, version) else None

        return await self._until(newer)

    async def ship(self, group: Group) -> wire.Ack:
        """Deliver a group: sent again until acknowledged; waits first while MAX_UNACKED others are under way.

        Cancelling gives the delivery up. Raises WireError when the group does not fit the schema.
        """
        async with self._room:
            acked: asyncio.Future[wire.Ack] = asyncio.get_running_loop().create_future()
            self._road.put_group(group, lambda ack: None if acked.done() else acked.set_result(ack))
            self._outgoing.set()
            try:
                return await acked
            except asyncio.CancelledError:
                self._road.parcels.pop(group.group_id, None)
                raise

    def confirm(self, version: int, epoch: int) -> None:
        """Tell that the engine samples with this version; said again on every connection."""
        self._road.confirm(version, epoch)
        self._outgoing.set()

    def return_leases(self, lease_ids: Sequence[str], reason: str) -> None:
        """Give leases back unfinished; the `hello` of the constructor must no longer list them."""
        self._road.return_leases(lease_ids, reason)
        self._outgoing.set()

    async def say_bye(self, *, deadline_s: float = 2.0) -> bool:
        """Take leave; True when the learner heard it within the deadline."""
        self._road.say_bye()
        self._outgoing.set()
        try:
            async with asyncio.timeout(deadline_s):
                await self._until(lambda: self._road.farewell or None)
        except TimeoutError:
            return False
        return True

    @property
    def stop_reason(self) -> str:
        """Why the learner said stop; empty while it has not."""
        return self._road.stop_reason or ""

    def gauges(self) -> Mapping[str, float]:
        """Depth of every queue, and what had to be repeated so far."""
        parcels = self._road.parcels.values()
        return {
            "channel/waiting_leases": len(self._road.leases),
            "channel/unacked_groups": len(parcels),
            "channel/unacked_bytes": sum(sum(map(len, parcel.frames)) for parcel in parcels),
            "channel/connections": self._num_connections,
            "channel/resent_groups": self._road.num_resent,
        }

    async def _serve(self, context: zmq.asyncio.Context) -> bool:
        """One connection from Hello to its loss; whether it was welcome at the end."""
        socket = context.socket(zmq.DEALER)
        try:
            broken = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            self._dial(socket)
            lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            connection = _Connection(socket=socket, lost=lost, heard_at=self._clock())
            self._num_connections += 1
            self._road.connect()
            self._outgoing.set()
            async with asyncio.TaskGroup() as group:
                works = (self._receive, self._send, self._pulse)
                tasks = [group.create_task(work(connection)) for work in works]
                tasks.append(group.create_task(_watch(connection, broken)))
                reason = await lost
                for task in tasks:
                    task.cancel()
            logger.warning("lost the learner at %s: %s; dialling again", self._address, reason)
            return self._road.welcomed
        finally:
            self._road.disconnect()
            socket.disable_monitor()
            socket.close(linger=0)

    def _dial(self, socket: zmq.asyncio.Socket) -> None:
        socket.set(zmq.ROUTING_ID, self._road.route)
        socket.set(zmq.IMMEDIATE, 1)  # queue nothing for a connection that does not stand
        socket.set(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.set(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.set(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        try:
            socket.connect(self._address)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot dial {self._address!r}: {error}; an address is tcp://HOST:PORT") from error

    async def _receive(self, connection: _Connection) -> None:
        while True:
            message = wire.decode_from_learner(await connection.socket.recv_multipart())
            connection.heard_at = self._clock()
            self._road.hear(message)
            if isinstance(message, wire.Welcome):
                logger.info("welcome to run %s, epoch %d, at %s", message.run_name, message.epoch, self._address)
            if self._road.stop_reason is not None:
                self.stopped.set()
            self._outgoing.set()
            self._heard.set()
            self._heard = asyncio.Event()

    async def _send(self, connection: _Connection) -> None:
        while True:
            await self._outgoing.wait()
            self._outgoing.clear()
            for frames in self._road.due(self._clock):
                await connection.socket.send_multipart(frames)

    async def _pulse(self, connection: _Connection) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            now_s = self._clock()
            if now_s - connection.heard_at > self._dead_after_s:
                connection.lose(f"silent for {now_s - connection.heard_at:.1f} s")
            self._road.tick(now_s)
            self._outgoing.set()

    async def _until(self, ready: Callable[[], T | None]) -> T:
        """Wait for what `receive` brings; `ready` is asked again after each message."""
        while (value := ready()) is None:
            await self._heard.wait()
        return value


async def _watch(connection: _Connection, broken: zmq.asyncio.Socket) -> None:
    await broken.recv_multipart()  # the one event this monitor is made for
    connection.lose("the connection broke")
