"""The weight stream between processes that are killed, stopped and slow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.publication.stream_kit import (
    DEADLINE_S,
    LOOPBACK,
    WEIGHTS,
    child,
    line_of,
    notice_at,
    published,
    raw_client,
    sparse,
    wait_until,
)
from trace_async.publication.manifest import CHUNK_BYTES, FileEntry, describe_file
from trace_async.publication.stream_client import WINDOW, StreamSource
from trace_async.publication.stream_server import WeightServer
from trace_async.publication.stream_wire import MAX_OUTSTANDING, ChunkRequest, encode_request

MIB = 1 << 20


def told(folder: Path, entry: FileEntry) -> str:
    """The entry in a file, for a child."""
    path = folder / "entry.json"
    path.write_text(json.dumps(asdict(entry)))
    return str(path)


def counters(process: subprocess.Popen[str]) -> dict[str, float]:
    assert process.stdin is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    found: dict[str, float] = json.loads(line_of(process))
    return found


def own_memory(pid: int) -> int:
    """Bytes that are the process's own: files that it maps do not count."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_server_killed_in_mid_transfer_and_started_again_costs_only_what_was_on_its_way(memory: Path) -> None:
    entry = published(memory / "published", 24 * CHUNK_BYTES)
    target, part = memory / "target", memory / "target.part"
    with ExitStack() as stack:
        first = stack.enter_context(child("serve", str(memory / "published"), LOOPBACK))
        address = line_of(first)
        client = stack.enter_context(child("fetch", address, told(memory, entry), str(target)))
        wait_until(lambda: size(part) >= CHUNK_BYTES)
        first.kill()
        first.wait()
        assert not target.exists()
        here = size(part) // CHUNK_BYTES
        second = stack.enter_context(child("serve", str(memory / "published"), address))
        assert line_of(second) == address
        assert client.wait(DEADLINE_S) == 0
        assert counters(second)["stream_chunks"] <= 24 - here + 1
    assert describe_file(target, name=WEIGHTS) == entry


def test_a_client_killed_in_mid_transfer_carries_on_where_it_was(memory: Path) -> None:
    entry = published(memory / "published", 24 * CHUNK_BYTES)
    target, part = memory / "target", memory / "target.part"
    with WeightServer(memory / "published", address=LOOPBACK) as server:
        with child("fetch", server.address, told(memory, entry), str(target)) as first:
            wait_until(lambda: size(part) >= CHUNK_BYTES)
            first.kill()
            first.wait()
        assert not target.exists()
        here, before = size(part) // CHUNK_BYTES, server.counters()["stream_chunks"]
        source = StreamSource()
        source.bring(notice_at(server.address), entry, target)
        source.close()
        assert server.counters()["stream_chunks"] - before <= 24 - here + 1
    assert describe_file(target, name=WEIGHTS) == entry


@pytest.mark.slow  # eight processes start
def test_eight_clients_at_once_read_one_map_and_wait_for_no_stuck_one(memory: Path) -> None:
    entry = published(memory / "published", 16 * CHUNK_BYTES)
    entry_path = told(memory, entry)
    with ExitStack() as stack:
        server = stack.enter_context(WeightServer(memory / "published", address=LOOPBACK))
        stuck = stack.enter_context(child("fetch", server.address, entry_path, str(memory / "stuck")))
        wait_until(lambda: size(memory / "stuck.part") > 0)
        os.kill(stuck.pid, signal.SIGSTOP)
        targets = [memory / f"target{number}" for number in range(7)]
        clients = [stack.enter_context(child("fetch", server.address, entry_path, str(target))) for target in targets]
        assert [client.wait(DEADLINE_S) for client in clients] == [0] * 7
        assert not (memory / "stuck").exists()
        assert server.counters()["stream_maps"] == 1
        os.kill(stuck.pid, signal.SIGCONT)
        assert stuck.wait(DEADLINE_S) == 0
        assert server.counters()["stream_maps"] == 1
        assert server.counters()["stream_chunks"] <= 8 * 16 + WINDOW
    assert all(describe_file(path, name=WEIGHTS) == entry for path in (*targets, memory / "stuck"))


def test_a_connection_that_takes_nothing_is_broken_off_and_its_file_let_go(memory: Path) -> None:
    entry = published(memory / "published", 16 * CHUNK_BYTES)
    with (
        WeightServer(memory / "published", address=LOOPBACK, idle_s=0.1, silent_s=0.5) as server,
        child("fetch", server.address, told(memory, entry), str(memory / "target")) as stuck,
    ):
        wait_until(lambda: size(memory / "target.part") > 0)
        os.kill(stuck.pid, signal.SIGSTOP)
        wait_until(lambda: WEIGHTS not in Path("/proc/self/maps").read_text())
        assert server.counters()["stream_open_files"] == 0
        os.kill(stuck.pid, signal.SIGCONT)
        assert stuck.wait(DEADLINE_S) == 0
    assert describe_file(memory / "target", name=WEIGHTS) == entry


def test_neither_end_holds_more_than_a_few_chunks_of_a_large_file(memory: Path) -> None:
    entry = sparse(memory / "published", 200 * MIB)
    with child("serve", str(memory / "published"), LOOPBACK) as server:
        address = line_of(server)
        with child("fetch", address, told(memory, entry), str(memory / "target")) as client:
            assert line_of(client) == "begin"
            assert int(line_of(client)) < 64 * MIB
        before = own_memory(server.pid)
        with raw_client(address, room=1) as slow:  # it asks for all it may and reads nothing
            for index in range(3 * MAX_OUTSTANDING):
                slow.send_multipart(encode_request(ChunkRequest(name=WEIGHTS, index=index)))
            wait_until(lambda: counters(server)["stream_dropped"] > 0)
            assert own_memory(server.pid) - before < 8 * MIB
    assert describe_file(memory / "target", name=WEIGHTS) == entry
