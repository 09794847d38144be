"""What holds for every objective: its two forms and its oracle agree, and what must not matter does not."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.methods.objectives.cases import Case, changed, random_case, with_turns
from tests.methods.objectives.kit import (
    ALL_CONFIGS,
    OPEN,
    coefficients,
    configs_of,
    evaluate,
    name_of,
    on_policy_coefficients,
)
from tests.methods.objectives.oracles import ORACLES, oracle
from tests.methods.objectives.references import REFERENCES, reference_loss
from trace_async.config import ObjectiveConfig
from trace_async.core.rows import Signal
from trace_async.methods.objective_kinds import KINDS, Scope
from trace_async.methods.objectives.registry import FUNCTIONS

every_config = pytest.mark.parametrize("config", ALL_CONFIGS, ids=name_of)
every_credited_config = pytest.mark.parametrize(
    "config", [config for config in ALL_CONFIGS if KINDS[config.kind].signal is not Signal.MASS], ids=name_of
)
"""Of kinds that train the advantages they are given, instead of comparing outcomes themselves."""

every_turnwise_config = pytest.mark.parametrize(
    "config", [config for config in ALL_CONFIGS if KINDS[config.kind].scope is Scope.TURN], ids=name_of
)


def case_for(config: ObjectiveConfig, seed: int, *, groups: int = 2) -> Case:
    """A random case that the kind can be used with; credit by leaves or by turns in turn."""
    return made_once(seed, by_leaves=KINDS[config.kind].needs_leaves or seed % 2 == 0, groups=groups)


@cache
def made_once(seed: int, *, by_leaves: bool, groups: int) -> Case:
    return random_case(np.random.default_rng(seed), by_leaves=by_leaves, groups=groups)


def slopes(case: Case, config: ObjectiveConfig, *, form: str = "node") -> tuple[float, NDArray[np.float64]]:
    """Loss, and its gradient with respect to the trained policy's logits."""
    logits = torch.tensor(case.logits, requires_grad=True)
    logprobs = case.logprobs_of(logits).float()
    if form == "node":
        loss = evaluate(logprobs, case.tensors(), config).loss
    else:
        loss = reference_loss(logprobs, case.tensors(), config)
    (gradient,) = torch.autograd.grad(loss, logits)
    return float(loss.detach()), gradient.numpy()


def assert_same(first: tuple[float, NDArray[np.float64]], second: tuple[float, NDArray[np.float64]]) -> None:
    assert first[0] == pytest.approx(second[0], rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(first[1], second[1], atol=1e-5, rtol=1e-5)


def test_every_kind_has_a_function_a_reference_and_an_oracle() -> None:
    assert set(KINDS) == set(FUNCTIONS) == set(REFERENCES) == set(ORACLES)


# ---- agreement --------------------------------------------------------------------------------------------------


@every_config
def test_the_node_form_has_loss_and_gradient_of_the_flattened_tree(config: ObjectiveConfig) -> None:
    moved = 0
    for seed in range(4):
        case = case_for(config, seed)
        node = slopes(case, config)
        assert_same(node, slopes(case, config, form="rows"))
        moved += bool(node[1].any())
    assert moved >= 2


@every_config
def test_the_gradient_is_that_of_finite_differences_of_the_oracle(config: ObjectiveConfig) -> None:
    case = case_for(config, 4 + ALL_CONFIGS.index(config) % 2, groups=1)
    loss, gradient = slopes(case, config)
    assert loss == pytest.approx(oracle(case.logprobs, case.logprobs, case, config), rel=1e-5, abs=1e-5)
    step, found = 1e-5, np.zeros_like(case.logits)
    for place in np.ndindex(*case.logits.shape):
        sides = []
        for sign in (1, -1):
            logits = case.logits.copy()
            logits[place] += sign * step
            sides.append(oracle(case.logprobs_of(torch.from_numpy(logits)).numpy(), case.logprobs, case, config))
        found[place] = (sides[0] - sides[1]) / (2 * step)
    np.testing.assert_allclose(gradient, found, atol=1e-5, rtol=1e-4)


@every_credited_config
def test_on_policy_every_token_has_its_mass_times_advantage(config: ObjectiveConfig) -> None:
    case = case_for(config, 6)
    case = changed(case, proximal=case.table.behaviour_logprobs.astype(np.float64))
    turns = case.tensors()
    found = coefficients(turns.behaviour_logprobs, turns, config)
    torch.testing.assert_close(found, on_policy_coefficients(config.kind, turns), atol=1e-6, rtol=1e-5)
    assert found.any()


# ---- what must not matter ---------------------------------------------------------------------------------------


@every_credited_config
def test_a_leaf_told_twice_with_half_its_mass_changes_nothing(config: ObjectiveConfig) -> None:
    case = case_for(config, 8)
    for leaf in case.leaves[:3]:
        assert_same(slopes(told_twice(case, leaf), config), slopes(case, config))


def told_twice(case: Case, leaf: int) -> Case:
    half = replace(case.turns[leaf], mass=float(case.table.mass[leaf]) / 2)
    turns = [half if j == leaf else turn for j, turn in enumerate(case.turns)]
    at = case.tokens_of(leaf)
    return changed(
        case,
        turns=(*turns, half),
        **{name: np.concatenate([getattr(case, name), getattr(case, name)[at]]) for name in TOKEN_FIELDS},
    )


TOKEN_FIELDS = ("state", "token", "proximal")


@every_config
def test_neither_the_order_of_turns_nor_the_numbers_of_trees_matter(config: ObjectiveConfig) -> None:
    case = case_for(config, 10)
    for seed in range(2):
        assert_same(slopes(shuffled(case, np.random.default_rng(seed)), config), slopes(case, config))


def shuffled(case: Case, rng: np.random.Generator) -> Case:
    """Any order in which parents stand before their children, and other numbers for the trees."""
    names = rng.permutation(len(case.root_belief))
    waiting, order = list(range(len(case.turns))), []
    while waiting:
        ready = [turn for turn in waiting if case.turns[turn].parent not in waiting]
        order.append(int(rng.choice(ready)))
        waiting.remove(order[-1])
    turns = []
    for old in order:
        turn = case.turns[old]
        parent = order.index(turn.parent) if turn.parent >= 0 else -1
        turns.append(replace(turn, parent=parent, group=int(names[turn.group])))
    at = np.concatenate([np.arange(case.tokens_of(turn).start, case.tokens_of(turn).stop) for turn in order])
    beliefs = np.empty(len(names))
    beliefs[names] = case.root_belief
    return changed(
        case,
        turns=tuple(turns),
        root_belief=tuple(beliefs.tolist()),
        **{name: getattr(case, name)[at] for name in TOKEN_FIELDS},
    )


@every_turnwise_config
def test_first_turns_that_became_context_leave_later_turns_alone(config: ObjectiveConfig) -> None:
    moved = 0
    for seed in range(12, 16):
        case = case_for(config, seed)
        context = with_turns(case, [replace(turn, trained=turn.trained and turn.parent >= 0) for turn in case.turns])
        first = torch.from_numpy(case.table.parent < 0)[case.tensors().turn]
        before, after = (coefficients(each.policy(), each.tensors(), config) for each in (case, context))
        torch.testing.assert_close(after[~first], before[~first])
        assert not after[first].any()
        moved += bool(before[first].any()) and bool(before[~first].any())
    assert moved


@every_turnwise_config
def test_turns_without_tokens_at_hand_contribute_nothing_and_calls_add_up(config: ObjectiveConfig) -> None:
    case = case_for(config, 14)
    assert_calls_add_up(case, config, np.array([j % 3 for j in range(len(case.turns))]))


@pytest.mark.parametrize(
    "config", [config for config in ALL_CONFIGS if KINDS[config.kind].scope is Scope.TREE], ids=name_of
)
def test_trees_do_not_see_each_other(config: ObjectiveConfig) -> None:
    case = case_for(config, 14, groups=3)
    assert_calls_add_up(case, config, case.table.group)


def assert_calls_add_up(case: Case, config: ObjectiveConfig, call_of: NDArray[np.integer]) -> None:
    """Turns j with the same `call_of[j]` are at hand together."""
    whole = evaluate(case.policy(), case.tensors(), config)
    expected = coefficients(case.policy(), case.tensors(), config)
    total, found = 0.0, torch.zeros_like(expected)
    for call in np.unique(call_of):
        tokens = np.flatnonzero(call_of[case.table.turn] == call)
        part = evaluate(case.policy(tokens), case.tensors(tokens), config)
        total += float(part.loss.detach())
        found[tokens] = coefficients(case.policy(tokens), case.tensors(tokens), config)
        assert not part.vetoed[torch.from_numpy(call_of != call)].any()
    assert total == pytest.approx(float(whole.loss.detach()), rel=1e-5, abs=1e-5)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@every_config
def test_without_any_token_the_loss_is_nothing(config: ObjectiveConfig) -> None:
    nothing = np.zeros(0, np.int64)
    case = case_for(config, 16)
    logprobs = case.policy(nothing)
    surrogate = evaluate(logprobs, case.tensors(nothing), config)
    assert float(surrogate.loss.detach()) == 0.0
    assert not surrogate.vetoed.any()


# ---- numbers that are none, and huge ones -----------------------------------------------------------------------


@every_config
@pytest.mark.parametrize("where", ["trained", "behaviour", "proximal"])
def test_a_number_that_is_none_takes_out_its_turn(config: ObjectiveConfig, where: str) -> None:
    if where == "proximal" and not KINDS[config.kind].anchors:
        return
    case = case_for(config, 18)
    victim = int(np.flatnonzero(case.table.trained)[1])
    rest = with_turns(case, [replace(t, trained=t.trained and j != victim) for j, t in enumerate(case.turns)])
    for poison in (math.nan, math.inf, -math.inf):
        logprobs, turns = case.policy().detach(), case.tensors()
        target = {"trained": logprobs, "behaviour": turns.behaviour_logprobs, "proximal": turns.proximal_logprobs}[
            where
        ]
        assert target is not None
        target[case.tokens_of(victim).start] = poison

        loss, found = evaluate(logprobs, turns, config).loss, coefficients(logprobs, turns, config)

        assert torch.isfinite(loss)
        assert torch.isfinite(found).all()
        assert not found[case.tokens_of(victim)].any()
        if KINDS[config.kind].scope is Scope.TURN:
            torch.testing.assert_close(found, coefficients(rest.policy(), rest.tensors(), config))


@every_config
@pytest.mark.parametrize("size", [30.0, 1e4])
def test_huge_log_ratios_never_overflow(config: ObjectiveConfig, size: float) -> None:
    case = case_for(config, 20)
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], case.token.size)).float()
    turns = case.tensors()
    assert turns.proximal_logprobs is not None
    for far in (turns.behaviour_logprobs + size * signs, turns.proximal_logprobs + size * signs):
        surrogate = evaluate(far, turns, config)
        assert torch.isfinite(surrogate.loss)
        assert torch.isfinite(coefficients(far, turns, config)).all()
    far_sampler = replace(turns, behaviour_logprobs=turns.behaviour_logprobs - size * signs)
    assert torch.isfinite(coefficients(case.policy(), far_sampler, config)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_loss_is_a_float32_number_with_gradient_and_the_rest_is_detached(kind: str) -> None:
    for config in configs_of(kind):
        case = case_for(config, 22)
        surrogate = evaluate(case.policy(), case.tensors(), config)
        assert surrogate.loss.shape == ()
        assert surrogate.loss.dtype == torch.float32
        assert surrogate.loss.requires_grad
        assert surrogate.touched.shape == case.token.shape
        assert surrogate.vetoed.shape == (len(case.turns),)
        assert_flags(surrogate.touched, surrogate.vetoed)


def assert_flags(*flags: Tensor) -> None:
    for each in flags:
        assert each.dtype == torch.bool
        assert not each.requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_vetoed_turn_is_reported_and_has_no_gradient(kind: str) -> None:
    config = replace(OPEN, kind=kind, veto_low=0.99, veto_high=1.01)
    case = case_for(config, 24)
    surrogate = evaluate(case.policy(), case.tensors(), config)
    assert surrogate.vetoed.any()
    assert not (surrogate.vetoed & ~case.tensors().trained).any()
    assert not coefficients(case.policy(), case.tensors(), config)[surrogate.vetoed[case.tensors().turn]].any()
