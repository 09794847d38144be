"""Which questions there are: splits by name, read at first use, kept without their paragraphs.

Invariants: no question of "train" is in another split, by its text in normal form; ids are distinct within a split.
Never: where questions come from, what is searched for them beyond a collection's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from envs.multihop_qa.answers import normalise
from envs.multihop_qa.episode import COLLECTION
from envs.multihop_qa.records import Question
from trace_async.core.types import Task
from trace_async.errors import ConfigError

TRAIN, HELDOUT = "train", "heldout"


class Split(NamedTuple):
    """Where the questions of a split come from, and what is searched for them."""

    questions: Callable[[], Iterable[Question]]
    collection: str


class Choice(NamedTuple):
    """Which questions of every split are taken."""

    hops: frozenset[int] = frozenset()  # empty: all
    kinds: frozenset[str] = frozenset()  # empty: all
    limit: int = 0  # the first so many of a split; 0: all

    def of(self, questions: Iterable[Question]) -> list[Question]:
        """The questions taken, without paragraphs, in their order."""
        taken: list[Question] = []
        for question in questions:
            if self.limit and len(taken) == self.limit:
                break
            if (not self.hops or question.hops in self.hops) and (not self.kinds or question.kind in self.kinds):
                taken.append(replace(question, paragraphs=()) if question.paragraphs else question)
        return taken


class MultihopTasks:
    """The TaskSource. Raises ConfigError at the first use of a split that is empty or shares a question with train."""

    def __init__(self, splits: Mapping[str, Split], choice: Choice) -> None:
        self._splits = splits
        self._choice = choice
        self._read: dict[str, list[Question]] = {}
        self._checked: set[str] = set()  # against the training questions

    def size(self, split: str) -> int:
        return len(self._questions(split))

    def task(self, split: str, index: int) -> Task:
        """Data: `Question.to_task`'s, and "collection". IndexError outside the split."""
        questions = self._questions(split)
        if not 0 <= index < len(questions):
            raise IndexError(f"split {split!r} has tasks 0..{len(questions) - 1}, not {index}")
        task = questions[index].to_task(split)
        return Task(task.task_id, {**task.data, COLLECTION: self._splits[split].collection})

    def collection(self, split: str) -> str:
        """What the questions of a split search. ConfigError as `size`."""
        self._check(split)
        return self._splits[split].collection

    def _check(self, split: str) -> None:
        if split not in self._splits:
            raise ConfigError(f"unknown split {split!r}: there are {', '.join(self._splits)}")

    def _questions(self, split: str) -> list[Question]:
        self._check(split)
        if split not in self._checked:
            other = HELDOUT if split == TRAIN else split
            for name in (TRAIN, other):
                if name not in self._read:
                    self._read[name] = self._load(name)
            _refuse_shared(self._read[TRAIN], self._read[other], other)
            self._checked.add(split)
        return self._read[split]

    def _load(self, split: str) -> list[Question]:
        questions = self._choice.of(self._splits[split].questions())
        if not questions:
            raise ConfigError(
                f"split {split!r} has no questions; check its sources and environment.options.hops and kinds"
            )
        seen: dict[str, Question] = {}
        for question in questions:
            task_id = question.to_task(split).task_id
            if task_id in seen:
                raise ConfigError(
                    f"split {split!r} has two questions {task_id!r}: {seen[task_id].question!r} and "
                    f"{question.question!r}; give one of them another id, or leave it out"
                )
            seen[task_id] = question
        return questions


def _refuse_shared(train: Iterable[Question], others: Iterable[Question], split: str) -> None:
    trained = {normalise(question.question): question for question in train}
    for other in others:
        same = trained.get(normalise(other.question))
        if same is not None:
            raise ConfigError(
                f"question {other.question!r} is in train (id {same.question_id!r}) and in {split} "
                f"(id {other.question_id!r}): take it out of one"
            )
