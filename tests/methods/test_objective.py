"""The off-policy objective: one-token tables, caps, vetoes, broken numbers, invariances, diagnostics."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.methods.objective_cases import OPEN, Turn, batch_of, coefficients, trained
from trace_async.config import ObjectiveConfig
from trace_async.methods.objective import ObjectiveStats, caps, finish_stats, merge_stats, tree_tis


def one_token(config: ObjectiveConfig, **fields: object) -> float:
    """Coefficient of one token sampled with probability .2 and trained at .5: ratio 2.5."""
    batch = batch_of(replace(Turn(mu=(0.2,)), **fields))  # type: ignore[arg-type]
    return float(coefficients(trained(batch, (0.5,)), batch, config)[0, 1])


@pytest.mark.parametrize(
    ("name", "config", "fields", "positive", "negative"),
    [
        ("TIS-REINFORCE min(R, 2)", replace(OPEN, cap_positive=2.0, cap_negative=2.0), {}, 2.0, -2.0),
        ("CISPO cap 5", replace(OPEN, cap_positive=5.0, cap_negative=5.0), {}, 2.5, -2.5),
        ("V-trace", OPEN, {"tight": True}, 1.0, -1.0),
        ("stale", replace(OPEN, cap_positive=5.0, cap_decay=0.25), {"age": 1}, 2.0, -1.0),
    ],
)
def test_one_token_has_the_coefficients_of_the_known_losses(
    name: str, config: ObjectiveConfig, fields: dict[str, object], positive: float, negative: float
) -> None:
    assert one_token(config, advantage=1.0, **fields) == pytest.approx(positive, rel=1e-5), name
    assert one_token(config, advantage=-1.0, **fields) == pytest.approx(negative, rel=1e-5), name


def test_caps_fall_with_age_for_good_turns_and_at_once_for_bad_ones() -> None:
    config = ObjectiveConfig(cap_positive=5.0, cap_negative=2.0, cap_decay=0.5)
    ages = (0, 1, 2, 3)
    good = caps(batch_of(*[Turn(mu=(0.5,), age=age) for age in ages]), config)
    bad = caps(batch_of(*[Turn(mu=(0.5,), age=age, advantage=-1.0) for age in ages]), config)
    tight = caps(batch_of(*[Turn(mu=(0.5,), age=0, advantage=a, tight=True) for a in (-1.0, 1.0)]), config)
    assert good.tolist() == [5.0, 3.0, 2.0, 1.5]
    assert bad.tolist() == [2.0, 1.0, 1.0, 1.0]
    assert tight.tolist() == [1.0, 1.0]


def test_a_decay_of_zero_leaves_the_full_cap_for_fresh_turns_only() -> None:
    turns = [Turn(mu=(0.5,), age=age) for age in (0, 1)]
    assert caps(batch_of(*turns), ObjectiveConfig(cap_decay=0.0)).tolist() == [5.0, 1.0]


def test_a_turn_whose_geometric_ratio_leaves_the_window_is_vetoed_whole_and_counted() -> None:
    batch = batch_of(Turn(mu=(0.2, 0.2)), Turn(mu=(0.2, 0.2)), Turn(mu=(0.8, 0.8)))
    logprobs = trained(batch, (0.5, 0.2), (0.5, 0.5), (0.3, 0.3))  # geometric 1.58, 2.5, 0.375

    found = coefficients(logprobs, batch, ObjectiveConfig())
    metrics = finish_stats(tree_tis(logprobs, batch, ObjectiveConfig())[1])

    torch.testing.assert_close(found[0, 1:], torch.tensor([2.5, 1.0]))
    assert not found[1:].any()
    assert metrics["objective/vetoed_share"] == pytest.approx(2 / 3)
    assert metrics["objective/nonfinite_share"] == 0.0


def test_a_single_impossible_token_vetoes_its_turn() -> None:
    batch = batch_of(Turn(mu=(0.9,) * 40), Turn(mu=(0.9,) * 40))
    logprobs = trained(batch, (0.9,) * 39 + (0.9 * 0.9e-4,), (0.9,) * 39 + (0.9 * 1.1e-4,))
    found = coefficients(logprobs, batch, ObjectiveConfig())  # geometric ratios are .79 both times
    assert not found[0].any()
    assert found[1].any()


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_log_probability_that_is_no_number_takes_out_its_turn_and_nothing_else(poison: float) -> None:
    clean = batch_of(Turn(mu=(0.5, 0.5)), Turn(mu=(0.5, 0.5)))
    logprobs = trained(clean, (0.5, 0.5), (0.5, 0.5))
    with torch.no_grad():
        logprobs[0, 2] = poison
    poisoned = replace(clean, behaviour_logprobs=clean.behaviour_logprobs.clone())
    poisoned.behaviour_logprobs[1, 1] = poison

    for batch, broken in ((clean, 1), (poisoned, 2)):
        loss, stats = tree_tis(logprobs, batch, ObjectiveConfig())
        (gradient,) = torch.autograd.grad(loss, logprobs)
        metrics = finish_stats(stats)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
        assert not gradient[:broken].any()
        assert metrics["objective/nonfinite_share"] == broken / 2
        assert metrics["objective/vetoed_share"] == 0.0
        assert metrics["objective/tokens"] == 4 - 2 * broken


def test_huge_ratios_do_not_overflow() -> None:
    batch = batch_of(Turn(mu=(0.5,)), Turn(mu=(0.5,), advantage=-1.0))
    far = replace(batch, behaviour_logprobs=torch.where(batch.turn_index >= 0, -1000.0, 0.0))
    logprobs = trained(batch, (0.5,), (0.5,))
    loss, stats = tree_tis(logprobs, far, OPEN)
    metrics = finish_stats(stats)
    assert torch.isfinite(loss)
    assert all(math.isfinite(value) for key, value in metrics.items() if not key.endswith("harmful_sq_mean"))
    assert metrics["objective/max_abs_log_ratio"] == pytest.approx(1000.0 + math.log(0.5))
    assert metrics["objective/capped_share"] == 1.0


# ---- invariances -------------------------------------------------------------------------------------------------

RANDOM_TURNS = st.lists(
    st.builds(
        Turn,
        mu=st.lists(st.floats(0.05, 1.0), min_size=1, max_size=4).map(tuple),
        advantage=st.floats(-1.0, 1.0),
        mass=st.floats(0.1, 1.0),
        age=st.integers(0, 12),
        tight=st.booleans(),
        depth=st.integers(1, 12),
    ),
    min_size=2,
    max_size=6,
)


def policy_of(turns: list[Turn]) -> list[tuple[float, ...]]:
    """Another policy's probabilities of the same tokens."""
    return [
        tuple(min(1.0, p * (0.4 + 0.37 * ((j + t) % 5))) for t, p in enumerate(turn.mu)) for j, turn in enumerate(turns)
    ]


@settings(max_examples=40)
@given(RANDOM_TURNS)
def test_the_order_of_the_turns_does_not_matter(turns: list[Turn]) -> None:
    forward, backward = batch_of(*turns), batch_of(*turns[::-1])
    policy = policy_of(turns)
    first = coefficients(trained(forward, *policy), forward, ObjectiveConfig())
    second = coefficients(trained(backward, *policy[::-1]), backward, ObjectiveConfig())
    torch.testing.assert_close(first, second.flip(0))


@settings(max_examples=40)
@given(RANDOM_TURNS)
def test_a_turn_told_twice_with_half_its_mass_changes_nothing(turns: list[Turn]) -> None:
    halves = [replace(turns[0], mass=turns[0].mass / 2)] * 2 + turns[1:]
    whole, split = batch_of(*turns), batch_of(*halves)
    policy = policy_of(turns)
    first = coefficients(trained(whole, *policy), whole, ObjectiveConfig())
    second = coefficients(trained(split, policy[0], *policy), split, ObjectiveConfig())
    torch.testing.assert_close(first, torch.cat([second[:1] + second[1:2], second[2:]]))


@settings(max_examples=40)
@given(RANDOM_TURNS, st.integers(1, 5))
def test_micro_batches_add_up_to_the_whole(turns: list[Turn], cut: int) -> None:
    cut = min(cut, len(turns) - 1)
    policy = policy_of(turns)

    def run(part: list[Turn], probabilities: list[tuple[float, ...]]) -> tuple[float, ObjectiveStats]:
        batch = batch_of(*part)
        loss, stats = tree_tis(trained(batch, *probabilities), batch, ObjectiveConfig())
        return float(loss.detach()), stats

    whole, whole_stats = run(turns, policy)
    parts = [run(turns[:cut], policy[:cut]), run(turns[cut:], policy[cut:])]
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-4, abs=1e-5)
    merged = finish_stats(merge_stats([stats for _, stats in parts]))
    assert merged == pytest.approx(finish_stats(whole_stats), rel=1e-9, abs=1e-12, nan_ok=True)


# ---- diagnostics -------------------------------------------------------------------------------------------------


def test_diagnostics_by_hand() -> None:
    batch = batch_of(
        Turn(mu=(0.2, 0.5), age=0, depth=1),
        Turn(mu=(0.4,), age=4, depth=2, advantage=-1.0),
        Turn(mu=(0.5,), age=9, depth=9),
    )
    _, stats = tree_tis(trained(batch, (0.3, 0.5), (0.2,), (0.5,)), batch, replace(OPEN, cap_positive=1.2))
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
    batch = batch_of(*[Turn(mu=(0.2, 0.2))] * 4)
    rows = [(0.2, 0.2), (0.1, 0.2), (0.4, 0.2), (0.4, 0.4)]
    _, stats = tree_tis(trained(batch, *rows), batch, OPEN)
    assert finish_stats(stats)["objective/ess_ratio"] == pytest.approx(0.661765, rel=1e-5)


def test_a_step_without_micro_batches_has_no_statistics() -> None:
    with pytest.raises(ValueError, match="no micro-batch"):
        merge_stats([])


def test_loss_and_statistics_are_detached_where_they_must_be() -> None:
    batch = batch_of(Turn(mu=(0.5,)))
    loss, stats = tree_tis(trained(batch, (0.6,)), batch, OPEN)
    assert loss.requires_grad
    assert loss.dtype == torch.float32
    assert not stats.age.requires_grad
    assert not stats.weights.requires_grad
