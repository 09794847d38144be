"""Both ends of a policy version as files: the learner publishes, actors fetch and verify.

A version is two files of one name: the policy's weights (safetensors) and the predictor's parameters (JSON).

Invariants
    - A file appears under its final name only when it is complete (written aside, renamed).
    - A notice carries the digests of exactly the bytes that were written; `fetch` returns no bytes whose digest
      differs. Whoever has fetched needs the files no more: they may be retired at any moment.
    - A file that a notice still in force points to is never retired.

Never: torch, sockets, or an opinion about what is inside the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trace_async.core.types import Json, VersionNotice
from trace_async.errors import PolicyError

_CHUNK_BYTES = 1 << 20
_WEIGHTS, _PREDICTOR = ".safetensors", ".predictor.json"


class FetchedVersion(NamedTuple):
    """What a notice announced."""

    weights: bytes  # exactly the bytes that the learner wrote
    predictor: Json


def publish(
    directory: Path, *, version: int, epoch: int, write: Callable[[Path], None], predictor: Json
) -> VersionNotice:
    """Write one version's weights and predictor into `directory` and return the notice that announces them.

    `write` must write a safetensors file at the path it is given. Raises whatever `write` raises, and there is no
    notice then.
    """

    def write_predictor(path: Path) -> None:
        path.write_text(json.dumps(predictor, allow_nan=False), encoding="utf-8")

    directory.mkdir(parents=True, exist_ok=True)
    name = f"e{epoch:03d}_v{version:06d}"
    weights, digest = _write_whole(directory / (name + _WEIGHTS), write)
    told, told_digest = _write_whole(directory / (name + _PREDICTOR), write_predictor)
    return VersionNotice(
        version=version, epoch=epoch, weights=weights, digest=digest, predictor=told, predictor_digest=told_digest
    )


def fetch(notice: VersionNotice) -> FetchedVersion:
    """The announced version, verified. Raises PolicyError when a file is missing or its digest differs."""
    weights = _read_verified(notice, notice.weights, notice.digest)
    return FetchedVersion(weights, _parsed(_read_verified(notice, notice.predictor, notice.predictor_digest)))


def retire(directory: Path, *, keep: int) -> list[Path]:
    """Delete all but the `keep` newest versions; returns what was deleted. `keep` must be at least 1."""
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    doomed = [path for kind in (_WEIGHTS, _PREDICTOR) for path in sorted(directory.glob(f"e*_v*{kind}"))[:-keep]]
    for path in doomed:
        path.unlink(missing_ok=True)
    return doomed


def _write_whole(final: Path, write: Callable[[Path], None]) -> tuple[str, str]:
    """The absolute path and the digest of what `write` wrote."""
    aside = final.with_name(f"{final.name}.{os.getpid()}.tmp")
    try:
        write(aside)
        digest = file_digest(aside)
        # Actors read through the page cache of this host or a shared file system; the rename is what makes it whole.
        os.replace(aside, final)
    finally:
        aside.unlink(missing_ok=True)
    return str(final.resolve()), digest


def _read_verified(notice: VersionNotice, path: str, digest: str) -> bytes:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise PolicyError(
            f"version {notice.version} (epoch {notice.epoch}): cannot read {path}: {error.strerror}; "
            "the run folder must be reachable from every actor under the same path"
        ) from error
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise PolicyError(
            f"version {notice.version} (epoch {notice.epoch}): {path} has sha256 {found[:12]}…, "
            f"the learner announced {digest[:12]}…; the file is damaged or belongs to another run"
        )
    return data


def _parsed(data: bytes) -> Json:
    told: Any = json.loads(data)  # verified: the learner's own writing
    assert isinstance(told, dict)
    return told


def file_digest(path: Path) -> str:
    """Hex sha256 of a file, read in bounded pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
