"""Strict reading of an environment's options: a table from the configuration becomes that environment's dataclass.

Unknown names and wrong types are ConfigErrors that name the cure; ranges are the dataclass's own business.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_type_hints

from trace_async.errors import ConfigError

T = TypeVar("T")


def read_options(kind: type[T], options: Mapping[str, Any], *, owner: str) -> T:
    """`kind(**options)` with names and types checked. Fields may be int, float, bool, str or tuple[int, ...].

    Raises ConfigError naming the nearest known option, or the type that was expected.
    """
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    hints = get_type_hints(kind)
    values: dict[str, Any] = {}
    for name, value in options.items():
        if name not in hints:
            near = difflib.get_close_matches(name, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
            raise ConfigError(f"environment.options.{name}: {owner} has no such option; {cure}")
        values[name] = _checked(value, hints[name], f"environment.options.{name}")
    return kind(**values)


def _checked(value: Any, hint: Any, where: str) -> Any:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is int and is_int:
        return value
    if hint is float and (is_int or isinstance(value, float)):
        return float(value)
    if hint is str and isinstance(value, str):
        return value
    if hint == tuple[int, ...] and isinstance(value, (list, tuple)):
        return tuple(_checked(item, int, where) for item in value)
    wanted = hint.__name__ if isinstance(hint, type) else "a list of int"
    raise ConfigError(f"{where}: expected {wanted}, got {value!r}")
