"""The beta predictor: posteriors by hand, calibration on synthetic prompts, exact state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders import chain_group, group_from_spec, spec
from trace_async.core.types import Group, GrownBy, Json, Prefix
from trace_async.errors import ConfigError
from trace_async.methods.calibration import brier, ece, spearman
from trace_async.predictors.beta import BetaPredictor
from trace_async.predictors.counts import CountOptions
from trace_async.predictors.protocol import Belief, Predictor
from trace_async.predictors.registry import make_predictor

NO_TOKENS = np.zeros(0, np.int32)


def prefix_of(prompt_id: str, turn_index: int = 0) -> Prefix:
    return Prefix(prompt_id=prompt_id, turn_index=turn_index, token_ids=NO_TOKENS)


def beta(**options: object) -> Predictor:
    return make_predictor("beta", options, seed=0, text_of=str)


def belief(predictor: Predictor, prompt_id: str) -> Belief:
    (found,) = predictor.score_prompts([prefix_of(prompt_id)])
    return found


def through_json(state: Json) -> Any:
    return json.loads(json.dumps(state))


# ---- posteriors --------------------------------------------------------------------------------------------------


def test_nothing_seen_is_an_even_chance_with_the_weight_of_two_rollouts() -> None:
    fresh = beta()
    assert belief(fresh, "a") == Belief(1.0, 1.0)
    assert fresh.predict([prefix_of("a"), prefix_of("a", 7)]).tolist() == [0.5, 0.5]
    assert fresh.version == 0


def test_a_prompts_posterior_by_hand_and_its_discount_at_the_next_visit() -> None:
    predictor = beta(discount=0.5, memory_rollouts=1e12)
    predictor.observe([chain_group((1.0, 0.0, 0.0), prompt_id="a")])
    # first visits say (1 + 1) / (3 + 2): the prior is Beta(.8, 1.2); then one success and two failures
    assert belief(predictor, "a") == pytest.approx(Belief(0.8 + 1, 1.2 + 2))
    assert belief(predictor, "b") == pytest.approx(Belief(0.8, 1.2))
    predictor.observe([chain_group((1.0, 1.0), prompt_id="a")])
    assert belief(predictor, "a") == pytest.approx(Belief(0.8 + 0.5 + 2, 1.2 + 1))
    assert belief(predictor, "a").mean == pytest.approx(3.3 / 5.5)


@pytest.mark.parametrize(("above", "successes"), [(0.5, 2), (0.2, 3), (0.8, 1), (-1.0, 4)])
def test_graded_rollouts_count_as_successes_above_the_groups_threshold(above: float, successes: int) -> None:
    predictor = beta(prior="uniform", memory_rollouts=1e12)
    predictor.observe([replace(chain_group((0.2, 0.4, 0.8, 1.0), prompt_id="a"), success_above=above)])
    assert belief(predictor, "a") == pytest.approx(Belief(1.0 + successes, 1.0 + 4 - successes))


def test_later_visits_do_not_change_what_is_believed_of_unseen_prompts() -> None:
    predictor = beta()
    predictor.observe([chain_group((0.0, 0.0), prompt_id="a")])
    before = belief(predictor, "unseen")
    predictor.observe([chain_group((1.0,) * 6, prompt_id="a")])
    assert belief(predictor, "unseen") == before


def test_only_the_own_ends_of_rollouts_from_the_prompt_count() -> None:
    """Continuations were granted by looking at outcomes; failed, closed and selected turns tell nothing."""
    group = group_from_spec(
        [
            spec(spec(outcome=1.0), spec(outcome=0.0), spec(outcome=0.0)),  # its own end is the first child
            spec(outcome=0.0, grown_by=GrownBy.CONTINUATION),
            spec(outcome=0.0, grown_by=GrownBy.SELECTED),
            spec(failed=True),
            spec(spec()),
        ],
        prompt_id="a",
    )
    predictor = beta()
    predictor.observe([group])
    assert belief(predictor, "a") == pytest.approx(Belief(1.0 + 1, 1.0 + 1))


def test_a_tree_in_which_every_rollout_failed_changes_nothing() -> None:
    predictor = beta()
    predictor.observe([group_from_spec([spec(failed=True), spec(spec())], prompt_id="a")])
    assert predictor.state() == beta().state()


def test_a_prefix_moves_the_prompts_odds_by_how_much_longer_successes_last() -> None:
    predictor = beta(memory_rollouts=1e12)
    for _ in range(80):
        predictor.observe([chain_group((1.0, 1.0), turns=3, prompt_id="a")])
        predictor.observe([chain_group((0.0,), turns=3, prompt_id="b")])
        predictor.observe([chain_group((0.0,), turns=1, prompt_id="c")])
    root = belief(predictor, "new").mean
    start, after_one, after_two, never = predictor.predict([prefix_of("new", turn) for turn in (0, 1, 2, 3)]).tolist()
    assert start == pytest.approx(root)
    # half the failures survive turn 1, all successes do: the odds double
    assert after_one / (1 - after_one) == pytest.approx(2 * root / (1 - root), rel=2e-2)
    assert after_two == pytest.approx(after_one, rel=1e-6)
    assert never == pytest.approx(root, rel=1e-6)  # nobody ever got there


def test_the_longest_unseen_prompt_is_forgotten_first() -> None:
    predictor = beta(max_prompts=2)
    for prompt_id in ("a", "b", "a", "c"):
        predictor.observe([chain_group((1.0, 0.0), prompt_id=prompt_id)])
    assert [entry[0] for entry in predictor.state()["prompts"]] == ["a", "c"]


def test_very_long_rollouts_share_the_last_depth() -> None:
    predictor = beta()
    predictor.observe([chain_group((1.0, 1.0), turns=60, prompt_id="a")])
    early, late = predictor.predict([prefix_of("a", 59), prefix_of("a", 10_000)]).tolist()
    assert 0.0 < late < early < 1.0


# ---- calibration -------------------------------------------------------------------------------------------------


def synthetic_group(prompt: int, success: float, rng: np.random.Generator, *, rollouts: int = 4) -> Group:
    """Chains whose length depends on the outcome only: successes take 3 to 6 turns, failures 1 to 5."""
    chains = []
    for _ in range(rollouts):
        succeeded = rng.random() < success
        length = int(rng.integers(3, 7)) if succeeded else int(rng.integers(1, 6))
        chain = spec(outcome=float(succeeded), actions=1, observations=0)
        for _ in range(length - 1):
            chain = spec(chain, actions=1, observations=0)
        chains.append(chain)
    return group_from_spec(chains, prompt_id=f"prompt-{prompt}")


def pairs_of(group: Group, predictor: Predictor) -> list[tuple[int, float, float]]:
    """(turns survived, prediction, outcome) at the prompt and at every non-leaf turn of a group of chains."""
    found, chain = [], 0
    for turn, outcome in enumerate(group.outcome):
        if np.isnan(outcome):
            continue
        for depth in range(turn - chain + 1):
            (predicted,) = predictor.predict([prefix_of(group.prompt_id, depth)]).tolist()
            found.append((depth, predicted, float(outcome)))
        chain = turn + 1
    return found


def test_predictions_made_before_the_outcomes_are_calibrated_for_prompts_and_prefixes() -> None:
    rng = np.random.default_rng(5)
    success = rng.beta(2.0, 3.0, 80)
    predictor = beta(prior_rollouts=5.0, discount=1.0, memory_rollouts=1e9)
    pairs, last_round = [], []
    for round_index in range(5):
        for prompt in rng.permutation(80).tolist():
            group = synthetic_group(prompt, success[prompt], rng)
            new = pairs_of(group, predictor)
            pairs += new if round_index or prompt % 2 else []  # the very first rates are learned from half the prompts
            last_round += new if round_index == 4 else []
            predictor.observe([group])
    depth, predicted, outcome = (np.array(column) for column in zip(*pairs, strict=True))
    for turns in range(5):
        at = depth == turns
        error = np.sqrt(0.25 / at.sum())
        assert abs(predicted[at].mean() - outcome[at].mean()) < 3 * error, f"after {turns} turns"
        assert ece(predicted[at], outcome[at]) < 0.07, f"after {turns} turns"
    _, late, happened = (np.array(column) for column in zip(*last_round, strict=True))
    assert brier(late, happened) < 0.9 * brier(np.full(len(late), happened.mean()), happened)
    means = [belief(predictor, f"prompt-{prompt}").mean for prompt in range(80)]
    assert spearman(means, success) > 0.85


# ---- state -------------------------------------------------------------------------------------------------------


def test_a_predictor_resumed_from_json_goes_on_exactly_as_the_one_that_was_not_stopped() -> None:
    rng = np.random.default_rng(1)
    groups = [synthetic_group(prompt % 7, 0.4, rng) for prompt in range(30)]
    first, second = beta(max_prompts=5), beta(max_prompts=5)
    for group in groups[:20]:
        first.observe([group])
    second.load(through_json(first.state()), version=9)
    for group in groups[20:]:
        first.observe([group])
        second.observe([group])
    assert second.state() == first.state()
    probes = [prefix_of(f"prompt-{prompt}", turn) for prompt in range(8) for turn in range(7)]
    np.testing.assert_array_equal(first.predict(probes), second.predict(probes))
    assert (first.version, second.version) == (0, 9)


def test_loading_keeps_no_more_prompts_than_may_be_remembered() -> None:
    large, small = beta(), beta(max_prompts=2)
    for prompt_id in ("a", "b", "c"):
        large.observe([chain_group((1.0, 0.0), prompt_id=prompt_id)])
    small.load(through_json(large.state()), version=1)
    assert [entry[0] for entry in small.state()["prompts"]] == ["b", "c"]


GOOD = {
    "kind": "beta",
    "prompts": [["a", 1.0, 2.0, 7.0]],
    "first_visits": [1.0, 2.0],
    "alive": [[1.0, 2.0]],
    "newest_version": 7,
}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"kind": "hashed"}, "not the state of a beta predictor"),
        ({"extra": 1}, "not the state of a beta predictor"),
        ({"prompts": [["a", 1.0]]}, "prompt a must be 3 numbers"),
        ({"prompts": [[3, 1.0, 1.0]]}, "does not start with a prompt id"),
        ({"prompts": [["a", 1.0, 1.0, 1.0], ["a", 1.0, 1.0, 1.0]]}, "told twice"),
        ({"prompts": [7]}, "prompts must be lists in a list"),
        ({"prompts": [[]]}, "does not start with a prompt id"),
        ({"first_visits": [1.0, -1.0]}, "first_visits must be 2 numbers"),
        ({"first_visits": [1.0, float("nan")]}, "first_visits must be 2 numbers"),
        ({"alive": [[1.0, True]]}, "alive after turn 0 must be 2 numbers"),
        ({"alive": [[1.0, 1.0]] * 257}, "257 depths"),
        ({"alive": None}, "alive a list"),
        ({"newest_version": -1}, "newest_version must be a count"),
    ],
)
def test_a_malformed_state_is_refused_and_changes_nothing(change: dict[str, object], complaint: str) -> None:
    predictor = beta()
    predictor.load(GOOD, version=3)
    with pytest.raises(ValueError, match=complaint):
        predictor.load({**GOOD, **change}, version=4)
    with pytest.raises(ValueError, match="not the state"):
        predictor.load({}, version=4)
    assert (predictor.state(), predictor.version) == (GOOD, 3)


def test_kinds_and_options_are_read_strictly() -> None:
    with pytest.raises(ConfigError, match=r"predictor.kind = 'bete' is not known; did you mean 'beta'"):
        make_predictor("bete", {}, seed=0, text_of=str)
    with pytest.raises(ConfigError, match=r"predictor.options.decay is no option here"):
        beta(decay=0.5)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"prior_rollouts": 0.0}, "prior_rollouts must be more than 0"),
        ({"memory_rollouts": 1.0}, "memory_rollouts must be more than 1"),
        ({"max_prompts": 0}, "max_prompts must be more than 0"),
        ({"discount": 1.1}, "discount must lie between 0 and 1, got 1.1"),
        ({"half_life_versions": -1.0}, "half_life_versions must be at least 0"),
        ({"prior": "even"}, "prior must be one of 'learned', 'uniform'"),
    ]
    for options, complaint in wrong:
        with pytest.raises(ConfigError, match=complaint):
            beta(**options)


def test_the_beta_predictor_fulfils_the_protocol() -> None:
    predictor: Predictor = BetaPredictor(CountOptions())
    assert predictor.predict([]).shape == (0,)


# ---- drift -------------------------------------------------------------------------------------------------------


def at_version(version: int, outcomes: tuple[float, ...], prompt_id: str) -> Group:
    return chain_group(outcomes, prompt_id=prompt_id, version=version)


def test_evidence_halves_with_the_versions_that_the_policy_has_gone_through_since() -> None:
    predictor = beta(half_life_versions=4.0, prior="uniform", discount=1.0)
    predictor.observe([at_version(0, (1.0,) * 8, "a")])
    assert belief(predictor, "a") == Belief(9.0, 1.0)
    predictor.observe([at_version(4, (1.0, 0.0), "b")])
    assert belief(predictor, "a") == Belief(5.0, 1.0)
    predictor.observe([at_version(8, (0.0,), "a"), at_version(8, (0.0,), "b")])
    # of the eight successes two are left, and the new failure counts in full
    assert belief(predictor, "a") == Belief(3.0, 2.0)
    assert belief(predictor, "b") == pytest.approx(Belief(1.5, 2.5))


def test_a_late_group_of_an_old_version_counts_as_much_as_it_is_worth_by_then() -> None:
    predictor = beta(half_life_versions=2.0, prior="uniform", discount=1.0)
    predictor.observe([at_version(6, (1.0,), "a"), at_version(2, (0.0,), "a")])
    assert belief(predictor, "a") == pytest.approx(Belief(2.0, 1.25))


def test_a_saturated_prompt_drifts_back_to_the_prior_and_is_worth_a_look_again() -> None:
    for outcome in (1.0, 0.0):
        predictor = beta(prior="uniform")
        predictor.observe([at_version(0, (outcome,) * 8, "saturated")])
        surprise = [1.0 - 2.0 * abs(belief(predictor, "saturated").mean - 0.5)]
        for version in range(1, 80):
            predictor.observe([at_version(version, (1.0, 0.0), f"other-{version}")])
            surprise.append(1.0 - 2.0 * abs(belief(predictor, "saturated").mean - 0.5))
        assert surprise == sorted(surprise)
        assert surprise[0] < 0.25 < 0.8 < surprise[-1]


def test_without_a_half_life_only_visits_discount() -> None:
    predictor = beta(half_life_versions=0.0, prior="uniform", discount=0.5)
    predictor.observe([at_version(0, (1.0, 1.0), "a"), at_version(1000, (1.0, 0.0), "b")])
    assert belief(predictor, "a") == Belief(3.0, 1.0)


def test_with_a_uniform_prior_and_no_half_life_it_is_the_posterior_of_mopps() -> None:
    """alpha <- lambda alpha + (1 - lambda) alpha0 + successes, alpha0 = beta0 = 1 (arXiv 2507.04632)."""
    predictor = beta(half_life_versions=0.0, prior="uniform", discount=0.7)
    alpha = beta_ = 1.0
    rng = np.random.default_rng(0)
    for visit in range(6):
        outcomes = tuple((rng.random(4) < 0.6).astype(float).tolist())
        predictor.observe([at_version(3 * visit, outcomes, "a")])
        alpha = 0.7 * alpha + 0.3 + sum(outcomes)
        beta_ = 0.7 * beta_ + 0.3 + 4 - sum(outcomes)
        assert belief(predictor, "a") == pytest.approx(Belief(alpha, beta_))
        assert belief(predictor, "unseen") == Belief(1.0, 1.0)


def test_a_stamp_far_newer_than_its_rollouts_end_is_no_power_of_two() -> None:
    predictor = beta()
    stamps = np.array([20_000, 0], np.int32)
    group = replace(chain_group((1.0,), turns=2, prompt_id="a"), version_min=stamps, version_max=stamps)
    predictor.observe([group])
    assert belief(predictor, "a").alpha < 4.0
