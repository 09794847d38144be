"""Who grows where inside one tree: the three moments at which an allocator speaks, and three allocators.

    uniform   chains only: what GRPO samples
    random    re-expands finished rollouts at random turns: Tree-GRPO (arXiv 2509.21240), one round
    trace     TRACE (arXiv 2606.11119), stage two, streaming: see `TraceAllocator`

An allocator reads a tree and answers with grants; it changes nothing, waits for nothing and remembers nothing but its
random generator, so one may serve any number of trees. Invariants: a grant is affordable at the moment it is given;
when the last root rollout of a tree has ended, every continuation of its budget has been granted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, GrownBy
from trace_async.errors import ConfigError
from trace_async.methods.allocation import allocate_prefixes, repeat_probability
from trace_async.methods.registry import pick, read_options

OPTIONS_KEY = "tree.options"
"""Where the configuration keeps an allocator's options."""

UNKNOWN_SUCCESS = 0.5
"""What stands in for a prediction that could not be had: no opinion, so success and failure repeat equally likely."""


class Allocator(Protocol):
    """Decides which nodes get children. Pure and synchronous: its grants are spent before anything else happens."""

    def start(self, tree: TurnTree) -> list[Grant]:
        """The first grants of a tree that has only its prompt."""
        ...

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """Grants when `node_id` has just been scored and its episode goes on; without one it is closed there."""
        ...

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """Grants when a rollout has just ended at `node_id`, as LEAF or FAILED."""
        ...


class _RootRollouts:
    """What all three share: every root at once, and a rollout runs to its end."""

    def start(self, tree: TurnTree) -> list[Grant]:
        """All roots."""
        return [Grant(node_id=ROOT, count=tree.budget.roots, grown_by=GrownBy.ROOT)]

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The rollout goes on."""
        return [Grant(node_id=node_id, count=1, grown_by=GrownBy.CHAIN)]


class UniformAllocator(_RootRollouts):
    """Root rollouts and nothing else."""

    def start(self, tree: TurnTree) -> list[Grant]:
        """All roots. Raises ConfigError when the tree has continuations, which nobody would spend."""
        if tree.budget.continuations > 0:
            raise ConfigError(
                f"tree {tree.tree_id}: tree.allocator = 'uniform' grows chains only and cannot spend "
                f"{tree.budget.continuations} continuations; set tree.continuations_per_root = 0"
            )
        return super().start(tree)

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """Nothing."""
        return []


class RandomAllocator(_RootRollouts):
    """Tree-GRPO: each ended root rollout is re-expanded at its share of continuations, drawn with replacement from the
    prompt and that rollout's non-leaf nodes. Only the prompt where the tree cannot branch.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The share of the root rollout that ended; nothing when a continuation did."""
        share = continuations_due(tree, node_id)
        rollout = tree.nodes[node_id].rollout
        places = [ROOT, *(anchor for anchor in tree.anchors() if tree.nodes[anchor].rollout == rollout)]
        drawn = Counter(int(place) for place in self._rng.choice(places, size=share))
        return _continuations(drawn)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceOptions:
    """Options of `trace`."""

    clip: float = 0.02  # predicted success is kept in [clip, 1 - clip], so that no anchor is ever worth nothing
    success_above: float = 0.5  # an outcome above this counts as a success

    def __post_init__(self) -> None:
        if not 0.0 < self.clip < 0.5:
            raise ConfigError(f"tree.options.clip must lie between 0 and 0.5, got {self.clip:g}")


class TraceAllocator(_RootRollouts):
    """Streaming TRACE: an ended root rollout's share of continuations goes at once to the anchors worth most.

    Anchors are the non-leaf prefixes of all root rollouts of the tree whose outcome is known by then. An anchor is
    worth the chance that its next continuation flips that outcome when the ones it already has did not: q^k (1-q). The
    paper waits for all root rollouts of the prompt; granting at each end waits for nothing and sees fewer anchors.
    With no such anchor (one-turn rollouts, or an environment that cannot branch) the share becomes rollouts from the
    prompt.
    """

    def __init__(self, options: TraceOptions, rng: np.random.Generator) -> None:
        self._options = options
        self._rng = rng

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The share of the root rollout that ended; nothing when a continuation did."""
        share = continuations_due(tree, node_id)
        if share == 0:
            return []
        anchors = self._known_anchors(tree)
        if not anchors:
            return _continuations({ROOT: share})
        counts = allocate_prefixes(
            [anchor.repeat for anchor in anchors],
            budget=share,
            rng=self._rng,
            granted=[anchor.granted for anchor in anchors],
        )
        return _continuations({anchor.node_id: int(count) for anchor, count in zip(anchors, counts, strict=True)})

    def _known_anchors(self, tree: TurnTree) -> list[_Anchor]:
        """Anchors whose bare rollout reached an outcome, in node order."""
        anchors = []
        for node_id in tree.anchors():
            outcome = _bare_outcome(tree, node_id)
            if not math.isnan(outcome):
                success = float(np.clip(_predicted(tree, node_id), self._options.clip, 1.0 - self._options.clip))
                repeat = float(repeat_probability(success, outcome > self._options.success_above))
                anchors.append(_Anchor(node_id, repeat, _num_granted(tree, node_id)))
        return anchors


class _Anchor(NamedTuple):
    node_id: int
    repeat: float  # q, chance that a continuation repeats the bare rollout's outcome
    granted: int  # continuations given so far, whatever became of them


def continuations_due(tree: TurnTree, node_id: int) -> int:
    """Continuations to grant now that a rollout has ended at `node_id`; 0 unless it was a root rollout.

    After e of m root rollouts have ended, floor(e/m of the budget) is granted: about N each, and all with the last.
    """
    if tree.nodes[tree.nodes[node_id].rollout].grown_by is not GrownBy.ROOT:
        return 0
    roots = [child for child in tree.nodes[ROOT].children if tree.nodes[child].grown_by is GrownBy.ROOT]
    num_ended = sum(tree.chain_end(root) is not None for root in roots)
    spent = tree.budget.continuations - tree.continuations_left
    return tree.budget.continuations * num_ended // tree.budget.roots - spent


def _continuations(counts: Mapping[int, int]) -> list[Grant]:
    return [
        Grant(node_id=node_id, count=count, grown_by=GrownBy.CONTINUATION)
        for node_id, count in sorted(counts.items())
        if count > 0
    ]


def _bare_outcome(tree: TurnTree, node_id: int) -> float:
    """Outcome of the bare rollout through a node; NaN while it runs and when it failed or was closed."""
    end = tree.chain_end(node_id)
    turn = None if end is None else tree.nodes[end].turn
    return math.nan if turn is None else turn.outcome


def _predicted(tree: TurnTree, node_id: int) -> float:
    score = tree.nodes[node_id].score
    return UNKNOWN_SUCCESS if score is None or math.isnan(score.success) else score.success


def _num_granted(tree: TurnTree, node_id: int) -> int:
    return sum(tree.nodes[child].grown_by is not GrownBy.CHAIN for child in tree.nodes[node_id].children)


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoOptions:
    """For allocators that have nothing to set."""


def _make_uniform(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    read_options(_NoOptions, options, where=OPTIONS_KEY)
    return UniformAllocator()


def _make_random(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    read_options(_NoOptions, options, where=OPTIONS_KEY)
    return RandomAllocator(rng)


def _make_trace(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    return TraceAllocator(read_options(TraceOptions, options, where=OPTIONS_KEY), rng)


ALLOCATORS: dict[str, Callable[[Mapping[str, Any], np.random.Generator], Allocator]] = {
    "uniform": _make_uniform,
    "random": _make_random,
    "trace": _make_trace,
}


def make_allocator(name: str, options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    """The allocator that `tree.allocator` names. Raises ConfigError for a name, option or value it does not know."""
    return pick(ALLOCATORS, name, where="tree.allocator")(options, rng)
