"""Minibatches and canary prompts as a JSON header and one run of bytes, for the ranks that train along.

Invariants: what is decoded equals what was encoded, arrays to the bit; only the records that are named here travel; no
pickle. Both ends run the same release, so there is no schema number. Never a socket.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trace_async.core.packing import Denominators, Minibatch, RowBatch
from trace_async.core.tree_packing import TreeBatch
from trace_async.core.turn_table import TurnTable

RECORDS: Final[dict[str, type[Any]]] = {
    record.__name__: record for record in (Denominators, Minibatch, RowBatch, TreeBatch, TurnTable)
}
_ALIGNED = 8


def encode(value: object) -> tuple[Any, Tensor]:
    """What stands in a header for `value`, and the bytes of its arrays, uint8 [n]. TypeError for what cannot travel."""
    arrays: list[NDArray[np.uint8]] = []
    header = _encode(value, arrays)
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.uint8)
    return header, torch.from_numpy(joined)


def decode(header: Any, payload: Tensor) -> Any:
    """The opposite of `encode`; arrays are views of the payload, tuples come back as lists."""
    return _decode(header, payload.numpy())


def _encode(value: object, arrays: list[NDArray[np.uint8]]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        start = sum(array.size for array in arrays)
        raw = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        arrays.append(np.concatenate([raw, np.zeros(-raw.size % _ALIGNED, np.uint8)]))
        return {"array": [start, value.dtype.str, *value.shape]}
    if isinstance(value, list | tuple):
        return [_encode(inner, arrays) for inner in value]
    if is_dataclass(value) and RECORDS.get(type(value).__name__) is type(value):
        inside = {field.name: _encode(getattr(value, field.name), arrays) for field in fields(value)}
        return {"record": type(value).__name__, "fields": inside}
    raise TypeError(f"{type(value).__name__} does not travel between ranks; name it in trainer_wire.RECORDS")


def _decode(header: Any, raw: NDArray[np.uint8]) -> Any:
    if isinstance(header, list):
        return [_decode(inner, raw) for inner in header]
    if not isinstance(header, dict):
        return header
    if "array" in header:
        start, dtype, *shape = header["array"]
        return np.frombuffer(raw, np.dtype(dtype), count=int(np.prod(shape)), offset=start).reshape(shape)
    return RECORDS[header["record"]](**{name: _decode(inner, raw) for name, inner in header["fields"].items()})
