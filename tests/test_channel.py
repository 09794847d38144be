"""Both ends of the road over real sockets: what must arrive does, once, whatever is lost on the way."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.builders import make_lease
from tests.channel_kit import (
    DEADLINE_S,
    HEARTBEAT_S,
    WELCOME,
    Recorder,
    Run,
    a_group,
    hear_actor,
    hear_learner,
    hello,
    learner_with,
    make_actor,
    on_both_loops,
    raw_actor,
    raw_learner,
    running,
    say,
)
from trace_async.core.types import Group, VersionNotice
from trace_async.errors import ConfigError, InvariantError, WireError
from trace_async.ledger import Ledger
from trace_async.transport import wire
from trace_async.transport.channel import ActorChannel
from trace_async.transport.channel_learner import LearnerChannel

NOTICE = VersionNotice(version=1, epoch=1, manifest_digest="d", directory="/v", address="")


@on_both_loops
def test_a_lease_goes_out_and_its_group_comes_back_acknowledged(run: Run) -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner:
            actor = make_actor(learner.address)
            async with running(actor):
                assert (await actor.welcome()).run_name == "test"
                assert learner.send("actor-0", wire.LeaseMessage(lease=make_lease()))
                assert await actor.next_lease() == make_lease()
                assert await actor.ship(a_group()) == wire.Ack(group_id="lease-0", accepted=True)
                actor.return_leases(["lease-1"], "too hard")
                await handler.until("return", "actor-0", ("lease-1",), "too hard")
                learner.announce(NOTICE)
                assert await actor.wait_newer(0, 1) == NOTICE
                actor.confirm(1, 1)
                await handler.until("confirm", "actor-0", 1, 1)
                assert await actor.say_bye()
                assert learner.actors == ()
        assert handler.count("group") == 1
        assert handler.count("gone") == 0

    run(story())


@on_both_loops
def test_a_group_whose_acknowledgement_is_lost_is_sent_again_until_one_arrives(run: Run) -> None:
    async def story() -> None:
        async with raw_learner() as (learner, address):
            actor = make_actor(address)
            async with running(actor):
                route, _ = await hear_actor(learner, wire.Hello)
                await say(learner, WELCOME, route)
                shipped = asyncio.create_task(actor.ship(a_group()))
                for _ in range(3):
                    _, message = await hear_actor(learner, wire.GroupMessage)
                    assert message.group.group_id == "lease-0"
                    assert not shipped.done()
                    await say(learner, wire.Notice(notice=None), route)  # alive, only the ack is lost
                await say(learner, wire.Ack(group_id="lease-0", accepted=True), route)
                assert (await shipped).accepted
                assert actor.gauges()["channel/resent_groups"] >= 2

    run(story())


def test_a_group_that_arrives_twice_is_delivered_once_and_acknowledged_twice(tmp_path: Path) -> None:
    class Shelf(Recorder):
        def on_group(self, actor_id: str, group: Group) -> wire.Ack:
            new = ledger.receive(group.group_id, wire.encode_group(group))
            super().on_group(actor_id, group)
            return wire.Ack(group_id=group.group_id, accepted=new, reason="" if new else "duplicate")

    async def story() -> None:
        async with learner_with(Shelf()) as learner, raw_actor(learner.address, "actor-0") as actor:
            await say(actor, hello())
            assert isinstance(await hear_learner(actor), wire.Welcome)
            for accepted in (True, False):
                await say(actor, wire.GroupMessage(group=a_group()))
                answer = await hear_learner(actor)
                assert isinstance(answer, wire.Ack)
                assert answer.accepted is accepted

    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.issue(make_lease())
        asyncio.run(story())
        assert [group_id for group_id, _ in ledger.shelved()] == ["lease-0"]


@on_both_loops
def test_a_learner_that_comes_back_on_its_port_gets_what_the_old_one_never_acknowledged(run: Run) -> None:
    async def until_it_has_two_groups(learner: zmq.asyncio.Socket, actor: ActorChannel) -> list[asyncio.Task[wire.Ack]]:
        route, _ = await hear_actor(learner, wire.Hello)
        await say(learner, WELCOME, route)
        await say(learner, wire.LeaseMessage(lease=make_lease(lease_id="waiting")), route)
        actor.confirm(5, 1)
        shipped = [asyncio.create_task(actor.ship(a_group(name))) for name in ("g1", "g2")]
        await hear_actor(learner, wire.GroupMessage)
        await hear_actor(learner, wire.GroupMessage)
        return shipped

    async def story() -> None:
        async with AsyncExitStack() as stack:
            async with raw_learner() as (old, address):
                actor = make_actor(address)
                await stack.enter_async_context(running(actor))
                shipped = await until_it_has_two_groups(old, actor)
            handler = Recorder(epoch=2)
            await stack.enter_async_context(learner_with(handler, address))
            assert all([(await task).accepted for task in shipped])
            await handler.until("confirm", "actor-0", 5, 1)
            assert (await actor.welcome()).epoch == 2
            assert handler.facts[0] == ("hello", "actor-0", ("waiting", "g1", "g2"), 1)
            assert handler.count("group") == 2
            assert (await actor.next_lease()).lease_id == "waiting"

    run(story())


@on_both_loops
def test_an_actor_waits_for_a_learner_that_is_not_there_yet(run: Run) -> None:
    async def story() -> None:
        async with raw_learner() as (_, address):
            pass
        actor, handler = make_actor(address, dead_after_s=0.1), Recorder()
        async with running(actor):
            shipped = asyncio.create_task(actor.ship(a_group()))
            await asyncio.sleep(0.25)  # beyond dead_after_s: the actor has dialled anew meanwhile
            async with learner_with(handler, address):
                assert (await shipped).accepted
        assert actor.gauges()["channel/connections"] >= 2

    run(story())


def test_a_silent_learner_is_dialled_anew() -> None:
    async def story() -> None:
        async with raw_learner() as (learner, address), running(make_actor(address, dead_after_s=0.1)):
            await hear_actor(learner, wire.Hello)
            await hear_actor(learner, wire.Hello)

    asyncio.run(story())


def test_an_actor_the_learner_does_not_know_is_asked_to_say_hello_again() -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner, raw_actor(learner.address, "actor-0") as actor:
            await say(actor, wire.GroupMessage(group=a_group()))
            answer = await hear_learner(actor)
            assert isinstance(answer, wire.Refuse)
            assert answer.hello_again
        assert handler.count("group") == 0

    asyncio.run(story())


def test_an_actor_that_the_handler_has_given_up_says_hello_again_and_is_served() -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner:
            actor = make_actor(learner.address)
            async with running(actor):
                await handler.until("heartbeat", "actor-0")
                handler.facts.clear()
                handler.given_up.add("actor-0")
                await handler.until("gone", "actor-0")
                await handler.until("hello", "actor-0")
                assert learner.send("actor-0", wire.LeaseMessage(lease=make_lease()))
                assert await actor.next_lease() == make_lease()
                assert actor.gauges()["channel/connections"] == 1

    asyncio.run(story())


def test_an_actor_of_another_schema_ends_with_the_reason() -> None:
    async def story() -> None:
        async with raw_learner() as (learner, address):
            actor = asyncio.create_task(make_actor(address).run())
            route, _ = await hear_actor(learner, wire.Hello)
            await say(learner, wire.Refuse(reason="schema 1, this end speaks 2", hello_again=False), route)
            with pytest.raises(ExceptionGroup) as caught:
                await actor
            assert caught.group_contains(WireError, match="this end speaks 2")

    asyncio.run(story())


def test_stop_reaches_every_actor_and_waits_until_all_have_left() -> None:
    async def story() -> None:
        handler = Recorder()
        async with learner_with(handler) as learner:
            actors = [make_actor(learner.address, f"actor-{number}") for number in range(2)]
            async with running(*actors):
                for actor in actors:
                    await actor.welcome()

                async def leave(actor: Any) -> None:
                    await actor.stopped.wait()
                    assert await actor.say_bye()

                async with asyncio.TaskGroup() as group:
                    for actor in actors:
                        group.create_task(leave(actor))
                    await learner.stop("done", deadline_s=DEADLINE_S)
                assert learner.actors == ()
        assert handler.count("bye") == 2

    asyncio.run(story())


def test_stop_does_not_wait_for_ever_for_an_actor_that_stays() -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as learner:
            actor = make_actor(learner.address)
            async with running(actor):
                await actor.welcome()
                await learner.stop("done", deadline_s=2 * HEARTBEAT_S)
                assert learner.actors == ("actor-0",)

    asyncio.run(story())


def test_an_actor_that_says_hello_after_the_stop_is_told_too() -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as learner:
            await learner.stop("60 steps done", deadline_s=0.0)
            late = make_actor(learner.address)
            async with running(late):
                async with asyncio.timeout(DEADLINE_S):
                    await late.stopped.wait()
                assert late.stop_reason == "60 steps done"
                assert await late.say_bye()
            assert learner.actors == ()

    asyncio.run(story())


def test_a_learner_that_starts_again_on_port_0_listens_where_it_did_and_its_actors_find_it() -> None:
    async def story() -> None:
        before, after = Recorder(), Recorder(epoch=2)
        async with AsyncExitStack() as stack:
            async with learner_with(before) as learner:
                address = learner.address
                actor = make_actor(address)
                await stack.enter_async_context(running(actor))
                await before.until("hello", "actor-0")
            async with learner_with(after, former=address) as learner:
                assert learner.address == address
                await after.until("hello", "actor-0")

    asyncio.run(story())


def test_a_former_port_that_another_has_taken_is_given_up_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as other, learner_with(Recorder(), former=other.address) as learner:
            assert learner.address != other.address
            assert f"cannot listen at {other.address} again" in caplog.text
            async with running(actor := make_actor(learner.address)):
                await actor.welcome()

    asyncio.run(story())


def test_a_former_address_does_not_count_when_the_port_is_a_fixed_one(tmp_path: Path) -> None:
    async def story() -> None:
        address = f"ipc://{tmp_path}/road"
        async with learner_with(Recorder(), address, former="tcp://127.0.0.1:1") as learner:
            assert learner.address == address

    asyncio.run(story())


def test_an_address_that_cannot_be_used_is_the_callers_mistake() -> None:
    async def story() -> None:
        async with learner_with(Recorder()) as learner:
            with pytest.raises(ConfigError, match=r"cannot listen.*in use.*coordinator\.address"):
                await LearnerChannel(learner.address, handler=Recorder()).run()
        with pytest.raises(ConfigError, match="cannot dial 'nonsense'"):
            await make_actor("nonsense").run()

    asyncio.run(story())


def test_a_group_is_shipped_once_at_a_time_and_a_cancelled_one_is_given_up() -> None:
    async def story() -> None:
        async with raw_learner() as (_, address):
            actor = make_actor(address)
            shipped = asyncio.create_task(actor.ship(a_group()))
            await asyncio.sleep(0)
            with pytest.raises(InvariantError, match="lease-0 is being shipped already"):
                await actor.ship(a_group())
            shipped.cancel()
            await asyncio.gather(shipped, return_exceptions=True)
            assert actor.gauges()["channel/unacked_groups"] == 0

    asyncio.run(story())
