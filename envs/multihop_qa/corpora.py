"""Passages out of corpus files or out of the context paragraphs of questions.

A corpus is a stream of passages with identities of their own; what has none gets `passage_id(title, text)`, so that
equal paragraphs of different sources are one document. Never: indexes, retrieval.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from envs.multihop_qa.loading.record import Record
from envs.multihop_qa.loading.rows import read_rows
from envs.multihop_qa.records import Question, passage_id
from envs.retrieval.protocol import Passage
from envs.retrieval.wire import split_contents
from trace_async.errors import ConfigError


def read_corpus(path: Path) -> Iterator[Passage]:
    """The passages of a corpus file, in order, read as they are asked for.

    Records are FlashRAG's and Search-R1's `id, contents` (the title, quoted or not, is the first line; a field
    `title` goes before it) or `title, text` with an `id` (or `_id`) if there is one; other fields are ignored. JSON
    lines, a JSON list, Parquet, CSV or TSV.
    Raises ConfigError with file, line or record, field and cure for whatever cannot be read, and for an empty file.
    """
    empty = True
    for row in read_rows(path):
        empty = False
        record = Record(row.place, row.fields, "corpus")
        doc_id = record.identity("id", "_id")
        if record.has("contents"):
            first_line, text = split_contents(record.text("contents"))
            title = record.text_or_empty("title") if record.has("title") else first_line
        else:
            title, text = record.text_or_empty("title"), record.text("text")
        yield Passage(doc_id or passage_id(title, text), title, text)
    if empty:
        raise ConfigError(f"{path}: holds no passage; check that the file is complete")


def from_questions(questions: Iterable[Question]) -> Iterator[Passage]:
    """The context paragraphs of the questions, each once, in order of first appearance."""
    return merge(passage for question in questions for passage in question.paragraphs)


def merge(*corpora: Iterable[Passage]) -> Iterator[Passage]:
    """The corpora one after the other, each document id once.

    Raises ConfigError when one id stands for two different passages: dropping one would hide a document.
    """
    seen: dict[str, int] = {}
    for corpus in corpora:
        for passage in corpus:
            content = hash((passage.title, passage.text))
            if passage.doc_id not in seen:
                seen[passage.doc_id] = content
                yield passage
            elif seen[passage.doc_id] != content:
                raise ConfigError(
                    f"document id {passage.doc_id!r} stands for two passages, the second titled {passage.title!r}; "
                    "give the corpora ids of their own, or leave the ids out"
                )
