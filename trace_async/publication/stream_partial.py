"""A file that arrives in chunks: which of them are here and right, on disk, after whatever happened before.

Owns one open partial file. Invariants: a chunk is written only when its digest is the entry's; whatever was in the
file before counts only where its digest is; the target appears when the last chunk is right, with the entry's length;
no file that has another name as well (a published one) is written to. Never: sockets, or what the bytes mean.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from trace_async.errors import WireError
from trace_async.publication.manifest import CHUNK_BYTES, FileEntry
from trace_async.publication.stream_wire import ChunkAnswer


class PartialFile:
    """`target` while it is being made, as TARGET.part; a context manager, whose methods raise OSError.

    Left without an error, it becomes `target`; else it stays, for the next attempt.
    """

    def __init__(self, target: Path, entry: FileEntry) -> None:
        """Opened, and made if need be, when entered."""
        self._target = target
        self._path = target.with_name(target.name + ".part")
        self._entry = entry
        self._descriptor = -1

    def __enter__(self) -> PartialFile:
        if not os.path.lexists(self._path) and os.path.lexists(self._target):
            os.replace(self._target, self._path)  # a copy that was given up, perhaps
        if os.path.lexists(self._path) and not _is_own(self._path):
            os.unlink(self._path)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                os.ftruncate(self._descriptor, self._entry.num_bytes)
        finally:
            os.close(self._descriptor)
        if kind is None:
            os.replace(self._path, self._target)

    def missing(self, *, check: Callable[[], None]) -> list[int]:
        """Numbers of the chunks that are not here or not right; `check` is called before each and may raise."""
        here_bytes = os.fstat(self._descriptor).st_size
        missing = []
        for index in range(len(self._entry.chunk_digests)):
            check()
            if index * CHUNK_BYTES >= here_bytes or not self._is_right(index):
                missing.append(index)
        return missing

    def take(self, answer: ChunkAnswer) -> None:
        """Write one chunk. Raises WireError when it is not the entry's."""
        entry, index = self._entry, answer.index
        if answer.file_bytes != entry.num_bytes:
            raise WireError(f"the file has {answer.file_bytes} bytes there, the manifest says {entry.num_bytes}")
        found = hashlib.sha256(answer.data).hexdigest()
        if found != entry.chunk_digests[index]:
            raise WireError(
                f"chunk {index} of {len(entry.chunk_digests)} has sha256 {found[:12]}…, the manifest says "
                f"{entry.chunk_digests[index][:12]}…"
            )
        _write_all(self._descriptor, memoryview(answer.data), index * CHUNK_BYTES)

    def _is_right(self, index: int) -> bool:
        length = min(CHUNK_BYTES, self._entry.num_bytes - index * CHUNK_BYTES)
        found = os.pread(self._descriptor, length, index * CHUNK_BYTES)
        return hashlib.sha256(found).hexdigest() == self._entry.chunk_digests[index]


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _is_own(path: Path) -> bool:
    """Whether writing to it changes no other file: it is no link, and nobody else's name for the same bytes."""
    found = os.lstat(path)
    return stat.S_ISREG(found.st_mode) and found.st_nlink == 1
