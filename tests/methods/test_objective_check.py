"""Combinations that make an objective meaningless are refused before anything runs, with the cure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.builders import chain_group
from trace_async.app.checks import check_parts
from trace_async.config import (
    Config,
    CoordinatorConfig,
    EngineConfig,
    LearnerConfig,
    ObjectiveConfig,
    TreeConfig,
)
from trace_async.errors import ConfigError
from trace_async.methods.credit import CREDITS, LEAF_RULES
from trace_async.methods.objective_check import check_objective, find_objective_problems
from trace_async.methods.objective_kinds import KINDS


def config_of(
    kind: str,
    *,
    proximal: str = "behaviour",
    options: dict[str, object] | None = None,
    updates: int = 1,
    max_age: int = 4,
    on_update: str = "drain",
    credit: str = "",
    **guards: float,
) -> Config:
    """With a credit rule that the kind takes, unless one is named."""
    fitting = "flat" if kind in KINDS and KINDS[kind].needs_leaves else "sibling_shrunk"
    return Config(
        objective=ObjectiveConfig(kind=kind, proximal=proximal, options=options or {}, **guards),
        learner=LearnerConfig(updates_per_step=updates, credit=credit or fitting),
        coordinator=CoordinatorConfig(max_age_steps=max_age, soft_age_steps=min(2, max_age)),
        engine=EngineConfig(on_update=on_update),
    )


def complaints(config: Config) -> dict[str, str]:
    return dict(find_objective_problems(config))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_accepted_with_its_defaults(kind: str) -> None:
    check_objective(config_of(kind))
    check_parts(config_of(kind))


# ---- ratios that are always one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.anchors])
def test_the_policy_a_step_starts_from_is_no_anchor_for_a_step_of_one_update(kind: str) -> None:
    found = complaints(config_of(kind, proximal="recomputed"))
    assert list(found) == ["objective.proximal"]
    assert "every ratio is exactly 1" in found["objective.proximal"]
    assert "learner.updates_per_step to 2 or more" in found["objective.proximal"]
    assert not complaints(config_of(kind, proximal="recomputed", updates=2))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.anchors])
def test_an_interpolated_anchor_needs_ages_at_which_it_is_not_the_sampler(kind: str) -> None:
    for max_age in (0, 1):
        found = complaints(config_of(kind, proximal="interpolated", max_age=max_age))
        assert f"coordinator.max_age_steps = {max_age}" in found["objective.proximal"]
    assert not complaints(config_of(kind, proximal="interpolated", max_age=2))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.anchors])
@pytest.mark.parametrize("proximal", ["recomputed", "interpolated"])
def test_a_kind_that_takes_no_anchor_is_given_none(kind: str, proximal: str) -> None:
    found = complaints(config_of(kind, proximal=proximal, updates=2))
    assert f"objective.kind = {kind!r} takes its ratios to the policy that sampled" in found["objective.proximal"]
    assert "'ppo', 'dapo', 'dr_grpo'" in found["objective.proximal"]


# ---- what nobody supplies ---------------------------------------------------------------------------------------


def test_an_interpolated_anchor_needs_turns_of_one_version() -> None:
    found = complaints(config_of("ppo", proximal="interpolated", on_update="continue"))
    assert "set engine.on_update = 'drain'" in found["objective.proximal"]
    for other in ("behaviour", "recomputed"):
        assert not complaints(config_of("ppo", proximal=other, updates=2, on_update="continue"))


@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind.needs_leaves])
@pytest.mark.parametrize("credit", CREDITS)
def test_path_ratios_need_a_credit_rule_that_gives_leaves_an_advantage(kind: str, credit: str) -> None:
    found = complaints(config_of(kind, credit=credit))
    assert bool(found) == (credit not in LEAF_RULES)
    if found:
        assert "one of 'flat', 'flat_normalised', 'rloo'" in found["learner.credit"]


@pytest.mark.parametrize("credit", CREDITS)
def test_leaf_rules_are_those_that_give_leaves_an_advantage(credit: str) -> None:
    given = CREDITS[credit](chain_group((1.0, 0.0))).leaf_advantage
    assert (given is not None) == (credit in LEAF_RULES)
    assert given is None or np.isfinite(given).sum() == 2


def test_one_rollout_per_prompt_is_nothing_to_learn_from() -> None:
    one = replace(Config(), tree=TreeConfig(max_roots_per_prompt=1, continuations_per_root=0))
    assert "nothing is ever trained; raise one of them" in complaints(one)["tree.max_roots_per_prompt"]
    for tree in (TreeConfig(max_roots_per_prompt=2, continuations_per_root=0), TreeConfig(max_roots_per_prompt=1)):
        assert not complaints(replace(Config(), tree=tree))


# ---- clips that a veto is ahead of ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "guards", "key", "cure"),
    [
        ("ppo", {"veto_token": 0.8}, "objective.veto_token", "lower it to less than 0.8"),
        ("lpo", {"veto_token": 0.9}, "objective.veto_token", "options.epsilon, which acts below 0.8, never does"),
        ("icepop", {"veto_token": 0.5}, "objective.veto_token", "options.low, which acts below 0.5, never does"),
        ("gspo_turn", {"veto_low": 0.997}, "objective.veto_low", "lower it to less than 0.996"),
        ("gspo_turn", {"veto_high": 1.004}, "objective.veto_high", "raise it to more than 1.004"),
    ],
)
def test_a_veto_that_makes_a_clip_unreachable_is_refused(
    kind: str, guards: dict[str, float], key: str, cure: str
) -> None:
    found = complaints(config_of(kind, **guards))  # type: ignore[arg-type]
    assert list(found) == [key]
    assert cure in found[key]


def test_vetoes_are_to_the_sampler_and_leave_a_clip_to_another_anchor_alone() -> None:
    assert not complaints(config_of("ppo", proximal="recomputed", updates=2, veto_token=0.9))


def test_vetoes_narrower_than_a_clip_of_single_tokens_are_fine() -> None:
    assert not complaints(config_of("ppo", veto_low=0.95, veto_high=1.05))


# ---- names and options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (ObjectiveConfig(kind="lpoo"), "objective.kind = 'lpoo' is not known; did you mean 'lpo'?"),
        (ObjectiveConfig(kind="tree_tis", options={"clip": 1}), "objective.options.clip is no option here"),
        (ObjectiveConfig(kind="lpo", options={"divergence": "chi"}), "objective.options.divergence must be one of"),
        (ObjectiveConfig(kind="lpo", options={"epsilon": 1.0}), "objective.options.epsilon must lie between 0 and 1"),
        (ObjectiveConfig(kind="gspo_turn", options={"clip_high": 0.0}), "objective.options.clip_high must be above 0"),
        (ObjectiveConfig(kind="vtrace", options={"future_bar": -1.0}), "objective.options.future_bar must be above 0"),
        (
            ObjectiveConfig(kind="topr", options={"negative_low": 2.0}),
            "negative_high must not be below negative_low = 2",
        ),
        (ObjectiveConfig(kind="topr", options={"positive_low": -1.0}), "positive_low must not be negative"),
    ],
)
def test_a_name_or_option_that_there_is_not_is_refused_before_the_run(objective: ObjectiveConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parts(Config(objective=objective))
    assert message in str(caught.value)


def test_an_alpha_without_its_divergence_is_refused() -> None:
    found = complaints(config_of("lpo", options={"alpha": 0.3}))
    assert "remove it, or set divergence = 'alpha'" in found["objective.options.alpha"]
    assert not complaints(config_of("lpo", options={"alpha": 0.3, "divergence": "alpha"}))


def test_all_complaints_are_told_at_once_with_their_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        check_objective(config_of("topr", proximal="recomputed", credit="sibling"))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["objective.proximal", "learner.credit"]


@pytest.mark.parametrize(
    ("kind", "options", "key", "cure"),
    [
        ("m2po", {"floor_low": 0.1}, "floor_low", "set variant = 'clip'"),
        ("m2po", {"floor_high": 0.1}, "floor_high", "set variant = 'clip'"),
        ("vtrace", {"future": "none", "future_bar": 2.0}, "future_bar", "set future = 'geometric' or 'product'"),
        ("vtrace", {"prefix": "none", "prefix_bar": 2.0}, "prefix_bar", "set prefix = 'minimum' or 'product'"),
    ],
)
def test_an_option_that_another_keeps_from_being_read_is_refused(
    kind: str, options: dict[str, object], key: str, cure: str
) -> None:
    assert cure in complaints(config_of(kind, options=options))[f"objective.options.{key}"]


def test_a_turn_that_is_vetoed_still_counts_in_the_ratio_of_its_path() -> None:
    """So no veto makes the clip of whole paths unreachable."""
    assert not complaints(config_of("gspo_path", veto_token=0.999))
