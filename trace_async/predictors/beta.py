"""`beta`: a Beta posterior for each prompt, moved by how many turns a rollout has survived. Counts, no learning."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from trace_async.core.types import FloatArray, Group, Json, Prefix
from trace_async.predictors.counts import COUNT_KEYS, CountOptions, Counts, counts_from, counts_state, in_order
from trace_async.predictors.protocol import Belief


class BetaPredictor:
    """With s successes and f failures counted of a prompt (see `counts`), c = prior_rollouts and p the prior's mean:

        v ~ Beta(c p + s, c (1-p) + f)

    A prefix after t turns has the odds of v's mean, times those that survival to t gives.
    """

    quick_batch = 512

    def __init__(self, options: CountOptions) -> None:
        self._options = options
        self._version = 0  # knowing nothing is what is published with the start weights
        self._counts = Counts(options)

    @property
    def version(self) -> int:
        """Policy version of the state that was loaded last; 0 before any."""
        return self._version

    def prepare(self, prefixes: Sequence[Prefix]) -> None:
        """Nothing is slow."""

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        """Posterior of each prompt."""
        counts = self._counts
        return [self._belief(counts, prefix.prompt_id) for prefix in prefixes]

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Posterior mean of each prefix's prompt, moved by the turns it has survived."""
        counts = self._counts
        success = np.empty(len(prefixes), np.float32)
        for place, prefix in enumerate(prefixes):
            alpha, beta = self._belief(counts, prefix.prompt_id)
            log_odds = math.log(alpha / beta) + counts.survival_log_odds(prefix.turn_index)
            success[place] = 0.5 + 0.5 * math.tanh(0.5 * log_odds)
        return success

    def observe(self, groups: Sequence[Group]) -> None:
        """Count the groups' rollouts."""
        for group in in_order(groups):
            self._counts.observe(group)

    def parameters(self) -> Json:
        """The same as `state`: counting needs no more than predicting."""
        return self.state()

    def state(self) -> Json:
        """The counts."""
        return {"kind": "beta", **counts_state(self._counts)}

    def load(self, state: Json, *, version: int) -> None:
        """Take over what `state` returned, stamped with `version`; more prompts than `max_prompts` are forgotten."""
        if set(state) != {"kind", *COUNT_KEYS} or state["kind"] != "beta":
            raise ValueError(f"not the state of a beta predictor: keys {sorted(state)}, kind {state.get('kind')!r}")
        counts = {key: value for key, value in state.items() if key != "kind"}
        self._counts, self._version = counts_from(counts, self._options), version

    def _belief(self, counts: Counts, prompt_id: str) -> Belief:
        successes, failures = counts.evidence(prompt_id)
        weight, rate = self._options.prior_rollouts, counts.rate
        return Belief(weight * rate + successes, weight * (1.0 - rate) + failures)
