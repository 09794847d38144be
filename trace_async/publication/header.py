"""The tensors of a safetensors file, read from its header without torch: eight bytes of length, then JSON.

Invariant: what `read_header` returns is consistent with the size of the file, to the byte; so a file that was cut off
anywhere is refused here, whatever its header says. Never reads a tensor.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from trace_async.errors import PolicyError
from trace_async.publication.manifest import TensorEntry

_MAX_HEADER_BYTES = 100 * 1000 * 1000
"""The limit of the safetensors library itself."""

_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
}


def read_header(path: Path) -> tuple[TensorEntry, ...]:
    """The file's tensors, sorted by name. Raises PolicyError when this is no whole safetensors file."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"the header would be {length} bytes long")
            told = json.loads(file.read(length))
        told.pop("__metadata__", None)
        entries = [(_entry(name, told[name]), told[name]["data_offsets"]) for name in sorted(told)]
        _check_spans([(entry, *offsets) for entry, offsets in entries], path.stat().st_size - 8 - length)
    except OSError as error:
        raise PolicyError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        raise PolicyError(f"{path} is no whole safetensors file: {type(error).__name__}: {error}") from error
    return tuple(entry for entry, _ in entries)


def _entry(name: str, told: Any) -> TensorEntry:
    return TensorEntry(name=name, dtype=told["dtype"], shape=tuple(told["shape"]))


def _check_spans(spans: list[tuple[TensorEntry, int, int]], num_bytes: int) -> None:
    """The tensors must fill the bytes behind the header, without gap or overlap."""
    end = 0
    for entry, begin, stop in sorted(spans, key=lambda span: span[1:]):
        if begin != end or stop - begin != math.prod(entry.shape) * _BITS[entry.dtype] // 8:
            raise ValueError(f"tensor {entry.name} of shape {entry.shape} in {entry.dtype} has bytes {begin} to {stop}")
        end = stop
    if end != num_bytes:
        raise ValueError(f"{num_bytes} bytes follow the header, its tensors take {end}")
