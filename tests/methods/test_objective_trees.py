"""The objective on packed trees: equal to the flattened tree, indifferent to what became context."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.builders import group_from_spec, random_group, spec
from tests.methods.objective_cases import OPEN, coefficients
from trace_async.config import ObjectiveConfig
from trace_async.core.group import paths, turn_spans
from trace_async.core.packing import PackItem, RowBatch, pack
from trace_async.core.types import Group, NodeState, TurnCredit, Verdict
from trace_async.methods.credit import CreditRule, flat_credit, sibling_credit
from trace_async.methods.objective import ObjectiveBatch, to_tensors, tree_tis


def only_batch(group: Group, credit: TurnCredit, *, context: tuple[int, ...] = ()) -> RowBatch:
    """The packed rows of one group of fresh turns; turns in `context` are too old to train."""
    verdicts = np.full(group.num_turns, Verdict.TRAIN, np.uint8)
    verdicts[list(context)] = Verdict.CONTEXT
    item = PackItem(group=group, credit=credit, verdicts=verdicts, ages=np.zeros(group.num_turns, np.int32))
    (rows,) = pack([item], pad_id=0, micro_batch_tokens=100_000)
    return rows


def table_of(group: Group, rng: np.random.Generator) -> Tensor:
    """Log-probability of each sampled token of a group under some other policy, the leaf variables of autograd."""
    shift = rng.normal(0.0, 0.7, group.num_sampled_tokens)
    values = np.minimum(group.logprobs + shift, -1e-3).astype(np.float32)
    return torch.from_numpy(values).requires_grad_()


def by_rows(group: Group, rows: RowBatch, table: Tensor) -> Tensor:
    """Log-probabilities [B, T] of packed rows, gathered from the table: turns are told apart by their behaviour."""
    found = torch.zeros(rows.token_ids.shape)
    where = {float(mu): m for m, mu in enumerate(group.logprobs)}
    for b, t in zip(*np.nonzero(rows.loss_mask), strict=True):
        found[b, t] = table[where[float(rows.behaviour_logprobs[b, t])]]
    return found


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
    rows, table = only_batch(group, credit), table_of(group, rng)
    config = replace(OPEN, cap_positive=2.0, cap_negative=2.0)

    loss, _ = tree_tis(by_rows(group, rows, table), to_tensors(rows), config)

    expected = flattened_loss(group, table, weights=weights, advantages=advantages)
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        torch.autograd.grad(loss, table)[0], torch.autograd.grad(expected, table)[0], atol=1e-5, rtol=1e-4
    )


def test_turning_the_first_turns_into_context_leaves_the_gradient_of_later_turns_alone() -> None:
    group = group_from_spec([spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0), spec(outcome=1.0))])
    credit = replace(sibling_credit(group), advantage=np.array([1, 1, -1, -1, -0.5, 0.5], np.float32))
    table = table_of(group, np.random.default_rng(0))
    first_turns = tuple(np.flatnonzero(group.parent < 0).tolist())

    gradients = []
    for rows in (only_batch(group, credit), only_batch(group, credit, context=first_turns)):
        loss, _ = tree_tis(by_rows(group, rows, table), to_tensors(rows), OPEN)
        gradients.append(torch.autograd.grad(loss, table)[0])

    spans = turn_spans(group)
    below = torch.ones(group.num_sampled_tokens, dtype=torch.bool)
    for turn in first_turns:
        first = int(spans.logprob_start[turn])
        below[first : first + int(group.action_lengths[turn])] = False
    torch.testing.assert_close(gradients[0][below], gradients[1][below])
    assert gradients[0][~below].all()
    assert not gradients[1][~below].any()


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(sibling_credit, {1 / 4, -1 / 4}), (flat_credit, {1 / 9, 2 / 9, -1 / 9})],
)
def test_on_policy_every_token_has_mass_times_advantage(rule: CreditRule, expected: set[float]) -> None:
    """The forked tree of the worked numbers; with the same policy on both sides every ratio is one."""
    group = group_from_spec([spec(spec(spec(outcome=1.0), spec(outcome=0.0)), spec(spec(outcome=0.0)))])
    rows = only_batch(group, rule(group))
    batch = to_tensors(rows)

    found = coefficients(torch.from_numpy(rows.behaviour_logprobs.copy()).requires_grad_(), batch, ObjectiveConfig())

    per_turn = (batch.mass * batch.advantage)[batch.turn_index.clamp(min=0)]
    torch.testing.assert_close(found, torch.where(batch.turn_index >= 0, per_turn, 0.0))
    assert {round(x, 6) for x in found.flatten().tolist()} == {0.0, *(round(x, 6) for x in expected)}


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
            logprobs = torch.stack([trained_by[turn] for turn in taken])[:, None]
            recorded = torch.stack([mu[turn] for turn in taken])[:, None]
            batch = ObjectiveBatch(
                behaviour_logprobs=recorded if corrected else logprobs.detach(),
                turn_index=torch.arange(len(taken))[:, None],
                advantage=torch.tensor([sum(values) / len(values), *values]) - baseline,
                mass=torch.tensor([1.0, *([1 / len(values)] * len(values))]),
                age=torch.zeros(len(taken), dtype=torch.int64),
                tight=torch.zeros(len(taken), dtype=torch.bool),
                depth=torch.ones(len(taken), dtype=torch.int64),
            )
            uncapped = replace(OPEN, cap_positive=1e6, cap_negative=1e6)
            loss = loss + recorded.sum().exp() * tree_tis(logprobs, batch, uncapped)[0]
    return (-torch.autograd.grad(loss, logits)[0]).tolist()


def test_each_turns_own_ratio_moves_the_gradient_as_enumeration_by_hand_says() -> None:
    """The trained policy's own gradient is (-.160594, .078483, -.153678); prefix and future factors would reach it."""
    assert expected_gradient(corrected=False, baseline=0.0) == pytest.approx([-0.217106, 0.178935, -0.139914], abs=2e-6)
    for baseline in (0.0, 0.3):  # the own ratio makes it unbiased in the baseline
        own_only = expected_gradient(corrected=True, baseline=baseline)
        assert own_only == pytest.approx([-0.150870, 0.107529, -0.115554], abs=2e-6)
