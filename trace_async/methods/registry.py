"""Names and options from the configuration become methods: strict, with the cure in the message.

Pure. Owns no table: each kind of method keeps its own next to its Protocol and asks here how to read it.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

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
    """`kind(**options)` for a dataclass with defaults whose fields are int, float, bool, str or Literal["name", ...].

    Ranges are the dataclass's own business. Raises ConfigError for an unknown name, a number that is not finite, a
    fraction where a count belongs, anything but true and false for a switch, no text, or a word that is no choice.
    """
    known = _types(kind)
    for name, value in options.items():
        if name not in known:
            raise ConfigError(f"{where}.{name} is no option here; {_cure(name, known)}")
        if complaint := _complaint(known[name], value):
            raise ConfigError(f"{where}.{name} must be {complaint}")
    return kind(**options)


@cache  # asked for by every tree; resolving annotations takes a third of a millisecond
def _types(kind: type[DataclassInstance]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _complaint(kind: Any, value: object) -> str:
    """What an option of that type must be instead of `value`; empty when the value will do."""
    if kind is bool:
        return "" if isinstance(value, bool) else f"true or false, got {value!r}"
    if kind is str:
        return "" if isinstance(value, str) else f"a text in quotes, got {value!r}"
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return "" if value in choices else f"one of {', '.join(map(repr, choices))}, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"a number, got {value!r}"
    return f"a whole number, got {value!r}" if kind is int and not isinstance(value, int) else ""


def _cure(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"known: {', '.join(names)}" if names else "it takes none"
