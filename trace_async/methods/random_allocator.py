"""Tree-GRPO's expansion (arXiv 2509.21240): ended rollouts are re-expanded at random turns. The control for `trace`.

There a prompt has m trees of one chain each; a round draws N nodes of every tree, uniformly and with replacement, from
its root and its turns that are no leaf, and rolls a fresh chain to the end from each. Here each root rollout is one of
those trees and N is `tree.continuations_per_root`. Two things are left out: further rounds, whose draws would include
the turns that earlier rounds grew (the published runs use one), and the random choice of K leaves of a tree for
training (the published K keeps all of them). Nothing waits: a tree is expanded when its own chain has ended.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from trace_async.core.tree import TurnTree
from trace_async.core.types import ROOT, Grant, NodeState
from trace_async.methods.growth_rules import RootRollouts, bare_rollout, continuations, continuations_due


class RandomAllocator(RootRollouts):
    """Each ended root rollout is re-expanded at its share of continuations, drawn with replacement from the prompt and
    that rollout's non-leaf nodes. Only the prompt where the tree cannot branch.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        """The share of the root rollout that ended; nothing when a continuation did."""
        share = continuations_due(tree, node_id)
        if share == 0:
            return []
        places = [ROOT]
        if tree.can_branch:
            chain = bare_rollout(tree, tree.nodes[node_id].rollout)
            places += [node.node_id for node in chain if node.state is NodeState.EXPANDED]
        drawn = Counter(int(place) for place in self._rng.choice(places, size=share))
        return continuations(drawn)
