"""Questions out of a file in any of the formats that are known.

A format says what the fields of a record mean; what holds the records (JSON lines, a JSON list, Parquet, CSV; gzip or
not) is told by the file itself, so that any format may come in any of them. Streams: nothing is kept but the alias
table of 2Wiki. Never: corpora, splits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

from envs.multihop_qa.loading import multihop, plain
from envs.multihop_qa.loading.record import Record
from envs.multihop_qa.loading.rows import TABLE_SUFFIXES, Row, kind_suffix, read_rows
from envs.multihop_qa.records import Question
from trace_async.errors import ConfigError

Parse = Callable[[Record, int], Question]
"""A record and its number in the file, from 1, become a question."""

AUTO = "auto"
_PARSERS: dict[str, Parse] = {
    "hotpotqa": lambda record, number: multihop.hotpotqa(record),
    "2wiki": lambda record, number: multihop.two_wiki(record, {}),
    "musique": lambda record, number: multihop.musique(record),
    "flashrag": plain.flashrag,
    "verl": plain.verl,
    "r1_searcher": plain.r1_searcher,
    "jsonl": plain.jsonl,
    "csv": plain.table,
    "world": plain.world,
}
FORMATS = (AUTO, *_PARSERS)

_FORMAT_PREFIX = re.compile(r"(\w{2,}):(.*)", re.DOTALL)  # one letter would be a drive


def load_questions(path: Path, *, format: str = AUTO, aliases: Path | None = None) -> Iterator[Question]:
    """The questions of a file, in order, read as they are asked for.

    `format` is one of FORMATS; "auto" decides by the suffix and the fields of the first record. `aliases` is 2Wiki's
    alias file (lines of Q_id, aliases, demonyms), which extends the answers of 2wiki questions with an answer_id; other
    formats leave it alone.
    Raises ConfigError with file, line or record, field and cure for whatever cannot be read, and for an empty file.
    """
    if format not in FORMATS:
        raise ConfigError(f"{format!r} is no format of questions; formats: {', '.join(FORMATS)}")
    return _load(path, format, aliases)


def parse_source(text: str) -> tuple[str, Path]:
    """FORMAT:PATH, or PATH alone (format "auto"), as format and path; ~ stands for the home folder.

    Raises ConfigError for an unknown format. A file whose name itself has a colon is written with its folder.
    """
    format, path = AUTO, text
    if found := _FORMAT_PREFIX.fullmatch(text):
        format, path = found[1], found[2]
    if format not in FORMATS:
        raise ConfigError(
            f"{text!r}: {format!r} is no format of questions; formats: {', '.join(FORMATS)} (a file of that name: "
            f"./{text})"
        )
    if not path:
        raise ConfigError(f"{text!r} names no file; write FORMAT:PATH or PATH")
    return format, Path(path).expanduser()


def _load(path: Path, format: str, aliases: Path | None) -> Iterator[Question]:
    rows = read_rows(path)
    first = next(rows, None)
    if first is None:
        raise ConfigError(f"{path}: holds no question; check that the file is complete")
    chosen = _detect(path, first) if format == AUTO else format
    parse = _parser(chosen, aliases)
    for row in chain([first], rows):
        yield parse(Record(row.place, row.fields, chosen), row.number)


def _parser(format: str, aliases: Path | None) -> Parse:
    if format == "2wiki" and aliases is not None:
        table = read_aliases(aliases)
        return lambda record, number: multihop.two_wiki(record, table)
    return _PARSERS[format]


def read_aliases(path: Path) -> Mapping[str, Sequence[str]]:
    """2Wiki's alias file: aliases and demonyms by Wikidata id, as the official evaluation joins them."""
    table: dict[str, Sequence[str]] = {}
    for row in read_rows(path):
        record = Record(row.place, row.fields, "2wiki alias")
        names = [*record.texts("aliases"), *(record.texts("demonyms") if record.has("demonyms") else ())]
        table[record.text("Q_id")] = tuple(names)
    return table


def _detect(path: Path, first: Row) -> str:
    """The format by the suffix, then by the fields that no other format has."""
    if kind_suffix(path) in TABLE_SUFFIXES:
        return "csv"
    names = set(first.fields)
    if "reward_model" in names:
        return "verl"
    if "question" in names:
        if "golden_answers" in names:
            return "flashrag"
        if "paragraphs" in names:
            return "musique"
        if "context" in names:
            return "2wiki" if "evidences" in names else "hotpotqa"
        if names >= {"question_id", "answers"}:
            return "world"
        if names >= {"idx", "answer"}:
            return "r1_searcher"
        if names & {"answer", "answers"}:
            return "jsonl"
    raise ConfigError(
        f"{first.place}: no known format of questions has the fields {', '.join(sorted(names)) or '(none)'}; "
        f"name the format as FORMAT:PATH, one of {', '.join(FORMATS[1:])}"
    )
