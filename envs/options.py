"""Strict reading of an environment's options: a table from the configuration becomes that environment's dataclass.

Tables inside the table become nested dataclasses. Unknown names and wrong types are ConfigErrors that give the dotted
path and the cure; ranges are the dataclasses' own business.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from trace_async.errors import ConfigError

T = TypeVar("T")

_WORDS = {int: "int", float: "float", bool: "bool", str: "str"}


def read_options(kind: type[T], options: Mapping[str, Any], *, owner: str, where: str = "environment.options") -> T:
    """`kind(**options)` with names and types checked.

    Fields may be int, float, bool, str, a dataclass (from a table), `tuple[X, ...]` (from a list), `Mapping[str, X]`
    (from a table with free names), or `X | None` (absent is None: a table has no way to write it).
    Raises ConfigError naming the nearest known option, or the type that was expected, at the dotted path.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"{where}.{name}: {owner} has no such option; {cure}")
        values[name] = _checked(value, hints[name], owner=owner, where=f"{where}.{name}")
    return kind(**values)


def _checked(value: Any, hint: Any, *, owner: str, where: str) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if (
        (hint is bool and isinstance(value, bool))
        or (hint is int and is_int)
        or (hint is str and isinstance(value, str))
    ):
        return value
    if hint is float and (is_int or isinstance(value, float)):
        return float(value)
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return read_options(hint, value, owner=owner, where=where)
    if get_origin(hint) is tuple and isinstance(value, list | tuple):
        return tuple(_checked(item, get_args(hint)[0], owner=owner, where=where) for item in value)
    if get_origin(hint) is Mapping and isinstance(value, Mapping):
        return {
            str(name): _checked(item, get_args(hint)[1], owner=owner, where=f"{where}.{name}")
            for name, item in value.items()
        }
    raise ConfigError(f"{where}: expected {_wanted(hint)}, got {value!r}")


def _wanted(hint: Any) -> str:
    """The expected type in the words of a configuration file."""
    if get_origin(hint) is tuple:
        return f"a list of {_wanted(get_args(hint)[0])}"
    return _WORDS.get(hint, "a table")
