"""What a finished tree teaches about its prompt and its prefixes. Pure.

Owns the tree targets of TRACE (arXiv 2606.11119): V(y) = (1 / n_y) sum over children c of n_c V(c), a leaf's value
being 1 where its outcome is a success by the group's threshold, else 0, and n the number of leaves below; hence V(y) is
the share of successes among the leaves below y.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.group import turn_spans
from trace_async.core.outcomes import is_success
from trace_async.core.types import FloatArray, Group, NodeState, Prefix


class Target(NamedTuple):
    """One lesson."""

    prefix: Prefix
    value: float  # V, share of successes among the leaves below, in [0, 1]
    leaves: int  # n > 0


def tree_targets(group: Group) -> list[Target]:
    """The prompt, then every prefix that went on, in the order of the turns; what has no leaf below it is left out."""
    successes, leaves = _sums_below(group)
    if not leaves[0]:
        return []
    spans, depths, ids = turn_spans(group), [0], [group.prompt_ids]  # of the prompt, then of each turn
    places = [0]
    for turn, parent in enumerate(group.parent.tolist()):
        depths.append(depths[parent + 1] + 1)
        ids.append(np.concatenate([ids[parent + 1], group.token_ids[spans.start[turn] : spans.end[turn]]]))
        if leaves[turn + 1] and group.state[turn] != NodeState.LEAF:
            places.append(turn + 1)
    return [
        Target(
            Prefix(prompt_id=group.prompt_id, turn_index=depths[place], token_ids=ids[place]),
            float(successes[place] / leaves[place]),
            int(leaves[place]),
        )
        for place in places
    ]


def _sums_below(group: Group) -> tuple[FloatArray, NDArray[np.int64]]:
    """Successes and leaves below the prompt [0] and each turn [1 + turn], leaves themselves included."""
    is_leaf = group.state == NodeState.LEAF
    leaves = np.concatenate([[0], is_leaf.astype(np.int64)])
    successes = np.concatenate([[0.0], is_leaf & is_success(group.outcome, group.success_above)]).astype(np.float32)
    for turn in range(group.num_turns - 1, -1, -1):  # parents come first
        above = int(group.parent[turn]) + 1
        leaves[above] += leaves[turn + 1]
        successes[above] += successes[turn + 1]
    return successes, leaves
