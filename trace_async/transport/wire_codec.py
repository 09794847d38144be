"""Records <-> plain JSON values and flat arrays, driven by the annotations of the records themselves.

Owns the mapping of one annotation to one codec. A dataclass or NamedTuple becomes a JSON object with exactly its
fields as keys; array fields leave the object and line up, in field order, beside it. Invariants: what `pack` accepts
comes back equal from `unpack`; nothing is converted with loss (an unexpected dtype, a tuple inside opaque JSON or an
infinite number is refused, NaN is null); `unpack` raises WireError and nothing else, and allocates in proportion to
its input. Knows no message, frame or socket.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Protocol, TypeAlias, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from trace_async.core.types import ByteArray, FloatArray, IntArray, Json
from trace_async.errors import WireError

DTYPES: Mapping[object, str] = {IntArray: "<i4", FloatArray: "<f4", ByteArray: "|u1"}
"""Array annotation -> dtype on the wire, always little-endian and one-dimensional."""
MAX_JSON_DEPTH = 32
"""Nesting of an opaque JSON value; deeper ones are refused before Python's own recursion limit is near."""
_INT64 = 2**63
_EXACT = 2**53  # whole numbers up to here are exact as a float

Array: TypeAlias = NDArray[np.generic]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedArray:
    """One array beside the JSON: where it belongs (dotted field path), its dtype on the wire, its values [n]."""

    name: str
    dtype: str
    values: Array


class Codec(Protocol):
    """Both directions for one annotation; `at` is the dotted path that error messages name."""

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> Any:
        """The JSON value; arrays met on the way are appended."""
        ...

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> Any:
        """The Python value; arrays are taken in the order `pack` appended them."""
        ...


def pack(record: object) -> tuple[dict[str, Any], list[NamedArray]]:
    """A dataclass record as a JSON object and its arrays; raises WireError when a value does not fit its annotation."""
    arrays: list[NamedArray] = []
    return cast(
        dict[str, Any], codec_for(cast(Hashable, type(record))).pack(record, type(record).__name__, arrays)
    ), arrays


def unpack(record_type: type[Any], value: object, arrays: Iterator[NamedArray]) -> Any:
    """The record that `pack` took apart; raises WireError on anything else. May leave arrays over."""
    return codec_for(cast(Hashable, record_type)).unpack(value, record_type.__name__, arrays)


@cache
def codec_for(annotation: Any) -> Codec:
    """The codec of an annotation; TypeError at first use when a record has a field the wire has no form for."""
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    if annotation in DTYPES:
        return _Array(DTYPES[annotation])
    if isinstance(annotation, type) and (is_dataclass(annotation) or hasattr(annotation, "_fields")):
        return _Record.of(annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _Tuple(codec_for(args[0]))
    if origin is Mapping and args[0] is str:
        return _Mapping(codec_for(args[1]))
    if origin is UnionType and len(args) == 2 and args[1] is NoneType:
        return _Optional(codec_for(args[0]))
    raise TypeError(f"no wire form for the annotation {annotation!r}")


def _refuse(at: str, wanted: str, value: object) -> WireError:
    return WireError(f"{at}: wants {wanted}, got {type(value).__name__} {reprlib.repr(value)}")


class _Text:
    """str without lone surrogates, so that it can be written anywhere."""

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> str:
        return self._check(value, at)

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> str:
        return self._check(value, at)

    def _check(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            raise _refuse(at, "a string", value)
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise WireError(f"{at}: text is not valid Unicode: {error.reason}") from error
        return value


class _Integer:
    """int within int64."""

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> int:
        return self.unpack(int(value) if isinstance(value, np.integer) else value, at, iter(()))

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise _refuse(at, "an integer", value)
        if not -_INT64 <= value < _INT64:
            raise WireError(f"{at}: integer of {value.bit_length()} bits does not fit 64")
        return int(value)


class _Number:
    """float; NaN travels as null, infinities not at all."""

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> float | None:
        if isinstance(value, bool) or not isinstance(value, int | float | np.floating | np.integer):
            raise _refuse(at, "a number", value)
        number = self._finite_or_nan(value, at)
        return None if math.isnan(number) else number

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> float:
        if value is None:
            return math.nan
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _refuse(at, "a number or null", value)
        return self._finite_or_nan(value, at)

    def _finite_or_nan(self, value: Any, at: str) -> float:
        if isinstance(value, int) and abs(value) > _EXACT:
            raise WireError(f"{at}: integer of {value.bit_length()} bits is not exact as a number")
        if math.isinf(value):
            raise WireError(f"{at}: infinite number")
        return float(value)


class _Flag:
    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> bool:
        return self.unpack(value, at, iter(()))

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> bool:
        if not isinstance(value, bool):
            raise _refuse(at, "true or false", value)
        return value


class _Opaque:
    """A JSON object that nobody here looks into; must already be plain JSON, so that it comes back equal."""

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> Any:
        return self.unpack(value, at, iter(()))

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> Any:
        if not isinstance(value, Mapping):
            raise _refuse(at, "a JSON object", value)
        return _plain(value, at, MAX_JSON_DEPTH)


def _plain(value: Any, at: str, depth: int) -> Any:
    if depth == 0:
        raise WireError(f"{at}: JSON nested deeper than {MAX_JSON_DEPTH}")
    if isinstance(value, Mapping):
        return {_TEXT.pack(key, f"{at} key", []): _plain(item, f"{at}.{key}", depth - 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item, at, depth - 1) for item in value]
    if isinstance(value, str):
        return _TEXT.pack(value, at, [])
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise _refuse(at, "plain JSON (object, list, string, finite number, true, false, null)", value)


@dataclass(frozen=True, slots=True)
class _Mapping:
    item: Codec

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise _refuse(at, "a mapping", value)
        return {_TEXT.pack(key, at, []): self.item.pack(item, f"{at}.{key}", arrays) for key, item in value.items()}

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _refuse(at, "an object", value)
        return {
            _TEXT.unpack(key, at, iter(())): self.item.unpack(item, f"{at}.{key}", arrays)
            for key, item in value.items()
        }


@dataclass(frozen=True, slots=True)
class _Tuple:
    item: Codec

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> list[Any]:
        if not isinstance(value, tuple):
            raise _refuse(at, "a tuple", value)
        return [self.item.pack(item, f"{at}[{index}]", arrays) for index, item in enumerate(value)]

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _refuse(at, "a list", value)
        return tuple(self.item.unpack(item, f"{at}[{index}]", arrays) for index, item in enumerate(value))


@dataclass(frozen=True, slots=True)
class _Optional:
    item: Codec

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> Any:
        return None if value is None else self.item.pack(value, at, arrays)

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> Any:
        return None if value is None else self.item.unpack(value, at, arrays)


@dataclass(frozen=True, slots=True)
class _Array:
    dtype: str

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> None:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype != np.dtype(self.dtype):
            shape = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
            raise WireError(f"{at}: wants a one-dimensional array of {self.dtype}, got {shape}")
        arrays.append(NamedArray(name=at, dtype=self.dtype, values=value))

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> Array:
        array = next(arrays, None)
        if array is None or (array.name, array.dtype) != (at, self.dtype):
            found = "none is left" if array is None else f"found {array.name[:80]!r} of {array.dtype[:16]!r}"
            raise WireError(f"{at}: wants an array of {self.dtype}, {found}")
        return array.values


@dataclass(frozen=True, slots=True)
class _Record:
    record_type: type[Any]
    fields: tuple[tuple[str, Codec], ...]
    keys: frozenset[str]  # fields that stay in the JSON object

    @classmethod
    def of(cls, record_type: type[Any]) -> _Record:
        hints = get_type_hints(record_type)
        names = [f.name for f in fields(record_type)] if is_dataclass(record_type) else list(record_type._fields)
        codecs = tuple((name, codec_for(hints[name])) for name in names)
        return cls(record_type, codecs, frozenset(name for name, codec in codecs if not isinstance(codec, _Array)))

    def pack(self, value: Any, at: str, arrays: list[NamedArray]) -> dict[str, Any]:
        if not isinstance(value, self.record_type):
            raise _refuse(at, self.record_type.__name__, value)
        packed = {name: codec.pack(getattr(value, name), f"{at}.{name}", arrays) for name, codec in self.fields}
        return {name: item for name, item in packed.items() if name in self.keys}

    def unpack(self, value: Any, at: str, arrays: Iterator[NamedArray]) -> Any:
        if not isinstance(value, dict):
            raise _refuse(at, "an object", value)
        if value.keys() != self.keys:
            missing, unknown = sorted(self.keys - value.keys()), sorted(value.keys() - self.keys)
            raise WireError(f"{at}: missing keys {missing}, unknown keys {[key[:40] for key in unknown[:8]]}")
        return self.record_type(
            **{name: codec.unpack(value.get(name), f"{at}.{name}", arrays) for name, codec in self.fields}
        )


_TEXT = _Text()
_SCALARS: Mapping[Any, Codec] = {str: _TEXT, int: _Integer(), float: _Number(), bool: _Flag(), Json: _Opaque()}
