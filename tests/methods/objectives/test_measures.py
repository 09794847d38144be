"""What an update is said to have seen."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.methods.objectives.cases import random_case
from tests.methods.objectives.kit import ALL_CONFIGS, OPEN, Turn, name_of, policy, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.measures import COLUMNS, finish_stats, merge_stats
from trace_async.methods.objectives.registry import ChosenObjective


def test_diagnostics_by_hand() -> None:
    turns = turns_of(
        Turn(mu=(0.2, 0.5), age=0, depth=1),
        Turn(mu=(0.4,), age=4, depth=2, advantage=-1.0),
        Turn(mu=(0.5,), age=9, depth=9),
    )
    objective = ChosenObjective(replace(OPEN, cap_positive=1.2))
    _, stats = objective(policy((0.3, 0.5), (0.2,), (0.5,)), turns)
    metrics = finish_stats(stats)

    assert metrics["age/0/log_ratio_mean"] == pytest.approx(math.log(1.5) / 2, rel=1e-5)
    assert metrics["age/0/log_ratio_sq_mean"] == pytest.approx(0.082201, rel=1e-4)  # half of (log 1.5)^2
    assert metrics["age/0/kl_k3"] == pytest.approx(0.094535 / 2, rel=1e-4)  # 1.5 - 1 - log 1.5
    assert metrics["age/0/capped_share"] == 0.5
    assert metrics["age/3-4/kl_k3"] == pytest.approx(0.5 - 1 + math.log(2), rel=1e-5)
    assert metrics["depth/2/log_ratio_mean"] == pytest.approx(-math.log(2), rel=1e-5)
    assert metrics["sign/negative/harmful_sq_mean"] == pytest.approx(math.log(2) ** 2, rel=1e-5)
    assert metrics["sign/positive/harmful_sq_mean"] == pytest.approx(math.log(1.5) ** 2, rel=1e-5)
    assert (metrics["objective/tokens"], metrics["objective/turns"]) == (4.0, 3.0)
    assert metrics["objective/capped_share"] == 0.25
    assert metrics["objective/max_abs_log_ratio"] == pytest.approx(math.log(2), rel=1e-5)
    assert {key.rsplit("/", 1)[0] for key in metrics} == {
        "objective", "age/0", "age/3-4", "age/9+", "depth/1", "depth/2", "depth/9+", "sign/negative", "sign/positive"
    }  # fmt: skip


def test_the_effective_sample_size_has_its_known_number() -> None:
    """Turn weights 1, .5, 2, 4: effective size 2.647 of 4; the weight of a turn is the product over its tokens."""
    turns = turns_of(*[Turn(mu=(0.2, 0.2))] * 4)
    _, stats = ChosenObjective(OPEN)(policy((0.2, 0.2), (0.1, 0.2), (0.4, 0.2), (0.4, 0.4)), turns)
    assert finish_stats(stats)["objective/ess_ratio"] == pytest.approx(0.661765, rel=1e-5)


def test_a_step_without_micro_batches_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="no micro-batch"):
        merge_stats([])


def test_loss_and_statistics_are_detached_where_they_must_be() -> None:
    loss, stats = ChosenObjective(OPEN)(policy((0.6,)), turns_of(Turn(mu=(0.5,))))
    assert loss.requires_grad
    assert loss.dtype == torch.float32
    assert not stats.age.requires_grad
    assert not stats.weights.requires_grad


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=name_of)
def test_what_was_seen_does_not_depend_on_the_objective(config: ObjectiveConfig) -> None:
    """Except for what its rules touched and vetoed."""
    case = random_case(np.random.default_rng(0), by_leaves=True)
    turns = case.tensors()
    _, stats = ChosenObjective(config)(case.policy(), turns)
    _, plain = ChosenObjective(replace(config, kind="tree_tis", options={}, proximal="behaviour"))(case.policy(), turns)
    seen = [column for column, name in enumerate(COLUMNS) if name not in ("capped", "masked", "vetoed")]
    assert torch.equal(stats.age[:, seen], plain.age[:, seen])
    assert torch.equal(stats.sign[:, seen], plain.sign[:, seen])
    assert torch.equal(stats.weights, plain.weights)


def test_a_vetoed_turn_has_no_part_in_the_effective_sample_size_nor_in_what_was_capped() -> None:
    """It trains nothing; with its ratio of 900 it would leave one turn in a hundred."""
    turns = turns_of(*[Turn(mu=(0.5,))] * 9, Turn(mu=(0.001,)))
    _, stats = ChosenObjective(replace(OPEN, veto_high=10.0))(policy(*[(0.5,)] * 9, (0.9,)), turns)
    metrics = finish_stats(stats)
    assert metrics["objective/vetoed_share"] == pytest.approx(0.1)
    assert metrics["objective/ess_ratio"] == pytest.approx(1.0)
    assert metrics["objective/capped_share"] == 0.0


def test_what_a_mask_took_away_is_counted_beside_what_was_bounded() -> None:
    """IcePop's window is [.5, 5] and the cap 2: ratios 1, 3, 6 and .4 are free, capped, masked and masked."""
    turns = turns_of(*[Turn(mu=(0.1,))] * 4)
    config = replace(OPEN, kind="icepop", cap_positive=2.0)
    metrics = finish_stats(ChosenObjective(config)(policy((0.1,), (0.3,), (0.6,), (0.04,)), turns)[1])
    assert metrics["objective/capped_share"] == 0.75
    assert metrics["objective/masked_share"] == 0.5
