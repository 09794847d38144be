"""Credit rules of independent rows tell the leaves' own advantages, of which the turns' are means."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import random_group
from trace_async.core.group import paths
from trace_async.core.rows import PackItem, Signal, carries_signal, leaf_parts
from trace_async.core.types import Group, NodeState, TurnCredit, Verdict
from trace_async.methods.credit import CREDITS, LEAF_RULES

SEEDS = st.integers(0, 2**32 - 1)
every_rule = st.sampled_from(sorted(CREDITS))
every_leaf_rule = st.sampled_from(sorted(LEAF_RULES))


def item_of(group: Group, credit: TurnCredit, signal: Signal = Signal.LEAVES) -> PackItem:
    verdicts = np.full(group.num_turns, Verdict.TRAIN, np.uint8)
    ages = np.zeros(group.num_turns, np.int32)
    return PackItem(group=group, credit=credit, verdicts=verdicts, ages=ages, signal=signal)


def leaves_below(group: Group) -> list[list[int]]:
    """For each turn, the leaves at or below it."""
    found: list[list[int]] = [[] for _ in range(group.num_turns)]
    for path in paths(group):
        if group.state[path[-1]] == NodeState.LEAF:
            for turn in path:
                found[turn].append(path[-1])
    return found


@settings(max_examples=80)
@given(SEEDS, every_leaf_rule)
def test_a_turns_advantage_is_the_mean_of_the_leaves_below_by_mass(seed: int, rule: str) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    credit = CREDITS[rule](group)
    own = credit.leaf_advantage
    assert own is not None
    np.testing.assert_array_equal(np.isnan(own), group.state != NodeState.LEAF)
    for turn, leaves in enumerate(leaves_below(group)):
        if leaves:
            weights = credit.mass[leaves]
            assert credit.mass[turn] == pytest.approx(weights.sum(), rel=1e-5)
            assert credit.advantage[turn] == pytest.approx(weights @ own[leaves] / weights.sum(), abs=1e-5)
        else:
            assert credit.advantage[turn] == 0


@settings(max_examples=80)
@given(SEEDS, every_rule)
def test_the_two_parts_of_an_advantage_sum_to_it_and_are_means_of_one_sign(seed: int, rule: str) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    credit = CREDITS[rule](group)
    above, below = leaf_parts(item_of(group, credit))
    assert (above >= 0).all()
    assert (below <= 0).all()
    np.testing.assert_allclose(above + below, credit.advantage, atol=1e-5)
    for turn, leaves in enumerate(leaves_below(group)):
        own = credit.advantage[[turn]] if credit.leaf_advantage is None else credit.leaf_advantage[leaves]
        weights = np.ones(own.size) if credit.leaf_advantage is None else credit.mass[leaves]
        if leaves and weights.sum() > 0:
            assert above[turn] == pytest.approx(weights @ np.maximum(own, 0) / weights.sum(), abs=1e-5)
            assert below[turn] == pytest.approx(weights @ np.minimum(own, 0) / weights.sum(), abs=1e-5)


@settings(max_examples=40)
@given(SEEDS, every_leaf_rule)
def test_a_turn_whose_leaves_cancel_still_has_their_signal(seed: int, rule: str) -> None:
    group = random_group(np.random.default_rng(seed), continuations=6)
    credit = CREDITS[rule](group)
    by_turn, by_leaves = (
        carries_signal(item_of(group, credit, signal)) for signal in (Signal.ADVANTAGE, Signal.LEAVES)
    )
    assert credit.leaf_advantage is not None
    own = np.nan_to_num(credit.leaf_advantage)
    some = np.array([bool((own[leaves] != 0).any()) for leaves in leaves_below(group)])
    np.testing.assert_array_equal(by_leaves, some)
    assert not (by_turn & ~by_leaves).any()


def test_other_rules_have_no_advantages_of_leaves() -> None:
    group = random_group(np.random.default_rng(3))
    assert {name for name, rule in CREDITS.items() if rule(group).leaf_advantage is not None} == LEAF_RULES
