"""Both ends of a policy version as files: the learner publishes, actors fetch and verify.

Invariants
    - A weight file appears under its final name only when it is complete (written aside, synced, renamed).
    - A notice carries the digest of exactly the bytes that were written; `fetch` returns no bytes whose digest
      differs. Whoever has fetched needs the file no more: it may be retired at any moment.
    - A file that a notice still in force points to is never retired.

Never: torch, sockets, or an opinion about what is inside the file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from trace_async.core.types import Json, VersionNotice
from trace_async.errors import PolicyError

_CHUNK_BYTES = 1 << 20


def publish(
    directory: Path, *, version: int, epoch: int, write: Callable[[Path], None], predictor: Json
) -> VersionNotice:
    """Write one version's weights into `directory` and return the notice that announces them.

    `write` must write a safetensors file at the path it is given. Raises whatever `write` raises; then nothing is left.
    """
    directory.mkdir(parents=True, exist_ok=True)
    final = directory / f"e{epoch:03d}_v{version:06d}.safetensors"
    aside = final.with_suffix(f".{os.getpid()}.tmp")
    try:
        write(aside)
        digest = file_digest(aside)
        # Actors read through the page cache of this host or a shared file system; the rename is what makes it whole.
        os.replace(aside, final)
    finally:
        aside.unlink(missing_ok=True)
    return VersionNotice(version=version, epoch=epoch, weights=str(final.resolve()), digest=digest, predictor=predictor)


def fetch(notice: VersionNotice) -> bytes:
    """The announced weights: exactly the bytes that the learner wrote.

    Raises PolicyError when the file is missing or its digest differs.
    """
    path = Path(notice.weights)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PolicyError(
            f"version {notice.version} (epoch {notice.epoch}): cannot read {path}: {error.strerror}; "
            "the run folder must be reachable from every actor under the same path"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != notice.digest:
        raise PolicyError(
            f"version {notice.version} (epoch {notice.epoch}): {path} has sha256 {found[:12]}…, "
            f"the learner announced {notice.digest[:12]}…; the file is damaged or belongs to another run"
        )
    return data


def retire(directory: Path, *, keep: int) -> list[Path]:
    """Delete all but the `keep` newest published files; returns what was deleted. `keep` must be at least 1."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    files = sorted(directory.glob("e*_v*.safetensors"))
    doomed = files[:-keep]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def file_digest(path: Path) -> str:
    """Hex sha256 of a file, read in bounded pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
