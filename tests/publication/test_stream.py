"""The weight stream over real loopback sockets: what arrives is what was published, whatever happens on the way."""

from __future__ import annotations

import asyncio
import math
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.publication.stream_kit import (
    DEADLINE_S,
    LOOPBACK,
    WEIGHTS,
    chunk_of,
    content,
    flaky_server,
    notice_at,
    published,
    raw_client,
    raw_server,
    wait_until,
)
from tests.publication.version_kit import memory_folder
from trace_async.errors import ConfigError, PolicyError
from trace_async.publication.manifest import CHUNK_BYTES, FileEntry
from trace_async.publication.stream_client import WINDOW, StreamSource
from trace_async.publication.stream_server import MAX_MAPS, WeightServer
from trace_async.publication.stream_wire import (
    MAX_OUTSTANDING,
    MAX_REQUEST_BYTES,
    Buffer,
    ChunkRequest,
    Refusal,
    Refused,
    decode_answer,
    encode_answer,
    encode_request,
)

MANIFEST = WEIGHTS.replace(".safetensors", ".manifest.json")
BIG = 5 * CHUNK_BYTES + 12345


@pytest.fixture
def server(memory: Path) -> Iterator[WeightServer]:
    with WeightServer(memory / "published", address=LOOPBACK) as server:
        yield server


@pytest.fixture
def source() -> Iterator[StreamSource]:
    source = StreamSource(patience_s=DEADLINE_S)
    yield source
    source.close()


def ask(socket: zmq.Socket[bytes], name: str, index: int = 0) -> object:
    """One request of a raw client and its answer."""
    socket.send_multipart(encode_request(ChunkRequest(name=name, index=index)))
    return decode_answer(socket.recv_multipart())


# ---- what arrives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, BIG])
def test_a_file_arrives_as_it_was_published(
    memory: Path, server: WeightServer, source: StreamSource, num_bytes: int
) -> None:
    entry = published(memory / "published", num_bytes)
    source.bring(notice_at(server.address), entry, memory / "target")
    assert (memory / "target").read_bytes() == (memory / "published" / WEIGHTS).read_bytes()
    assert not (memory / "target.part").exists()
    assert server.counters()["stream_bytes"] == num_bytes


@pytest.mark.parametrize("num_bytes", [2, 2 * CHUNK_BYTES + 5])
def test_a_manifest_of_any_length_arrives(
    memory: Path, server: WeightServer, source: StreamSource, num_bytes: int
) -> None:
    published(memory / "published", num_bytes, name=MANIFEST)
    assert source.read_manifest(notice_at(server.address)) == (memory / "published" / MANIFEST).read_bytes()


def test_a_manifest_that_claims_to_be_huge_is_not_fetched(source: StreamSource) -> None:
    def answer(request: ChunkRequest) -> list[Buffer]:
        header = encode_answer(chunk_of(bytes(CHUNK_BYTES), request))[0]
        return [bytes(header[:10]) + (2**40).to_bytes(8, "big") + bytes(header[18:]), bytes(CHUNK_BYTES)]

    with raw_server(answer) as address, pytest.raises(PolicyError, match="a manifest of 1099511627776 bytes"):
        source.read_manifest(notice_at(address))


@settings(max_examples=6)
@given(st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)), st.integers(0, 7 * CHUNK_BYTES))
def test_only_what_is_missing_or_wrong_is_fetched_again(damaged: set[int], zeroed: set[int], length: int) -> None:
    with memory_folder() as folder, WeightServer(folder, address=LOOPBACK) as server:
        entry = published(folder, BIG)
        whole = (folder / WEIGHTS).read_bytes()
        left = bytearray(whole)
        for index in damaged:
            left[index * CHUNK_BYTES] ^= 1
        for index in zeroed:
            left[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES] = bytes(
                len(left[index * CHUNK_BYTES :][:CHUNK_BYTES])
            )
        left.extend(bytes(2 * CHUNK_BYTES))
        part, target = folder / "target.part", folder / "target"
        part.write_bytes(left[:length])
        here = {index for index in range(6) if min((index + 1) * CHUNK_BYTES, BIG) <= length} - damaged - zeroed
        source = StreamSource()
        source.bring(notice_at(server.address), entry, target)
        source.close()
        assert target.read_bytes() == whole
        assert server.counters()["stream_chunks"] == 6 - len(here)


def test_a_copy_that_was_given_up_is_carried_on(memory: Path, server: WeightServer, source: StreamSource) -> None:
    entry = published(memory / "published", BIG)
    whole = (memory / "published" / WEIGHTS).read_bytes()
    (memory / "target").write_bytes(whole[: 3 * CHUNK_BYTES])
    source.bring(notice_at(server.address), entry, memory / "target")
    assert (memory / "target").read_bytes() == whole
    assert server.counters()["stream_chunks"] == 3


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_a_file_that_has_another_name_as_well_is_never_written_to(
    memory: Path, server: WeightServer, source: StreamSource, suffix: str
) -> None:
    entry = published(memory / "published", BIG)
    other = memory / "other"
    other.write_bytes(b"somebody else's")
    os.link(other, memory / f"target{suffix}")
    source.bring(notice_at(server.address), entry, memory / "target")
    assert other.read_bytes() == b"somebody else's"
    assert (memory / "target").read_bytes() == (memory / "published" / WEIGHTS).read_bytes()


# ---- losses ----------------------------------------------------------------------------------------------------------


@settings(max_examples=5)
@given(st.lists(st.integers(0, 6), max_size=5))
def test_any_sequence_of_lost_connections_costs_at_most_the_chunks_on_their_way(losses: list[int]) -> None:
    data, asked = content(BIG, seed=1), list[int]()
    with memory_folder() as folder, flaky_server(data, losses=losses, asked=asked) as address:
        entry = published(folder, BIG, seed=1)
        source = StreamSource(patience_s=DEADLINE_S)
        source.bring(notice_at(address), entry, folder / "target")
        source.close()
        assert (folder / "target").read_bytes() == data
    assert set(asked) == set(range(6))
    assert len(asked) <= 6 + WINDOW * len(losses)


def test_a_version_that_is_retired_while_it_is_fetched_arrives_whole(memory: Path, server: WeightServer) -> None:
    entry = published(memory / "published", BIG)
    whole = (memory / "published" / WEIGHTS).read_bytes()
    with raw_client(server.address) as socket:
        ask(socket, WEIGHTS)
        (memory / "published" / WEIGHTS).unlink()
        source = StreamSource()
        source.bring(notice_at(server.address), entry, memory / "target")
        source.close()
    assert (memory / "target").read_bytes() == whole
    assert server.counters()["stream_maps"] == 1


def test_many_clients_at_once_read_one_map(memory: Path, server: WeightServer) -> None:
    entry = published(memory / "published", BIG)

    def bring(target: Path) -> bytes:
        source = StreamSource(patience_s=DEADLINE_S)
        source.bring(notice_at(server.address), entry, target)
        source.close()
        return target.read_bytes()

    with ThreadPoolExecutor(8) as pool:
        arrived = set(pool.map(bring, [memory / f"target{number}" for number in range(8)]))
    assert arrived == {(memory / "published" / WEIGHTS).read_bytes()}
    assert (server.counters()["stream_maps"], server.counters()["stream_chunks"]) == (1, 8 * 6)


def test_a_version_that_was_retired_before_is_refused_at_once(
    memory: Path, server: WeightServer, source: StreamSource
) -> None:
    entry = published(memory / "published", BIG)
    (memory / "published" / WEIGHTS).unlink()
    with pytest.raises(PolicyError, match=rf"version 7.*{server.address}.*{WEIGHTS} is not here \(any more\).*newer"):
        source.bring(notice_at(server.address), entry, memory / "target")


def test_a_retired_file_that_nobody_asks_for_is_let_go(memory: Path) -> None:
    published(memory, 1000)
    with WeightServer(memory, address=LOOPBACK, idle_s=0.05) as server, raw_client(server.address) as socket:
        ask(socket, WEIGHTS)
        (memory / WEIGHTS).unlink()
        wait_until(lambda: server.counters()["stream_open_files"] == 0)
        told = ask(socket, WEIGHTS)
    assert isinstance(told, Refusal)
    assert told.code == Refused.GONE


def test_what_is_published_anew_under_an_old_name_is_what_is_served(memory: Path, server: WeightServer) -> None:
    published(memory / "published", 1000, seed=1)
    with raw_client(server.address) as socket:
        before = ask(socket, WEIGHTS)
        published(memory / "new", 1000, seed=2)
        os.replace(memory / "new" / WEIGHTS, memory / "published" / WEIGHTS)
        assert ask(socket, WEIGHTS) != before
    assert server.counters()["stream_maps"] == 2


def test_a_file_cut_in_place_is_refused_and_does_not_kill_the_server(memory: Path, server: WeightServer) -> None:
    published(memory / "published", BIG)
    with raw_client(server.address) as socket:
        ask(socket, WEIGHTS)
        os.truncate(memory / "published" / WEIGHTS, 10)
        told = ask(socket, WEIGHTS, 3)
        assert isinstance(told, Refusal)
        assert (told.code, "cut from" in told.reason) == (Refused.UNREADABLE, True)
        published(memory / "published", 100)
        assert not isinstance(ask(socket, WEIGHTS), Refusal)


def test_open_files_are_bounded(memory: Path, server: WeightServer) -> None:
    with raw_client(server.address) as socket:
        for version in range(2 * MAX_MAPS):
            name = f"e001_v{version:06d}.safetensors"
            published(memory / "published", 10, name=name)
            ask(socket, name)
    assert server.counters()["stream_open_files"] == MAX_MAPS


def test_a_retired_file_that_somebody_is_in_the_middle_of_is_never_the_one_to_go(
    memory: Path, server: WeightServer
) -> None:
    with raw_client(server.address) as socket:
        for version in range(2 * MAX_MAPS):
            name = f"e001_v{version:06d}.safetensors"
            published(memory / "published", 10, name=name)
            assert not isinstance(ask(socket, name), Refusal)
            (memory / "published" / name).unlink()
        for version in range(2 * MAX_MAPS):
            assert not isinstance(ask(socket, f"e001_v{version:06d}.safetensors"), Refusal)


# ---- hostile clients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", ".", "", "secret.safetensors", "e001_v000007.safetensors.part", "sub/" + WEIGHTS],
)
def test_only_published_names_are_served(memory: Path, server: WeightServer, name: str) -> None:
    published(memory / "published", 10)
    published(memory / "published" / "sub", 10)
    (memory / "secret").write_text("secret")
    with raw_client(server.address) as socket:
        told = ask(socket, name)
    assert isinstance(told, Refusal)
    assert (told.code, told.name) == (Refused.GONE, name)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_regular_file_is_not_served_under_any_name(memory: Path, server: WeightServer, kind: str) -> None:
    (memory / "published").mkdir()
    (memory / "secret").write_text("secret")
    path = memory / "published" / WEIGHTS
    if kind == "link":
        path.symlink_to(memory / "secret")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with raw_client(server.address) as socket:
        told = ask(socket, WEIGHTS)
    assert isinstance(told, Refusal)
    assert told.code == Refused.UNREADABLE


@pytest.mark.parametrize(("index", "num_bytes"), [(6, BIG), (2**32 - 1, BIG), (0, 0)])
def test_a_chunk_behind_the_end_is_refused_with_the_length(
    memory: Path, server: WeightServer, index: int, num_bytes: int
) -> None:
    published(memory / "published", num_bytes)
    with raw_client(server.address) as socket:
        told = ask(socket, WEIGHTS, index)
    assert isinstance(told, Refusal)
    assert (told.code, told.index, str(num_bytes) in told.reason) == (Refused.BEYOND, index, True)


@settings(max_examples=10)
@given(st.lists(st.lists(st.binary(max_size=2 * MAX_REQUEST_BYTES), min_size=1, max_size=4), max_size=20))
def test_hostile_frames_change_nothing_for_others(messages: list[list[bytes]]) -> None:
    with memory_folder() as folder, WeightServer(folder, address=LOOPBACK) as server:
        entry = published(folder, CHUNK_BYTES + 1)
        with raw_client(server.address) as hostile:
            for frames in messages:
                hostile.send_multipart(frames, zmq.DONTWAIT)
            source = StreamSource(patience_s=DEADLINE_S)
            source.bring(notice_at(server.address), entry, folder / "target")
            source.close()
        counters = server.counters()
    assert counters["stream_refused"] <= len(messages)
    assert (counters["stream_chunks"], counters["stream_maps"]) == (2, 1)


def test_a_client_that_asks_and_does_not_read_is_answered_up_to_its_credit_only(
    memory: Path, server: WeightServer, source: StreamSource
) -> None:
    entry = published(memory / "published", 16 * CHUNK_BYTES)
    with raw_client(server.address, room=1) as greedy:
        for index in range(400):
            greedy.send_multipart(encode_request(ChunkRequest(name=WEIGHTS, index=index % 16)))
        wait_until(lambda: server.counters()["stream_dropped"] > 300)
        source.bring(notice_at(server.address), entry, memory / "target")
        assert server.counters()["stream_dropped"] + MAX_OUTSTANDING + 32 >= 400


# ---- lying servers ---------------------------------------------------------------------------------------------------


def test_a_corrupted_chunk_is_refused_and_never_written(memory: Path, source: StreamSource) -> None:
    entry = published(memory, BIG)
    data = (memory / WEIGHTS).read_bytes()
    lie = data[: 2 * CHUNK_BYTES + 7] + b"!" + data[2 * CHUNK_BYTES + 8 :]
    with (
        raw_server(lambda request: encode_answer(chunk_of(lie, request))) as address,
        pytest.raises(PolicyError, match=f"version 7.*{address}.*chunk 2 of 6 has sha256 .*the manifest says"),
    ):
        source.bring(notice_at(address), entry, memory / "target")
    assert not (memory / "target").exists()
    assert (memory / "target.part").read_bytes() == data[: 2 * CHUNK_BYTES]


def test_a_file_of_another_length_is_refused(memory: Path, source: StreamSource) -> None:
    entry = published(memory, BIG)
    longer = (memory / WEIGHTS).read_bytes() + b"x"
    with (
        raw_server(lambda request: encode_answer(chunk_of(longer, request))) as address,
        pytest.raises(PolicyError, match=f"has {BIG + 1} bytes there, the manifest says {BIG}"),
    ):
        source.bring(notice_at(address), entry, memory / "target")


def test_a_chunk_that_nobody_asked_for_is_refused(memory: Path, source: StreamSource) -> None:
    entry = published(memory, BIG)
    data = (memory / WEIGHTS).read_bytes()
    other = ChunkRequest(name=WEIGHTS, index=5)
    with (
        raw_server(lambda request: encode_answer(chunk_of(data, other))) as address,
        pytest.raises(PolicyError, match=r"chunk 5 of .* nobody asked for"),
    ):
        source.bring(notice_at(address), entry, memory / "target")


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_hostile_frames_are_a_policy_error(frames: list[bytes]) -> None:
    with memory_folder() as folder:
        entry = published(folder, 10)
        source = StreamSource(patience_s=DEADLINE_S)
        with (
            raw_server(lambda request: frames) as address,
            pytest.raises(PolicyError, match=f"{address} sent something"),
        ):
            source.bring(notice_at(address), entry, folder / "target")
        source.close()


def test_a_frame_longer_than_a_chunk_is_not_received(memory: Path) -> None:
    entry = published(memory, 10)
    source = StreamSource(patience_s=0.3)
    with (
        raw_server(lambda request: [b"x", bytes(2 * CHUNK_BYTES)]) as address,
        pytest.raises(PolicyError, match=r"sent nothing for 0\.3 s"),
    ):
        source.bring(notice_at(address), entry, memory / "target")
    source.close()


# ---- waiting and ending ----------------------------------------------------------------------------------------------


def test_silence_is_reported_with_the_address_the_chunks_and_the_cure(memory: Path) -> None:
    entry = published(memory, BIG)
    data = (memory / WEIGHTS).read_bytes()
    source = StreamSource(patience_s=2.0)

    def answer(request: ChunkRequest) -> list[Buffer] | None:
        return encode_answer(chunk_of(data, request)) if request.index < 2 else None

    with raw_server(answer) as address, pytest.raises(PolicyError) as caught:
        source.bring(notice_at(address), entry, memory / "target")
    source.close()
    for words in (address, "2 s", "2 chunks", str(2 * CHUNK_BYTES), "4 are missing (2, 3, 4, 5)", "check that"):
        assert words in str(caught.value)


def test_a_learner_that_is_not_there_is_silence(memory: Path) -> None:
    source = StreamSource(patience_s=0.2)
    with pytest.raises(PolicyError, match="sent nothing"):
        source.read_manifest(notice_at("tcp://127.0.0.1:1"))
    source.close()


@pytest.mark.parametrize(("address", "words"), [("", "publication.address"), ("nonsense", "cannot dial 'nonsense'")])
def test_an_address_that_is_none_is_refused(source: StreamSource, address: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        source.read_manifest(notice_at(address))


def test_closing_from_another_thread_ends_a_transfer_at_once(memory: Path) -> None:
    entry = published(memory, BIG)
    source, errors = StreamSource(), list[BaseException]()
    asked = threading.Event()

    def bring() -> None:
        try:
            source.bring(notice_at(address), entry, memory / "target")
        except PolicyError as error:
            errors.append(error)

    with raw_server(lambda request: asked.set()) as address:
        thread = threading.Thread(target=bring)
        thread.start()
        assert asked.wait(DEADLINE_S)
        begin_s = time.monotonic()
        source.close()
        thread.join()
        assert time.monotonic() - begin_s < 1.0
    assert "was ended" in str(errors[0])
    with pytest.raises(PolicyError, match="was ended"):
        source.read_manifest(notice_at(address))
    source.close()


def test_a_disk_that_refuses_is_a_policy_error(memory: Path, server: WeightServer, source: StreamSource) -> None:
    entry = published(memory / "published", 10)
    with pytest.raises(PolicyError, match=r"version 7.*cannot write .*No such file.*free space"):
        source.bring(notice_at(server.address), entry, memory / "missing" / "target")


def test_an_address_in_use_is_refused_with_the_cure(memory: Path, server: WeightServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at .*publication\.address"):
        WeightServer(memory, address=server.address)


def test_a_closed_server_gives_its_address_back_and_may_be_closed_again(memory: Path) -> None:
    first = WeightServer(memory, address=LOOPBACK)
    first.close()
    first.close()
    with WeightServer(memory, address=first.address) as second:
        assert second.address == first.address


def test_whoever_watches_learns_that_the_server_was_closed(memory: Path) -> None:
    async def watch_and_close() -> None:
        with WeightServer(memory, address=LOOPBACK) as server:
            async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
                group.create_task(server.watch())
                server.close()

    asyncio.run(watch_and_close())


def test_an_error_of_the_thread_comes_out_of_watch_and_of_close(memory: Path) -> None:
    published(memory, 10)
    server = WeightServer(memory, address=LOOPBACK, idle_s=math.nan)  # no time to sleep once a file is open

    async def watch() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await server.watch()

    with raw_client(server.address) as socket:
        socket.send_multipart(encode_request(ChunkRequest(name=WEIGHTS, index=0)))
        with pytest.raises(ValueError, match="NaN"):
            asyncio.run(watch())
        with pytest.raises(ValueError, match="NaN"):
            server.close()


def test_entries_of_no_bytes_need_no_server(memory: Path, source: StreamSource) -> None:
    entry = FileEntry(name=WEIGHTS, num_bytes=0, chunk_digests=())
    source.bring(notice_at(""), entry, memory / "target")
    assert (memory / "target").read_bytes() == b""
