"""A rank that ends is noticed by its connection, with the reason where it gave one."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from trace_async.errors import RankError
from trace_async.trainer_lifeline import Lifeline, Member, open_follower, open_leader, this_member


class Pair:
    """Both ends in one process."""

    def __init__(self, stack: ExitStack) -> None:
        self.losses: queue.Queue[RankError] = queue.Queue()
        self.leader_losses: queue.Queue[RankError] = queue.Queue()
        listener = socket.create_server(("127.0.0.1", 0))
        opened: queue.Queue[Lifeline] = queue.Queue()
        address = listener.getsockname()

        def follow() -> None:
            follower = open_follower(
                address, rank=3, leader=this_member(0), deadline_s=10.0, on_loss=self.leader_losses.put
            )
            opened.put(self.inner.enter_context(follower))

        self.inner = stack.enter_context(ExitStack())
        thread = threading.Thread(target=follow)
        thread.start()
        self.leader = stack.enter_context(open_leader(listener, others=1, deadline_s=10.0, on_loss=self.losses.put))
        thread.join()
        self.follower = opened.get()


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


def test_the_reason_of_a_rank_that_failed_reaches_the_leader_with_what_it_was_at(pair: Pair) -> None:
    pair.leader.phase = "step, version 7"
    pair.follower.say("OutOfMemoryError: 3 GiB")
    pair.inner.close()
    lost = pair.losses.get(timeout=10.0)
    assert f"rank 3 (pid {os.getpid()} on {socket.gethostname()}) failed (OutOfMemoryError: 3 GiB)" in str(lost)
    assert "at: step, version 7" in str(lost)
    assert pair.leader.lost(wait_s=0.0) is lost


def test_nobody_is_lost_while_both_live_nor_by_an_end_that_was_expected(pair: Pair) -> None:
    assert pair.leader.lost(wait_s=0.05) is None
    pair.leader.expect_the_end()
    pair.inner.close()
    assert pair.leader.lost(wait_s=0.2) is None
    assert pair.losses.empty()


def test_a_rank_hears_of_its_leaders_end(pair: Pair) -> None:
    pair.leader.close()
    assert "rank 0 (pid" in str(pair.leader_losses.get(timeout=10.0))


def test_the_watching_thread_ends_with_its_owner(pair: Pair) -> None:
    pair.inner.close()
    pair.leader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "lifeline"]


def test_strangers_are_sent_away_and_missing_ranks_are_counted() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_connection(listener.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n")
        with (
            pytest.raises(RankError, match=r"0 of 1 other ranks .* came within 0.3 s"),
            open_leader(listener, others=1, deadline_s=0.3, on_loss=lambda error: None),
        ):
            pass
        stranger.settimeout(5.0)
        assert stranger.recv(10) == b""


STUCK = """
import socket, sys, threading
from trace_async.trainer_lifeline import Member, open_follower
leader = Member(rank=0, pid=1, host="there")
address = ("127.0.0.1", int(sys.argv[1]))
with open_follower(address, rank=1, leader=leader, deadline_s=10, on_loss=lambda error: None) as line:
    line.phase = "a collective that never ends"
    sys.stdout.write("there\\n")
    sys.stdout.flush()
    threading.Event().wait()
"""


def test_a_process_that_cannot_end_in_order_is_ended_with_the_message() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    command = [sys.executable, "-c", STUCK, str(listener.getsockname()[1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            listener.settimeout(20.0)
            link, _ = listener.accept()
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            link.close()
            listener.close()
            _, said = process.communicate(timeout=20.0)
        finally:
            process.send_signal(signal.SIGKILL)
    assert process.returncode == 1
    assert "rank 0 (pid 1 on there) ended without a word" in said
    assert "a collective that never ends" in said


def test_a_member_says_where_it_is() -> None:
    assert str(Member(rank=2, pid=10, host="b")) == "rank 2 (pid 10 on b)"
