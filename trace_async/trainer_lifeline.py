"""Notices that a rank of the learner has ended, while others may wait for it in the middle of a collective.

Every other rank keeps a TCP connection to the leader. Its end is the end of the process, whatever killed it: the kernel
closes it, and keep-alive packets find a machine that has gone. A rank that fails says why before it goes.

Invariants
    - Whoever loses a peer is told once, by a call from the watching thread, and has GRACE_S to end in order. Then the
      process is ended: it may be inside a collective that nothing else can interrupt.
    - The thread ends with the block that opened it.

Never: tensors, process groups, restarts.
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Final

from trace_async.errors import RankError

_LOG = logging.getLogger(__name__)

GRACE_S: Final = 5.0
"""What a process may take to end by itself after it has lost a rank."""

_KEEPALIVE: Final = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
"""A machine that answers nothing for 10 + 3 x 5 s is gone."""

_CURE: Final = "the run goes on from its last checkpoint when it is started again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Another rank, as it introduced itself."""

    rank: int
    pid: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


def this_member(rank: int) -> Member:
    """This process, which has that rank."""
    return Member(rank=rank, pid=os.getpid(), host=socket.gethostname())


class Lifeline:
    """The connections of one rank; `open_leader` and `open_follower` make it."""

    def __init__(self, links: Mapping[socket.socket, Member], *, on_loss: Callable[[RankError], None]) -> None:
        self.phase = "start-up"  # what this process is at, for the message
        self._links = dict(links)
        self._on_loss = on_loss
        self._lost: RankError | None = None
        self._found = threading.Event()
        self._over = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._thread.start()

    def lost(self, *, wait_s: float) -> RankError | None:
        """Who was lost; waits a moment for the news, since a collective fails before or after a connection does."""
        self._found.wait(wait_s)
        return self._lost

    def say(self, reason: str) -> None:
        """Tell the other end why this process is about to end."""
        for link in self._links:
            with suppress(OSError):
                link.sendall(json.dumps({"failed": reason[:2000]}).encode() + b"\n")

    def expect_the_end(self) -> None:
        """From now on the others may go."""
        self._over = True

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._over = True
        with suppress(OSError):
            self._wake.send(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join(GRACE_S)
        for link in (*self._links, self._wake, self._woken):
            link.close()

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for watched in (*self._links, self._woken):
                selector.register(watched, selectors.EVENT_READ)
            said = dict.fromkeys(self._links, b"")
            while not self._over:
                for link in [key.fileobj for key, _ in selector.select()]:
                    if not isinstance(link, socket.socket) or link is self._woken:
                        continue
                    part = _read(link)
                    said[link] += part
                    if not part:
                        selector.unregister(link)
                        if not self._over:
                            self._end(self._links[link], said[link])
                            return

    def _end(self, member: Member, said: bytes) -> None:
        """In the watching thread, once: tell, wait, end."""
        self._lost = RankError(f"{member} {_why(said)} while this process was at: {self.phase}; {_CURE}")
        self._found.set()
        self._on_loss(self._lost)
        until_s = time.monotonic() + GRACE_S
        with selectors.DefaultSelector() as selector:  # woken by `close`, when the process ends in order
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._over and (left_s := until_s - time.monotonic()) > 0:
                selector.select(left_s)
        if not self._over:
            sys.stderr.write(f"trace-async: {self._lost}\n")
            sys.stderr.flush()
            os._exit(1)


@contextmanager
def open_leader(
    listener: socket.socket, *, others: int, deadline_s: float, on_loss: Callable[[RankError], None]
) -> Iterator[Lifeline]:
    """The leader's end: takes a connection of each other rank, for which it waits `deadline_s`.

    Raises RankError when not all have come by then.
    """
    links: dict[socket.socket, Member] = {}
    until_s = time.monotonic() + deadline_s
    with listener:
        while len(links) < others:
            listener.settimeout(max(0.01, until_s - time.monotonic()))
            try:
                link, _ = listener.accept()
            except TimeoutError as error:
                here = sorted(member.rank for member in links.values())
                raise RankError(
                    f"{len(links)} of {others} other ranks (of them {here}) came within {deadline_s:g} s"
                ) from error
            if (member := _introduction(link)) is not None:
                links[_kept_alive(link)] = member
    lifeline = Lifeline(links, on_loss=on_loss)
    try:
        yield lifeline
    finally:
        lifeline.close()


@contextmanager
def open_follower(
    address: tuple[str, int], *, rank: int, leader: Member, deadline_s: float, on_loss: Callable[[RankError], None]
) -> Iterator[Lifeline]:
    """Another rank's end: connects to the leader at `address`; OSError when nobody answers within `deadline_s`."""
    link = socket.create_connection(address, timeout=deadline_s)
    link.settimeout(None)
    link.sendall(json.dumps(asdict(this_member(rank))).encode() + b"\n")
    lifeline = Lifeline({_kept_alive(link): leader}, on_loss=on_loss)
    try:
        yield lifeline
    finally:
        lifeline.close()


def _introduction(link: socket.socket) -> Member | None:
    """Who is there; None, and the connection closed, for a stranger."""
    link.settimeout(10.0)
    try:
        with link.makefile("rb", buffering=0) as lines:
            said = json.loads(lines.readline(1000))
        member = Member(rank=int(said["rank"]), pid=int(said["pid"]), host=str(said["host"]))
    except (OSError, ValueError, KeyError, TypeError):
        link.close()
        return None
    link.settimeout(None)
    return member


def _kept_alive(link: socket.socket) -> socket.socket:
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):  # not every system has all of them
            link.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return link


def _read(link: socket.socket) -> bytes:
    try:
        return link.recv(4096)
    except OSError:
        return b""


def _why(said: bytes) -> str:
    for line in said.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            return f"failed ({json.loads(line)['failed']})"
    return "ended without a word (killed, out of memory, or its machine is gone)"
