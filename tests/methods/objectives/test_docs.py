"""docs/objectives.md names every kind and every option with its default, and no other."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from trace_async.methods.credit import LEAF_RULES
from trace_async.methods.objective_kinds import KINDS, Kind, Scope

PAGE = (Path(__file__).parents[3] / "docs" / "objectives.md").read_text(encoding="utf-8")


def rows_of(section: str) -> dict[str, list[str]]:
    """Cells of the table rows of a section that begin with a name in backticks."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(r"\| `\w+` \|", line)]
    return {name.strip("`"): cells for name, *cells in rows}


def test_every_kind_stands_in_the_table_and_no_other() -> None:
    assert list(rows_of("Kinds")) == list(KINDS)


def test_every_kind_stands_among_those_to_take() -> None:
    choices = PAGE.split("## Which to take\n")[1].split("\n## ")[0]
    assert {name for name in re.findall(r"`(\w+)`", choices) if name in KINDS} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_kind_sees_is_told(name: str) -> None:
    seen = {Scope.TURN: "turns", Scope.TREE: "trees", Scope.STEP: "the whole update"}
    assert rows_of("Kinds")[name][-2] == seen[KINDS[name].scope]


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_every_option_is_told_with_its_default(name: str, kind: Kind) -> None:
    table = rows_of("Options")
    if kind.options is None:
        assert name not in table
        return
    told = dict(re.findall(r"`(\w+)` ([\w.\"]+)", table[name][0]))
    assert told == {field.name: json.dumps(field.default) for field in fields(kind.options)}


def test_leaf_rules_are_told() -> None:
    (sentence,) = re.findall(r"Leaf rules are (.+?) \(\[credit", PAGE, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", sentence)) == LEAF_RULES
