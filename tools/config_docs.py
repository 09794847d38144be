"""Prints docs/configuration.md from the dataclasses, their comments and their ranges: `make docs`.

What a key means stands once, in the comment beside it in trace_async/config.py.
"""

from __future__ import annotations

import ast
import sys
import typing
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from trace_async import config as sections
from trace_async.config import Config
from trace_async.config_check import CHOICES, RANGES

_HEAD = """# Configuration

One TOML file, read once and strictly: an unknown key, a wrong type or a combination that cannot work is refused with
the file, the key and the cure. Write only what differs from the defaults. On the command line `--set section.key=value`
overrides the file (TOML values; words need no quotes), and the resolved configuration is saved as `config.json` in the
run folder.

Written by `make docs` from `trace_async/config.py`; a test compares the two.
"""


def render() -> str:
    """The whole page."""
    meanings = _read_meanings(Path(sections.__file__).read_text(encoding="utf-8"))
    return _HEAD + "".join(_render_section(name, meanings) for name in (field.name for field in fields(Config)))


def _render_section(name: str, meanings: dict[str, str]) -> str:
    section = typing.get_type_hints(Config)[name]
    hints = typing.get_type_hints(section)
    lines = [f"\n## [{name}]\n", "| key | type | default | allowed | meaning |", "|---|---|---|---|---|"]
    for key, default in ((field.name, getattr(section(), field.name)) for field in fields(section)):
        path = f"{name}.{key}"
        kind = getattr(typing.get_origin(hints[key]) or hints[key], "__name__", str(hints[key]))
        allowed = ", ".join(f"`{choice}`" for choice in CHOICES[path]) if path in CHOICES else str(RANGES.get(path, ""))
        meaning = meanings[f"{section.__name__}.{key}"]
        lines.append(f"| `{key}` | {kind} | `{_toml(default)}` | {allowed} | {meaning} |")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _read_meanings(source: str) -> dict[str, str]:
    """Class.field -> the comment on the field's line."""
    lines = source.splitlines()
    return {name: lines[line - 1].partition("  # ")[2] for name, line in _fields(ast.parse(source))}


def _fields(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for section in tree.body:
        if isinstance(section, ast.ClassDef):
            for statement in section.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    yield f"{section.name}.{statement.target.id}", statement.end_lineno or statement.lineno


if __name__ == "__main__":
    sys.stdout.write(render())
