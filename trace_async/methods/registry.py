"""Names and options from the configuration become methods: strict, with the cure in the message.

Pure. Owns no table: each kind of method keeps its own next to its Protocol and asks here how to read it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from trace_async.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    OptionsT = TypeVar("OptionsT", bound=DataclassInstance)

T = TypeVar("T")


def pick(table: Mapping[str, T], name: str, *, where: str) -> T:
    """The entry called `name`; `where` is the key of the configuration that named it.

    Raises ConfigError naming the nearest known entry.
    """
    if name not in table:
        raise ConfigError(f"{where} = {name!r} is not known; {_cure(name, table)}")
    return table[name]


def read_options(kind: type[OptionsT], options: Mapping[str, Any], *, where: str) -> OptionsT:
    """`kind(**options)` for a dataclass of int and float fields with defaults; ranges are its own business.

    Raises ConfigError for an unknown name, a value that is not a finite number, or a fraction where a count belongs.
    """
    counts = {field.name: isinstance(field.default, int) for field in fields(kind)}
    for name, value in options.items():
        if name not in counts:
            raise ConfigError(f"{where}.{name} is no option here; {_cure(name, counts)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{where}.{name} must be a number, got {value!r}")
        if counts[name] and not isinstance(value, int):
            raise ConfigError(f"{where}.{name} must be a whole number, got {value!r}")
    return kind(**options)


def _cure(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}" if names else "it takes none"
