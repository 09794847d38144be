"""Which prompts of a candidate pool get a round's root rollouts, and how many: one Protocol, four methods.

    even    as few prompts as can take the budget, each the same: GRPO and every method without an opinion of prompts
    trace   TRACE (arXiv 2606.11119), stage one, with an exploration floor: see `TraceRoots`
    mopps   MoPPS (arXiv 2507.04632): a Thompson draw of each prompt's success, the ones nearest to the target
    pcl     prompt-curriculum filtering: the ones whose predicted success is nearest to the target

A root allocator remembers nothing: its answer depends on beliefs, budget and the generator handed in, so a resumed run
repeats the plan of the killed one. Invariants: counts sum to the budget exactly, no prompt gets more than `max_roots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from trace_async.errors import ConfigError
from trace_async.methods.allocation import (
    Counts,
    Floats,
    allocate_roots,
    check_spendable,
    root_values,
    root_values_beta,
)
from trace_async.methods.registry import pick, read_options

OPTIONS_KEY = "tree.root_options"
"""Where the configuration keeps a root allocator's options."""

EXPLORED_ROOTS = 2
"""Roots of an explored prompt: the fewest that can be mixed, so that exploring may also teach the policy."""


class Belief(Protocol):
    """Beta(alpha, beta) over a prompt's success probability."""

    @property
    def alpha(self) -> float:
        """Prior and seen successes, > 0."""
        ...

    @property
    def beta(self) -> float:
        """Prior and seen failures, > 0."""
        ...


class RootAllocator(Protocol):
    """Divides a round's roots among candidates. Pure."""

    def pool_size(self, candidates: int, *, budget: int, max_roots: int) -> int:
        """How many prompts to draw from the stream for a round; `candidates` is what the configuration offers."""
        ...

    def allocate(self, beliefs: Sequence[Belief], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        """Roots int64 [beliefs], 0 to `max_roots` each, `budget` in all.

        Raises ConfigError when the budget cannot be spent exactly.
        """
        ...


class EvenRoots:
    """Equal counts for as few prompts as can take the budget, whatever is believed of them: GRPO's groups."""

    def pool_size(self, candidates: int, *, budget: int, max_roots: int) -> int:
        """Only what can take the budget, so that each epoch visits every prompt once."""
        return -(-budget // max_roots)

    def allocate(self, beliefs: Sequence[Belief], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        """Drawn at random when there are more than needed."""
        return _spread(rng.permutation(len(beliefs)), budget=budget, max_roots=max_roots)


class _WholePool:
    """What methods share that choose among candidates."""

    def pool_size(self, candidates: int, *, budget: int, max_roots: int) -> int:
        """All of them."""
        return candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `trace`."""

    form: Literal["beta", "point"] = "beta"  # expected value under the belief, or the value at its mean
    clip: float = 0.02  # form "point": the mean is kept in [clip, 1 - clip]
    least: int = 0  # roots that every candidate gets at least; 0 filters prompts
    explore_share: float = 0.1  # share of the roots that goes to prompts drawn without looking at beliefs

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip < 0.5:
            raise ConfigError(f"{OPTIONS_KEY}.clip must be >= 0 and < 0.5, got {self.clip:g}")
        if self.least not in (0, 1):
            raise ConfigError(f"{OPTIONS_KEY}.least must be 0 (prompts may be filtered) or 1, got {self.least}")
        if not 0.0 <= self.explore_share <= 1.0:
            raise ConfigError(f"{OPTIONS_KEY}.explore_share must lie between 0 and 1, got {self.explore_share:g}")


class TraceRoots(_WholePool):
    """Maximises the expected number of prompts with mixed outcomes, after a share of the budget was set aside.

    That share, `explore_share`, goes in twos to candidates drawn at random, whatever is believed of them: without it a
    prompt once believed hopeless or solved would never be tried again, although the policy moves on. A fraction of a
    prompt is decided by chance, so that small budgets explore too. What explored prompts got counts when the rest is
    allocated. The floor is derived here; the paper leaves it open.
    """

    def __init__(self, options: TraceOptions) -> None:
        self._options = options

    def allocate(self, beliefs: Sequence[Belief], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        """The optimum given what the explored prompts get."""
        least = np.full(len(beliefs), self._options.least, np.int64)
        check_spendable(least, budget=budget, max_roots=max_roots)
        each = min(EXPLORED_ROOTS, max_roots)
        share = (budget - int(least.sum())) * self._options.explore_share
        num_explored = min(int(share / each + rng.random()), int(budget - least.sum()) // each, len(beliefs))
        explored = rng.permutation(len(beliefs))[:num_explored]
        least[explored] = each
        return allocate_roots(
            self._values(beliefs, max_roots), budget=budget, max_roots=max_roots, rng=rng, least=least
        )

    def _values(self, beliefs: Sequence[Belief], max_roots: int) -> Floats:
        """[candidates, max_roots + 1] worth of 0 .. max_roots roots."""
        alpha, beta = _columns(beliefs)
        if self._options.form == "beta":
            return root_values_beta(alpha, beta, max_roots)
        clip = self._options.clip
        return root_values(np.clip(alpha / (alpha + beta), clip, 1.0 - clip), max_roots)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Options of `mopps` and `pcl`."""

    target: float = 0.5  # success probability that prompts should be near to

    def __post_init__(self) -> None:
        if not 0.0 <= self.target <= 1.0:
            raise ConfigError(f"{OPTIONS_KEY}.target must lie between 0 and 1, got {self.target:g}")


class MoppsRoots(_WholePool):
    """Thompson sampling: draws each prompt's success from its belief and takes those with the smallest squared distance
    to the target, `max_roots` each. A belief that is not sure is drawn far from its mean now and then, so it is tried.
    """

    def __init__(self, options: TargetOptions) -> None:
        self._options = options

    def allocate(self, beliefs: Sequence[Belief], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        """Equal counts for the nearest draws."""
        alpha, beta = _columns(beliefs)
        ranking = _nearest(rng.beta(alpha, beta), self._options.target, rng)
        return _spread(ranking, budget=budget, max_roots=max_roots)


class PclRoots(_WholePool):
    """Filters by the predicted mean: the prompts nearest to the target, `max_roots` each. The predictor stands for the
    value model of prompt-curriculum learning; how sure it is does not count.
    """

    def __init__(self, options: TargetOptions) -> None:
        self._options = options

    def allocate(self, beliefs: Sequence[Belief], *, budget: int, max_roots: int, rng: np.random.Generator) -> Counts:
        """Equal counts for the nearest means."""
        alpha, beta = _columns(beliefs)
        ranking = _nearest(alpha / (alpha + beta), self._options.target, rng)
        return _spread(ranking, budget=budget, max_roots=max_roots)


def _columns(beliefs: Sequence[Belief]) -> tuple[Floats, Floats]:
    """alpha, beta [beliefs]."""
    alpha = np.array([belief.alpha for belief in beliefs], np.float64)
    return alpha, np.array([belief.beta for belief in beliefs], np.float64)


def _nearest(success: Floats, target: float, rng: np.random.Generator) -> Counts:
    """Places in the order of the distance of `success` to the target; equal ones are shuffled."""
    return np.lexsort((rng.random(len(success)), (success - target) ** 2))


def _spread(ranking: Counts, *, budget: int, max_roots: int) -> Counts:
    """Counts over as few of the first in `ranking` as can take the budget; they differ by at most one."""
    check_spendable(np.zeros(len(ranking), np.int64), budget=budget, max_roots=max_roots)
    counts = np.zeros(len(ranking), np.int64)
    if budget > 0:
        active = ranking[: -(-budget // max_roots)]
        counts[active] = budget // len(active)
        counts[active[: budget % len(active)]] += 1
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoOptions:
    """For allocators that have nothing to set."""


def _make_even(options: Mapping[str, Any]) -> RootAllocator:
    read_options(_NoOptions, options, where=OPTIONS_KEY)
    return EvenRoots()


def _make_trace(options: Mapping[str, Any]) -> RootAllocator:
    return TraceRoots(read_options(TraceOptions, options, where=OPTIONS_KEY))


def _make_mopps(options: Mapping[str, Any]) -> RootAllocator:
    return MoppsRoots(read_options(TargetOptions, options, where=OPTIONS_KEY))


def _make_pcl(options: Mapping[str, Any]) -> RootAllocator:
    return PclRoots(read_options(TargetOptions, options, where=OPTIONS_KEY))


ROOT_ALLOCATORS: dict[str, Callable[[Mapping[str, Any]], RootAllocator]] = {
    "even": _make_even,
    "trace": _make_trace,
    "mopps": _make_mopps,
    "pcl": _make_pcl,
}


def make_root_allocator(name: str, options: Mapping[str, Any]) -> RootAllocator:
    """The root allocator that `tree.root_allocator` names. Raises ConfigError for a name, option or value it does not
    know.
    """
    return pick(ROOT_ALLOCATORS, name, where="tree.root_allocator")(options)
