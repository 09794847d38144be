"""Objectives that look at whole trees, through the trainer's update: however rows are batched, the same gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.builders import random_group
from tests.trainer_kit import Layout, minibatch
from trace_async.config import ObjectiveConfig
from trace_async.core.packing import PackItem, pack
from trace_async.core.rows import scored_turns
from trace_async.core.staleness import ages, judge_turns
from trace_async.core.tree_packing import pack_trees
from trace_async.core.types import Group
from trace_async.methods.credit import flat_credit
from trace_async.methods.objective_kinds import KINDS, Scope
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.policies.tiny import tiny_model, tiny_tokenizer
from trace_async.trainer_scoring import Scorer
from trace_async.trainer_update import accumulate, score_all

TREE_KINDS = [name for name, kind in KINDS.items() if kind.scope is Scope.TREE]
OPTIONS: dict[str, dict[str, object]] = {
    "gspo_path": {"clip_low": 0.2, "clip_high": 0.2},
    "lpo": {"epsilon": 0.4},
}


class Gradient(NamedTuple):
    """What one update did."""

    slopes: Tensor  # [parameters]
    loss: float
    num_batches: int
    whole: bool  # no tree is spread over batches


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_model(tiny_tokenizer([f"w{index}" for index in range(200)]), seed=3, hidden_size=16, num_layers=1)


@pytest.fixture(scope="module")
def scorer(model: torch.nn.Module) -> Scorer:
    made = Scorer(model, temperature=1.0)
    assert made.probe_trees(100)
    return made


def trees(kind: str) -> list[PackItem]:
    """Four random trees, some turns of which are over age."""
    rng, made = np.random.default_rng(5), list[PackItem]()
    while len(made) < 4:
        item = judged(random_group(rng, continuations=6, failures=0.0), kind)
        if scored_turns(item).any():
            made.append(item)
    return made


def judged(group: Group, kind: str) -> PackItem:
    age = ages(group, trainer_version=4, trainer_epoch=group.epoch)
    verdicts = judge_turns(age, soft=2, hard=3)
    signal = KINDS[kind].signal
    return PackItem(group=group, credit=flat_credit(group), verdicts=verdicts, ages=age, signal=signal, whole_tree=True)


def sampled_nearby(items: list[PackItem], scorer: Scorer) -> list[PackItem]:
    """The same trees as if a policy close to the model had sampled them."""
    table = minibatch(items, layout=pack)
    logprobs = score_all(table, scorer).cpu().numpy()
    noise = np.random.default_rng(0).normal(0.0, 0.3, logprobs.size).astype(np.float32)
    ends = np.cumsum([item.group.num_sampled_tokens for item in items])
    parts = np.split(logprobs + noise, ends[:-1])
    return [replace(item, group=replace(item.group, logprobs=part)) for item, part in zip(items, parts, strict=True)]


@pytest.mark.parametrize("kind", TREE_KINDS)
def test_trees_in_one_batch_or_spread_over_many_have_the_same_gradient(
    kind: str, model: torch.nn.Module, scorer: Scorer
) -> None:
    items = sampled_nearby(trees(kind), scorer)
    config = ObjectiveConfig(kind=kind, options=OPTIONS.get(kind, {}))

    def update(layout: Layout, micro_batch_tokens: int) -> Gradient:
        model.zero_grad()
        part = minibatch(items, layout=layout, micro_batch_tokens=micro_batch_tokens)
        seen = accumulate(part, scorer=scorer, objective=ChosenObjective(config), proximal=None)
        slopes = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return Gradient(slopes.clone(), seen.loss, len(part.rows), all(batch.whole for batch in part.rows))

    whole = update(pack_trees, 100_000)
    tree_by_tree = update(pack_trees, 100)
    spread = update(pack, 40)

    assert whole.slopes.any()
    assert whole.num_batches < tree_by_tree.num_batches < spread.num_batches
    assert whole.whole
    assert tree_by_tree.whole
    assert not spread.whole
    for other in (tree_by_tree, spread):
        assert other.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(other.slopes, whole.slopes, rtol=1e-3, atol=1e-5 * float(whole.slopes.abs().max()))
