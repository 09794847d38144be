"""Reads the folder of a world strictly: what is missing, damaged or changed is named by file, line and field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from envs.multihop_qa.records import Question
from envs.multihop_qa.world.build import World, content_digest
from envs.multihop_qa.world.graph import SPLITS
from envs.multihop_qa.world.options import WorldOptions
from envs.multihop_qa.world.writing import ABOUT, CORPUS, FORMAT, QUESTIONS
from envs.options import read_options
from envs.retrieval.protocol import Passage
from trace_async.errors import ConfigError

_CURE = "make the world again with trace-async make-world"

_TEXTS = ("question_id", "question", "dataset", "kind", "level", "split", "world")
_LISTS: Mapping[str, tuple[type, ...]] = {
    **dict.fromkeys(("answers", "gold_titles", "gold_ids"), (str,)),
    "supporting_facts": (str, int),
    "evidences": (str, str, str),
    "steps": (str, str, str, str),
}
"""List fields of a question and what their rows hold; rows of one text stand without brackets."""

_FIELDS = {*_TEXTS, *_LISTS, "hops"}


class _About(NamedTuple):
    """What world.json says of one of its worlds."""

    options: WorldOptions
    digest: str


def read_world(folder: Path, *, new_world: bool = False) -> World:
    """The world that `write_world` wrote, or the new world beside it.

    Raises ConfigError with file, line and field when something is missing, damaged or was changed.
    """
    part = "new_world" if new_world else "world"
    about = _read_about(folder / ABOUT, part)
    pages = tuple(_read_page(line, where) for where, line in _lines(folder / CORPUS[part]))
    questions: dict[str, list[Question]] = {split: [] for split in SPLITS}
    for name in QUESTIONS[part]:
        for where, line in _lines(folder / name):
            split, question = _read_question(line, where, about.digest)
            questions[split].append(question)
    found = {split: tuple(questions[split]) for split in SPLITS}
    if (digest := content_digest(pages, found)) != about.digest:
        raise ConfigError(
            f"{folder}: pages and questions have digest {digest[:12]}, {ABOUT} says {about.digest[:12]}: "
            f"files were changed after they were written; {_CURE}"
        )
    return World(options=about.options, digest=about.digest, pages=pages, questions=found)


def _read_about(path: Path, part: str) -> _About:
    try:
        about = json.loads(path.read_text(encoding="ascii"))
    except FileNotFoundError as error:
        raise ConfigError(f"{path.parent} is no world: it has no {path.name}; {_CURE}") from error
    except ValueError as error:  # neither ASCII nor JSON
        raise ConfigError(f"{path}: not JSON: {error}; {_CURE}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise ConfigError(f"{path}: field 'format': expected {FORMAT}; {_CURE}")
    world = about.get(part)
    if world is None:
        raise ConfigError(f"{path}: field {part!r} is missing: this folder has none; {_CURE}")
    options = world.get("options") if isinstance(world, dict) else None
    digest = world.get("digest") if isinstance(world, dict) else None
    if not isinstance(options, dict) or not isinstance(digest, str):
        raise ConfigError(f"{path}: field {part!r}: expected options (a table) and digest (a text); {_CURE}")
    if missing := sorted({field.name for field in fields(WorldOptions)} - set(options)):
        raise ConfigError(f"{path}: field '{part}.options': {', '.join(missing)} missing; {_CURE}")
    return _About(read_options(WorldOptions, options, owner="a world", where=f"{path}: {part}.options"), digest)


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each line with where it stands."""
    try:
        file = path.open(encoding="ascii", newline="\n")
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing; {_CURE}") from error
    with file:
        try:
            for number, text in enumerate(file, start=1):
                where = f"{path}: line {number}"
                yield where, _object(text, where)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not ASCII: {error}; {_CURE}") from error


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        line = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {_CURE}") from error
    if not isinstance(line, dict):
        raise ConfigError(f"{where}: expected an object, got {type(line).__name__}; {_CURE}")
    return line


def _read_page(line: Mapping[str, Any], where: str) -> Passage:
    doc_id, contents = _text(line, "id", where), _text(line, "contents", where)
    title, newline, text = contents.partition("\n")
    if not newline or len(title) < 3 or not title.startswith('"') or not title.endswith('"'):
        raise ConfigError(f"{where}: field 'contents': the first line must be the title in quotes; {_CURE}")
    return Passage(doc_id, title[1:-1], text)


def _read_question(line: Mapping[str, Any], where: str, digest: str) -> tuple[str, Question]:
    """A question and its split."""
    if odd := sorted(_FIELDS ^ set(line)):
        raise ConfigError(f"{where}: field {odd[0]!r} is {'missing' if odd[0] in _FIELDS else 'unknown'}; {_CURE}")
    for name in _TEXTS:
        _text(line, name, where)
    if type(line["hops"]) is not int:
        raise ConfigError(f"{where}: field 'hops': expected an int, got {line['hops']!r}; {_CURE}")
    for name, row in _LISTS.items():
        if not isinstance(line[name], list) or not all(_fits(one, row) for one in line[name]):
            raise ConfigError(f"{where}: field {name!r}: expected a list of {_shape(row)}, got {line[name]!r}; {_CURE}")
    if line["split"] not in SPLITS:
        raise ConfigError(f"{where}: field 'split': expected {' or '.join(SPLITS)}, got {line['split']!r}; {_CURE}")
    if line["world"] != digest:
        raise ConfigError(f"{where}: field 'world': the question is of world {line['world'][:12]}, not {digest[:12]}")
    return str(line["split"]), Question.from_data(line)


def _text(line: Mapping[str, Any], name: str, where: str) -> str:
    value = line.get(name)
    if not isinstance(value, str):
        raise ConfigError(f"{where}: field {name!r}: expected a text, got {value!r}; {_CURE}")
    return value


def _fits(value: object, row: tuple[type, ...]) -> bool:
    cells = [value] if len(row) == 1 else value
    return isinstance(cells, list) and [type(cell) for cell in cells] == list(row)


def _shape(row: tuple[type, ...]) -> str:
    names = ["text" if cell is str else "number" for cell in row]
    return "texts" if len(row) == 1 else f"[{', '.join(names)}]"
