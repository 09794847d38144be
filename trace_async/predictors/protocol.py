"""What a rollout's chance of success is, before and while it is played: the words that all predictors share.

A predictor serves the allocators and nothing else; `scoring.py` asks it for many prefixes at once. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from trace_async.core.types import FloatArray, Group, IntArray, Json, Prefix

OPTIONS_KEY = "predictor.options"

TextOf: TypeAlias = Callable[[IntArray], str]
"""The words of a prefix's tokens, for predictors that read text."""


class Belief(NamedTuple):
    """Success probability of a prompt ~ Beta(alpha, beta)."""

    alpha: float
    beta: float

    @property
    def mean(self) -> float:
        """Predicted success probability."""
        return self.alpha / (self.alpha + self.beta)


class Predictor(Protocol):
    """Predicts at the actors and for the planner, learns at the learner.

    Invariants: a prediction looks at a prefix's past only, and does not depend on what else is in its batch; memory is
    bounded; `state` and `load` are exact inverses, so a resumed run predicts to the bit what the killed one would have;
    `load` may come while another thread is in `predict`, which then answers wholly by the one or by the other.
    """

    @property
    def version(self) -> int:
        """Policy version with which the present parameters were published; 0 before any."""
        ...

    @property
    def quick_batch(self) -> int:
        """Prefixes of one `predict` that an event loop can wait for, about a millisecond; 0: none, use a thread."""
        ...

    def prepare(self, prefixes: Sequence[Prefix]) -> None:
        """Do what is slow about scoring these prompts, in any thread, so that `score_prompts` of them is quick."""
        ...

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        """Belief about a root rollout of each prompt; `turn_index` 0, `token_ids` empty where they are not known."""
        ...

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        """Success probability of a rollout that goes on from each prefix, float32 [prefixes] in [0, 1]."""
        ...

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the finished trees of one step, once, when they are consumed; their order does not matter.

        May take seconds.
        """
        ...

    def parameters(self) -> Json:
        """What predictions need, as JSON; published with a policy version."""
        ...

    def state(self) -> Json:
        """Everything, what only `observe` needs included, as JSON."""
        ...

    def load(self, state: Json, *, version: int) -> None:
        """Become the predictor that `state` came from; from `parameters` one that predicts the same.

        Raises ValueError, and changes nothing, when it is malformed.
        """
        ...
