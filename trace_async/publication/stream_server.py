"""Serves the published files of one folder to any number of actors, chunk by chunk, from a thread of its own.

Owns one ROUTER socket, its ZeroMQ context, its thread, and the maps of the files it serves.

Invariants
    - Only requests are answered, and each with at most one chunk or one refusal; nothing is ever pushed.
    - A client costs its bounded pipe and no more: every send is tried without waiting, an answer for which the client's
      pipe has no room is dropped (it may ask again), and a client that takes nothing for SILENT_S loses its connection.
      No client waits for another.
    - A file is opened and mapped once, however many clients read it, and its bytes go from the map to the sockets
      without a copy. A retired (unlinked) file stays readable while somebody keeps asking for it.
    - Only regular files with the name of a published file, in the folder itself, are ever opened.
    - Frames are hostile until decoded, and refused ones change nothing.
    - An error of the thread comes out of `watch` and of `close`.

Never: touches the learner's event loop or the socket of the group road, writes a file, or knows what a file means.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket as sockets
import stat
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import zmq

from trace_async.errors import ConfigError, WireError
from trace_async.publication.manifest import CHUNK_BYTES, base_of
from trace_async.publication.stream_wire import (
    MAX_OUTSTANDING,
    MAX_REQUEST_BYTES,
    ChunkAnswer,
    ChunkRequest,
    Refusal,
    Refused,
    decode_request,
    encode_answer,
)

MAX_MAPS = 12
"""Files that are open at a time: three versions in use and one more; the one asked for least recently goes, but none
that was retired, since it could not be opened again for those who are in the middle of it."""
MAX_RETIRED_MAPS = 64
"""Files that are open at a time, retired ones included: for actors that each are in the middle of another version."""
IDLE_S = 30.0
"""A file that nobody asked for is closed, so that a retired one gives its memory or disk back."""
SILENT_S = 60.0
"""A connection whose other end takes no byte for this long is broken off, by the kernel."""

logger = logging.getLogger(__name__)


class WeightServer:
    """The learner's end of the weight stream; serves from its making until `close`."""

    def __init__(self, directory: Path, *, address: str, idle_s: float = IDLE_S, silent_s: float = SILENT_S) -> None:
        """Listen at `address` (port 0 or *: any free one). Raises ConfigError when that is not possible."""
        self._files = _Files(directory, idle_s=idle_s, clock=time.monotonic)
        self._counts: Counter[str] = Counter()
        self._context = zmq.Context()
        try:
            self._socket = _bind(self._context, address, silent_s=silent_s)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self.address = str(self._socket.get_string(zmq.LAST_ENDPOINT))
        self._asleep, self._wake = sockets.socketpair()
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # so that a cancelled `watch` does not cancel it
        # a daemon, so that an owner that dies without closing does not hang its process
        self._thread = threading.Thread(target=self._run, name="weight-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> WeightServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def watch(self) -> None:
        """Return when the server is closed; raises what ended its thread. For a task of the owner's TaskGroup."""
        await asyncio.wrap_future(self._ended)

    def close(self) -> None:
        """Stop serving, at once and more than once; raises what ended the thread before."""
        self._wake.close()
        self._thread.join()
        self._asleep.close()
        self._ended.result()

    def counters(self) -> Mapping[str, float]:
        """Since the start: chunks and bytes sent, files mapped, requests refused, answers dropped; and open files."""
        counts = self._counts
        return {
            "stream_chunks": counts["chunks"],
            "stream_bytes": counts["bytes"],
            "stream_refused": counts["refused"],
            "stream_dropped": counts["dropped"],
            "stream_maps": self._files.num_mapped,
            "stream_open_files": len(self._files),
        }

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Boundary of the thread: whatever ends it is handed to the owner."""
        try:
            self._serve()
        except BaseException as error:
            logger.exception("the weight server at %s ended", self.address)
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        finally:
            self._files.clear()
            self._context.destroy(linger=0)

    def _serve(self) -> None:
        """Consumes requests, produces answers; woken by a request, by `close`, and once in `idle_s` while files are
        open."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._asleep, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(self._files.idle_ms))
            if self._asleep.fileno() in ready:
                return
            if self._socket in ready:
                route, *frames = self._socket.recv_multipart()
                self._send(route, self._answer(frames))
            self._files.close_idle()

    def _answer(self, frames: list[bytes]) -> ChunkAnswer | Refusal:
        try:
            request = decode_request(frames)
        except WireError as error:
            return Refusal(name="", index=0, code=Refused.MALFORMED, reason=str(error))
        return self._files.chunk(request)

    def _send(self, route: bytes, answer: ChunkAnswer | Refusal) -> None:
        if isinstance(answer, Refusal):
            self._counts["refused"] += 1
            if self._counts["refused"].bit_count() == 1:  # the 1st, 2nd, 4th, ...: a flood must not fill the log
                logger.warning("refused a request (%d so far): %s", self._counts["refused"], answer.reason)
        self._count(answer, 1)  # before it can arrive: whoever has an answer finds it counted
        try:
            self._socket.send_multipart([route, *encode_answer(answer)], zmq.DONTWAIT, copy=False)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):  # the pipe is full; the client is gone
                raise
            self._count(answer, -1)
            self._counts["dropped"] += 1

    def _count(self, answer: ChunkAnswer | Refusal, times: int) -> None:
        if isinstance(answer, ChunkAnswer):
            self._counts["chunks"] += times
            self._counts["bytes"] += times * len(answer.data)


@dataclass(slots=True, kw_only=True)
class _Map:
    """One open file. Whoever holds a slice of `view` keeps the pages, so nothing is closed by hand."""

    pages: mmap.mmap
    view: memoryview
    inode: tuple[int, int]
    asked_s: float


class _Files:
    """The maps of files asked for lately, by name; used by the server's thread only."""

    def __init__(self, directory: Path, *, idle_s: float, clock: Callable[[], float]) -> None:
        self._directory = directory
        self._idle_s = idle_s
        self._clock = clock
        self._maps: OrderedDict[str, _Map] = OrderedDict()  # least recently asked for first
        self.num_mapped = 0

    def __len__(self) -> int:
        return len(self._maps)

    @property
    def idle_ms(self) -> int | None:
        """How long the server may sleep before it must look here again; None: until the next request."""
        return int(1000 * self._idle_s) + 1 if self._maps else None

    def close_idle(self) -> None:
        """Forget files that nobody asked for."""
        before_s = self._clock() - self._idle_s
        while self._maps and next(iter(self._maps.values())).asked_s < before_s:
            self._maps.popitem(last=False)

    def clear(self) -> None:
        """Forget all files."""
        self._maps.clear()

    def chunk(self, request: ChunkRequest) -> ChunkAnswer | Refusal:
        """The bytes, as a view of the map, or why there are none."""
        name, index = request.name, request.index
        if base_of(name) is None:
            return Refusal(name=name, index=index, code=Refused.GONE, reason=f"{name!r} is not a published file's name")
        try:
            found = self._open(name)
            if found is None:  # it has no bytes, and an empty map cannot be made
                return _beyond(request, 0)
            size = len(found.view)
            if found.pages.size() < size:  # reading on would kill the process
                raise OSError(f"it was cut from {size} to {found.pages.size()} bytes")
        except FileNotFoundError:
            reason = f"{name} is not here (any more): it was retired, and a newer version is announced"
            return Refusal(name=name, index=index, code=Refused.GONE, reason=reason)
        except OSError as error:
            self._maps.pop(name, None)
            reason = f"the learner cannot read {name}: {error.strerror or error}"
            return Refusal(name=name, index=index, code=Refused.UNREADABLE, reason=reason)
        if index * CHUNK_BYTES >= size:
            return _beyond(request, size)
        data = found.view[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        return ChunkAnswer(name=name, index=index, file_bytes=size, data=data)

    def _open(self, name: str) -> _Map | None:
        """The file's map, made now or before; None when the file is empty. Raises OSError."""
        known = self._maps.get(name)
        path = self._directory / name
        with suppress(FileNotFoundError):  # retired: what is mapped is still whole
            found = os.stat(path, follow_symlinks=False)
            if known is not None and known.inode != (found.st_dev, found.st_ino):
                known = None  # published anew under its old name
        if known is None:
            known = _map(path, asked_s=self._clock())
            if known is None:
                return None
            self.num_mapped += 1
            self._maps[name] = known
            if len(self._maps) > MAX_MAPS:
                self._let_go(but=name)
        known.asked_s = self._clock()
        self._maps.move_to_end(name)
        return known

    def _let_go(self, *, but: str) -> None:
        """Of the one asked for least recently that can be opened again; of a retired one only where there are many."""
        there = (name for name in self._maps if name != but and (self._directory / name).exists())
        oldest = next(there, None)
        if oldest is None and len(self._maps) > MAX_RETIRED_MAPS:
            oldest = next(iter(self._maps))
        if oldest is not None:
            del self._maps[oldest]


def _map(path: Path, *, asked_s: float) -> _Map | None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # no links, no waiting for a pipe's writer
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is not a regular file")
        if found.st_size == 0:
            return None
        pages = mmap.mmap(descriptor, found.st_size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    return _Map(pages=pages, view=memoryview(pages), inode=(found.st_dev, found.st_ino), asked_s=asked_s)


def _beyond(request: ChunkRequest, size: int) -> Refusal:
    reason = f"{request.name} has {size} bytes, chunk {request.index} begins behind them"
    return Refusal(name=request.name, index=request.index, code=Refused.BEYOND, reason=reason)


def _bind(context: zmq.Context[zmq.Socket[bytes]], address: str, *, silent_s: float) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)  # a full pipe and an absent client are errors, not silence
    socket.set(zmq.SNDHWM, MAX_OUTSTANDING)  # a pipe's room is the client's credit
    socket.set(zmq.RCVHWM, MAX_OUTSTANDING)
    socket.set(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
    socket.set(zmq.TCP_MAXRT, int(1000 * silent_s))
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        raise ConfigError(f"cannot listen at {address!r}: {error}; choose another publication.address") from error
    return socket
