"""Reads the configuration: TOML and `--set` overrides in, the frozen tree of `config.py` out, and its JSON form.

Invariants: a key that no section declares is refused with the nearest known key; a value has exactly the declared
type (an integer counts as a number, nothing else is converted); a `Config` that leaves this file has passed
`config_check`. All problems of a file are reported together, each with its source, key path and cure.

Never reads the environment or the command line, never knows which allocators or environments exist.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar

from trace_async.config import Config
from trace_async.config_check import find_problems
from trace_async.errors import ConfigError

Section = TypeVar("Section")
Table: TypeAlias = Mapping[str, object]

_TYPE_NAMES = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false", dict: "a table"}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a TOML file after `a.b=c` overrides, later ones winning.

    Raises ConfigError for a file that cannot be read, an unknown key, a wrong type or a refused combination.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    reader = _Reader(source=str(path))
    for override in overrides:
        reader.apply_override(table, override)
    return reader.read(table)


def to_json(config: Config) -> dict[str, object]:
    """Every key with its value, defaults included; JSON keeps None, which TOML cannot say."""
    return asdict(config)


def from_json(data: Table, *, source: str = "configuration") -> Config:
    """What `to_json` wrote, checked as strictly as a file. `source` names it in errors."""
    return _Reader(source=source).read(data)


def save_config(config: Config, path: Path) -> None:
    """Writes the resolved configuration as JSON, in one piece."""
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(to_json(config), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    aside.replace(path)


def load_saved_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """Reads what `save_config` wrote, with `KEY=VALUE` overrides; ConfigError when it is missing or damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; is this a run folder?") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected a table of sections, got {_describe(data)}")
    reader = _Reader(source=str(path))
    for override in overrides:
        reader.apply_override(data, override)
    return reader.read(data)


def known_keys() -> tuple[str, ...]:
    """Every key path of the tree, sections in order."""
    return tuple(_leaf_paths(Config, ""))


class _Reader:
    """One reading: remembers which override set which key, and every problem met."""

    def __init__(self, *, source: str) -> None:
        self._source = source
        self._origins: dict[str, str] = {}
        self._problems: list[str] = []

    def apply_override(self, table: dict[str, object], override: str) -> None:
        """Puts one `a.b=c` into the table; the value is TOML, or the bare text when it is not TOML."""
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {override}: expected section.key=value, for example learner.max_steps=20")
        place = table
        for key in keys[:-1]:
            below = place.setdefault(key, {})
            if not isinstance(below, dict):
                raise ConfigError(f"--set {override}: {key} is {_describe(below)}, not a table")
            place = below
        name = ".".join(keys)
        place[keys[-1]] = _parse_value(text.strip(), wants_text=_hint_of(name) is str)
        self._origins[name] = f"--set {override}"

    def read(self, table: Table) -> Config:
        config = self._read_section(Config, table, "")
        if not self._problems:
            self._problems += [f"{self._origin(key)}: {key}: {what}" for key, what in find_problems(config)]
        if self._problems:
            raise ConfigError("\n".join(self._problems))
        return config

    def _read_section(self, section: type[Section], table: Table, prefix: str) -> Section:
        hints = typing.get_type_hints(section)
        values: dict[str, object] = {}
        for key, value in table.items():
            path = prefix + key
            if key not in hints:
                self._refuse(path, _unknown_key(path))
            elif is_dataclass(hints[key]):
                if isinstance(value, Mapping):
                    values[key] = self._read_section(hints[key], value, f"{path}.")
                else:
                    names = ", ".join(f.name for f in fields(hints[key]))
                    self._refuse(path, f"is a section, got {_describe(value)}; set one of its keys: {names}")
            else:
                values[key] = self._read_value(hints[key], value, path)
        return section(**values)

    def _read_value(self, hint: object, value: object, path: str) -> object:
        if isinstance(hint, types.UnionType):
            if value is None:
                return None
            hint = next(option for option in hint.__args__ if option is not type(None))
        wanted = typing.get_origin(hint) or hint
        if wanted is float and type(value) is int:
            value = float(value)
        fits = type(value) is wanted and (wanted is not float or math.isfinite(typing.cast(float, value)))
        if not fits:
            self._refuse(path, f"expected {_TYPE_NAMES[typing.cast(type, wanted)]}, got {_describe(value)}")
        elif wanted is dict and (odd := _find_unspeakable(value, path)):
            self._refuse(*odd)
        return value

    def _refuse(self, path: str, what: str) -> None:
        self._problems.append(f"{self._origin(path)}: {path}: {what}")

    def _origin(self, path: str) -> str:
        """The override that set `path`, or something inside it, else the file."""
        for name, origin in self._origins.items():
            if name == path or name.startswith(f"{path}.") or path.startswith(f"{name}."):
                return origin
        return self._source


def _parse_value(text: str, *, wants_text: bool) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    # a line break in the text would smuggle in further keys; a string key takes `123` or `true` as the words they are
    if len(parsed) > 1 or (wants_text and not isinstance(value, str)):
        return text
    return value


def _hint_of(path: str) -> object:
    hint: object = Config
    for key in path.split("."):
        if not isinstance(hint, type) or not is_dataclass(hint):
            return None
        hint = typing.get_type_hints(hint).get(key)
    return hint


def _leaf_paths(section: type, prefix: str) -> Iterator[str]:
    for name, hint in typing.get_type_hints(section).items():
        if is_dataclass(hint):
            yield from _leaf_paths(typing.cast(type, hint), f"{prefix}{name}.")
        else:
            yield prefix + name


def _unknown_key(path: str) -> str:
    near = _nearest_key(path)
    if near:
        return f"unknown key; did you mean {near}?"
    section, _, _ = path.rpartition(".")
    siblings = [key.removeprefix(f"{section}.") for key in known_keys() if key.startswith(f"{section}.")]
    known = siblings or [f.name for f in fields(Config)]
    return f"unknown key; known here: {', '.join(known)}"


def _nearest_key(path: str) -> str | None:
    """A key of the same section with a close name, else the same name elsewhere, else any close path."""
    section, _, name = path.rpartition(".")
    keys = known_keys()
    if not section:
        close = difflib.get_close_matches(name, [f.name for f in fields(Config)], n=1, cutoff=0.75)
        if close:
            return f"[{close[0]}]"
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    everywhere = {key.rpartition(".")[2]: key for key in keys}
    for names, cutoff in ((siblings, 0.6), (everywhere, 0.8)):
        close = difflib.get_close_matches(name, list(names), n=1, cutoff=cutoff)
        if close:
            return names[close[0]]
    return next(iter(difflib.get_close_matches(path, keys, n=1, cutoff=0.75)), None)


def _find_unspeakable(value: object, path: str) -> tuple[str, str] | None:
    """The first value inside an option table that JSON cannot carry: a date, a time, NaN."""
    if isinstance(value, Mapping):
        inner = [(f"{path}.{key}", item) for key, item in value.items()]
    elif isinstance(value, list):
        inner = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return None
    else:
        return path, f"expected a string, number, boolean, list or table, got {_describe(value)}"
    return next((odd for name, item in inner if (odd := _find_unspeakable(item, name))), None)


def _describe(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean {str(value).lower()}"
    names = ((int, "integer"), (float, "number"), (str, "string"), (list, "list"), (Mapping, "table"))
    kind = next((name for known, name in names if isinstance(value, known)), type(value).__name__)
    return "a table" if kind == "table" else f"{kind} {value!r}"
