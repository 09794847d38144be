"""LPO on turn trees: which tokens belong to which alternative, and who is left out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.methods.objectives.kit import OPEN, Turn, coefficients, evaluate, turns_of
from trace_async.config import ObjectiveConfig
from trace_async.methods.objectives.turns import TurnTensors


def lpo(**options: object) -> ObjectiveConfig:
    return replace(OPEN, kind="lpo", options={"tau": "one", **options})


def forward(rewards: tuple[float, ...], logits: tuple[float, ...] | None = None, tau: float = 1 + 1e-6) -> list[float]:
    """w - P, the ascent of forward KL."""
    target = torch.softmax(torch.tensor(rewards) / tau, 0)
    return (target - torch.softmax(torch.tensor(logits or (0.0,) * len(rewards)), 0)).tolist()


def on_policy(turns: TurnTensors, config: ObjectiveConfig) -> list[float]:
    return coefficients(turns.behaviour_logprobs, turns, config).tolist()


def moved(turns: TurnTensors, by: dict[int, float]) -> Tensor:
    """Log-probabilities of a policy that moved every token of some turns by so many nats."""
    shift = torch.zeros(turns.num_turns)
    shift[list(by)] = torch.tensor(list(by.values()))
    return turns.behaviour_logprobs + shift[turns.turn]


FORKED = (  # r above a and b; a above a1 and a2; b above b1
    Turn(mu=(0.5, 0.5, 0.5)),
    Turn(mu=(0.5, 0.5), parent=0),
    Turn(mu=(0.5,), parent=1, outcome=1.0, mass=0.25),
    Turn(mu=(0.5, 0.5), parent=1, outcome=0.0, mass=0.25),
    Turn(mu=(0.5, 0.5), parent=0),
    Turn(mu=(0.5, 0.5, 0.5), parent=4, outcome=0.0, mass=0.5),
)


def test_every_fork_compares_its_children_and_alternatives_go_on_to_the_next_fork_or_leaf() -> None:
    """V(a) = 1/2, V(b) = 0; b's alternative has the tokens of b and b1; r, which has no sibling, belongs to none."""
    a, b = forward((0.5, 0.0))
    a1, a2 = forward((1.0, 0.0))
    found = on_policy(turns_of(*FORKED), lpo())
    half = 0.5  # the mass of a, the prefix that a1 and a2 share
    assert found == pytest.approx([*[0.0] * 3, *[a / 2] * 2, a1 * half, *[a2 * half / 2] * 2, *[b / 5] * 5], abs=1e-6)


def test_first_turns_are_the_alternatives_of_the_prompt() -> None:
    turns = turns_of(Turn(outcome=1.0, mass=0.5), Turn(mu=(0.5, 0.5), outcome=0.0, mass=0.5))
    good, bad = forward((1.0, 0.0))
    assert on_policy(turns, lpo()) == pytest.approx([good, bad / 2, bad / 2], abs=1e-6)


def test_a_prompts_simplex_has_one_alternative_per_leaf_and_shared_turns_stand_in_several() -> None:
    """Leaves a1, a2, b1 of 6, 7 and 8 tokens."""
    a1, a2, b1 = forward((1.0, 0.0, 0.0))
    r, a = a1 / 6 + a2 / 7 + b1 / 8, a1 / 6 + a2 / 7
    expected = [*[r] * 3, *[a] * 2, a1 / 6, *[a2 / 7] * 2, *[b1 / 8] * 5]
    assert on_policy(turns_of(*FORKED), lpo(simplex="prompt")) == pytest.approx(expected, abs=1e-6)


def test_log_ratios_are_means_over_an_alternatives_tokens_or_sums() -> None:
    turns = turns_of(Turn(mu=(0.4, 0.4), outcome=1.0, mass=0.5), Turn(mu=(0.4,), outcome=0.0, mass=0.5))
    logprobs = moved(turns, {0: 0.1})
    for normalise, log_ratio, length in ((True, 0.1, 2), (False, 0.2, 1)):
        good, bad = forward((1.0, 0.0), (log_ratio, 0.0))
        found = coefficients(logprobs, turns, lpo(normalise=normalise)).tolist()
        assert found == pytest.approx([good / length, good / length, bad], abs=1e-6)


def test_a_token_outside_the_clip_has_no_gradient_whatever_its_sign_but_counts_in_the_listwise_policy() -> None:
    turns = turns_of(*[Turn(mu=(0.3,), outcome=outcome, mass=1 / 3) for outcome in (1.0, 0.0, 0.0)])
    for shift in (0.3, -0.3):  # beyond log(1.2) and log(0.8)
        logprobs = moved(turns, {0: shift, 1: shift})
        surrogate = evaluate(logprobs, turns, lpo())
        found = coefficients(logprobs, turns, lpo()).tolist()
        assert surrogate.touched.tolist() == [True, True, False]
        assert found == pytest.approx([0.0, 0.0, forward((1.0, 0.0, 0.0), (shift, shift, 0.0))[2]], abs=1e-6)


def test_the_loss_is_the_clipped_log_ratio_weighted_by_fixed_slopes() -> None:
    turns = turns_of(Turn(mu=(0.4,), outcome=1.0, mass=0.5), Turn(mu=(0.4,), outcome=0.0, mass=0.5))
    good, bad = forward((1.0, 0.0), (0.5, -0.1))
    loss = float(evaluate(moved(turns, {0: 0.5, 1: -0.1}), turns, lpo()).loss)
    assert loss == pytest.approx(-(good * math.log(1.2) + bad * -0.1), abs=1e-6)
    assert float(evaluate(turns.behaviour_logprobs, turns, lpo()).loss) == 0.0


def test_on_policy_reverse_kl_is_the_policy_gradient_of_the_children_s_mean() -> None:
    outcomes = (1.0, 0.0, 0.25)
    turns = turns_of(*[Turn(outcome=outcome, mass=1 / 3) for outcome in outcomes])
    found = on_policy(turns, lpo(divergence="reverse_kl"))
    mean = sum(outcomes) / 3
    assert found == pytest.approx([(outcome - mean) / 3 for outcome in outcomes], abs=1e-6)


def test_turns_without_loss_give_their_ratio_and_their_length_and_get_no_gradient() -> None:
    turns = turns_of(
        Turn(mu=(0.4,), trained=False), Turn(mu=(0.4,), parent=0, outcome=1.0, mass=0.5), Turn(outcome=0.0, mass=0.5)
    )
    found = coefficients(moved(turns, {0: 0.2}), turns, lpo()).tolist()
    good, bad = forward((1.0, 0.0), (0.1, 0.0))
    assert found == pytest.approx([0.0, good / 2, bad], abs=1e-6)


def test_a_vetoed_turn_gives_its_ratio_and_gets_no_gradient() -> None:
    turns = turns_of(Turn(mu=(0.2,), outcome=1.0, mass=0.5), Turn(outcome=0.0, mass=0.5))
    logprobs, config = moved(turns, {0: 1.0}), replace(lpo(), veto_high=2.0)
    found = coefficients(logprobs, turns, config).tolist()
    assert evaluate(logprobs, turns, config).vetoed.tolist() == [True, False]
    assert found == pytest.approx([0.0, forward((1.0, 0.0), (1.0, 0.0))[1]], abs=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_a_number_that_is_none_takes_out_the_sets_it_belongs_to_and_no_other(trained: bool) -> None:
    turns = turns_of(*[replace(turn, trained=trained or j != 2) for j, turn in enumerate(FORKED)])
    logprobs = turns.behaviour_logprobs.clone()
    logprobs[5] = math.nan  # the token of a1
    found, whole = coefficients(logprobs, turns, lpo()), coefficients(turns.behaviour_logprobs, turns, lpo())
    assert found[5:8].tolist() == [0.0] * 3  # the fork below a
    torch.testing.assert_close(found[:5], whole[:5])
    torch.testing.assert_close(found[8:], whole[8:])
    assert not coefficients(logprobs, turns, lpo(simplex="prompt")).any()


@pytest.mark.parametrize("simplex", ["node", "prompt"])
def test_what_was_selected_is_no_alternative_and_gets_no_gradient(simplex: str) -> None:
    pair = (Turn(outcome=1.0, mass=0.5), Turn(outcome=0.0, mass=0.5))
    selected = Turn(drawn=False, trained=True, mass=0.0)
    below = Turn(parent=2, outcome=1.0, mass=0.0)
    alone = on_policy(turns_of(*pair), lpo(simplex=simplex))
    assert on_policy(turns_of(*pair, selected, below), lpo(simplex=simplex)) == [*alone, 0.0, 0.0]


def test_an_end_without_an_outcome_is_no_alternative_and_a_chain_beside_it_goes_on() -> None:
    """The first rollout's second turn has a sibling that was closed without an outcome."""
    turns = turns_of(
        Turn(),
        Turn(parent=0, outcome=1.0, mass=0.5),
        Turn(parent=0, value=math.nan, mass=0.0),
        Turn(outcome=0.0, mass=0.5),
    )
    turns = replace(turns, value=torch.tensor([1.0, 1.0, math.nan, 0.0]), mass=torch.tensor([0.5, 0.5, 0.0, 0.5]))
    good, bad = forward((1.0, 0.0))
    assert on_policy(turns, lpo()) == pytest.approx([good / 2, good / 2, 0.0, bad], abs=1e-6)


def test_a_prompt_with_one_rollout_has_nothing_to_compare() -> None:
    turns = turns_of(Turn(), Turn(parent=0, outcome=1.0))
    for simplex in ("node", "prompt"):
        assert not any(on_policy(turns, lpo(simplex=simplex)))


def test_a_fork_has_a_floor_under_tau_and_a_prompt_has_none() -> None:
    turns = turns_of(Turn(outcome=0.01, mass=0.5), Turn(outcome=0.0, mass=0.5))
    node, prompt = (on_policy(turns, lpo(simplex=simplex, tau="group_std")) for simplex in ("node", "prompt"))
    assert node == pytest.approx(forward((0.01, 0.0), tau=0.05), abs=1e-5)
    assert prompt == pytest.approx(forward((0.01, 0.0), tau=0.005), abs=1e-3)


def test_equal_children_pull_a_drifted_policy_back_to_even() -> None:
    turns = turns_of(Turn(mu=(0.4,), outcome=1.0, mass=0.5), Turn(mu=(0.4,), outcome=1.0, mass=0.5))
    assert not any(on_policy(turns, lpo(tau="group_std")))
    high, low = coefficients(moved(turns, {0: 0.1}), turns, lpo(tau="group_std")).tolist()
    assert high == pytest.approx(0.5 - 1 / (1 + math.exp(-0.1)), abs=1e-6)
    assert low == pytest.approx(-high, abs=1e-6)


def test_more_rollouts_do_not_make_a_prompt_heavier() -> None:
    sizes = []
    for number in (2, 8, 64):
        outcomes = [float(k < number // 2) for k in range(number)]
        turns = turns_of(*[Turn(outcome=outcome, mass=1 / number) for outcome in outcomes])
        sizes.append(sum(abs(c) for c in on_policy(turns, lpo(simplex="prompt", tau="group_std"))))
    assert sizes == pytest.approx([sizes[0]] * 3, abs=1e-5)


def test_from_the_policy_a_better_alternative_is_raised_however_likely_it_has_become() -> None:
    """Rewards 1 and .8, tau 1, the policy at .6 and .4: to the sampler's target the better one would be lowered."""
    turns = turns_of(Turn(outcome=1.0, mass=0.5), Turn(outcome=0.8, mass=0.5))
    policy = moved(turns, {0: math.log(0.6 / 0.4)})
    back, on = (coefficients(policy, turns, lpo(start=start, epsilon=0.9)).tolist() for start in ("sampler", "policy"))
    target = [0.6 * math.exp(1.0), 0.4 * math.exp(0.8)]
    rise = target[0] / sum(target) - 0.6
    assert on == pytest.approx([rise, -rise], abs=1e-5)
    assert back == pytest.approx(forward((1.0, 0.8), (math.log(0.6 / 0.4), 0.0)), abs=1e-5)
    assert back[0] < 0 < on[0]
