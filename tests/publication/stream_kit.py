"""Published files and both ends of the weight stream for tests: real sockets, raw peers, child processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import zmq

from trace_async.core.types import VersionNotice
from trace_async.publication.manifest import CHUNK_BYTES, FileEntry, describe_file
from trace_async.publication.stream_wire import Buffer, ChunkAnswer, ChunkRequest, decode_request, encode_answer

REPO = Path(__file__).parent.parent.parent
WEIGHTS = "e001_v000007.safetensors"
LOOPBACK = "tcp://127.0.0.1:*"
DEADLINE_S = 40.0
"""Of every wait; only a broken test reaches it."""


def notice_at(address: str, *, version: int = 7) -> VersionNotice:
    return VersionNotice(version=version, epoch=1, manifest_digest="", directory="/nowhere", address=address)


def content(num_bytes: int, *, seed: int = 0) -> bytes:
    """Bytes that say on every line which seed and chunk they are of; quickly made."""
    chunks = (b"%07d %07d\n" % (seed, index) * (CHUNK_BYTES // 16) for index in range(-(-num_bytes // CHUNK_BYTES)))
    return b"".join(chunks)[:num_bytes]


def published(directory: Path, num_bytes: int, *, name: str = WEIGHTS, seed: int = 0) -> FileEntry:
    """A published file; every chunk differs."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_bytes(content(num_bytes, seed=seed))
    return describe_file(directory / name, name=name)


def sparse(directory: Path, num_bytes: int, *, name: str = WEIGHTS) -> FileEntry:
    """A published file of zeros, which takes no room on the disk."""
    directory.mkdir(exist_ok=True)
    with (directory / name).open("wb") as file:
        file.truncate(num_bytes)
    return describe_file(directory / name, name=name)


def chunk_of(data: bytes, request: ChunkRequest) -> ChunkAnswer:
    """What an honest server answers."""
    begin = request.index * CHUNK_BYTES
    return ChunkAnswer(
        name=request.name, index=request.index, file_bytes=len(data), data=data[begin : begin + CHUNK_BYTES]
    )


@contextmanager
def raw_server(answer: Callable[[ChunkRequest], Sequence[Buffer] | None]) -> Iterator[str]:
    """The address of a peer that answers requests with whatever frames it is told to; None: silence."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(LOOPBACK)
    address = str(socket.get_string(zmq.LAST_ENDPOINT))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if socket.poll(20):
                route, *frames = socket.recv_multipart()
                if (told := answer(decode_request(frames))) is not None:
                    socket.send_multipart([route, *told])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


@contextmanager
def flaky_server(data: bytes, *, losses: Sequence[int], asked: list[int]) -> Iterator[str]:
    """The address of a server that goes away after so many answers, and comes back at once, for each of `losses`.

    `asked` gets the chunk numbers of all requests.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = _bind_and_name(context, LOOPBACK)
    stop = threading.Event()

    def serve() -> None:
        for answers in [*losses, None]:
            socket = _bound(context, address)
            while answers is None or answers > 0:
                if stop.is_set():
                    break
                if socket.poll(20):
                    route, *frames = socket.recv_multipart()
                    request = decode_request(frames)
                    asked.append(request.index)
                    socket.send_multipart([route, *encode_answer(chunk_of(data, request))])
                    answers = None if answers is None else answers - 1
            socket.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield address
    finally:
        stop.set()
        thread.join()
        context.destroy(linger=0)


def _bind_and_name(context: zmq.Context[zmq.Socket[bytes]], address: str) -> str:
    with context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        return str(socket.get_string(zmq.LAST_ENDPOINT))


def _bound(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A socket at the address; the one that had it before may take a moment to let go."""
    socket = context.socket(zmq.ROUTER)
    until_s = time.monotonic() + DEADLINE_S
    while True:
        try:
            socket.bind(address)
            return socket
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > until_s:
                raise
            time.sleep(0.005)


@contextmanager
def raw_client(address: str, *, room: int = 100) -> Iterator[zmq.Socket[bytes]]:
    """A peer that says whatever it likes; `room`: answers that it takes before somebody reads them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.RCVTIMEO, int(1000 * DEADLINE_S))
    socket.set(zmq.RCVHWM, room)
    socket.connect(address)
    try:
        yield socket
    finally:
        context.destroy(linger=0)


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A process of `tests.publication.stream_child`, killed at the end if it still runs."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.publication.stream_child", *words],
        cwd=REPO,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    """The next line that a child says; empty when it ended."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def wait_until(condition: Callable[[], bool]) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until_s, "it did not come about"
        time.sleep(0.002)
