"""The actor's end: verified or refused, whatever lies about, and nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.publication.version_kit import listing, memory_folder, publish, weights_bytes
from trace_async.core.types import VersionNotice
from trace_async.errors import ConfigError, PolicyError
from trace_async.publication.manifest import FileEntry, bytes_digest, describe_file, from_bytes, notice_names, to_bytes
from trace_async.publication.staging import FetchedVersion, FileSource, Source, Stager
from trace_async.publication.staging_folder import StagingFolder
from trace_async.publication.store import VersionStore

REPO = Path(__file__).parents[2]


class Stream:
    """A weight server's client in memory: hands out the files of a folder, or what the test makes of them."""

    def __init__(self, published: Path) -> None:
        self.published = published
        self.calls: list[str] = []
        self.addresses: list[str] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda name, data: data
        self.hangs = False
        self.hanging = threading.Event()
        self.closed = threading.Event()

    def read_manifest(self, notice: VersionNotice) -> bytes:
        self.addresses.append(notice.address)
        return self._read(notice_names(notice).manifest)

    def bring(self, notice: VersionNotice, entry: FileEntry, target: Path) -> None:
        if self.hangs:
            self.hanging.set()
            assert self.closed.wait(20)
            raise PolicyError("closed")
        target.write_bytes(self._read(entry.name))

    def close(self) -> None:
        self.closed.set()

    def _read(self, name: str) -> bytes:
        self.calls.append(name)
        try:
            return self.spoil(name, (self.published / name).read_bytes())
        except OSError as error:
            raise PolicyError(f"the server has no {name}") from error


def a_stream_and_files_are_sources(published: Path) -> list[Source]:
    """For the type checker."""
    return [Stream(published), FileSource()]


class Scene:
    """A publisher, an actor, and a server in between."""

    def __init__(self, root: Path, store: VersionStore, stager: Stager, stream: Stream) -> None:
        self.published, self.staged = root / "published", next((root / "staging").iterdir())
        self.store, self.stager, self.stream = store, stager, stream

    def fetch(self, notice: VersionNotice) -> FetchedVersion:
        return asyncio.run(self.stager.fetch(notice))


@contextmanager
def scene(root: Path, *, address: str = "tcp://10.0.0.7:5", dialled: str = "") -> Iterator[Scene]:
    stream = Stream(root / "published")
    with (
        VersionStore(root / "published", address=address) as store,
        StagingFolder("actor-7", root=root / "staging") as folder,
        Stager(folder, make_stream=lambda: stream, dialled=dialled) as stager,
    ):
        yield Scene(root, store, stager, stream)


# ---- where it comes from -------------------------------------------------------------------------------------------


def test_files_that_can_be_seen_are_linked_and_outlive_their_retirement(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = publish(it.store, 3).notice
        manifest, weights, predictor = it.fetch(notice)
        assert (manifest.version, predictor, weights.parent) == (3, {"of": 3}, it.staged)
        assert weights.stat().st_ino == (it.published / weights.name).stat().st_ino
        publish(it.store, 4)
        it.store.retire(keep=1, needed_since=4)
        assert weights.read_bytes() == weights_bytes(3)
        assert it.stream.calls == []


def test_the_next_version_takes_the_place_of_the_last(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        for version in (3, 4):
            weights = it.fetch(publish(it.store, version).notice).weights
            assert weights.read_bytes() == weights_bytes(version)
        assert listing(it.staged) == ["e001_v000004.predictor.json", "e001_v000004.safetensors"]


def test_where_links_cannot_be_the_file_is_copied(tmp_path: Path) -> None:
    with memory_folder() as memory, scene(tmp_path) as it:
        if memory.stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("this machine has no second file system")
        with VersionStore(memory) as store:
            notice = publish(store, 3).notice
            weights = it.fetch(notice).weights
        assert weights.read_bytes() == weights_bytes(3)
        assert weights.stat().st_dev != memory.stat().st_dev


def test_without_files_the_weight_server_is_asked(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = replace(publish(it.store, 3).notice, directory="/nowhere")
        assert it.fetch(notice).weights.read_bytes() == weights_bytes(3)
        assert it.stream.calls == [notice_names(notice)[index] for index in (2, 1, 0)]


def test_files_of_another_run_under_the_same_path_are_passed_over_for_the_server(tmp_path: Path) -> None:
    with scene(tmp_path) as it, VersionStore(tmp_path / "other") as other:
        publish(other, 3, floats=9)
        notice = replace(publish(it.store, 3).notice, directory=str(tmp_path / "other"))
        assert it.fetch(notice).weights.read_bytes() == weights_bytes(3)
        assert it.stream.calls


def test_what_was_brought_whole_before_is_not_brought_again(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = replace(publish(it.store, 3).notice, directory="/nowhere")
        it.fetch(notice)
        it.stream.calls.clear()
        assert it.fetch(notice).weights.read_bytes() == weights_bytes(3)
        assert it.stream.calls == [notice_names(notice).manifest]


@pytest.mark.parametrize(
    ("listens", "dialled", "asked"),
    [
        ("tcp://0.0.0.0:5", "tcp://learner.example:77", "tcp://learner.example:5"),
        ("tcp://[::]:5", "tcp://[2001:db8::7]:77", "tcp://[2001:db8::7]:5"),
        ("tcp://*:5", "tcp://10.1.2.3:77", "tcp://10.1.2.3:5"),
        ("tcp://10.0.0.7:5", "tcp://10.1.2.3:77", "tcp://10.0.0.7:5"),
        ("tcp://0.0.0.0:5", "ipc:///tmp/road", "tcp://0.0.0.0:5"),
    ],
)
def test_a_server_on_every_interface_is_reached_where_the_learner_was(
    tmp_path: Path, listens: str, dialled: str, asked: str
) -> None:
    with scene(tmp_path, address=listens, dialled=dialled) as it:
        it.fetch(replace(publish(it.store, 3).notice, directory="/nowhere"))
        assert it.stream.addresses == [asked]


def test_a_version_that_is_nowhere_names_both_ways_and_the_cure(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = publish(it.store, 3).notice
        (it.published / notice_names(notice).manifest).unlink()
        with pytest.raises(
            PolicyError, match=r"version 3 of epoch 1 .*From files: cannot read .*the server has no .*let"
        ):
            it.fetch(notice)
        with pytest.raises(PolicyError, match=r"From the weight server: none runs \(publication.address\)"):
            it.fetch(replace(notice, address=""))


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["safetensors", "predictor.json", "manifest.json"])
def test_a_file_cut_off_after_any_byte_or_changed_in_one_is_refused(kind: str) -> None:
    with memory_folder() as root, scene(root, address="") as it:
        notice = publish(it.store, 3).notice
        path = it.published / f"e001_v000003.{kind}"
        whole = path.read_bytes()
        cuts = [whole[:length] for length in range(len(whole))]
        for data in [*cuts, *(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in range(0, len(whole), 7))]:
            path.write_bytes(data)
            with pytest.raises(PolicyError, match="version 3 of epoch 1 cannot be had"):
                it.fetch(notice)
        path.write_bytes(whole)
        assert it.fetch(notice).weights.read_bytes() == weights_bytes(3)


def test_a_server_that_sends_other_bytes_is_not_believed_and_what_it_sent_is_gone(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = replace(publish(it.store, 3).notice, directory="/nowhere")
        it.stream.spoil = lambda name, data: weights_bytes(4) if name.endswith(".safetensors") else data
        with pytest.raises(PolicyError, match=r"e001_v000003.safetensors is not what its manifest says"):
            it.fetch(notice)
        assert listing(it.staged) == ["e001_v000003.predictor.json"]


def test_a_manifest_that_is_of_another_version_or_lies_about_its_tensors_is_refused(tmp_path: Path) -> None:
    with scene(tmp_path, address="") as it:
        notice = publish(it.store, 3).notice
        path = it.published / notice_names(notice).manifest
        honest = from_bytes(path.read_bytes())
        other = publish(it.store, 4).notice
        lie = to_bytes(replace(honest, tensors=()))
        path.write_bytes(lie)
        with pytest.raises(PolicyError, match="has other tensors than its manifest says"):
            it.fetch(replace(notice, manifest_digest=bytes_digest(lie)))
        stranger = (it.published / notice_names(other).manifest).read_bytes()
        path.write_bytes(stranger)
        with pytest.raises(PolicyError, match="the manifest is of version 4 of epoch 1"):
            it.fetch(replace(notice, manifest_digest=other.manifest_digest))


# ---- giving up -----------------------------------------------------------------------------------------------------


def test_a_fetch_that_is_cancelled_ends_its_thread_first_and_the_next_one_works(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = replace(publish(it.store, 3).notice, directory="/nowhere")

        async def main() -> FetchedVersion:
            it.stream.hangs = True
            fetching = asyncio.ensure_future(it.stager.fetch(notice))
            await asyncio.to_thread(it.stream.hanging.wait, 20)
            fetching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetching
            assert it.stream.closed.is_set()
            it.stream.hangs = False
            return await it.stager.fetch(notice)

        assert asyncio.run(main()).weights.read_bytes() == weights_bytes(3)


def test_a_deadline_ends_a_fetch_as_a_cancellation_does(tmp_path: Path) -> None:
    with scene(tmp_path) as it:
        notice = replace(publish(it.store, 3).notice, directory="/nowhere")
        it.stream.hangs = True

        async def main() -> None:
            async with asyncio.timeout(0.05):
                await it.stager.fetch(notice)

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        assert it.stream.closed.is_set()


def test_verifying_and_copying_end_when_they_are_given_up(tmp_path: Path) -> None:
    source = FileSource()
    source.close()
    with memory_folder() as memory, VersionStore(memory) as store:
        notice = publish(store, 3).notice
        entry = from_bytes((memory / notice_names(notice).manifest).read_bytes()).weights
        if memory.stat().st_dev != tmp_path.stat().st_dev:
            with pytest.raises(PolicyError, match="was given up"):
                source.bring(notice, entry, tmp_path / entry.name)

        def stop() -> None:
            raise PolicyError("given up")

        with pytest.raises(PolicyError, match="given up"):
            describe_file(memory / entry.name, name=entry.name, on_chunk=stop)


# ---- the folder ----------------------------------------------------------------------------------------------------


def test_two_living_actors_of_one_name_have_a_folder_each_and_leave_none(tmp_path: Path) -> None:
    with StagingFolder("a/../b", root=tmp_path) as one, StagingFolder("a/../b", root=tmp_path) as two:
        assert one.path != two.path
        assert {one.path.parent, two.path.parent} == {tmp_path}
    assert list(tmp_path.iterdir()) == []


def test_a_killed_actors_folder_goes_to_its_successor_and_others_are_swept(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trace_async.publication.staging_folder import StagingFolder\n"
        "for name in sys.argv[2:]:\n"
        "    folder = StagingFolder(name, root=Path(sys.argv[1]))\n"
        "    (folder.path / 'e001_v000003.safetensors.part').write_bytes(name.encode())\n"
        "    print(folder.path, flush=True); globals()[name] = folder\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), "mine", "others"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=REPO, stdin=pipe, stdout=pipe) as dead:
        assert dead.stdout is not None
        paths = [Path(dead.stdout.readline().decode().strip()) for _ in range(2)]
        with StagingFolder("mine", root=tmp_path) as beside:
            assert beside.path not in paths
        assert all(path.is_dir() for path in paths)  # it lives
        os.kill(dead.pid, signal.SIGKILL)
    with StagingFolder("mine", root=tmp_path) as heir:
        assert heir.path == paths[0]
        assert (heir.path / "e001_v000003.safetensors.part").read_bytes() == b"mine"
        assert not paths[1].exists()
        heir.keep_only("e001_v000004.")
        assert listing(heir.path) == []


def test_a_staging_root_that_somebody_else_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        StagingFolder("a", root=tmp_path / "root")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="set TMPDIR to another folder"):
        StagingFolder("a", root=tmp_path / "file" / "root")
