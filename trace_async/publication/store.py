"""The learner's end of a published version: three files, written so that nobody ever loads half of one.

Owns the publication folder, by a lock: one publisher at a time. Invariants
    - Every file is written aside, brought to the disk, and renamed; the manifest last, when the others are there to
      stay. So whatever the moment at which the publisher dies, a manifest that exists is whole and so is its version.
    - A version that is retired loses its manifest first. The newest version is never retired.
    - What a dead publisher left half done is deleted when the folder is opened, and nothing that is not a version's
      file is ever touched.

Blocking; used by one thread at a time. Never: torch, sockets, or an opinion about who still needs a version.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Self

from trace_async.core.types import Adapter, Canary, Json, VersionNotice
from trace_async.disk import sync
from trace_async.errors import ConfigError
from trace_async.publication.header import read_header
from trace_async.publication.manifest import (
    FileEntry,
    Manifest,
    base_name,
    base_of,
    bytes_digest,
    describe_file,
    names_of,
    to_bytes,
)

ASIDE = ".part"
"""Ends the name of a file that is not whole yet."""

_LOCK = ".publisher"
_FOREIGN = -1


class Published(NamedTuple):
    """A version that can be fetched from now on."""

    notice: VersionNotice
    num_bytes: int  # of its three files


class _Kept(NamedTuple):
    """A complete version on disk."""

    base: str
    version: int  # _FOREIGN: of an earlier publisher


class VersionStore:
    """One publisher's folder, for the versions of one epoch; a context manager that holds the folder's lock."""

    def __init__(self, directory: Path, *, address: str = "") -> None:
        """`address`: where a weight server offers these files, told in every notice; "" for nowhere.

        Raises ConfigError when another publisher works in the folder, or when it cannot be written.
        """
        self._address = address
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._directory = directory.resolve()
            self._lock = _lock(self._directory)
        except OSError as error:
            raise ConfigError(f"cannot publish versions in {directory}: {error.strerror}") from error
        self._kept: list[_Kept] = []  # oldest first
        self._clean_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._lock)

    @property
    def num_versions(self) -> int:
        """Complete versions on disk."""
        return len(self._kept)

    def publish(
        self,
        *,
        version: int,
        epoch: int,
        write: Callable[[Path], None],
        predictor: Json,
        canary: Canary,
        adapter: Adapter | None,
    ) -> Published:
        """Write one version; `write` must write a safetensors file at the path it is given.

        Raises whatever `write` raises, and OSError; there is no such version then.
        """
        base = base_name(version=version, epoch=epoch)
        names = names_of(base)
        self._delete(base)  # of another run that used this folder
        told = json.dumps(predictor, allow_nan=False).encode()
        manifest = Manifest(
            version=version,
            epoch=epoch,
            weights=self._put(names.weights, write),
            predictor=self._put(names.predictor, lambda path: _write(path, told)),
            tensors=read_header(self._directory / names.weights),
            canary=canary,
            adapter=adapter,
        )
        data = to_bytes(manifest)
        sync(self._directory)  # after a power cut the manifest must not be there without the others
        self._put(names.manifest, lambda path: _write(path, data))
        sync(self._directory)
        self._kept.append(_Kept(base, version))
        return Published(
            VersionNotice(
                version=version,
                epoch=epoch,
                manifest_digest=bytes_digest(data),
                directory=str(self._directory),
                address=self._address,
            ),
            manifest.weights.num_bytes + manifest.predictor.num_bytes + len(data),
        )

    def retire(self, *, keep: int, needed_since: int) -> None:
        """Delete what is older than version `needed_since`, and all but the `keep` newest; the newest stays.

        With `needed_since` -1 somebody may still need a version of an earlier publisher. `keep` must be at least 1.
        """
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        surplus = len(self._kept) - keep
        for index, (base, version) in enumerate(self._kept[:-1]):
            if index < surplus or version < needed_since:
                self._delete(base)

    def clear(self) -> None:
        """Delete every version: nobody is left who could need one."""
        for base, _ in self._kept:
            self._delete(base)

    # ---- files ---------------------------------------------------------------------------------------------------

    def _put(self, name: str, write: Callable[[Path], None]) -> FileEntry:
        """One file, whole or not at all; hashed while the disk takes it."""
        aside = self._directory / (name + ASIDE)
        try:
            write(aside)
            with ThreadPoolExecutor(1, thread_name_prefix="sync") as disk:
                synced = disk.submit(sync, aside)
                entry = describe_file(aside, name=name)
                synced.result()
            os.replace(aside, self._directory / name)
        finally:
            aside.unlink(missing_ok=True)
        return entry

    def _delete(self, base: str) -> None:
        self._kept = [kept for kept in self._kept if kept.base != base]
        for name in reversed(names_of(base)):  # the manifest first
            (self._directory / name).unlink(missing_ok=True)

    def _clean_up(self) -> None:
        """Delete what is no whole version, take note of those that are."""
        found = {path.name for path in self._directory.iterdir()}
        for name in found:
            if name.endswith(ASIDE) and base_of(name.removesuffix(ASIDE)) is not None:
                (self._directory / name).unlink(missing_ok=True)
        for base in sorted({base for name in found if (base := base_of(name)) is not None}):
            if found.issuperset(names_of(base)):
                self._kept.append(_Kept(base, _FOREIGN))
            else:
                self._delete(base)


def _lock(directory: Path) -> int:
    """The descriptor that holds the folder; the kernel lets go of it when the process ends, however it ends."""
    descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(
            f"{directory} is in use by another run that publishes there; stop it, or set publication.directory to "
            "another folder"
        ) from error
    return descriptor


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
