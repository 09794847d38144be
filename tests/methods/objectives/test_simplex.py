"""Listwise Policy Optimization on one set of alternatives: what its paper proves, on 200 random sets each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import NamedTuple, get_args

import pytest
import torch
from torch import Tensor

from tests.methods.objectives.tree_references import divergence as divergence_of
from trace_async.methods.objectives.simplex import (
    TAU_OFFSET,
    Divergence,
    TauRule,
    log_policy,
    log_target,
    slopes,
    temperature,
)

DIVERGENCES: tuple[Divergence, ...] = get_args(Divergence)
every_divergence = pytest.mark.parametrize("divergence", DIVERGENCES)
ALPHA = 0.4


class Set(NamedTuple):
    """One random set of alternatives, float64 [1, K]."""

    rewards: Tensor
    logits: Tensor
    tau: Tensor  # [1]

    @property
    def mask(self) -> Tensor:
        return torch.ones_like(self.rewards, dtype=torch.bool)

    @property
    def log_w(self) -> Tensor:
        return log_target(self.rewards, self.mask, self.tau)

    @property
    def log_p(self) -> Tensor:
        return log_policy(self.logits, self.mask)

    def slopes(self, divergence: Divergence) -> Tensor:
        return slopes(self.log_p, self.log_w, divergence=divergence, alpha=ALPHA)


def random_sets(*, count: int = 200, on_policy: bool = False) -> Iterator[Set]:
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        size = 2 + number % 7
        rewards = torch.randn(1, size, generator=generator, dtype=torch.float64)
        logits = torch.randn(1, size, generator=generator, dtype=torch.float64)
        tau = torch.rand(1, generator=generator, dtype=torch.float64) * 2 + 0.1
        yield Set(rewards, torch.zeros_like(logits) if on_policy else logits, tau)


def uniform_like(values: Tensor) -> Tensor:
    return torch.full_like(values, 1 / values.shape[1])


def kl(first: Tensor, second: Tensor) -> Tensor:
    terms: Tensor = first * (first.log() - second.log())
    return terms.sum(1)


def successes(number: int, *, of: int = 8) -> Tensor:
    return torch.tensor([[1.0] * number + [0.0] * (of - number)], dtype=torch.float64)


# ---- the target -------------------------------------------------------------------------------------------------


def test_the_target_is_the_best_trade_of_reward_against_distance_from_the_start() -> None:
    """J(w) = sum w R - tau KL(w || P_t); J(P) = tau log sum_j P_t,j exp(R_j / tau) - tau KL(P || w)."""
    for one in random_sets():
        w, start, p = one.log_w.exp(), uniform_like(one.rewards), one.log_p.exp()

        def gain(at: Tensor, one: Set = one, start: Tensor = start) -> Tensor:
            return (at * one.rewards).sum(1) - one.tau * kl(at, start)

        assert float(gain(w)) >= float(gain(p))
        most = one.tau * (start * (one.rewards / one.tau).exp()).sum(1).log()
        torch.testing.assert_close(gain(p), most - one.tau * kl(p, w))


def test_the_target_gains_tau_times_both_divergences_from_the_start() -> None:
    for one in random_sets():
        w, start = one.log_w.exp(), uniform_like(one.rewards)
        gained = ((w - start) * one.rewards).sum(1)
        torch.testing.assert_close(gained, one.tau * (kl(w, start) + kl(start, w)))


def test_a_policy_near_the_target_keeps_the_gain_but_for_twice_the_largest_reward_times_its_distance() -> None:
    for one in random_sets():
        w, p, start = one.log_w.exp(), one.log_p.exp(), uniform_like(one.rewards)
        near = 0.9 * w + 0.1 * p
        distance = (near - w).abs().sum(1) / 2
        promised = one.tau * (kl(w, start) + kl(start, w)) - 2 * one.rewards.abs().amax(1) * distance
        assert float(((near - start) * one.rewards).sum(1)) >= float(promised) - 1e-12


def test_a_baseline_that_the_set_shares_cancels() -> None:
    for one in random_sets(count=20):
        torch.testing.assert_close(log_target(one.rewards + 17.0, one.mask, one.tau), one.log_w)


def test_tau_copies_the_normaliser_of_a_method() -> None:
    rewards, mask = successes(1), torch.ones(1, 8, dtype=torch.bool)
    found = {rule: float(temperature(rewards, mask, rule=rule, floor=0.0)) for rule in get_args(TauRule)}
    assert found == pytest.approx({"group_std": math.sqrt(1 / 8 * 7 / 8), "one": 1.0, "group_mean": 1 / 8}, abs=2e-6)


@pytest.mark.parametrize("rule", ["group_std", "group_mean"])
def test_tau_has_a_floor(rule: TauRule) -> None:
    rewards = torch.tensor([[0.01, 0.012]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert float(temperature(rewards, mask, rule=rule, floor=0.05)) == pytest.approx(0.05 + TAU_OFFSET)
    assert float(temperature(rewards, mask, rule=rule, floor=0.0)) < 0.0121


def test_a_mean_that_is_not_above_zero_divides_by_one() -> None:
    rewards = torch.tensor([[-1.0, 1.0], [-1.0, 0.0]])
    tau = temperature(rewards, torch.ones(2, 2, dtype=torch.bool), rule="group_mean", floor=0.0)
    torch.testing.assert_close(tau, torch.ones(2))


@pytest.mark.parametrize("rule", get_args(TauRule))
def test_equal_rewards_have_a_uniform_target(rule: TauRule) -> None:
    rewards = torch.full((1, 3), 0.7)
    mask = torch.ones(1, 3, dtype=torch.bool)
    target = log_target(rewards, mask, temperature(rewards, mask, rule=rule, floor=0.0)).exp()
    torch.testing.assert_close(target, uniform_like(rewards))


# ---- the slopes -------------------------------------------------------------------------------------------------


@every_divergence
def test_slopes_are_those_of_finite_differences_of_the_definition(divergence: Divergence) -> None:
    options, step = SimpleNamespace(divergence=divergence, alpha=ALPHA), 1e-6
    for one in random_sets():
        w = one.log_w.exp()[0]
        for k, slope in enumerate(one.slopes(divergence)[0].tolist()):
            sides = []
            for sign in (1, -1):
                moved = one.logits[0].clone()
                moved[k] += sign * step
                sides.append(float(divergence_of(torch.softmax(moved, 0), w, options)))
            assert slope == pytest.approx((sides[0] - sides[1]) / (2 * step), abs=1e-7)


@every_divergence
def test_slopes_sum_to_zero(divergence: Divergence) -> None:
    for one in random_sets():
        assert float(one.slopes(divergence).sum()) == pytest.approx(0.0, abs=1e-12)


@every_divergence
def test_slopes_vanish_as_the_policy_reaches_the_target(divergence: Divergence) -> None:
    for one in random_sets():
        sizes = []
        for share in (1.0, 0.1, 0.0):
            log_p = log_policy(one.log_w + share * one.logits, one.mask)
            sizes.append(float(slopes(log_p, one.log_w, divergence=divergence, alpha=ALPHA).abs().sum()))
        assert sizes[2] == pytest.approx(0.0, abs=1e-12)
        assert sizes[1] < max(sizes[0], 0.2)


@every_divergence
def test_following_the_slopes_reaches_the_target(divergence: Divergence) -> None:
    """Self-correcting: gradient descent on the logits ends at w."""
    one = next(random_sets())
    logits = one.logits.clone()
    for _ in range(3000):
        logits -= slopes(log_policy(logits, one.mask), one.log_w, divergence=divergence, alpha=ALPHA)
    torch.testing.assert_close(log_policy(logits, one.mask).exp(), one.log_w.exp(), atol=1e-6, rtol=0)


def test_forward_kl_slopes_are_bounded_whatever_the_rewards() -> None:
    for one in random_sets():
        c = one._replace(rewards=one.rewards * 1000).slopes("forward_kl")
        assert float(c.abs().max()) <= 1
        assert float(c.abs().sum()) <= 2


def test_on_policy_reverse_kl_is_the_plain_policy_gradient_of_the_group() -> None:
    for one in random_sets(on_policy=True):
        advantage = (one.rewards - one.rewards.mean()) / one.tau
        torch.testing.assert_close(one.slopes("reverse_kl"), -advantage / advantage.shape[1])


def test_off_policy_reverse_kl_leaves_the_policy_gradient_by_no_more_than_the_drift() -> None:
    """The gap of a coefficient is O(drift (1 + max |A|) / K), drift = max |K P - 1|; the constant is below 4."""
    for one in random_sets():
        mild = one._replace(logits=0.1 * one.logits)
        size = mild.rewards.shape[1]
        advantage = (mild.rewards - mild.rewards.mean()) / mild.tau
        drift = (size * mild.log_p.exp() - 1).abs().max()
        gap = (mild.slopes("reverse_kl") + advantage / size).abs().max()
        assert float(gap) <= float(4 * drift * (1 + advantage.abs().max()) / size)


def test_forward_kl_keeps_some_mass_on_everything_that_the_target_has() -> None:
    """w_k >= a and KL(w || P) <= D give P_k > a exp(-D/a - 1)."""
    for one in random_sets():
        w, p = one.log_w.exp()[0], one.log_p.exp()[0]
        distance = kl(w[None], p[None])
        assert bool((p > w * (-distance / w - 1).exp()).all())


def test_two_alternatives_make_the_soft_form_of_dpo() -> None:
    tau = 0.7
    logits = torch.tensor([[0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    margin = logits[0, 0] - logits[0, 1]
    log = torch.nn.functional.logsigmoid
    preference = torch.sigmoid(torch.tensor([1 / tau, -1 / tau], dtype=torch.float64))
    loss = -preference[0] * log(margin) - preference[1] * log(-margin)
    (expected,) = torch.autograd.grad(loss, logits)

    one = Set(successes(1, of=2), logits.detach(), torch.tensor([tau], dtype=torch.float64))

    torch.testing.assert_close(one.slopes("forward_kl"), expected)


@every_divergence
def test_equal_rewards_pull_a_drifted_policy_back_to_even_and_leave_an_even_one_alone(divergence: Divergence) -> None:
    tau = torch.tensor([0.5], dtype=torch.float64)
    even = Set(torch.full((1, 3), 0.7, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64), tau)
    assert float(even.slopes(divergence).abs().max()) < 1e-12
    drifted = even._replace(logits=torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)).slopes(divergence)[0]
    assert drifted[0] > 0.05  # descent lowers what is too likely
    assert drifted[2] < -0.02


TABLE = [  # K = 8: successes, rule, target of a success and of a failure, slope of each, policy gradient of a success
    (1, "group_std", 0.7461, 0.0363, -0.6211, 0.0887, -0.3307),
    (1, "one", 0.2797, 0.1029, -0.1547, 0.0221, -0.1094),
    (1, "group_mean", 0.9977, 0.0003, -0.8727, 0.1247, -0.8750),
    (2, "group_std", 0.3852, 0.0383, -0.2602, 0.0867, -0.2165),
    (4, "group_std", 0.2202, 0.0298, -0.0952, 0.0952, -0.1250),
    (6, "group_std", 0.1613, 0.0160, -0.0363, 0.1090, -0.0722),
    (7, "group_std", 0.1419, 0.0069, -0.0169, 0.1181, -0.0472),
]


@pytest.mark.parametrize(("number", "rule", "w_success", "w_failure", "c_success", "c_failure", "plain"), TABLE)
def test_eight_alternatives_have_the_numbers_of_the_table(
    number: int, rule: TauRule, w_success: float, w_failure: float, c_success: float, c_failure: float, plain: float
) -> None:
    """Forward KL pulls rare successes more, and pushes rare failures less, than a policy gradient of the same tau."""
    rewards = successes(number)
    tau = temperature(rewards, torch.ones_like(rewards, dtype=torch.bool), rule=rule, floor=0.0)
    one = Set(rewards, torch.zeros_like(rewards), tau)
    target, forward, reverse = one.log_w.exp()[0], one.slopes("forward_kl")[0], one.slopes("reverse_kl")[0]
    assert (float(target[0]), float(target[-1])) == pytest.approx((w_success, w_failure), abs=5.1e-5)
    assert (float(forward[0]), float(forward[-1])) == pytest.approx((c_success, c_failure), abs=5.1e-5)
    assert float(reverse[0]) == pytest.approx(plain, abs=5.1e-5)


def test_fitting_the_target_point_by_point_would_push_everything_up_for_ever() -> None:
    """The control: -sum w log pi has slopes -w, which sum to -1 and do not vanish at the target."""
    one = next(random_sets())
    at_target = one._replace(logits=one.log_w)
    assert float((-one.log_w.exp()).sum()) == pytest.approx(-1.0)
    assert float(at_target.slopes("forward_kl").abs().max()) < 1e-12


@pytest.mark.parametrize(("share", "like"), [(0.999, "forward_kl"), (0.001, "reverse_kl")])
def test_the_alpha_divergence_ends_at_both_kl_divergences(share: float, like: Divergence) -> None:
    for one in random_sets(count=20):
        found = slopes(one.log_p, one.log_w, divergence="alpha", alpha=share)
        torch.testing.assert_close(found, one.slopes(like), atol=0.02, rtol=0.02)


@every_divergence
def test_padding_changes_nothing_and_has_no_slope(divergence: Divergence) -> None:
    for one in random_sets(count=20):
        wider = [torch.cat([values, torch.full((1, 2), 9.0)], 1) for values in (one.rewards, one.logits)]
        mask = torch.cat([one.mask, torch.zeros(1, 2, dtype=torch.bool)], 1)
        for rule in get_args(TauRule):
            tau = temperature(one.rewards, one.mask, rule=rule, floor=0.05)
            torch.testing.assert_close(temperature(wider[0], mask, rule=rule, floor=0.05), tau)
        log_p, log_w = log_policy(wider[1], mask), log_target(wider[0], mask, one.tau)
        found = slopes(log_p, log_w, divergence=divergence, alpha=ALPHA)
        torch.testing.assert_close(found[:, :-2], one.slopes(divergence))
        assert not found[:, -2:].any()


@every_divergence
def test_a_target_that_leaves_an_alternative_no_chance_has_finite_slopes(divergence: Divergence) -> None:
    rewards, logits = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[-20.0, 20.0, 0.0]])
    one = Set(rewards, logits, torch.tensor([1e-6]))
    assert torch.isfinite(one.slopes(divergence)).all()
