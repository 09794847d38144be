"""Splits: sizes, tasks, choices, and questions that must not be shared."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from envs.multihop_qa.records import Question, SubQuestion
from envs.multihop_qa.tasks import Choice, MultihopTasks, Split
from envs.retrieval.protocol import Passage
from trace_async.errors import ConfigError


def question(number: int, *, text: str = "", hops: int = 2, kind: str = "chain") -> Question:
    return Question(
        question_id=f"q{number}",
        question=text or f"Who is {number}?",
        answers=(f"A{number}",),
        dataset="made",
        hops=hops,
        kind=kind,
        steps=(SubQuestion("Who?", f"A{number}", "T", "1"),),
        paragraphs=(Passage("1", "T", "x" * 100),),
    )


class Shelf:
    """Questions that count how often they are read."""

    def __init__(self, *questions: Question) -> None:
        self.questions = questions
        self.num_readings = 0

    def __call__(self) -> Iterator[Question]:
        self.num_readings += 1
        yield from self.questions


def tasks_of(choice: Choice | None = None, **shelves: Shelf) -> MultihopTasks:
    return MultihopTasks({name: Split(shelf, f"about {name}") for name, shelf in shelves.items()}, choice or Choice())


def test_a_task_is_its_question_without_paragraphs_and_the_collection_it_searches() -> None:
    train, heldout = Shelf(question(0), question(1)), Shelf(question(2))
    tasks = tasks_of(train=train, heldout=heldout)
    assert (train.num_readings, heldout.num_readings) == (0, 0)
    assert (tasks.size("train"), tasks.size("heldout")) == (2, 1)
    task = tasks.task("train", 1)
    assert task.task_id == "made/train/q1"
    assert task.data["collection"] == "about train"
    assert json.loads(json.dumps(task.data)) == task.data
    assert "x" * 100 not in json.dumps(task.data)
    assert Question.from_data(task.data).steps == question(1).steps
    assert (train.num_readings, heldout.num_readings) == (1, 1)


def test_a_choice_holds_for_every_split() -> None:
    questions = [question(n, hops=n % 3 + 1, kind="chain" if n < 6 else "count") for n in range(9)]

    def ids(choice: Choice) -> list[str]:
        tasks = tasks_of(choice, train=Shelf(question(90)), heldout=Shelf(question(91)), dev=Shelf(*questions))
        return [tasks.task("dev", index).data["question_id"] for index in range(tasks.size("dev"))]

    assert ids(Choice()) == [f"q{n}" for n in range(9)]
    assert ids(Choice(hops=frozenset({1, 2}))) == ["q0", "q1", "q3", "q4", "q6", "q7"]
    assert ids(Choice(hops=frozenset({2}), kinds=frozenset({"chain"}))) == ["q1", "q4"]
    assert ids(Choice(limit=4)) == ["q0", "q1", "q2", "q3"]


def test_a_question_of_train_in_another_split_is_refused_by_name() -> None:
    shared = question(7, text="who IS the 2?")  # the same in normal form
    tasks = tasks_of(
        train=Shelf(question(1), question(2)),
        heldout=Shelf(question(3)),
        dev=Shelf(question(4), shared),
        more=Shelf(shared),
    )
    assert tasks.size("train") == 2
    for split in ("dev", "more"):
        with pytest.raises(ConfigError, match=rf"'who IS the 2\?' is in train \(id 'q2'\) and in {split} \(id 'q7'\)"):
            tasks.size(split)
    both = tasks_of(train=Shelf(question(2)), heldout=Shelf(question(3), question(2)), dev=Shelf(question(4)))
    assert both.size("dev") == 1
    for split in ("train", "heldout"):
        with pytest.raises(ConfigError, match=r"'Who is 2.*in heldout"):
            both.size(split)


def test_empty_splits_equal_ids_unknown_splits_and_indices_outside_are_refused() -> None:
    tasks = tasks_of(Choice(hops=frozenset({5})), train=Shelf(question(1, hops=5)), heldout=Shelf(question(2)))
    with pytest.raises(ConfigError, match=r"split 'heldout' has no questions; check its sources and .*hops"):
        tasks.task("train", 0)
    twice = tasks_of(train=Shelf(question(1), question(1, text="Where?")), heldout=Shelf(question(2)))
    with pytest.raises(ConfigError, match=r"two questions 'made/train/q1': 'Who is 1\?' and 'Where\?'"):
        twice.size("train")
    fine = tasks_of(train=Shelf(question(1)), heldout=Shelf(question(2)))
    with pytest.raises(ConfigError, match="unknown split 'test': there are train, heldout"):
        fine.size("test")
    for index in (-1, 1):
        with pytest.raises(IndexError, match=rf"split 'train' has tasks 0..0, not {index}"):
            fine.task("train", index)
