"""The round planner: one look at the whole pool, exact sums, and plans that a resumed run repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet_world import Belief, HashedBeliefs, ManyTasks, bare_prefix, make_tree_config
from trace_async.config import TreeConfig
from trace_async.coordination.rounds import PromptBeliefs, RoundPlanner
from trace_async.core.types import Prefix, Task
from trace_async.errors import InvariantError
from trace_async.methods.allocation import Counts
from trace_async.methods.root_allocators import ROOT_ALLOCATORS, RootAllocator, make_root_allocator
from trace_async.prompts import PromptStream

NAMES = sorted(ROOT_ALLOCATORS)


@dataclass
class Listening:
    """Beliefs that remember what they were asked."""

    calls: list[list[Prefix]] = field(default_factory=list)

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        self.calls.append(list(prefixes))
        return HashedBeliefs().score_prompts(prefixes)


class Spendthrift:
    """A root allocator that gives everybody one more than there is."""

    def pool_size(self, candidates: int, *, budget: int, max_roots: int) -> int:
        return budget + 1

    def allocate(self, beliefs: Sequence[object], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        return np.ones(len(beliefs), np.int64)


def planner(
    tree: TreeConfig,
    *,
    beliefs: PromptBeliefs | None = None,
    allocator: RootAllocator | None = None,
    num_train: int = 20,
    seed: int = 3,
) -> RoundPlanner:
    return RoundPlanner(
        PromptStream(ManyTasks(), num_train=num_train, seed=seed),
        beliefs or HashedBeliefs(),
        allocator or make_root_allocator(tree.root_allocator, tree.root_options),
        prefix_of=bare_prefix,
        tree=tree,
        candidates=8,
        seed=seed,
    )


def tree_of(name: str, options: Mapping[str, Any] | None = None) -> TreeConfig:
    return replace(make_tree_config(root_allocator=name), root_options=dict(options or {}))


def test_the_whole_pool_is_scored_in_one_call_in_the_order_of_the_stream() -> None:
    beliefs = Listening()
    plan = planner(tree_of("trace"), beliefs=beliefs, num_train=0).plan(0)

    (asked,) = beliefs.calls
    assert [prefix.prompt_id for prefix in asked] == [f"train-{index}" for index in range(8)]
    assert [draft.task.task_id for draft in plan] == [
        prefix.prompt_id for prefix in asked if prefix.prompt_id in {draft.task.task_id for draft in plan}
    ]


def test_a_draft_carries_the_mean_and_the_strength_of_what_was_believed_before() -> None:
    for draft in planner(tree_of("trace")).plan(0):
        (belief,) = HashedBeliefs().score_prompts([bare_prefix(Task(draft.task.task_id, {}))])
        assert draft.success == pytest.approx(belief.alpha / (belief.alpha + belief.beta))
        assert draft.strength == pytest.approx(belief.alpha + belief.beta)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32 - 1), rounds=st.integers(1, 6))
def test_every_round_spends_exactly_its_roots_on_different_prompts(name: str, seed: int, rounds: int) -> None:
    made = planner(tree_of(name), seed=seed)
    for number in range(rounds):
        plan = made.plan(number)
        assert sum(draft.roots for draft in plan) == 6
        assert all(1 <= draft.roots <= 3 for draft in plan)
        assert len({draft.task.task_id for draft in plan}) == len(plan)


@pytest.mark.parametrize("name", NAMES)
@given(before=st.integers(0, 6), skipped=st.integers(0, 3))
def test_a_resumed_run_plans_what_the_stopped_one_would_have(name: str, before: int, skipped: int) -> None:
    stopped = planner(tree_of(name))
    for number in range(before):
        stopped.plan(number)
    cursor = json.loads(json.dumps(stopped.state()))
    later = [stopped.plan(number) for number in range(before, before + skipped + 2)]

    resumed = planner(tree_of(name))
    resumed.load(cursor)
    for _ in range(skipped):
        resumed.skip()  # rounds that the ledger knows

    assert [resumed.plan(number) for number in range(before + skipped, before + skipped + 2)] == later[skipped:]


def test_even_visits_every_prompt_once_in_an_epoch() -> None:
    made = planner(tree_of("even"), num_train=20)
    visited = [draft.task.task_id for number in range(10) for draft in made.plan(number)]
    assert sorted(visited) == sorted(f"train-{index}" for index in range(20))


def test_with_exploration_every_prompt_is_visited_in_the_end_whatever_is_believed_of_it() -> None:
    explored = planner(tree_of("trace"), num_train=20)
    greedy = planner(tree_of("trace", {"explore_share": 0.0}), num_train=20)
    visited = {draft.task.task_id for number in range(250) for draft in explored.plan(number)}
    without = {draft.task.task_id for number in range(250) for draft in greedy.plan(number)}
    assert len(visited) == 20
    assert len(without) < 20


def test_an_allocator_that_overspends_ends_the_run() -> None:
    with pytest.raises(InvariantError, match=r"round 4 allocates 7 roots, 1 to 1 each, over 7 prompts; it must be 6"):
        planner(tree_of("even"), allocator=Spendthrift()).plan(4)
