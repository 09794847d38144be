"""What the tests of publication share: weights without torch, a whole version, and how much of it is on disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from trace_async.core.types import Adapter, Canary
from trace_async.publication.store import Published, VersionStore

CANARY = Canary(
    prompts=(np.array([3, 1, 4], np.int32), np.array([1, 5], np.int32)),
    logprobs=(np.array([-0.1, -2.3], np.float32), np.array([-1e-7], np.float32)),
)


def weights_bytes(version: int, *, floats: int = 8) -> bytes:
    """A safetensors file of one tensor that is full of `version`."""
    data = np.full(floats, version, np.float32).tobytes()
    header = {"__metadata__": {"a": "b"}, "w": {"dtype": "F32", "shape": [floats], "data_offsets": [0, len(data)]}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def writes(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(content)

    return write


def publish(
    store: VersionStore, version: int, *, epoch: int = 1, floats: int = 8, adapter: Adapter | None = None
) -> Published:
    return store.publish(
        version=version,
        epoch=epoch,
        write=writes(weights_bytes(version, floats=floats)),
        predictor={"of": version},
        canary=CANARY,
        adapter=adapter,
    )


def listing(folder: Path) -> list[str]:
    """Names of files that are not hidden."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in memory, where the machine has such, for tests that publish hundreds of times: disks are slow."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)
