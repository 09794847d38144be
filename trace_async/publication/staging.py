"""The actor's end of a published version: brought into a folder of its own, verified, and only then handed on.

Owns the choice of the source, anew for every fetch: the published files where this machine sees them, else the weight
server. Invariants
    - What `fetch` returns has the digests that the notice announces, through the manifest; anything else raises.
    - The weights of the last fetch lie in the folder until the next fetch, whatever the learner retires.
    - One thread at a time fetches; it ends with `fetch`, however that ends, because closing the source ends it.

A process that was killed leaves its folder to the next one of the same actor, and with it the chunks that were brought;
nothing in it is believed that has not the right digest. Never: torch, an engine, or an opinion about when to fetch.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self
from urllib.parse import urlsplit

from trace_async.core.types import Json, VersionNotice
from trace_async.errors import PolicyError
from trace_async.publication.header import read_header
from trace_async.publication.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    FileEntry,
    Manifest,
    base_name,
    bytes_digest,
    describe_file,
    from_bytes,
    notice_names,
)
from trace_async.publication.staging_folder import StagingFolder

_EVERY_INTERFACE = ("0.0.0.0", "::", "*")


class Source(Protocol):
    """Where the files of a version come from; blocking, used by one thread, except `close`."""

    def read_manifest(self, notice: VersionNotice) -> bytes:
        """The manifest's bytes, not verified. Raises PolicyError when they cannot be had."""
        ...

    def bring(self, notice: VersionNotice, entry: FileEntry, target: Path) -> None:
        """Make `target` hold the file's bytes; what an earlier attempt left as `target` or beside it may be used.

        Names beside it start with `target.name`. Raises PolicyError when the bytes cannot be had, and soon after
        `close`. The caller verifies the digest.
        """
        ...

    def close(self) -> None:
        """End what is under way, from any thread, at any time, more than once."""
        ...


class FetchedVersion(NamedTuple):
    """What a notice announced, verified."""

    manifest: Manifest
    weights: Path  # stays until the next fetch
    predictor: Json


class Stager:
    """Fetches versions for one actor; a context manager."""

    def __init__(self, folder: StagingFolder, *, make_stream: Callable[[], Source], dialled: str = "") -> None:
        """`make_stream` makes a client of weight servers; `dialled`: the address at which the learner was reached."""
        self._folder = folder
        self._make_stream = make_stream
        self._dialled = dialled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fetch")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()

    async def fetch(self, notice: VersionNotice) -> FetchedVersion:
        """The announced version; waits for the thread. Cancelling it closes the source and waits until the thread ends.

        Raises PolicyError when it cannot be had from anywhere.
        """
        fetch = _Fetch(_dialable(notice, self._dialled), folder=self._folder, make_stream=self._make_stream)
        work = asyncio.get_running_loop().run_in_executor(self._thread, fetch.run)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            fetch.close()
            await asyncio.wait([work])
            work.exception()  # of what was given up, so nobody misses it
            raise


class _Fetch:
    """One attempt at one version; `run` in a thread, `close` from anywhere."""

    def __init__(self, notice: VersionNotice, *, folder: StagingFolder, make_stream: Callable[[], Source]) -> None:
        self._notice = notice
        self._folder = folder
        self._make_stream = make_stream
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._closed = False

    def run(self) -> FetchedVersion:
        notice = self._notice
        reasons = []
        for make in (FileSource, self._make_stream) if notice.address else (FileSource,):
            try:
                with closing(self._open(make)) as source:
                    return self._fetch(source)
            except (PolicyError, OSError) as error:
                reasons.append(str(error))
            self._check_open()
        files, stream = (*reasons, "none runs (publication.address)")[:2]
        raise PolicyError(
            f"version {notice.version} of epoch {notice.epoch} cannot be had. From files: {files}. From the weight "
            f"server: {stream}. Let this machine see {notice.directory} under the same path, or let it reach the "
            "weight server"
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._source is not None:
                self._source.close()

    def _open(self, make: Callable[[], Source]) -> Source:
        with self._lock:
            self._source = make()
            if self._closed:
                self._source.close()
            return self._source

    def _fetch(self, source: Source) -> FetchedVersion:
        notice = self._notice
        data = source.read_manifest(notice)
        self._check("the manifest", found=bytes_digest(data), announced=notice.manifest_digest)
        manifest = from_bytes(data)
        if (manifest.epoch, manifest.version) != (notice.epoch, notice.version):
            raise PolicyError(f"the manifest is of version {manifest.version} of epoch {manifest.epoch}")
        self._folder.keep_only(base_name(version=notice.version, epoch=notice.epoch) + ".")
        predictor = self._bring(source, manifest.predictor)
        weights = self._bring(source, manifest.weights)
        if read_header(weights) != manifest.tensors:
            raise PolicyError(f"{manifest.weights.name} has other tensors than its manifest says")
        return FetchedVersion(manifest, weights, _read_predictor(predictor))

    def _bring(self, source: Source, entry: FileEntry) -> Path:
        """The file, whole; taken as it lies there when an earlier attempt had it whole."""
        target = self._folder.path / entry.name
        if not self._is_whole(target, entry):
            source.bring(self._notice, entry, target)
            if not self._is_whole(target, entry):
                target.unlink(missing_ok=True)
                raise PolicyError(f"{entry.name} is not what its manifest says: it is damaged, or of another run")
        return target

    def _is_whole(self, path: Path, entry: FileEntry) -> bool:
        if not path.is_file() or path.stat().st_size != entry.num_bytes:
            return False
        return describe_file(path, name=entry.name, on_chunk=self._check_open) == entry

    def _check(self, what: str, *, found: str, announced: str) -> None:
        if found != announced:
            raise PolicyError(
                f"{what} has sha256 {found[:12]}…, the learner announced {announced[:12]}…: it is damaged, or of "
                "another run"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise PolicyError(f"fetching version {self._notice.version} of epoch {self._notice.epoch} was given up")


class FileSource:
    """The published files themselves, where this machine sees them under the same path."""

    def __init__(self) -> None:
        self._closed = False

    def read_manifest(self, notice: VersionNotice) -> bytes:
        """The manifest's bytes, at most MAX_MANIFEST_BYTES + 1 of them."""
        path = Path(notice.directory) / notice_names(notice).manifest
        try:
            with path.open("rb") as file:
                return file.read(MAX_MANIFEST_BYTES + 1)
        except OSError as error:
            raise PolicyError(f"cannot read {path}: {error.strerror}") from error

    def bring(self, notice: VersionNotice, entry: FileEntry, target: Path) -> None:
        """A hard link, so that nothing is copied and the file may be retired; a copy where links cannot be."""
        published = Path(notice.directory) / entry.name
        target.unlink(missing_ok=True)
        try:
            try:
                os.link(published, target)
            except OSError:  # it lies on another file system, or on one without links
                self._copy(published, target)
        except OSError as error:
            raise PolicyError(f"cannot bring {published} to {target}: {error.strerror}") from error

    def close(self) -> None:
        """A copy under way ends after its chunk."""
        self._closed = True

    def _copy(self, published: Path, target: Path) -> None:
        with published.open("rb") as source, target.open("wb") as copy:
            while chunk := source.read(CHUNK_BYTES):
                copy.write(chunk)
                if self._closed:
                    raise PolicyError(f"the copy of {published} was given up")


def _read_predictor(path: Path) -> Json:
    told = json.loads(path.read_bytes())  # verified: the learner's own writing
    assert isinstance(told, dict)
    return told


def _dialable(notice: VersionNotice, dialled: str) -> VersionNotice:
    """The notice, with the host at which the learner was reached where its server listens on every interface."""
    url, learner = urlsplit(notice.address), urlsplit(dialled)
    if url.hostname not in _EVERY_INTERFACE or not learner.hostname:
        return notice
    return replace(notice, address=f"tcp://{learner.netloc.rpartition(':')[0]}:{url.port}")
