"""Numbers worked out by hand: one token under every loss, the sign split, denominators, options."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.builders import group_from_spec, spec
from tests.methods.objectives.cases import Case, random_case, with_turns
from tests.methods.objectives.kit import OPEN, UNCAPPED, Turn, coefficients, evaluate, policy, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.core.packing import denominators
from trace_async.core.rows import PackItem
from trace_async.core.types import Verdict
from trace_async.errors import ConfigError, InvariantError
from trace_async.methods.credit import flat_credit, sibling_credit
from trace_async.methods.objective_kinds import KINDS, options_of
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.methods.objectives.turns import TurnTensors

MU, OLD, NOW = 0.20, 0.25, 0.50  # probabilities of the token when sampled, before the step, and under the weights


def one_token(config: ObjectiveConfig, **fields: object) -> float:
    """Its coefficient: to MU its ratio is 2.5, to OLD it is 2."""
    return float(coefficients(policy((NOW,)), one_turn(**fields), config)[0])


def one_turn(**fields: object) -> TurnTensors:
    turns = turns_of(replace(Turn(mu=(MU,)), **fields))  # type: ignore[arg-type]
    return replace(turns, proximal_logprobs=torch.tensor([OLD]).log())


KL = 0.00183258  # the slope of DPPO's squared log-ratio: 2 x .001 log 2.5


@pytest.mark.parametrize(
    ("name", "config", "fields", "positive", "negative"),
    [
        ("TIS-REINFORCE min(R, 1)", replace(OPEN, cap_positive=1.0, cap_negative=1.0), {}, 1.0, -1.0),
        ("TIS-REINFORCE min(R, 2)", replace(OPEN, cap_positive=2.0, cap_negative=2.0), {}, 2.0, -2.0),
        ("CISPO cap 5", replace(OPEN, cap_positive=5.0, cap_negative=5.0), {}, 2.5, -2.5),
        ("REINFORCE min(R, 1.02)", replace(OPEN, cap_positive=1.02, cap_negative=1.02), {}, 1.02, -1.02),
        ("V-trace", OPEN, {"tight": True}, 1.0, -1.0),
        ("stale", replace(OPEN, cap_positive=5.0, cap_decay=0.25), {"age": 1}, 2.0, -1.0),
        ("PPO at mu", replace(OPEN, kind="ppo"), {}, 0.0, -2.5),
        ("DAPO at mu", replace(OPEN, kind="dapo"), {}, 0.0, -2.5),
        ("Dr.GRPO at mu", replace(OPEN, kind="dr_grpo"), {}, 0.0, -2.5),
        ("PPO, dual clip", replace(OPEN, kind="ppo", options={"dual_clip": 2.0}), {}, 0.0, 0.0),
        ("PPO, wide clip", replace(OPEN, kind="ppo", options={"clip_high": 2.0, "dual_clip": 3.0}), {}, 2.5, -2.5),
        ("decoupled PPO", replace(OPEN, kind="ppo", proximal="recomputed"), {}, 0.0, -2.5),
        (
            "decoupled PPO, wide clip",  # b r = 1.25 x 2
            replace(OPEN, kind="ppo", proximal="recomputed", options={"clip_high": 1.5}),
            {},
            2.5,
            -2.5,
        ),
        (
            "TIS(1.1) x PPO",
            replace(UNCAPPED, kind="ppo", proximal="recomputed", cap_positive=1.1, cap_negative=1.1,
                    options={"clip_high": 1.5}),
            {},
            2.2,
            -2.2,
        ),
        (
            "TIS by sign x PPO",
            replace(OPEN, kind="ppo", proximal="recomputed", cap_positive=1.2, cap_negative=1.1,
                    options={"clip_high": 1.5}),
            {},
            2.4,
            -2.2,
        ),
        (
            "PPO, TIGHT: the weight is 1",
            replace(OPEN, kind="ppo", proximal="recomputed", options={"clip_high": 1.5}),
            {"tight": True},
            2.0,
            -2.0,
        ),
        ("no correction", replace(OPEN, kind="reinforce"), {"age": 3}, 1.0, -1.0),
        ("TIS(2), any age and sign", replace(OPEN, kind="reinforce", options={"cap": 2.0}), {"age": 3}, 2.0, -2.0),
        ("IcePop", replace(UNCAPPED, kind="icepop"), {}, 2.5, -2.5),
        ("IcePop up to 2", replace(UNCAPPED, kind="icepop", options={"high": 2.0}), {}, 0.0, 0.0),
        ("DPPO", replace(UNCAPPED, kind="dppo"), {}, -KL, -2.5 - KL),
        ("IPO", replace(UNCAPPED, kind="ipo"), {}, 0.0, 0.0),
        ("IPO, wide", replace(UNCAPPED, kind="ipo", options={"delta": 0.31}), {}, 2.5, -2.5),
        ("M2PO", replace(UNCAPPED, kind="m2po"), {}, 0.0, -2.5),
        ("M2PO, its code's clip", replace(UNCAPPED, kind="m2po", options={"variant": "clip"}), {}, 0.0, -2.5),
        ("M2PO within the budget", replace(UNCAPPED, kind="m2po", options={"budget": 0.84}), {}, 2.5, -2.5),
    ],
)  # fmt: skip
def test_one_token_has_the_coefficients_of_the_known_losses(
    name: str, config: ObjectiveConfig, fields: dict[str, object], positive: float, negative: float
) -> None:
    assert one_token(config, advantage=1.0, **fields) == pytest.approx(positive, rel=1e-5), name
    assert one_token(config, advantage=-1.0, **fields) == pytest.approx(negative, rel=1e-5), name


@pytest.mark.parametrize(("kind", "good", "bad"), [("ppo", 0.0, -2.0), ("dapo", 0.0, -2.0)])
def test_without_the_weight_of_stale_tokens_decoupled_ppo_is_ppo_to_the_old_policy(
    kind: str, good: float, bad: float
) -> None:
    config = replace(OPEN, kind=kind, proximal="recomputed", cap_positive=1.0, cap_negative=1.0)
    assert one_token(config, advantage=1.0) == pytest.approx(good)
    assert one_token(config, advantage=-1.0) == pytest.approx(bad, rel=1e-5)


# ---- the interpolated anchor ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "ratio"),
    [(0, 2.5), (1, 2.5), (2, 2.5**0.5), (4, 2.5**0.25)],  # log r = log R / age: one step of `age`
)
def test_the_interpolated_anchor_is_one_step_behind(age: int, ratio: float) -> None:
    """Weight and ratio share R between them, so a token that no clip touches has coefficient R all the same."""
    inside = replace(UNCAPPED, kind="ppo", proximal="interpolated", cap_decay=1.0, options={"clip_high": 9.0})
    assert one_token(inside, age=age) == pytest.approx(2.5, rel=1e-5)
    for clip_high, kept in ((ratio - 1 + 0.01, True), (ratio - 1 - 0.01, False)):
        config = replace(inside, options={"clip_high": clip_high})
        assert bool(one_token(config, age=age)) == kept


def test_an_anchor_that_nobody_computed_is_an_error() -> None:
    turns = replace(one_turn(), proximal_logprobs=None)
    with pytest.raises(InvariantError, match="recomputed"):
        evaluate(policy((NOW,)), turns, replace(OPEN, kind="ppo", proximal="recomputed"))


def test_a_pass_for_the_anchor_is_asked_for_by_clipped_kinds_that_recompute_it() -> None:
    asking = {
        (kind, proximal)
        for kind in KINDS
        for proximal in ("behaviour", "recomputed", "interpolated")
        if ChosenObjective(ObjectiveConfig(kind=kind, proximal=proximal)).needs_proximal
    }
    assert asking == {(kind, "recomputed") for kind in ("ppo", "dapo", "dr_grpo")}


# ---- the sign split ---------------------------------------------------------------------------------------------


def test_a_token_shared_by_leaves_of_both_signs_has_the_flattened_trees_loss() -> None:
    """Three leaves of weight 1/3 with advantages 2/3, -1/3, -1/3; a token of the first turn has ratio 1.5."""
    leaves = [Turn(mu=(0.4,), parent=0, leaf_advantage=a, mass=1 / 3) for a in (2 / 3, -1 / 3, -1 / 3)]
    turns = turns_of(Turn(mu=(0.4,)), *leaves)
    logprobs = policy((0.6,), (0.4,), (0.4,), (0.4,))
    at_the_root = 1 / 3 * (2 / 3 * 1.2 - 1 / 3 * 1.5 - 1 / 3 * 1.5)
    at_the_leaves = 1 / 3 * (2 / 3 - 1 / 3 - 1 / 3)

    surrogate = evaluate(logprobs, turns, replace(OPEN, kind="ppo"))

    assert at_the_root == pytest.approx(-0.066667, abs=1e-6)
    assert -float(surrogate.loss.detach()) == pytest.approx(at_the_root + at_the_leaves, abs=1e-6)
    assert float(turns.advantage[0]) == pytest.approx(0.0, abs=1e-7)
    assert coefficients(logprobs, turns, replace(OPEN, kind="ppo"))[0] == pytest.approx(-2 / 9 * 1.5, rel=1e-5)
    net = replace(turns, positive=turns.advantage.clamp(min=0), negative=turns.advantage.clamp(max=0))
    assert coefficients(logprobs, net, replace(OPEN, kind="ppo"))[0] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("kind", ["ppo", "dppo", "m2po"])
def test_the_net_advantage_would_be_another_objective(kind: str) -> None:
    case, config = random_case(np.random.default_rng(5), by_leaves=True, spread=0.8), replace(OPEN, kind=kind)
    leaves = set(case.leaves)
    net: Case = with_turns(
        case,
        [
            replace(turn, leaf_advantage=math.nan, advantage=float(case.table.advantage[j]))
            for j, turn in enumerate(case.turns)
        ],
    )
    split, whole = (coefficients(case.policy(), each.tensors(), config) for each in (case, net))
    assert float((split - whole).abs().max()) > 0.02
    below = np.array([turn in leaves for turn in case.table.turn])
    if kind != "m2po":  # a leaf has one sign, so its turn has the same loss either way
        torch.testing.assert_close(split[below], whole[below])


def test_what_a_rule_touched_is_told_by_the_sign_it_bends_for() -> None:
    mixed = [Turn(mu=(0.4,), parent=0, leaf_advantage=a, mass=0.5) for a in (1.0, -1.0)]
    turns = turns_of(Turn(mu=(0.4, 0.4)), *mixed)
    logprobs = policy((0.6, 0.2), (0.6,), (0.6,))  # ratios 1.5 and .5 in the first turn, 1.5 below
    assert evaluate(logprobs, turns, replace(UNCAPPED, kind="ppo")).touched.tolist() == [True, True, True, False]
    dppo = replace(UNCAPPED, kind="dppo", options={"low": 0.19, "high": 0.19})
    assert evaluate(logprobs, turns, dppo).touched.tolist() == [True, True, True, False]
    icepop = replace(UNCAPPED, kind="icepop", options={"low": 0.6, "high": 1.6})
    assert evaluate(logprobs, turns, icepop).touched.tolist() == [False, True, False, False]


# ---- denominators -----------------------------------------------------------------------------------------------


def test_denominators_count_the_flattened_tree() -> None:
    """Lengths 3, 2, 1, 2, 2, 3: leaves' rows of 6, 7 and 8 tokens; 21 in all, of which 13 are different ones."""
    fork = spec(spec(outcome=1.0, actions=1), spec(outcome=0.0, actions=2), actions=2)
    group = group_from_spec([spec(fork, spec(spec(outcome=0.0, actions=3), actions=2), actions=3)])
    counts = {}
    for rule in (flat_credit, sibling_credit):
        credit = rule(group)
        item = PackItem(
            group=group,
            credit=credit,
            verdicts=np.full(group.num_turns, Verdict.CONTEXT, np.uint8),
            ages=np.zeros(group.num_turns, np.int32),
        )
        counts[rule] = denominators([item, item])
    assert group.num_sampled_tokens == 13
    assert counts[flat_credit].tokens == pytest.approx(2 * 21 / 3, rel=1e-6)
    assert counts[sibling_credit].tokens == pytest.approx(2 * (6 / 4 + 7 / 4 + 8 / 2), rel=1e-6)
    assert counts[flat_credit].prompts == 2
    assert ChosenObjective(ObjectiveConfig(kind="ppo")).denominator(counts[flat_credit]) == counts[flat_credit].tokens
    dr_grpo = ChosenObjective(ObjectiveConfig(kind="dr_grpo", options={"max_tokens": 50}))
    assert dr_grpo.denominator(counts[flat_credit]) == 100.0


# ---- options ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("reinforce", {"cap": -1.0}, "cap must not be negative"),
        ("ppo", {"clip_low": 1.0}, "clip_low must lie between 0 and 1"),
        ("dapo", {"clip_high": 0.0}, "clip_high must be above 0"),
        ("ppo", {"dual_clip": 1.0}, "dual_clip must be 0 for none, or above 1, got 1"),
        ("dr_grpo", {"max_tokens": 0}, "max_tokens must be above 0"),
        ("dr_grpo", {"clip_low": -0.1}, "clip_low must lie between 0 and 1"),
        ("icepop", {"low": 1.5}, "low must lie between 0 and 1"),
        ("icepop", {"high": 0.9}, "high must be above 1"),
        ("dppo", {"kl_tau": -1.0}, "kl_tau must not be negative"),
        ("dppo", {"low": 0.0}, "low must be above 0"),
        ("ipo", {"delta": 0.0}, "delta must be above 0"),
        ("m2po", {"budget": 0.0}, "budget must be above 0"),
        ("m2po", {"variant": "soft"}, "variant must be one of 'mask', 'clip'"),
        ("m2po", {"floor_low": 1.0}, "floor_low must lie between 0 and 1"),
        ("m2po", {"floor_high": -0.1}, "floor_high must not be negative"),
        ("ppo", {"max_tokens": 5}, "max_tokens is no option here"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(kind: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"objective.options.{message}"):
        options_of(ObjectiveConfig(kind=kind, options=options))


def test_clips_have_their_papers_defaults() -> None:
    found = {kind: options_of(ObjectiveConfig(kind=kind)) for kind in ("ppo", "dapo", "dr_grpo")}
    assert {kind: (each.clip_low, each.clip_high, each.dual_clip) for kind, each in found.items()} == {
        "ppo": (0.2, 0.2, 0.0),
        "dapo": (0.2, 0.28, 0.0),
        "dr_grpo": (0.2, 0.2, 0.0),
    }
