"""Options tables: nested, typed, and refused with the dotted path and the cure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from envs.options import read_options
from trace_async.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Inner:
    depth: int = 1
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outer:
    rate: float = 0.5
    name: str = ""
    on: bool = False
    sizes: tuple[int, ...] = ()
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def twice(self) -> float:
        return 2 * self.rate


def read(options: Mapping[str, Any]) -> Outer:
    return read_options(Outer, options, owner="outer")


def test_every_kind_of_field_is_read_from_what_a_toml_table_holds() -> None:
    table = {
        "rate": 1,
        "name": "x",
        "on": True,
        "sizes": [3, 4],
        "inner": {"depth": 2, "names": ["a", "b"]},
        "maybe": {},
        "sets": {"dev": ["a.jsonl"], "test": []},
    }
    assert read(table) == Outer(
        rate=1.0,
        name="x",
        on=True,
        sizes=(3, 4),
        inner=Inner(depth=2, names=("a", "b")),
        maybe=Inner(),
        sets={"dev": ("a.jsonl",), "test": ()},
    )
    assert isinstance(read(table).rate, float)
    assert read({}) == Outer()
    assert read({}).maybe is None


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"nme": "x"}, r"^environment\.options\.nme: outer has no such option; did you mean 'name'\?"),
        ({"zzz": 1}, "known options: rate, name, on, sizes, inner, maybe, sets"),
        ({"twice": 1}, "outer has no such option"),
        ({"inner": {"dpth": 1}}, r"^environment\.options\.inner\.dpth: .* did you mean 'depth'"),
        ({"inner": 3}, r"^environment\.options\.inner: expected a table, got 3"),
        ({"inner": {"names": ["a", 1]}}, r"^environment\.options\.inner\.names: expected str, got 1"),
        ({"maybe": {"depth": "1"}}, r"^environment\.options\.maybe\.depth: expected int, got '1'"),
        ({"maybe": "x"}, "expected a table, got 'x'"),
        ({"sets": ["a"]}, r"^environment\.options\.sets: expected a table, got \['a'\]"),
        ({"sets": {"dev": "a"}}, r"^environment\.options\.sets\.dev: expected a list of str, got 'a'"),
        ({"on": 1}, "expected bool, got 1"),
        ({"rate": True}, "expected float, got True"),
        ({"sizes": [True]}, "expected int, got True"),
        ({"name": None}, "expected str, got None"),
    ],
)
def test_a_wrong_option_is_refused_with_its_dotted_path(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(options)
