"""What a group's predictions said before anything below them was played, and what then happened.

Invariants: an outcome counts for the prediction at the place where its rollout started, and nowhere else. For a prompt
these are the root rollouts; for a prefix the rollout that went on from it, and the continuations granted right there,
each followed along its own chain. All of them are draws of the policy from that very prefix. A continuation granted
further down is none: its place was chosen by looking at an outcome, so counting it above would shift the mean. How
many continuations a prefix gets may depend on what was drawn there before; sums over draws stay unbiased then (Wald's
identity), means per prefix do not, which is why every draw weighs the same. Rollouts that failed or were closed have
no outcome, SELECTED ones are no draws. Outcomes above the group's `success_above` are successes: here only, rewards
stay what they are for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.outcomes import is_success
from trace_async.core.types import Group, GrownBy
from trace_async.methods.allocation import prefix_value, repeat_probability, root_value, root_value_beta

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


class Forecasts(NamedTuple):
    """Predictions and the draws that tested them; arrays [n], one entry for each prompt or prefix with a draw."""

    predicted: Floats  # probability of success
    successes: Counts
    draws: Counts  # >= 1

    @property
    def rates(self) -> Floats:
        """Share of successes [n]."""
        return np.asarray(self.successes / self.draws)

    def per_draw(self) -> tuple[Floats, Floats]:
        """The same as pairs: predictions repeated for each draw, and 1 or 0 for what happened; both [sum of draws]."""
        place = np.arange(int(self.draws.sum())) - np.repeat(np.cumsum(self.draws) - self.draws, self.draws)
        happened = place < np.repeat(self.successes, self.draws)
        return np.repeat(self.predicted, self.draws), happened.astype(np.float64)


class Promise(NamedTuple):
    """What an allocation was expected to bring, summed over the places it was given to, and what it brought."""

    places: int
    expected: float
    realised: int


def bare_outcomes(group: Group) -> Floats:
    """[K] outcome of the rollout through each turn, followed along its own chain; NaN when it has none."""
    outcomes = group.outcome.astype(np.float64).tolist()
    chained, parents = (group.grown_by == GrownBy.CHAIN).tolist(), group.parent.tolist()
    for turn in range(group.num_turns - 1, -1, -1):  # parents come first
        if chained[turn]:
            outcomes[parents[turn]] = outcomes[turn]
    return np.array(outcomes, np.float64)


def root_outcomes(group: Group) -> Floats:
    """Outcomes of the root rollouts, in the order in which they were granted; those without one are left out."""
    bare = bare_outcomes(group)
    return np.asarray(bare[(group.grown_by == GrownBy.ROOT) & ~np.isnan(bare)])


def prompt_forecasts(groups: Sequence[Group]) -> Forecasts:
    """The prompt's prediction against its root rollouts, one entry for each group that has both."""
    found = []
    for group in groups:
        outcomes, success = root_outcomes(group), group.root_score.success
        if outcomes.size and np.isfinite(success):
            found.append((success, int(is_success(outcomes, group.success_above).sum()), outcomes.size))
    return _forecasts(found)


def prefix_forecasts(groups: Sequence[Group]) -> Forecasts:
    """Each scored turn's prediction against the rollouts that went on from it, one entry for each turn with both."""
    parts = []
    for group in groups:
        draws = _Draws.of(group)
        tested = np.isfinite(group.score) & (draws.known + draws.further > 0)
        successes, total = draws.successes + draws.further_successes, draws.known + draws.further
        parts.append(np.stack([group.score, successes, total])[:, tested])
    return _forecasts(np.concatenate([np.zeros((3, 0)), *parts], axis=1).T)


def promised_mixed(groups: Sequence[Group]) -> Promise:
    """Groups whose root rollouts hold a success and a failure: V_root of those that came to an end, and the count.

    Under the belief Beta(strength x success, strength x (1 - success)) where its strength is known, else at the mean.
    """
    places, expected, realised = 0, 0.0, 0
    for group in groups:
        outcomes, score = root_outcomes(group), group.root_score
        if not outcomes.size or not np.isfinite(score.success):
            continue
        places += 1
        if np.isfinite(score.strength) and score.strength > 0:
            alpha, beta = score.strength * score.success, score.strength * (1.0 - score.success)
            expected += float(root_value_beta(alpha, beta, outcomes.size))
        else:
            expected += float(root_value(score.success, outcomes.size))
        realised += np.unique(is_success(outcomes, group.success_above)).size > 1
    return Promise(places, expected, realised)


def promised_flips(groups: Sequence[Group]) -> Promise:
    """Turns with continuations of which one did not repeat the bare rollout's outcome: sum of 1 - q^K, and the count.

    Even honest predictions promise more than is kept where continuations go to turns whose prediction contradicts the
    outcome seen: the contradiction is in part the prediction's own error, and V_pref does not know that.
    """
    places, expected, realised = 0, 0.0, 0
    for group in groups:
        draws = _Draws.of(group)
        anchor = np.isfinite(group.score) & (draws.known > 0) & (draws.further > 0)
        succeeded, further = draws.successes[anchor] > 0, draws.further[anchor]
        repeats = np.where(succeeded, draws.further_successes[anchor], further - draws.further_successes[anchor])
        places += int(anchor.sum())
        expected += float(prefix_value(repeat_probability(group.score[anchor], succeeded), further).sum())
        realised += int((repeats < further).sum())
    return Promise(places, expected, realised)


class _Draws(NamedTuple):
    """What was drawn from each turn of a group; counts [K]."""

    known: Counts  # 1 when the rollout through the turn has an outcome
    successes: Counts  # 1 when that is a success
    further: Counts  # continuations granted at the turn that came to an outcome
    further_successes: Counts

    @classmethod
    def of(cls, group: Group) -> _Draws:
        bare = bare_outcomes(group)
        known, succeeded = ~np.isnan(bare), is_success(bare, group.success_above)
        starts = (group.grown_by == GrownBy.CONTINUATION) & (group.parent >= 0) & known
        at = group.parent[starts]
        return cls(
            known.astype(np.int64),
            succeeded.astype(np.int64),
            np.bincount(at, minlength=group.num_turns),
            np.bincount(at[succeeded[starts]], minlength=group.num_turns),
        )


def _forecasts(entries: Sequence[tuple[float, int, int]] | Floats) -> Forecasts:
    table = np.asarray(entries, np.float64).reshape(-1, 3)
    return Forecasts(table[:, 0], table[:, 1].astype(np.int64), table[:, 2].astype(np.int64))
