"""The prompt stream: every prompt once per epoch, no prompt twice in one take, resumable anywhere."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.core.types import Task
from trace_async.errors import ConfigError
from trace_async.prompts import Candidate, PromptStream


class Numbered:
    """Tasks called t0, t1, ...; `count` None = without end."""

    def __init__(self, count: int | None) -> None:
        self._count = count

    def size(self, split: str) -> int | None:
        assert split == "train"
        return self._count

    def task(self, split: str, index: int) -> Task:
        assert split == "train"
        return Task(f"t{index}", {"index": index})


def names(candidates: tuple[Candidate, ...]) -> list[str]:
    return [candidate.task.task_id for candidate in candidates]


takes = st.lists(st.integers(1, 12), min_size=1, max_size=40)


@given(size=st.integers(1, 12), seed=st.integers(0, 2**63 - 1), counts=takes)
def test_every_prompt_comes_exactly_once_in_each_epoch(size: int, seed: int, counts: list[int]) -> None:
    stream = PromptStream(Numbered(size), num_train=0, seed=seed)

    seen = Counter((c.task.task_id, c.visit) for count in counts for c in stream.take(count))

    assert set(seen.values()) == {1}
    last = max(visit for _, visit in seen)
    for epoch in range(last):
        assert sum(visit == epoch for _, visit in seen) == size


@given(size=st.integers(1, 12), seed=st.integers(0, 1000), counts=takes)
def test_no_take_holds_a_prompt_twice(size: int, seed: int, counts: list[int]) -> None:
    stream = PromptStream(Numbered(size), num_train=0, seed=seed)

    for count in counts:
        taken = names(stream.take(count))
        assert len(taken) == len(set(taken)) == min(count, size)


@given(size=st.none() | st.integers(1, 12), counts=takes, cut=st.integers(0, 40))
def test_a_stream_loaded_from_json_goes_on_as_the_one_that_was_not_stopped(
    size: int | None, counts: list[int], cut: int
) -> None:
    whole = PromptStream(Numbered(size), num_train=0, seed=7)
    first = PromptStream(Numbered(size), num_train=0, seed=7)
    for count in counts[:cut]:
        first.take(count)
    second = PromptStream(Numbered(size), num_train=0, seed=7)
    second.load(json.loads(json.dumps(first.state())))

    expected = [whole.take(count) for count in counts][cut:]

    assert [second.take(count) for count in counts[cut:]] == expected


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    first = PromptStream(Numbered(50), num_train=0, seed=1)
    other = PromptStream(Numbered(50), num_train=0, seed=2)

    orders = {tuple(names(first.take(50))), tuple(names(first.take(50))), tuple(names(other.take(50)))}

    assert len(orders) == 3


def test_only_the_first_num_train_tasks_are_used() -> None:
    stream = PromptStream(Numbered(None), num_train=5, seed=0)

    assert sorted(names(stream.take(99))) == ["t0", "t1", "t2", "t3", "t4"]


def test_a_source_without_end_is_walked_in_order_and_never_repeats() -> None:
    stream = PromptStream(Numbered(None), num_train=0, seed=0)

    assert names(stream.take(2)) + names(stream.take(3)) == ["t0", "t1", "t2", "t3", "t4"]


def test_a_pool_larger_than_the_source_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="num_train is 9, but the environment has 8"):
        PromptStream(Numbered(8), num_train=9, seed=0)


def test_a_cursor_of_another_pool_is_refused() -> None:
    state = PromptStream(Numbered(8), num_train=0, seed=0).state()

    with pytest.raises(ConfigError, match="of 8 prompts and seed 0, this run has 6 and 0"):
        PromptStream(Numbered(8), num_train=6, seed=0).load(state)
