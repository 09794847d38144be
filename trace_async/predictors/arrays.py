"""Arrays inside JSON: base64 of their bytes, little-endian, exact. Never pickle."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DTYPES = {"float16": "<f2", "float32": "<f4", "int32": "<i4", "int64": "<i8"}


def array_to_json(values: NDArray[Any]) -> dict[str, Any]:
    """Raises KeyError for a dtype that is not used here."""
    data = np.ascontiguousarray(values, _DTYPES[values.dtype.name]).tobytes()
    return {
        "dtype": values.dtype.name,
        "shape": list(values.shape),
        "data": base64.b64encode(data).decode("ascii"),
    }


def array_from_json(told: Any, *, dtype: str, shape: tuple[int, ...], what: str) -> NDArray[Any]:
    """The array that `array_to_json` told, writable; -1 in `shape` stands for any length.

    Raises ValueError when it has another dtype or shape, is damaged, or holds a number that is not finite.
    """
    if not isinstance(told, dict) or set(told) != {"dtype", "shape", "data"} or told["dtype"] != dtype:
        raise ValueError(f"state of a predictor: {what} must be an array of {dtype}")
    found = told["shape"]
    if not isinstance(found, list) or not all(type(length) is int and length >= 0 for length in found):
        raise ValueError(f"state of a predictor: {what} has the shape {found!r}")
    if len(found) != len(shape) or any(want not in (-1, have) for want, have in zip(shape, found, strict=True)):
        raise ValueError(f"state of a predictor: {what} must be of shape {list(shape)}, got {found}")
    try:
        data = base64.b64decode(told["data"], validate=True)
        values = np.frombuffer(data, _DTYPES[dtype]).reshape(found).astype(dtype)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ValueError(f"state of a predictor: {what} is damaged: {error}") from error
    if not np.isfinite(values).all():
        raise ValueError(f"state of a predictor: {what} holds numbers that are not finite")
    return values
