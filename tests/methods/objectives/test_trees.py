"""Objectives on packed trees: equal to the flattened tree, indifferent to what became context."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import chain_group, group_from_spec, random_group, spec
from tests.methods.objectives.kit import OPEN, UNCAPPED, Turn, coefficients, evaluate, turns_of
from tests.methods.objectives.references import REFERENCES, LeafRows
from trace_async.config import ObjectiveConfig
from trace_async.core.group import paths, turn_spans
from trace_async.core.packing import RowBatch, denominators, first_tokens, pack
from trace_async.core.rows import PackItem, Signal
from trace_async.core.turn_table import TurnTable, make_table
from trace_async.core.types import Group, NodeState, TurnCredit, Verdict
from trace_async.methods.credit import CreditRule, flat_credit, sibling_credit
from trace_async.methods.objective_kinds import KINDS, Normaliser, options_of
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.methods.objectives.turns import TurnTensors, to_tensors


class Packed(NamedTuple):
    """One group as the learner packs it."""

    item: PackItem
    table: TurnTable
    rows: RowBatch

    def at_hand(self, logprobs: Tensor) -> tuple[Tensor, TurnTensors]:
        """Log-probabilities [N] of all sampled tokens, and the turns, as an objective gets them: in order of rows."""
        places = self.rows.token_index[self.rows.scored]
        return logprobs[torch.from_numpy(places)], to_tensors(self.table, tokens=places)


def packed(group: Group, credit: TurnCredit, *, context: tuple[int, ...] = (), kind: str = "tree_tis") -> Packed:
    """The packed rows of one group of fresh turns; turns in `context` are too old to train."""
    verdicts = np.full(group.num_turns, Verdict.TRAIN, np.uint8)
    verdicts[list(context)] = Verdict.CONTEXT
    ages = np.zeros(group.num_turns, np.int32)
    item = PackItem(group=group, credit=credit, verdicts=verdicts, ages=ages, signal=KINDS[kind].signal)
    (rows,) = pack([item], first_tokens=first_tokens([item]), pad_id=0, micro_batch_tokens=100_000)
    return Packed(item, make_table([item]), rows)


def other_policy(group: Group, rng: np.random.Generator) -> Tensor:
    """Log-probability of each sampled token of a group under some other policy, the leaf variables of autograd."""
    shift = rng.normal(0.0, 0.7, group.num_sampled_tokens)
    values = np.minimum(group.logprobs + shift, -1e-3).astype(np.float32)
    return torch.from_numpy(values).requires_grad_()


def flattened_loss(group: Group, table: Tensor, *, weights: dict[int, float], advantages: dict[int, float]) -> Tensor:
    """The oracle: one row per leaf, shared turns repeated, token-level TIS with cap 2, leaf weights and advantages."""
    spans, mu = turn_spans(group), torch.from_numpy(group.logprobs.copy())
    loss = torch.zeros(())
    for path in paths(group):
        if path[-1] not in weights:
            continue
        for turn in path:
            first = int(spans.logprob_start[turn])
            tokens = slice(first, first + int(group.action_lengths[turn]))
            weight = torch.exp(table[tokens].detach() - mu[tokens]).clamp(max=2.0)
            loss = loss - weights[path[-1]] * advantages[path[-1]] * (weight * table[tokens]).sum()
    return loss


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_packed_rows_have_the_gradient_of_the_flattened_tree(seed: int, hierarchical: bool) -> None:
    """Any leaf advantages and either kind of leaf weights, folded into mass and advantage of the turns."""
    rng = np.random.default_rng(seed)
    group = random_group(rng, continuations=6, selected=False)
    leaves = np.flatnonzero(group.state == NodeState.LEAF).tolist()
    if not leaves:
        return
    shares = (sibling_credit if hierarchical else flat_credit)(group).mass
    weights = {leaf: float(shares[leaf]) for leaf in leaves}
    advantages = {leaf: float(rng.normal()) for leaf in leaves}
    mass, total = np.zeros(group.num_turns), np.zeros(group.num_turns)
    for path in paths(group):
        if path[-1] in weights:
            mass[list(path)] += weights[path[-1]]
            total[list(path)] += weights[path[-1]] * advantages[path[-1]]
    mean = np.divide(total, mass, out=np.zeros_like(total), where=mass > 0)
    credit = TurnCredit(
        value=shares, advantage=mean.astype(np.float32), mass=np.where(mass > 0, mass, 0).astype(np.float32)
    )
    table = other_policy(group, rng)
    config = replace(OPEN, cap_positive=2.0, cap_negative=2.0)

    loss = evaluate(*packed(group, credit).at_hand(table), config).loss

    expected = flattened_loss(group, table, weights=weights, advantages=advantages)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(loss, table)[0], torch.autograd.grad(expected, table)[0], atol=1e-5, rtol=1e-4
    )


def test_turning_the_first_turns_into_context_leaves_the_gradient_of_later_turns_alone() -> None:
    group = group_from_spec([spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0), spec(outcome=1.0))])
    credit = replace(sibling_credit(group), advantage=np.array([1, 1, -1, -1, -0.5, 0.5], np.float32))
    table = other_policy(group, np.random.default_rng(0))
    first_turns = tuple(np.flatnonzero(group.parent < 0).tolist())

    gradients = [
        torch.autograd.grad(evaluate(*rows.at_hand(table), OPEN).loss, table)[0]
        for rows in (packed(group, credit), packed(group, credit, context=first_turns))
    ]

    spans = turn_spans(group)
    below = torch.ones(group.num_sampled_tokens, dtype=torch.bool)
    for turn in first_turns:
        first = int(spans.logprob_start[turn])
        below[first : first + int(group.action_lengths[turn])] = False
    torch.testing.assert_close(gradients[0][below], gradients[1][below])
    assert gradients[0][~below].all()
    assert not gradients[1][~below].any()


@pytest.mark.parametrize("kind", ["tree_tis", "ppo", "dr_grpo", "icepop", "dppo", "ipo", "m2po"])
@pytest.mark.parametrize(
    ("rule", "expected"),
    [(sibling_credit, {1 / 4, -1 / 4}), (flat_credit, {1 / 9, 2 / 9, -1 / 9})],
)
def test_on_policy_every_token_has_mass_times_advantage(rule: CreditRule, expected: set[float], kind: str) -> None:
    """The forked tree of the worked numbers; with the same policy on both sides every ratio is one."""
    group = group_from_spec([spec(spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0)))])
    rows = packed(group, rule(group), kind=kind)
    logprobs, turns = rows.at_hand(torch.from_numpy(group.logprobs.copy()))

    found = coefficients(logprobs, turns, ObjectiveConfig(kind=kind))

    torch.testing.assert_close(found, (turns.mass * turns.advantage)[turns.turn])
    seen = {round(x, 6) for x in found.tolist()} - {0.0}
    assert seen == {round(x, 6) for x in expected}


@pytest.mark.parametrize("kind", [kind for kind, entry in KINDS.items() if entry.signal is not Signal.MASS])
def test_chains_have_the_loss_of_a_flat_trainer(kind: str) -> None:
    """One row per response, advantage = outcome - mean, the sum over rows divided as the paper says."""
    group = chain_group((1.0, 0.25, 0.0, 0.0), turns=2)
    group = replace(group, logprobs=np.linspace(-1.9, -0.4, group.num_sampled_tokens, dtype=np.float32))
    shape, outcome = (4, -1), np.array([1.0, 0.25, 0.0, 0.0], np.float32)
    config, every = replace(UNCAPPED, kind=kind), other_policy(group, np.random.default_rng(1))
    whole = packed(group, flat_credit(group), kind=kind)
    objective = ChosenObjective(config)

    loss = objective(*whole.at_hand(every))[0] / objective.denominator(denominators([whole.item]))

    logprobs, mu = every.view(shape), torch.from_numpy(group.logprobs.copy()).view(shape)
    advantage = torch.from_numpy(outcome - outcome.mean())[:, None].expand_as(mu)
    turn = torch.arange(group.num_turns).repeat_interleave(2).view(shape)
    rows = LeafRows(
        logprobs=logprobs,
        mu=mu,
        proximal=mu,
        advantage=advantage,
        net=advantage,
        age=torch.zeros(mu.shape),
        tight=torch.zeros(mu.shape, dtype=torch.bool),
        turn=turn,
        trained=torch.ones(mu.shape, dtype=torch.bool),
        weight=torch.ones(4, 1),
        leaf=turn[:, -1],
        turns=whole.at_hand(every)[1],
    )
    count = {
        Normaliser.TOKENS: mu.numel(),
        Normaliser.TURNS: group.num_turns,
        Normaliser.PROMPTS: len(outcome),
        Normaliser.CONSTANT: len(outcome) * 1024,
    }[KINDS[kind].normaliser]
    expected = REFERENCES[kind](rows, config, options_of(config)) / count
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-5)
    slopes = [torch.autograd.grad(each, every)[0] for each in (loss, expected)]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-6, rtol=1e-5)
    assert slopes[0].any()


LOGITS, BEHAVIOUR_LOGITS = (0.4, -0.3, 0.8), (-0.2, 0.5, 0.1)  # of action 1: at the root, below 0, below 1
REWARD = ((0.2, 1.0), (0.7, -0.5))  # [root action][child action]


def expected_gradient(*, corrected: bool, baseline: float) -> list[float]:
    """Ascent direction of `LOGITS`, over every tree of one root and 3 children below action 0, 1 below action 1."""
    logits = torch.tensor(LOGITS, requires_grad=True)
    log = torch.nn.functional.logsigmoid
    trained_by = torch.stack([log(-logits), log(logits)])  # [action, place]
    behaviour = torch.tensor(BEHAVIOUR_LOGITS)
    mu = torch.stack([log(-behaviour), log(behaviour)])
    loss = torch.zeros(())
    for root in (0, 1):
        for children in product((0, 1), repeat=3 if root == 0 else 1):
            taken = [(root, 0), *((child, 1 + root) for child in children)]
            values = [REWARD[root][child] for child in children]
            logprobs = torch.stack([trained_by[turn] for turn in taken])
            recorded = torch.stack([mu[turn] for turn in taken])
            first = Turn(advantage=sum(values) / len(values) - baseline)
            below = [Turn(parent=0, advantage=value - baseline, mass=1 / len(values)) for value in values]
            turns = replace(turns_of(first, *below), behaviour_logprobs=recorded if corrected else logprobs.detach())
            loss = loss + recorded.sum().exp() * evaluate(logprobs, turns, UNCAPPED).loss
    return (-torch.autograd.grad(loss, logits)[0]).tolist()


def test_each_turns_own_ratio_moves_the_gradient_as_enumeration_by_hand_says() -> None:
    """The trained policy's own gradient is (-.160594, .078483, -.153678); prefix and future factors would reach it."""
    assert expected_gradient(corrected=False, baseline=0.0) == pytest.approx([-0.217106, 0.178935, -0.139914], abs=2e-6)
    for baseline in (0.0, 0.3):  # the own ratio makes it unbiased in the baseline
        own_only = expected_gradient(corrected=True, baseline=baseline)
        assert own_only == pytest.approx([-0.150870, 0.107529, -0.115554], abs=2e-6)
