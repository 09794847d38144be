"""One actor's folder for what it fetches: its own while it lives, found again by its successor, deleted when nobody is.

Invariants: a folder belongs to the process that holds the lock in it, and the kernel lets go of that lock however the
process ends; only folders whose lock is free are deleted; nobody else's files are touched. Blocking, for a moment.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from trace_async.errors import ConfigError
from trace_async.publication.manifest import bytes_digest

_LOCK = ".lock"
_MAX_NAMESAKES = 64  # actors of one id on one machine, of as many runs
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


class StagingFolder:
    """A context manager: the lock is taken when it is made, the folder deleted at its end."""

    def __init__(self, actor_id: str, *, root: Path | None = None) -> None:
        """`root` holds the folders of this user's actors; None: one under the temporary directory.

        Takes over what a dead process of the same actor left, deletes what other dead processes left. Raises
        ConfigError when there is no room for a folder.
        """
        try:
            root = _private(Path(tempfile.gettempdir()) / f"trace-async-{os.getuid()}" if root is None else root)
            self.path, self._lock = next(_free(root, _folder_name(actor_id)))
            for other in root.iterdir():
                _sweep(other)
        except OSError as error:
            raise ConfigError(f"cannot stage versions under {root}: {error}; set TMPDIR to another folder") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def keep_only(self, prefix: str) -> None:
        """Delete every file in it whose name does not start so."""
        self.path.mkdir(exist_ok=True)  # whoever tidies temporary directories may have been here
        for path in self.path.iterdir():
            if path.name != _LOCK and not path.name.startswith(prefix):
                path.unlink(missing_ok=True)


def _private(root: Path) -> Path:
    """A folder that only this user can look into. Raises ConfigError when somebody else made it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(f"{root} belongs to somebody else; remove it, or set TMPDIR to a folder of your own")
    return root


def _folder_name(actor_id: str) -> str:
    return f"{_UNSAFE.sub('_', actor_id)[:40]}-{bytes_digest(actor_id.encode())[:8]}"


def _free(root: Path, name: str) -> Iterator[tuple[Path, int]]:
    """Folders of that name that no living process has, locked; more than one when two runs name an actor alike."""
    for number in range(_MAX_NAMESAKES):
        path = root / f"{name}.{number}"
        path.mkdir(mode=0o700, exist_ok=True)
        if (lock := _try_lock(path)) is not None:
            yield path, lock
    raise OSError(f"none of {_MAX_NAMESAKES} folders {name}.N can be locked; its file system may have no locks")


def _sweep(path: Path) -> None:
    if (lock := _try_lock(path)) is not None:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _try_lock(path: Path) -> int | None:
    """The descriptor that holds the folder; None when another one does, or when it is gone."""
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # whoever had it may have deleted the folder; then this is the lock of nothing
        if os.fstat(lock).st_ino == (path / _LOCK).stat().st_ino:
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
