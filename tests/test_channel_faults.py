"""Bad company on real sockets: hostile, dead, silent, deaf and doubled actors harm only themselves."""

from __future__ import annotations

import asyncio
import os
import sys

import zmq
import zmq.asyncio

from tests.builders import make_lease
from tests.channel_kit import (
    DEADLINE_S,
    Recorder,
    Run,
    a_group,
    hear_learner,
    hello,
    learner_with,
    make_actor,
    on_both_loops,
    raw_actor,
    raw_socket,
    running,
    say,
    status,
)
from trace_async.transport import wire
from trace_async.transport.peers import MAX_OUTBOX


@on_both_loops
def test_a_hostile_peer_is_refused_and_the_others_keep_working(run: Run) -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner:
            actor = make_actor(learner.address)
            async with running(actor), raw_actor(learner.address, "mallory") as mallory:
                await actor.welcome()
                for frames in ([b"garbage"], [b"hello", b"{}"], [b"group", b"NaN", b"\0" * 1000], [b"", b"", b""]):
                    await mallory.send_multipart(frames)
                    answer = await hear_learner(mallory)
                    assert isinstance(answer, wire.Refuse)
                    assert not answer.hello_again
                await say(mallory, wire.Heartbeat(status=status("actor-0")))
                answer = await hear_learner(mallory)
                assert isinstance(answer, wire.Refuse)
                assert "'actor-0' came from" in answer.reason
                await mallory.send(bytes(wire.MAX_FRAME_BYTES + 1))  # ZeroMQ hangs up on it
                for number in range(1000):
                    await mallory.send_multipart([b"flood", str(number).encode()])
                assert (await actor.ship(a_group())).accepted
                assert learner.actors == ("actor-0",)
                assert learner.gauges()["channel/refused_messages"] >= 5
        assert handler.count("group") == 1

    run(story())


def test_bytes_that_are_not_even_zeromq_are_ignored() -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as learner:
            host, port = learner.address.removeprefix("tcp://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(os.urandom(4096))
            actor = make_actor(learner.address)
            async with running(actor):
                assert (await actor.ship(a_group())).accepted
            writer.close()

    asyncio.run(story())


def test_a_message_to_an_actor_that_is_not_here_is_reported() -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as learner:
            assert not learner.send("nobody", wire.LeaseMessage(lease=make_lease()))

    asyncio.run(story())


@on_both_loops
def test_an_actor_that_vanishes_is_gone_long_before_silence_alone_would_tell(run: Run) -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler, dead_after_s=60.0) as learner:
            async with raw_actor(learner.address, "actor-0") as actor:
                await say(actor, hello())
                await hear_learner(actor)
            await handler.until("gone", "actor-0")
            assert learner.actors == ()

    run(story())


def test_an_actor_that_is_connected_and_silent_is_gone_after_the_deadline() -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler, dead_after_s=0.2) as learner, raw_actor(learner.address, "actor-0") as actor:
            await say(actor, hello())
            await hear_learner(actor)
            await handler.until("gone", "actor-0")
            assert handler.count("gone") == 1

    asyncio.run(story())


def test_an_actor_that_does_not_read_is_gone_and_holds_nobody_up() -> None:
    async def story() -> None:
        handler = Recorder()
        big = wire.Release(lease_ids=("x" * 900_000,), reason="")
        async with learner_with(handler, dead_after_s=60.0) as learner:
            quick = make_actor(learner.address, "quick")
            async with running(quick), raw_socket(zmq.DEALER, ROUTING_ID=b"slow/", RCVHWM=1) as slow:
                slow.connect(learner.address)
                await say(slow, hello("slow"))
                await handler.until("hello", "slow")
                await quick.welcome()
                for _ in range(40):
                    assert learner.send("slow", big)
                assert (await quick.ship(a_group(actor_id="quick"))).accepted
                small = wire.Release(lease_ids=(), reason="")
                while learner.send("slow", small):
                    assert learner.gauges()["channel/outbox_max_messages"] <= MAX_OUTBOX
                assert handler.facts[-1] == ("gone", "slow")

    asyncio.run(story())


ACTOR_PROCESS = """
import asyncio, sys
from tests.builders import chain_group
from tests.channel_kit import make_actor, running

async def main():
    actor = make_actor(sys.argv[1])
    async with running(actor):
        await actor.ship(chain_group())
        await asyncio.Event().wait()

asyncio.run(main())
"""


@on_both_loops
def test_kill_minus_nine_of_an_actor_process_is_noticed(run: Run) -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler, dead_after_s=60.0) as learner:
            process = await asyncio.create_subprocess_exec(sys.executable, "-c", ACTOR_PROCESS, learner.address)
            await handler.until("group", "actor-0", "lease-0")
            process.kill()
            await process.wait()
            await handler.until("gone", "actor-0")
        assert handler.count("bye") == 0

    run(story())


@on_both_loops
def test_the_newer_of_two_processes_with_one_id_takes_over_and_the_older_is_told_to_stop(run: Run) -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner:
            older, newer = make_actor(learner.address), make_actor(learner.address)
            async with running(older):
                await older.welcome()
                async with running(newer):
                    await newer.welcome()
                    async with asyncio.timeout(DEADLINE_S):
                        await older.stopped.wait()
                    assert "newer process" in older.stop_reason
                    assert (await newer.ship(a_group())).accepted
                    assert not newer.stopped.is_set()
        assert handler.count("gone") == 0

    run(story())
