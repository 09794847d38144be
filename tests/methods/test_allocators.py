"""What all tree allocators promise, and the two controls: chains only, and Tree-GRPO's random places."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import failure_of, make_turn
from tests.methods.allocator_kit import allocator, granted, grow_at_random, play, spend, tree_of
from trace_async.core.types import ROOT, Grant, GrownBy, NodeState, Score
from trace_async.errors import ConfigError
from trace_async.methods.allocators import ALLOCATORS, make_allocator
from trace_async.methods.growth_rules import continuations_due

RULES: list[tuple[str, dict[str, Any]]] = [
    ("random", {}),
    ("arpo", {}),
    ("arpo", {"alpha": 0.6}),
    ("trace", {}),
    ("trace", {"hold_below": 0.0}),
    ("trace", {"form": "beta", "strength": 4.0}),
    ("trace", {"mode": "joint"}),
    ("trace", {"mode": "joint", "form": "beta", "cost_aware": True}),
]


@pytest.mark.parametrize("name", sorted(ALLOCATORS))
def test_every_allocator_starts_with_all_roots_and_lets_a_rollout_go_on(name: str) -> None:
    tree, rule = tree_of(3, 0), allocator(name)
    assert rule.start(tree) == [Grant(node_id=ROOT, count=3, grown_by=GrownBy.ROOT)]
    first, *_ = spend(tree, rule.start(tree))
    play(tree, first, rule, 0.5, outcome=1.0)
    assert tree.nodes[first].chain_child is not None
    assert tree.continuations_left == 0


@settings(max_examples=150)
@given(st.sampled_from(RULES), st.integers(1, 4), st.integers(0, 9), st.booleans(), st.integers(0, 2**32 - 1))
def test_in_any_order_and_with_any_failures_every_continuation_is_spent_by_the_last_root_rollouts_end(
    rule: tuple[str, dict[str, Any]], roots: int, continuations: int, can_branch: bool, seed: int
) -> None:
    name, options = rule
    tree = tree_of(roots, continuations, can_branch=can_branch, max_turns=5)
    left = grow_at_random(tree, allocator(name, seed, **options), seed)
    tree.validate()
    assert len(left) == roots
    assert (tree.roots_left, left[-1]) == (0, 0)
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize(("name", "options"), RULES)
def test_equal_seeds_grow_equal_trees(name: str, options: dict[str, Any]) -> None:
    def history(seed: int) -> object:
        tree = tree_of(3, 6, max_turns=5)
        grow_at_random(tree, allocator(name, seed, **options), 1)
        return tree.history

    assert history(3) == history(3)


def test_names_and_options_are_read_strictly() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(ConfigError, match=r"tree.allocator = 'tracee' is not known; did you mean 'trace'"):
        make_allocator("tracee", {}, rng)
    with pytest.raises(ConfigError, match=r"tree.options.clip is no option here; it takes none"):
        make_allocator("uniform", {"clip": 0.1}, rng)
    with pytest.raises(ConfigError, match=r"tree.options.clipp is no option here; did you mean 'clip'"):
        make_allocator("trace", {"clipp": 0.1}, rng)
    with pytest.raises(ConfigError, match=r"tree.options.mode must be one of 'streaming', 'joint', got 'late'"):
        make_allocator("trace", {"mode": "late"}, rng)


@pytest.mark.parametrize(
    ("name", "options", "cure"),
    [
        ("trace", {"clip": 0.5}, r"clip must lie between 0 and 0.5, got 0.5"),
        ("trace", {"strength": 0.0}, r"strength must be a positive number of rollouts, got 0"),
        ("trace", {"hold_below": 1.5}, r"hold_below is a probability, 0 to 1, got 1.5"),
        ("arpo", {"tokens": 0}, r"tokens must be at least 1, got 0"),
    ],
)
def test_an_option_out_of_its_range_is_refused(name: str, options: dict[str, Any], cure: str) -> None:
    with pytest.raises(ConfigError, match=rf"tree.options.{cure}"):
        make_allocator(name, options, np.random.default_rng(0))


def test_uniform_grows_nothing_at_an_end_and_refuses_continuations() -> None:
    tree, rule = tree_of(2, 0), allocator("uniform")
    first, _ = spend(tree, rule.start(tree))
    assert rule.on_rollout_end(tree, play(tree, first, rule, 0.5, outcome=1.0)) == []
    with pytest.raises(ConfigError, match=r"4 continuations; set tree.continuations_per_root = 0"):
        rule.start(tree_of(2, 4))


def test_random_draws_with_replacement_from_the_prompt_and_the_ended_rollouts_own_turns() -> None:
    places = Counter[int]()
    for seed in range(300):
        tree, rule = tree_of(2, 12), allocator("random", seed)
        first, second = spend(tree, rule.start(tree))
        play(tree, first, rule, 0.5, 0.5, outcome=1.0)
        grants = granted(rule.on_rollout_end(tree, play(tree, second, rule, 0.5, 0.5, outcome=1.0)))
        assert sum(grants.values()) == 12
        places.update(grants)
    own = [ROOT, second, tree.nodes[second].children[0]]
    assert sorted(places) == sorted(own)
    assert all(abs(places[place] - 1200) < 150 for place in own)  # 5 standard deviations


def test_random_makes_a_tree_of_each_root_rollout_with_as_many_further_leaves_as_tree_grpo() -> None:
    """M trees, one round of N expansions each: M (1 + N) leaves, of which N are grown in every tree."""
    tree, rule = tree_of(2, 4), allocator("random", 5)
    for first in spend(tree, rule.start(tree)):
        grants = rule.on_rollout_end(tree, play(tree, first, rule, 0.5, 0.5, 0.5, outcome=1.0))
        assert sum(granted(grants).values()) == 2
        for node in spend(tree, grants):
            assert rule.on_rollout_end(tree, play(tree, node, rule, 0.5, outcome=0.0)) == []
    assert sum(node.state is NodeState.LEAF for node in tree.nodes) == 2 * (1 + 2)


def test_random_uses_what_a_failed_rollout_has_left_behind() -> None:
    places = set()
    for seed in range(20):
        tree, rule = tree_of(1, 4), allocator("random", seed)
        (first,) = spend(tree, rule.start(tree))
        tree.record_turn(first, make_turn())
        tree.record_score(first, Score(success=0.5, predictor_version=0))
        (running,) = spend(tree, rule.on_turn(tree, first))
        tree.fail(running, failure_of(running))
        places |= set(granted(rule.on_rollout_end(tree, running)))
    assert places == {ROOT, first}


def test_shares_of_a_budget_that_does_not_divide_add_up_to_it() -> None:
    tree, rule = tree_of(3, 5), allocator("trace", hold_below=0.0)
    shares = []
    for node in spend(tree, rule.start(tree)):
        end = play(tree, node, rule, 0.5, outcome=1.0)
        shares.append(continuations_due(tree, end))
        spend(tree, rule.on_rollout_end(tree, end))
    assert shares == [1, 2, 2]
