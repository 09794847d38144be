"""The tree allocators by name: who grows where inside one tree.

    uniform   chains only: what GRPO samples
    random    re-expands finished rollouts at random turns: Tree-GRPO, one round (`random_allocator`)
    arpo      branches where the policy is surprised by a reply: ARPO (`arpo_allocator`)
    trace     TRACE, stage two: where a continuation most likely flips the outcome (`trace_allocator`)

An allocator reads a tree and answers with grants; it changes nothing, waits for nothing and remembers nothing but its
random generator, so one may serve any number of trees. Invariants: a grant is affordable at the moment it is given;
when the last root rollout of a tree has ended, every continuation of its budget has been granted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trace_async.core.tree import TurnTree
from trace_async.core.types import Grant
from trace_async.errors import ConfigError
from trace_async.methods.arpo_allocator import ArpoAllocator, ArpoOptions
from trace_async.methods.growth_rules import OPTIONS_KEY, Allocator, RootRollouts
from trace_async.methods.random_allocator import RandomAllocator
from trace_async.methods.registry import pick, read_options
from trace_async.methods.trace_allocator import TraceAllocator, TraceOptions

__all__ = ["ALLOCATORS", "Allocator", "UniformAllocator", "make_allocator"]


class UniformAllocator(RootRollouts):
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _NoOptions:
    """For allocators that have nothing to set."""


def _make_uniform(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    read_options(_NoOptions, options, where=OPTIONS_KEY)
    return UniformAllocator()


def _make_random(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    read_options(_NoOptions, options, where=OPTIONS_KEY)
    return RandomAllocator(rng)


def _make_arpo(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    return ArpoAllocator(read_options(ArpoOptions, options, where=OPTIONS_KEY))


def _make_trace(options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    return TraceAllocator(read_options(TraceOptions, options, where=OPTIONS_KEY), rng)


ALLOCATORS: dict[str, Callable[[Mapping[str, Any], np.random.Generator], Allocator]] = {
    "uniform": _make_uniform,
    "random": _make_random,
    "arpo": _make_arpo,
    "trace": _make_trace,
}


def make_allocator(name: str, options: Mapping[str, Any], rng: np.random.Generator) -> Allocator:
    """The allocator that `tree.allocator` names. Raises ConfigError for a name, option or value it does not know."""
    return pick(ALLOCATORS, name, where="tree.allocator")(options, rng)
