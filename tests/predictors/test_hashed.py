"""The hashed predictor: learns what prompts share, is honest about what it has not seen, resumes to the bit."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.builders import chain_group, group_from_spec, random_group, spec
from trace_async.core.types import Group, IntArray, Prefix
from trace_async.errors import ConfigError
from trace_async.methods.calibration import brier, spearman
from trace_async.predictors.arrays import array_to_json
from trace_async.predictors.protocol import Predictor
from trace_async.predictors.registry import make_predictor
from trace_async.predictors.targets import tree_targets

HARD, EASY = 41, 42
"""Words that tell whether a prompt is hard."""


def make(kind: str = "hashed", *, seed: int = 0, **options: object) -> Predictor:
    quick = {"learning_rate": 3e-3, "minibatch": 64} if kind == "hashed" else {}
    return make_predictor(kind, {**quick, **options}, seed=seed, text_of=str)


def prompt_of(number: int, rng: np.random.Generator) -> tuple[IntArray, float]:
    """Words of a prompt and its success: one word of eight tells, the others are noise."""
    words = rng.integers(50, 90, 8)
    easy = bool(rng.random() < 0.5)
    words[rng.integers(0, 8)] = EASY if easy else HARD
    return words.astype(np.int32), 0.85 if easy else 0.15


def visit(number: int, rng: np.random.Generator, *, version: int = 0) -> Group:
    """Four one-turn or two-turn rollouts of a prompt that has `prompt_of`'s words."""
    words, success = prompt_of(number, rng)
    outcomes = tuple((rng.random(4) < success).astype(float).tolist())
    group = chain_group(outcomes, turns=2, prompt_id=f"prompt-{number}", version=version, seed=number)
    return replace(group, prompt_ids=words)


def prompt_prefix(group: Group) -> Prefix:
    return Prefix(prompt_id=group.prompt_id, turn_index=0, token_ids=group.prompt_ids)


def rounds_of(rng: np.random.Generator, rounds: int, size: int = 8) -> list[list[Group]]:
    return [[visit(size * index + number, rng) for number in range(size)] for index in range(rounds)]


def forecasts(predictor: Predictor, rounds: Sequence[Sequence[Group]]) -> tuple[list[float], list[float]]:
    """Beliefs of prompts never seen, each before its outcomes; the rounds are observed."""
    predicted, happened = [], []
    for groups in rounds:
        for belief, group in zip(predictor.score_prompts([prompt_prefix(g) for g in groups]), groups, strict=True):
            predicted.append(belief.mean)
            happened.append(float(np.nanmean(group.outcome)))
        predictor.observe(groups)
    return predicted, happened


def test_before_it_has_learned_it_says_what_beta_says() -> None:
    beta, hashed = make("beta"), make()
    group = random_group(np.random.default_rng(4), roots=3)
    prefixes = [target.prefix for target in tree_targets(group)]
    np.testing.assert_allclose(hashed.predict(prefixes), beta.predict(prefixes), atol=1e-6)
    assert hashed.score_prompts(prefixes[:1]) == beta.score_prompts(prefixes[:1])


def test_on_prompts_never_seen_it_beats_beta_by_far_where_a_word_tells() -> None:
    rng = np.random.default_rng(0)
    rounds = rounds_of(rng, 36)
    scores = {}
    for kind in ("beta", "hashed"):
        predictor = make(kind)
        forecasts(predictor, rounds[:24])
        predicted, happened = forecasts(predictor, rounds[24:])
        scores[kind] = (brier(predicted, happened), spearman(predicted, happened))
    assert scores["hashed"][0] < 0.6 * scores["beta"][0]
    assert scores["hashed"][1] > 0.6 > 0.3 > abs(scores["beta"][1])


def test_a_prompts_own_evidence_comes_on_top_of_the_networks_word() -> None:
    rng = np.random.default_rng(1)
    predictor = make(prior_rollouts=2.0, half_life_versions=0.0)
    forecasts(predictor, rounds_of(rng, 20))
    group = visit(900, rng)
    (before,) = predictor.score_prompts([prompt_prefix(group)])
    parameters = predictor.parameters()
    assert before.alpha + before.beta == pytest.approx(2.0)
    # the evidence of six failures, as a checkpoint would have it
    counts = {**parameters["counts"], "prompts": [*parameters["counts"]["prompts"], [group.prompt_id, 0.0, 6.0, 0.0]]}
    predictor.load({**parameters, "counts": counts}, version=1)
    (after,) = predictor.score_prompts([prompt_prefix(group)])
    assert after == pytest.approx((before.alpha, before.beta + 6.0))
    assert predictor.predict([prompt_prefix(group)])[0] == pytest.approx(after.mean)


def test_a_prompt_whose_words_are_not_known_is_any_prompt() -> None:
    rng = np.random.default_rng(2)
    predictor, beta = make(), make("beta")
    for groups in rounds_of(rng, 10):
        predictor.observe(groups)
        beta.observe(groups)
    bare = Prefix(prompt_id="new", turn_index=0, token_ids=np.empty(0, np.int32))
    assert predictor.score_prompts([bare])[0] == pytest.approx(beta.score_prompts([bare])[0])


def test_however_sure_the_network_is_a_belief_has_two_sides() -> None:
    predictor = make()
    predictor.observe([visit(0, np.random.default_rng(0))])
    parameters = through_json(predictor.parameters())
    for sure in (1e6, -1e6):
        parameters["network"]["b2"] = array_to_json(np.array([sure], np.float32))
        predictor.load(parameters, version=1)
        (belief,) = predictor.score_prompts([prompt_prefix(visit(1, np.random.default_rng(1)))])
        assert min(belief) > 0.0
        assert abs(belief.mean - 0.5) == pytest.approx(0.4999)


def test_predictions_do_not_depend_on_the_batch_to_the_bit() -> None:
    predictor = make()
    forecasts(predictor, rounds_of(np.random.default_rng(3), 6))
    prefixes = [t.prefix for seed in range(6) for t in tree_targets(random_group(np.random.default_rng(seed)))]
    together = predictor.predict(prefixes)
    np.testing.assert_array_equal(together, np.concatenate([predictor.predict([prefix]) for prefix in prefixes]))
    assert ((together > 0.0) & (together < 1.0)).all()


def test_what_is_predicted_at_a_prefix_does_not_change_with_its_continuation() -> None:
    """Only the prefix's own tokens and what was observed before are looked at."""
    predictor = make()
    forecasts(predictor, rounds_of(np.random.default_rng(3), 6))
    one = group_from_spec([spec(spec(spec(outcome=1.0), spec(outcome=0.0)))], seed=1)
    # the same first turn, then another future
    other = group_from_spec([spec(spec(outcome=0.0), spec(outcome=0.0), spec(outcome=0.0))], seed=1)
    first, second = tree_targets(one), tree_targets(other)
    assert [target.prefix.turn_index for target in second] == [0, 1]
    assert first[1].value != second[1].value
    np.testing.assert_array_equal(first[1].prefix.token_ids, second[1].prefix.token_ids)
    np.testing.assert_array_equal(
        predictor.predict([first[0].prefix, first[1].prefix]), predictor.predict([t.prefix for t in second])
    )


def test_a_lesson_is_made_with_the_counts_from_before_its_tree() -> None:
    """Else the network would learn to trust an evidence that at prediction does not hold the outcome."""
    predictor = make(steps=1)
    predictor.observe([visit(0, np.random.default_rng(0))])
    told = predictor.state()["learning"]["prefixes"]["numbers"]
    numbers = np.frombuffer(base64.b64decode(told["data"]), "<f4").reshape(told["shape"])
    evidence_as_log_odds, evidence_share = numbers[:, 3], numbers[:, 4]
    assert (evidence_as_log_odds == 0.0).all()
    assert (evidence_share == 0.0).all()


def through_json(state: object) -> Any:
    return json.loads(json.dumps(state, allow_nan=False))


@pytest.mark.parametrize("replay", [40, 4096])
def test_a_predictor_resumed_from_json_learns_on_exactly_as_the_one_that_was_not_stopped(replay: int) -> None:
    rounds = rounds_of(np.random.default_rng(5), 8, size=4)
    first, second = make(replay=replay), make(replay=replay)
    for groups in rounds[:5]:
        first.observe(groups)
    second.load(through_json(first.state()), version=5)
    for groups in rounds[5:]:
        first.observe(groups)
        second.observe(groups)
    assert second.state() == first.state()
    probes = [target.prefix for groups in rounds for group in groups for target in tree_targets(group)]
    np.testing.assert_array_equal(first.predict(probes), second.predict(probes))
    assert (first.version, second.version) == (0, 5)


def test_what_is_published_predicts_the_same_and_is_small() -> None:
    rounds = rounds_of(np.random.default_rng(5), 8)
    learner, actor = make(), make(seed=99)
    for groups in rounds:
        learner.observe(groups)
    published = through_json(learner.parameters())
    actor.load(published, version=8)
    probes = [target.prefix for groups in rounds for group in groups for target in tree_targets(group)]
    np.testing.assert_array_equal(learner.predict(probes), actor.predict(probes))
    prompts = [prompt_prefix(group) for groups in rounds for group in groups]
    assert learner.score_prompts(prompts) == actor.score_prompts(prompts)
    assert "learning" not in published
    assert actor.version == 8


def test_the_same_seed_learns_the_same_and_another_something_else() -> None:
    rounds = rounds_of(np.random.default_rng(6), 4)
    told = []
    for seed in (1, 1, 2):
        predictor = make(seed=seed)
        for groups in rounds:
            predictor.observe(groups)
        told.append(predictor.parameters())
    assert told[0] == told[1] != told[2]


@pytest.mark.parametrize("kind", ["beta", "hashed"])
def test_the_order_of_a_steps_trees_does_not_matter(kind: str) -> None:
    rounds = rounds_of(np.random.default_rng(6), 3)
    told = []
    for turn in (1, -1):
        predictor = make(kind)
        for groups in rounds:
            predictor.observe(groups[::turn])
        told.append(predictor.state())
    assert told[0] == told[1]


def test_what_teaches_nothing_changes_nothing() -> None:
    predictor = make()
    predictor.observe([])
    predictor.observe([group_from_spec([spec(failed=True)])])
    assert predictor.state() == make().state()


def test_a_malformed_state_is_refused_and_changes_nothing() -> None:
    predictor = make(steps=1)
    predictor.observe(rounds_of(np.random.default_rng(7), 1)[0])
    good = through_json(predictor.state())
    learning = good["learning"]
    prefixes = learning["prefixes"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**good, "kind": "beta"}, "not the state of a predictor of kind hashed"),
        ({**good, "extra": 1}, "not the state of a predictor"),
        ({**good, "counts": {}}, "counts must have exactly"),
        ({**good, "network": {}}, "network must have exactly"),
        ({**good, "network": {**good["network"], "b2": good["network"]["b1"]}}, "network.b2 must be of shape"),
        ({**good, "learning": {}}, "learning must have"),
        ({**good, "learning": {**learning, "observed": -1}}, "observed must be a count"),
        ({**good, "learning": {**learning, "optimizer": {}}}, "its optimizer must have"),
        ({**good, "learning": {**learning, "prompts": {}}}, "prompts must have rows"),
        (
            {
                **good,
                "learning": {**learning, "prefixes": {**prefixes, "rows": learning["prompts"]["rows"]}},
            },
            "lengths of prefixes do not sum",
        ),
    ]
    for state, complaint in wrong:
        with pytest.raises(ValueError, match=complaint):
            predictor.load(state, version=9)
    assert through_json(predictor.state()) == good
    assert predictor.version == 0


def test_options_are_read_strictly() -> None:
    wrong: list[tuple[dict[str, object], str]] = [
        ({"buckets": 0}, "buckets must be at least 1"),
        ({"hidden": 0}, "hidden must be more than 0"),
        ({"minibatch": 1}, "minibatch must be at least 2"),
        ({"loss": "hinge"}, "loss must be one of 'squared', 'log'"),
        ({"discount": 2.0}, "discount must lie between 0 and 1"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0"),
        ({"bucket": 3}, "did you mean 'buckets'"),
    ]
    for options, complaint in wrong:
        with pytest.raises(ConfigError, match=complaint):
            make_predictor("hashed", options, seed=0, text_of=str)
