"""From options to a world. Equal options give an equal world, byte for byte, on every platform and for ever.

Never: files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from envs.multihop_qa.records import Question
from envs.multihop_qa.world.graph import SPLITS
from envs.multihop_qa.world.growth import grow
from envs.multihop_qa.world.options import WorldOptions
from envs.multihop_qa.world.pages import write_pages
from envs.multihop_qa.world.questions import write_questions
from envs.retrieval.protocol import Passage

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Pages and questions about them."""

    options: WorldOptions
    digest: str  # `content_digest` of the rest
    pages: tuple[Passage, ...]  # one an entity
    questions: Mapping[str, tuple[Question, ...]]  # "train", "heldout"


def make_world(options: WorldOptions) -> World:
    """The world of these options. Raises ConfigError when it does not yield the questions that are wanted."""
    graph = grow(options)
    pages = write_pages(graph, options)
    questions = write_questions(graph, pages, options)
    passages = tuple(page.passage for page in pages)
    return World(options=options, digest=content_digest(passages, questions), pages=passages, questions=questions)


def question_data(question: Question, split: str) -> dict[str, object]:
    """Everything of a question but its paragraphs, as JSON."""
    return {"split": split, **question.to_task(split).data}


def content_digest(pages: Sequence[Passage], questions: Mapping[str, Sequence[Question]]) -> str:
    """sha256 over the content: pages and questions in their order, one JSON line each."""
    digest = hashlib.sha256()
    for line in _lines(pages, questions):
        digest.update(_ENCODER.encode(line).encode() + b"\n")
    return digest.hexdigest()


def _lines(pages: Sequence[Passage], questions: Mapping[str, Sequence[Question]]) -> Iterator[object]:
    yield from pages
    for split in SPLITS:
        for question in questions[split]:
            yield question_data(question, split)
