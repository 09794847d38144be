"""What a published version consists of, in one small file whose digest the learner announces.

A version is three files of one name, e.g. e003_v000012: .safetensors (weights), .predictor.json, .manifest.json. The
manifest names the other two with digests, the tensors, and the canary that proves an engine samples with them.

Invariants
    - `from_bytes(to_bytes(manifest))` is that manifest; the bytes of equal manifests are equal.
    - What `from_bytes` returns is consistent in itself: file names are those of its version and epoch (so no path can
      hide in them), every file has one digest for each of its chunks, canary prompts and log-probabilities fit.
    - Whoever has verified a manifest's digest may trust its numbers; nobody else may.

Never: torch, sockets, or an opinion about what the tensors mean.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from trace_async.core.types import Adapter, Canary, FloatArray, IntArray, Json, VersionNotice
from trace_async.errors import PolicyError

CHUNK_BYTES = 4 * 1024 * 1024
"""What one chunk digest covers; the last chunk of a file is shorter."""

MAX_MANIFEST_BYTES = 16 * 1024 * 1024
"""Nobody reads more before the digest is checked; enough for 500 GB of weights."""

_MAX_HASHERS = 4
"""Threads; sha256 takes a second for each gigabyte on one core, and lets the other threads run meanwhile."""

_FORMAT = 1
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WHOLE_NAME = re.compile(r"(?P<base>e\d{3,}_v\d{6,})\.(?P<kind>safetensors|predictor\.json|manifest\.json)")
_INT32 = 2**31
T = TypeVar("T")


class Names(NamedTuple):
    """File names of one version, without folder."""

    weights: str
    predictor: str
    manifest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a version."""

    name: str
    num_bytes: int
    chunk_digests: tuple[str, ...]  # sha256 of each CHUNK_BYTES, hex; together they vouch for the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One tensor of the weights, as the safetensors header has it."""

    name: str
    dtype: str  # safetensors' word, e.g. "F32"
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about one version but its bytes."""

    version: int
    epoch: int
    weights: FileEntry
    predictor: FileEntry
    tensors: tuple[TensorEntry, ...]  # sorted by name
    canary: Canary
    adapter: Adapter | None  # the tensors are low-rank pairs; None: they are the whole policy


# ---- names -----------------------------------------------------------------------------------------------------------


def base_name(*, version: int, epoch: int) -> str:
    """What the three files' names start with; sorts like (epoch, version) up to a million versions."""
    return f"e{epoch:03d}_v{version:06d}"


def names_of(base: str) -> Names:
    """The three file names of one version."""
    return Names(base + ".safetensors", base + ".predictor.json", base + ".manifest.json")


def notice_names(notice: VersionNotice) -> Names:
    """The file names of an announced version."""
    return names_of(base_name(version=notice.version, epoch=notice.epoch))


def base_of(name: str) -> str | None:
    """The version that a complete file belongs to; None for any other file name."""
    match = _WHOLE_NAME.fullmatch(name)
    return match["base"] if match else None


# ---- digests ---------------------------------------------------------------------------------------------------------


def bytes_digest(data: bytes) -> str:
    """Hex sha256."""
    return hashlib.sha256(data).hexdigest()


def file_digest(path: Path) -> str:
    """Hex sha256 of a file, read in chunks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe_file(path: Path, *, name: str, on_chunk: Callable[[], None] = lambda: None) -> FileEntry:
    """The entry of a file that is or will be called `name`; each byte is hashed once, by a few threads.

    `on_chunk` is called before each chunk, in those threads, and may raise to end it early.
    """
    with path.open("rb") as file:
        descriptor, num_bytes = file.fileno(), os.fstat(file.fileno()).st_size

        def digest(begin: int) -> str:
            on_chunk()
            return bytes_digest(os.pread(descriptor, CHUNK_BYTES, begin))

        begins = range(0, num_bytes, CHUNK_BYTES)
        with ThreadPoolExecutor(max(1, min(_MAX_HASHERS, len(begins))), thread_name_prefix="hash") as pool:
            digests = tuple(pool.map(digest, begins))
    return FileEntry(name=name, num_bytes=num_bytes, chunk_digests=digests)


# ---- bytes -----------------------------------------------------------------------------------------------------------


def to_bytes(manifest: Manifest) -> bytes:
    """UTF-8 JSON, the same for equal manifests. Raises ValueError when a log-probability is not finite."""
    canary = {
        "prompts": [prompt.tolist() for prompt in manifest.canary.prompts],
        "logprobs": [logprobs.tolist() for logprobs in manifest.canary.logprobs],
    }
    told = {
        "format": _FORMAT,
        "version": manifest.version,
        "epoch": manifest.epoch,
        "weights": asdict(manifest.weights),
        "predictor": asdict(manifest.predictor),
        "tensors": [asdict(tensor) for tensor in manifest.tensors],
        "canary": canary,
        "adapter": asdict(manifest.adapter) if manifest.adapter is not None else None,
    }
    return json.dumps(told, allow_nan=False, sort_keys=True, separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Manifest:
    """What `to_bytes` wrote. Raises PolicyError for anything else, whatever it is."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise PolicyError(f"a manifest of {len(data)} bytes is longer than {MAX_MANIFEST_BYTES}")
    try:
        told = json.loads(data)
        if told["format"] != _FORMAT:
            raise PolicyError(f"the manifest has format {told['format']!r}, this program reads {_FORMAT}")
        manifest = _manifest(told)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise PolicyError(f"this is no manifest of a version: {type(error).__name__}: {error}") from error
    return manifest


def _manifest(told: Json) -> Manifest:
    version, epoch = _count(told["version"]), _count(told["epoch"])
    names = names_of(base_name(version=version, epoch=epoch))
    adapter = told["adapter"]
    return Manifest(
        version=version,
        epoch=epoch,
        weights=_file(told["weights"], name=names.weights),
        predictor=_file(told["predictor"], name=names.predictor),
        tensors=tuple(_tensor(entry) for entry in _list(told["tensors"])),
        canary=_canary(told["canary"]),
        adapter=None if adapter is None else _adapter(adapter),
    )


def _file(told: Json, *, name: str) -> FileEntry:
    num_bytes = _count(told["num_bytes"])
    chunks = tuple(_digest(digest) for digest in _list(told["chunk_digests"]))
    if told["name"] != name:
        raise ValueError(f"the file is called {told['name']!r}, expected {name!r}")
    if len(chunks) != -(-num_bytes // CHUNK_BYTES):
        raise ValueError(f"{len(chunks)} chunk digests for {num_bytes} bytes")
    return FileEntry(name=name, num_bytes=num_bytes, chunk_digests=chunks)


def _tensor(told: Json) -> TensorEntry:
    return TensorEntry(
        name=_text(told["name"]),
        dtype=_text(told["dtype"]),
        shape=tuple(_count(size) for size in _list(told["shape"])),
    )


def _canary(told: Json) -> Canary:
    prompts = tuple(_ids(prompt) for prompt in _list(told["prompts"]))
    logprobs = tuple(_logprobs(entry) for entry in _list(told["logprobs"]))
    lengths = [(len(prompt) - 1, len(entry)) for prompt, entry in zip(prompts, logprobs, strict=True)]
    if not lengths or any(expected < 1 or expected != found for expected, found in lengths):
        raise ValueError(f"canary prompts and log-probabilities do not fit: {lengths}")
    return Canary(prompts=prompts, logprobs=logprobs)


def _adapter(told: Json) -> Adapter:
    rank, alpha = _count(told["rank"]), _number(told["alpha"])
    if rank < 1 or not math.isfinite(alpha):
        raise ValueError(f"adapter of rank {rank} with alpha {alpha!r}")
    return Adapter(rank=rank, alpha=alpha)


def _ids(told: Any) -> IntArray:
    ids = [_count(token) for token in _list(told)]
    if any(token >= _INT32 for token in ids):
        raise ValueError("a canary token id does not fit into 32 bits")
    return np.asarray(ids, dtype=np.int32)


def _logprobs(told: Any) -> FloatArray:
    logprobs = np.asarray([_number(value) for value in _list(told)], dtype=np.float32)
    if not np.isfinite(logprobs).all():
        raise ValueError("a canary log-probability is not finite")
    return logprobs


def _count(told: Any) -> int:
    count = _typed(told, int)  # which a bool is not
    return count if count >= 0 else _refuse(told, "a count")


def _number(told: Any) -> float:
    return float(told) if type(told) in (int, float) else _refuse(told, "a number")


def _digest(told: Any) -> str:
    digest = _text(told)
    return digest if _DIGEST.fullmatch(digest) else _refuse(told, "a sha256")


def _text(told: Any) -> str:
    return _typed(told, str)


def _list(told: Any) -> list[Any]:
    return _typed(told, list)


def _typed(told: Any, kind: type[T]) -> T:
    return told if type(told) is kind else _refuse(told, kind.__name__)


def _refuse(told: Any, expected: str) -> NoReturn:
    raise ValueError(f"{told!r:.80} is not {expected}")
