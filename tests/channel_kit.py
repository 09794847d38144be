"""Both ends of the road for tests over real loopback sockets: a handler that records, raw peers, quick pulses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

import pytest
import uvloop
import zmq
import zmq.asyncio

from tests.builders import chain_group
from trace_async.core.types import ActorStatus, Group
from trace_async.transport import wire
from trace_async.transport.channel import ActorChannel
from trace_async.transport.channel_learner import LearnerChannel

HEARTBEAT_S = 0.05
DEAD_AFTER_S = 0.5
RESEND_S = 0.15
DEADLINE_S = 10.0
"""Of every wait; only a broken test reaches it."""

Fact: TypeAlias = tuple[Any, ...]
Run: TypeAlias = Callable[[Coroutine[Any, Any, None]], None]
on_both_loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


class Recorder:
    """A handler that accepts everything and remembers it as facts like ("group", actor_id, group_id)."""

    def __init__(self, epoch: int = 1) -> None:
        self.epoch = epoch
        self.facts: list[Fact] = []
        self.given_up: set[str] = set()  # until they say hello again
        self._more = asyncio.Event()

    def note(self, *fact: Any) -> None:
        self.facts.append(fact)
        self._more.set()

    async def until(self, *start: Any) -> Fact:
        """The first fact that begins like this; waits for it."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                for fact in self.facts:
                    if fact[: len(start)] == start:
                        return fact
                self._more.clear()
                await self._more.wait()

    def count(self, *start: Any) -> int:
        return sum(fact[: len(start)] == start for fact in self.facts)

    def on_hello(self, hello: wire.Hello) -> wire.Welcome:
        self.given_up.discard(hello.actor_id)
        self.note("hello", hello.actor_id, hello.live_leases, hello.pid)
        return wire.Welcome(epoch=self.epoch, run_name="test", config={}, notice=None)

    def on_group(self, actor_id: str, group: Group) -> wire.Ack:
        self.note("group", actor_id, group.group_id)
        return wire.Ack(group_id=group.group_id, accepted=True)

    def on_heartbeat(self, status: ActorStatus) -> bool:
        self.note("heartbeat", status.actor_id)
        return status.actor_id not in self.given_up

    def on_confirm(self, actor_id: str, version: int, epoch: int) -> None:
        self.note("confirm", actor_id, version, epoch)

    def on_return(self, actor_id: str, lease_ids: tuple[str, ...], reason: str) -> None:
        self.note("return", actor_id, lease_ids, reason)

    def on_bye(self, actor_id: str) -> None:
        self.note("bye", actor_id)

    def on_gone(self, actor_id: str) -> None:
        self.note("gone", actor_id)


def a_group(lease_id: str = "lease-0", actor_id: str = "actor-0") -> Group:
    return replace(chain_group(lease_id=lease_id), actor_id=actor_id)


def hello(actor_id: str = "actor-0", *, pid: int = 1, live: tuple[str, ...] = ()) -> wire.Hello:
    return wire.Hello(actor_id=actor_id, host="here", pid=pid, capacity_roots=8, live_leases=live)


def status(actor_id: str = "actor-0") -> ActorStatus:
    return ActorStatus(actor_id=actor_id, host="here", pid=1, version=-1, live_roots=0, counters={}, trees=())


def make_actor(address: str, actor_id: str = "actor-0", **options: Any) -> ActorChannel:
    pulses = {"heartbeat_s": HEARTBEAT_S, "dead_after_s": DEAD_AFTER_S, "resend_s": RESEND_S}
    return ActorChannel(address, hello=lambda: hello(actor_id), status=lambda: status(actor_id), **(pulses | options))


@asynccontextmanager
async def running(*channels: ActorChannel | LearnerChannel) -> AsyncIterator[None]:
    """The channels run inside; afterwards no task is left."""
    async with asyncio.timeout(2 * DEADLINE_S):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(channel.run()) for channel in channels]
            yield
            for task in tasks:
                task.cancel()


@asynccontextmanager
async def learner_with(
    handler: Recorder, address: str = "tcp://127.0.0.1:0", *, dead_after_s: float = DEAD_AFTER_S, former: str = ""
) -> AsyncIterator[LearnerChannel]:
    """A running, bound learner; `former`: where it listened before."""
    learner = LearnerChannel(
        address, handler=handler, former_address=former, heartbeat_s=HEARTBEAT_S, dead_after_s=dead_after_s
    )
    async with running(learner):
        await learner.ready()
        yield learner


@asynccontextmanager
async def raw_socket(kind: int, **options: Any) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare socket that says exactly what a test wants."""
    context = zmq.asyncio.Context()
    try:
        socket = context.socket(kind)
        for name, value in options.items():
            socket.set(getattr(zmq, name), value)
        yield socket
    finally:
        context.destroy(linger=0)


@asynccontextmanager
async def raw_actor(address: str, actor_id: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A bare DEALER that dials the learner under an actor's id."""
    async with raw_socket(zmq.DEALER, ROUTING_ID=wire.routing_id(actor_id, "")) as socket:
        socket.connect(address)
        yield socket


@asynccontextmanager
async def raw_learner(address: str = "tcp://127.0.0.1:0") -> AsyncIterator[tuple[zmq.asyncio.Socket, str]]:
    """A bare ROUTER and its address."""
    async with raw_socket(zmq.ROUTER, ROUTER_MANDATORY=1, ROUTER_HANDOVER=1) as socket:
        socket.bind(address)
        yield socket, str(socket.get_string(zmq.LAST_ENDPOINT))


async def say(socket: zmq.asyncio.Socket, message: wire.ActorMessage | wire.LearnerMessage, *route: bytes) -> None:
    await socket.send_multipart([*route, *wire.encode(message)])


async def hear_learner(socket: zmq.asyncio.Socket) -> wire.LearnerMessage:
    """What a raw actor hears next."""
    async with asyncio.timeout(DEADLINE_S):
        return wire.decode_from_learner(await socket.recv_multipart())


async def hear_actor(socket: zmq.asyncio.Socket, *kinds: type[wire.ActorMessage]) -> tuple[bytes, Any]:
    """What a raw learner hears next of these kinds, and from where; other kinds are passed over."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            route, *frames = await socket.recv_multipart()
            message = wire.decode_from_actor(frames)
            if isinstance(message, kinds):
                return route, message


WELCOME = wire.Welcome(epoch=1, run_name="test", config={}, notice=None)
