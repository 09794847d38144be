"""Fetches published files from the learner's weight server, chunk by chunk: the source of actors on other hosts.

Owns a ZeroMQ context and, while a transfer runs, one DEALER socket and a partial file beside the target.

Invariants
    - At most WINDOW chunks are asked for and not here yet, so memory is bounded whatever the size of the file.
    - A chunk enters the partial file only when its digest is the manifest's. What an earlier transfer, process or
      crash left in the partial file is kept chunk by chunk, where the digest agrees, and asked for where it does not.
    - A lost connection (reported by the socket's monitor) is followed by a new one that asks for what is missing, be
      it of the same server or of one that took its place at the address.
    - No wait for a chunk is longer than `patience_s`; `close` ends it at once. Either is a PolicyError.
    - Frames are hostile until decoded and their digest is right.

Never: the group road's socket, the event loop's thread, or a file under its final name before it is whole.
"""

from __future__ import annotations

import logging
import socket as sockets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import zmq

from trace_async.core.types import VersionNotice
from trace_async.errors import PolicyError, WireError
from trace_async.publication.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, FileEntry, notice_names
from trace_async.publication.stream_partial import PartialFile
from trace_async.publication.stream_wire import (
    MAX_ANSWER_BYTES,
    ChunkAnswer,
    ChunkRequest,
    Refusal,
    decode_answer,
    encode_request,
)

WINDOW = 4
"""Chunks on their way: enough to keep a fast line busy while one of them is being checked."""
PATIENCE_S = 20.0
"""For one chunk; a line slower than 200 kB/s, or a server that is gone for longer, counts as broken. The next attempt
goes on with what came, from the address of the newest notice, which a learner that was restarted has changed."""
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.05, 1.0  # between connections on which no chunk came
_KEEPALIVE = (
    (zmq.TCP_KEEPALIVE, 1),
    (zmq.TCP_KEEPALIVE_IDLE, 10),
    (zmq.TCP_KEEPALIVE_INTVL, 5),
    (zmq.TCP_KEEPALIVE_CNT, 3),
)
"""A client only listens: without probes it would never learn that the server's host is gone."""
_SHOWN = 5  # chunk numbers in a message

_Socket: TypeAlias = zmq.Socket[bytes]

logger = logging.getLogger(__name__)


class StreamSource:
    """A `Source`: for one thread at a time, except `close`."""

    def __init__(self, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long to wait for one chunk."""
        self._patience_s = patience_s
        self._closed = threading.Event()
        self._busy = threading.Lock()
        self._context: zmq.Context[_Socket] = zmq.Context()
        self._asleep, self._wake = sockets.socketpair()

    def read_manifest(self, notice: VersionNotice) -> bytes:
        """The manifest's bytes, not verified. Raises PolicyError when they cannot be had."""
        wanted = deque([0])
        found: dict[int, bytes] = {}

        def take(answer: ChunkAnswer) -> None:
            if answer.file_bytes > MAX_MANIFEST_BYTES:
                raise WireError(f"a manifest of {answer.file_bytes} bytes, more than {MAX_MANIFEST_BYTES}")
            found[answer.index] = bytes(answer.data)
            if answer.index == 0:  # it tells how many there are
                wanted.extend(range(1, -(-answer.file_bytes // CHUNK_BYTES)))

        with self._line(notice) as line:
            line.fetch(notice_names(notice).manifest, wanted, take)
        return b"".join(found[index] for index in sorted(found))

    def bring(self, notice: VersionNotice, entry: FileEntry, target: Path) -> None:
        """Make `target` hold the file's bytes. What is already right in TARGET.part, or in `target`, is not fetched.

        Raises PolicyError when the server refuses, sends what the manifest does not say, or sends nothing for
        `patience_s`; when the disk refuses; and soon after `close`. The partial file then stays, for the next attempt.
        """
        try:
            with self._line(notice) as line, PartialFile(target, entry) as partial:
                wanted = deque(partial.missing(check=line.check))
                line.fetch(entry.name, wanted, partial.take)
        except OSError as error:
            raise PolicyError(
                f"version {notice.version} (epoch {notice.epoch}): cannot write {target}: {error.strerror or error}; "
                "free space there or choose another folder"
            ) from error

    def close(self) -> None:
        """End what is under way, within a chunk's time, and refuse everything later. Waits for nothing."""
        self._closed.set()
        self._wake.close()
        self._let_go()

    @contextmanager
    def _line(self, notice: VersionNotice) -> Iterator[_Line]:
        """The way to the server for one transfer; one at a time."""
        try:
            with self._busy:
                yield _Line(
                    context=self._context,
                    address=notice.address,
                    what=f"version {notice.version} (epoch {notice.epoch})",
                    patience_s=self._patience_s,
                    closed=self._closed,
                    asleep=self._asleep,
                )
        finally:
            if self._closed.is_set():
                self._let_go()

    def _let_go(self) -> None:
        """Close what a transfer under way still looks at, unless there is one: then its end does it."""
        if self._busy.acquire(blocking=False):
            self._context.destroy(linger=0)
            self._asleep.close()
            self._busy.release()


@dataclass(slots=True, kw_only=True)
class _Line:
    """One transfer's connections to the server, one after the other."""

    context: zmq.Context[_Socket]
    address: str
    what: str
    patience_s: float
    closed: threading.Event
    asleep: sockets.socket  # readable once the source is closed
    num_chunks: int = 0  # that came and were right
    num_bytes: int = 0  # of those
    heard_s: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raises PolicyError when the source is closed."""
        if self.closed.is_set():
            raise PolicyError(f"{self.what}: the transfer from {self.address} was ended")

    def fetch(self, name: str, wanted: deque[int], take: Callable[[ChunkAnswer], None]) -> None:
        """Get the `wanted` chunks; `take` may append more, and raises WireError for one that is wrong."""
        self.check()
        if wanted and not self.address:
            raise PolicyError(
                f"{self.what}: the learner's files are not to be seen from here and it runs no weight server; give "
                'publication.address another value than "none", or share publication.directory with this host'
            )
        self.heard_s, pause_s = time.monotonic(), 0.0
        while wanted:
            before = self.num_chunks
            with self._dial() as (socket, lost):
                self._fetch_here(socket, lost, _Job(name=name, wanted=wanted, take=take))
            pause_s = 0.0 if self.num_chunks > before else min(max(2 * pause_s, _FIRST_PAUSE_S), _LAST_PAUSE_S)
            if wanted:
                logger.warning("%s: lost the weight server at %s; dialling again", self.what, self.address)
                self._wait((), at_most_s=pause_s)

    def _fetch_here(self, socket: _Socket, lost: _Socket, job: _Job) -> None:
        """Fetch over one connection until all is here or the connection is lost; what is missing then is wanted."""
        try:
            while job.asked or job.wanted:
                while job.wanted and len(job.asked) < WINDOW:
                    job.asked.append(job.wanted.popleft())
                    socket.send_multipart(
                        encode_request(ChunkRequest(name=job.name, index=job.asked[-1])), zmq.DONTWAIT
                    )
                left_s = self.heard_s + self.patience_s - time.monotonic()
                ready = self._wait((socket, lost), at_most_s=max(left_s, 0))
                if socket in ready:
                    self._hear(socket, job)
                elif lost in ready:
                    return
                elif left_s <= 0:
                    raise self._silence(job)
        finally:
            job.wanted.extendleft(reversed(job.asked))

    def _hear(self, socket: _Socket, job: _Job) -> None:
        frames = socket.recv_multipart(zmq.DONTWAIT, copy=False)
        try:
            answer = decode_answer([frame.buffer for frame in frames])
            if isinstance(answer, Refusal):
                raise PolicyError(
                    f"{self.what}: the weight server at {self.address} refuses chunk {answer.index} of {job.name}: "
                    f"{answer.reason}"
                )
            if answer.name != job.name or answer.index not in job.asked:
                raise WireError(f"chunk {answer.index} of {answer.name!r}, which nobody asked for")
            job.take(answer)
        except WireError as error:
            raise PolicyError(
                f"{self.what}: the weight server at {self.address} sent something wrong for {job.name}: {error}"
            ) from error
        job.asked.remove(answer.index)
        self.num_chunks += 1
        self.num_bytes += len(answer.data)
        self.heard_s = time.monotonic()

    def _wait(self, ready: Sequence[_Socket], *, at_most_s: float) -> set[_Socket]:
        """Which of the sockets can be read; woken by them, by `close` (a PolicyError) and by the clock."""
        poller = zmq.Poller()
        poller.register(self.asleep, zmq.POLLIN)
        for socket in ready:
            poller.register(socket, zmq.POLLIN)
        found = poller.poll(int(1000 * at_most_s) + 1)
        self.check()
        return {socket for socket, _ in found}

    def _silence(self, job: _Job) -> PolicyError:
        missing = sorted((*job.asked, *job.wanted))
        shown = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
        return PolicyError(
            f"{self.what}: the weight server at {self.address} sent nothing for {self.patience_s:g} s; of {job.name} "
            f"{self.num_chunks} chunks ({self.num_bytes} bytes) came and {len(missing)} are missing ({shown}); check "
            "that the learner runs and that this host can reach the address (publication.address)"
        )

    @contextmanager
    def _dial(self) -> Iterator[tuple[_Socket, _Socket]]:
        """A socket that dials the server, and one that can be read once its connection is lost."""
        socket = self.context.socket(zmq.DEALER)
        lost = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            socket.set(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
            socket.set(zmq.RCVHWM, 2 * WINDOW)
            for option, value in _KEEPALIVE:
                socket.set(option, value)
            try:
                socket.connect(self.address)
            except zmq.ZMQError as error:
                raise PolicyError(f"{self.what}: cannot dial {self.address!r}: {error}") from error
            yield socket, lost
        finally:
            socket.disable_monitor()
            lost.close(linger=0)
            socket.close(linger=0)


@dataclass(slots=True, kw_only=True)
class _Job:
    """One file on its way."""

    name: str
    wanted: deque[int]  # chunk numbers
    take: Callable[[ChunkAnswer], None]
    asked: deque[int] = field(default_factory=deque)  # of the present connection
