"""The records of multi-hop question answering that loaders, the generated world, the game and the metrics share.

Pure data. A question comes out of a file or a generator as a `Question`, travels as the data of a `Task` without its
context paragraphs, and is judged by its gold answers. Never: files, retrieval, scoring.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs.retrieval.protocol import Passage
from trace_async.core.types import Task


def passage_id(title: str, text: str) -> str:
    """Identity of a paragraph by its content: equal paragraphs of several data sets are one document of a corpus."""
    return hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]


class SubQuestion(NamedTuple):
    """One hop: what is asked, what is found, and on which page."""

    question: str  # answers of earlier hops filled in
    answer: str
    title: str = ""  # page that says so; "" unknown
    doc_id: str = ""  # the same page by identity; "" unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question with everything its data set says of it; "" and () where it says nothing."""

    question_id: str  # unique within its data set
    question: str
    answers: tuple[str, ...]  # at least one; the first is the data set's own, aliases follow
    dataset: str = ""  # "hotpotqa", "2wiki", "musique", "flashrag", "world", ...
    kind: str = ""  # bridge, comparison, compositional, chain, ...
    hops: int = 0  # 0 unknown
    level: str = ""  # easy, medium, hard
    gold_titles: tuple[str, ...] = ()  # pages that answer it, in the order of the path where that is known, distinct
    gold_ids: tuple[str, ...] = ()  # the same pages by identity (`passage_id`), as far as known
    supporting_facts: tuple[tuple[str, int], ...] = ()  # (title, sentence number from 0)
    evidences: tuple[tuple[str, str, str], ...] = ()  # (subject, relation, object)
    steps: tuple[SubQuestion, ...] = ()  # the decomposition, where there is one
    paragraphs: tuple[Passage, ...] = ()  # context given with the question, gold and distracting

    def to_task(self, split: str) -> Task:
        """The task `{dataset}/{split}/{question_id}`; its data leave the paragraphs out."""
        data = {
            "question_id": self.question_id,
            "question": self.question,
            "answers": list(self.answers),
            "dataset": self.dataset,
            "kind": self.kind,
            "hops": self.hops,
            "level": self.level,
            "gold_titles": list(self.gold_titles),
            "gold_ids": list(self.gold_ids),
            "supporting_facts": [list(fact) for fact in self.supporting_facts],
            "evidences": [list(evidence) for evidence in self.evidences],
            "steps": [list(step) for step in self.steps],
        }
        return Task(f"{self.dataset or 'qa'}/{split}/{self.question_id}", data)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Question:
        """What `to_task` wrote. KeyError or ValueError when it is something else."""
        return cls(
            question_id=str(data["question_id"]),
            question=str(data["question"]),
            answers=tuple(str(answer) for answer in data["answers"]),
            dataset=str(data.get("dataset", "")),
            kind=str(data.get("kind", "")),
            hops=int(data.get("hops", 0)),
            level=str(data.get("level", "")),
            gold_titles=tuple(data.get("gold_titles", ())),
            gold_ids=tuple(data.get("gold_ids", ())),
            supporting_facts=tuple((str(title), int(number)) for title, number in data.get("supporting_facts", ())),
            evidences=tuple((str(s), str(r), str(o)) for s, r, o in data.get("evidences", ())),
            steps=tuple(SubQuestion(*step) for step in data.get("steps", ())),
        )
