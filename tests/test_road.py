"""Both ends of the road without sockets: whatever a network and restarts do, each group is acknowledged, once."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import make_lease
from tests.channel_kit import RESEND_S, WELCOME, Recorder, a_group, hello, status
from trace_async.core.types import VersionNotice
from trace_async.errors import WireError
from trace_async.transport import wire
from trace_async.transport.peers import MAX_OUTBOX, MAX_REPLIES, Peers
from trace_async.transport.road import MAX_WAITING_LEASES, ActorRoad

GROUP = a_group()
HELLO_1 = wire.encode(replace(hello(), incarnation="1"))
HELLO_2 = wire.encode(replace(hello(), incarnation="2"))


def hear(peers: Peers, message: wire.ActorMessage, now_s: float = 0.0) -> None:
    peers.hear(b"actor-0/1", wire.encode(message), now_s)


def said(frames: wire.Frames) -> str:
    return frames[0].decode()


def make_road(incarnation: str = "1") -> ActorRoad:
    return ActorRoad(
        hello=hello, status=status, on_release=lambda ids, reason: None, incarnation=incarnation, resend_s=RESEND_S
    )


def notice(version: int, epoch: int) -> wire.Notice:
    return wire.Notice(
        notice=VersionNotice(version=version, epoch=epoch, manifest_digest="d", directory="/v", address="")
    )


class Network:
    """One actor's road and the learner's peers with a wire between them that loses what a test tells it to lose."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.road = make_road()
        self.handler = Recorder()
        self.peers = Peers(self.handler)
        self.up: deque[wire.Frames] = deque()
        self.down: deque[wire.Frames] = deque()
        self.acks: dict[str, int] = {}
        self.road.connect()

    def ship(self) -> None:
        name = f"g{len(self.acks)}"
        self.acks[name] = 0
        self.road.put_group(replace(GROUP, group_id=name, lease_id=name), self.on_ack)

    def on_ack(self, ack: wire.Ack) -> None:
        self.acks[ack.group_id] += 1

    def lease(self) -> None:
        self.peers.queue("actor-0", wire.LeaseMessage(lease=make_lease(lease_id=f"lease-{self.now_s}")))

    def send(self) -> None:
        self.up.extend(self.road.due(lambda: self.now_s))

    def arrive_up(self) -> None:
        if self.up:
            self.peers.hear(self.road.route, self.up.popleft(), self.now_s)
        self.down.extend(frames for _, frames in self.peers.replies)
        self.peers.replies.clear()
        for peer in self.peers.here.values():
            self.down.extend(peer.outbox)
            self.down.extend([self.peers.notice] * peer.notice_due)
            peer.outbox.clear()
            peer.notice_due = False

    def arrive_down(self) -> None:
        if self.down:
            self.road.hear(wire.decode_from_learner(self.down.popleft()))

    def tick(self) -> None:
        self.now_s += 2 * RESEND_S
        self.road.tick(self.now_s)

    def lose(self) -> None:
        """One message vanishes in each direction."""
        if self.up:
            self.up.popleft()
        if self.down:
            self.down.popleft()

    def break_connection(self) -> None:
        self.up.clear()
        self.down.clear()
        self.road.disconnect()
        self.road.connect()

    def restart_learner(self) -> None:
        """A new learner is on the same port before the actor has noticed anything."""
        self.up.clear()
        self.down.clear()
        self.peers = Peers(self.handler)

    def settle(self) -> None:
        """From now on nothing is lost, and a silent learner is dialled anew."""
        for _ in range(4):
            self.send()
            while self.up:
                self.arrive_up()
            if not self.down:
                self.break_connection()
            while self.down:
                self.arrive_down()
            self.tick()


MOVES = [
    *(Network.ship, Network.lease, Network.send, Network.send, Network.arrive_up, Network.arrive_up),
    *(Network.arrive_down, Network.arrive_down, Network.tick, Network.lose),
    *(Network.break_connection, Network.restart_learner),
]


@settings(max_examples=300)
@given(st.lists(st.sampled_from(MOVES), max_size=60))
def test_every_group_is_acknowledged_once_whatever_was_lost_before(moves: list[object]) -> None:
    network = Network()
    for move in moves:
        assert callable(move)
        move(network)
    network.settle()
    assert all(count == 1 for count in network.acks.values())
    assert not network.road.parcels
    assert {fact[2] for fact in network.handler.facts if fact[0] == "group"} == set(network.acks)


def test_hello_lists_what_is_held_what_waits_and_what_is_not_acknowledged() -> None:
    road = ActorRoad(
        hello=lambda: hello(live=("growing",)),
        status=status,
        on_release=lambda ids, reason: None,
        incarnation="7",
        resend_s=1.0,
    )
    road.connect()
    road.hear(wire.LeaseMessage(lease=make_lease(lease_id="waiting")))
    road.put_group(GROUP, lambda ack: None)
    (frames,) = road.due(lambda: 0.0)
    assert wire.decode(frames) == replace(hello(live=("growing", "waiting", "lease-0")), incarnation="7")


def test_nothing_but_hello_is_said_before_the_welcome() -> None:
    road = make_road()
    road.connect()
    road.confirm(3, 1)
    road.tick(0.0)
    road.put_group(GROUP, lambda ack: None)
    assert [frames[0] for frames in road.due(lambda: 0.0)] == [b"hello"]
    road.hear(WELCOME)
    assert [frames[0] for frames in road.due(lambda: 0.0)] == [b"confirm", b"heartbeat", b"group"]
    assert list(road.due(lambda: 0.0)) == []


def test_a_confirmed_version_is_told_on_every_connection() -> None:
    road = make_road()
    road.confirm(3, 1)
    for _ in range(2):
        road.connect()
        road.hear(WELCOME)
        assert b"confirm" in [frames[0] for frames in road.due(lambda: 0.0)]


def test_the_newest_notice_wins_by_epoch_and_then_by_version() -> None:
    road = make_road()
    for version, epoch in ((5, 1), (4, 1), (2, 2), (9, 1), (1, 2)):
        road.hear(notice(version, epoch))
    assert road.notice is not None
    assert (road.notice.version, road.notice.epoch) == (2, 2)


def test_a_released_lease_is_not_handed_out_any_more() -> None:
    road = make_road()
    road.hear(wire.LeaseMessage(lease=make_lease(lease_id="a")))
    road.hear(wire.LeaseMessage(lease=make_lease(lease_id="b")))
    road.hear(wire.Release(lease_ids=("a", "unknown"), reason="leased again"))
    assert list(road.leases) == ["b"]


def test_leases_beyond_the_bound_go_back() -> None:
    road = make_road()
    road.connect()
    road.hear(WELCOME)
    for number in range(MAX_WAITING_LEASES + 1):
        road.hear(wire.LeaseMessage(lease=make_lease(lease_id=f"l{number}")))
    said = [wire.decode(frames) for frames in road.due(lambda: 0.0)]
    assert [message.lease_ids for message in said if isinstance(message, wire.Return)] == [(f"l{MAX_WAITING_LEASES}",)]
    assert len(road.leases) == MAX_WAITING_LEASES


def test_a_refusal_that_no_hello_cures_is_an_error() -> None:
    with pytest.raises(WireError, match=r"actor-0: schema 1"):
        make_road().hear(wire.Refuse(reason="schema 1", hello_again=False))


def test_a_welcome_goes_out_before_the_leases_that_the_handler_sends_at_once() -> None:
    class Eager(Recorder):
        def on_hello(self, hello: wire.Hello) -> wire.Welcome:
            assert peers.queue(hello.actor_id, wire.LeaseMessage(lease=make_lease()))
            return super().on_hello(hello)

    peers = Peers(Eager())
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    assert [frames[0] for frames in peers.here["actor-0"].outbox] == [b"welcome", b"lease"]


def test_an_older_process_can_neither_speak_nor_leave_in_the_name_of_the_newer() -> None:
    handler = Recorder()
    peers = Peers(handler)
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    peers.hear(b"actor-0/2", HELLO_2, 0.0)
    told = len(peers.replies)
    for message in (wire.Heartbeat(status=status()), wire.GroupMessage(group=GROUP), wire.Bye(actor_id="actor-0")):
        peers.hear(b"actor-0/1", wire.encode(message), 0.0)
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    assert peers.here["actor-0"].route == b"actor-0/2"
    assert [fact[0] for fact in handler.facts] == ["hello", "hello"]
    assert [frames[0] for _, frames in peers.replies] == [b"stop"] * (told + 4)
    assert told == 1


@pytest.mark.parametrize("route", [b"mallory/1", b"actor-0", b"actor-01/1", b"\0\1\2\3\4", b""])
def test_nobody_speaks_in_the_name_of_another(route: bytes) -> None:
    handler = Recorder()
    peers = Peers(handler)
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    for message in (wire.Heartbeat(status=status()), wire.Bye(actor_id="actor-0"), hello()):
        peers.hear(route, wire.encode(message), 0.0)
    assert handler.count("hello") == len(handler.facts) == 1
    assert [frames[0] for _, frames in peers.replies] == [b"refuse"] * 3


def test_an_unreachable_actor_has_a_grace_to_dial_anew_and_is_reported_once() -> None:
    handler = Recorder()
    peers = Peers(handler)
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    first = peers.here["actor-0"]
    peers.unreachable(first, 1.0, grace_s=2.0)
    assert handler.count("gone") == 0
    peers.hear(b"actor-0/1", HELLO_1, 2.0)  # the same process on a new connection
    peers.unreachable(first, 9.0, grace_s=2.0)
    assert handler.count("gone") == 0
    peers.unreachable(peers.here["actor-0"], 9.0, grace_s=2.0)
    peers.unreachable(peers.here["actor-0"], 11.0, grace_s=2.0)
    assert handler.facts[-1] == ("gone", "actor-0")
    assert handler.count("gone") == 1


def test_every_queue_of_the_learner_is_bounded() -> None:
    handler = Recorder()
    peers = Peers(handler)
    for number in range(2 * MAX_REPLIES):
        peers.hear(f"stranger-{number}".encode(), [b"garbage"], 0.0)
    assert len(peers.replies) == MAX_REPLIES
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    queued = 0
    while peers.queue("actor-0", wire.Stop(reason="")):
        queued += 1
    assert queued < MAX_OUTBOX
    assert handler.facts[-1] == ("gone", "actor-0")


def test_an_actor_that_the_handler_has_given_up_is_gone_here_too_and_asked_for_a_hello() -> None:
    handler = Recorder()
    peers = Peers(handler)
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    handler.given_up.add("actor-0")

    hear(peers, wire.Confirm(actor_id="actor-0", version=0, epoch=1), 11.0)
    assert list(peers.here) == ["actor-0"], "a word that is no heartbeat says nothing about it"
    hear(peers, wire.Heartbeat(status=status()), 12.0)

    assert peers.here == {}
    assert handler.facts[-1] == ("gone", "actor-0")
    route, frames = peers.replies[-1]
    answer = wire.decode_from_learner(frames)
    assert route == b"actor-0/1"
    assert isinstance(answer, wire.Refuse)
    assert answer.hello_again


def test_a_stop_is_said_again_after_each_hello() -> None:
    peers = Peers(Recorder())
    peers.hear(b"actor-0/1", HELLO_1, 0.0)
    peers.stop("over")
    assert [said(frames) for frames in peers.here["actor-0"].outbox] == ["welcome", "stop"]

    peers.hear(b"actor-0/1", HELLO_1, 0.1)  # it dials anew before the Stop went out

    assert [said(frames) for frames in peers.here["actor-0"].outbox] == ["welcome", "stop"]
