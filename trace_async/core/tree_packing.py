"""Judged groups as packed trees: every token that is needed is computed once, whoever shares it.

A batch is one row without padding: pieces of trees (`tree_pieces.py`) one after the other, each the prompt and then its
turns in depth-first order. Attention goes to ancestors only, positions count along the path, and the token that
predicts the first token of a turn is the last one of its parent, wherever that stands. So each token sees exactly what
it saw when it was sampled, and gradients equal those of path rows (`packing.py`).

In this order the tokens below a token are those that follow it up to `subtree_end`. A chain is a run of neighbours that
are each other's parents; what a chain sees before itself is a few runs too, whose tokens in order have the positions
0, 1, 2 and so on.

Axes: B = 1 row · T positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.group import turn_spans
from trace_async.core.packing import PackItem, RowBatch
from trace_async.core.tree_pieces import Piece, cut_tree, fill_packs
from trace_async.core.types import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch(RowBatch):
    """Packed trees of one forward pass."""

    positions: NDArray[np.int64]  # [1, T] tokens before this one on its path
    predecessor: NDArray[np.int64]  # [1, T] the token above, whose logits predict this one; itself for a first token
    subtree_end: NDArray[np.int64]  # [1, T] s is visible to t exactly when s <= t < subtree_end[s]


class Chain(NamedTuple):
    """Neighbours in a row, each the parent of the next."""

    start: int
    end: int
    above: tuple[tuple[int, int], ...]  # what the first one sees before itself: runs (start, end), from the prompt on


def pack_trees(items: Sequence[PackItem], *, first_tokens: Sequence[int], micro_batch_tokens: int) -> list[RowBatch]:
    """Batches of at most `micro_batch_tokens` in which every scored turn of `items` stands once; long trees first.

    `first_tokens`: where each item's sampled tokens start in the table. Raises ConfigError when a path is over the
    bound.
    """
    pieces = [piece for index, item in enumerate(items) for piece in cut_tree(item, index, bound=micro_batch_tokens)]
    pieces_of = np.bincount([piece.item for piece in pieces], minlength=len(items))
    return [_batch(items, pack, first_tokens, pieces_of) for pack in fill_packs(pieces, bound=micro_batch_tokens)]


def find_chains(batch: TreeBatch) -> list[Chain]:
    """The fewest chains that make up the row, in order."""
    places, predecessor = np.arange(batch.predecessor.size), batch.predecessor[0]
    first = predecessor == places
    starts = np.flatnonzero(first | (predecessor != places - 1)).tolist()
    chains: list[Chain] = []
    for start, end in zip(starts, [*starts[1:], places.size], strict=True):
        above: tuple[tuple[int, int], ...] = ()
        if not first[start]:
            parent = int(predecessor[start])
            chain = chains[int(np.searchsorted(starts, parent, side="right")) - 1]
            above = joined(chain.above, (chain.start, parent + 1))
        chains.append(Chain(start, end, above))
    return chains


def joined(runs: tuple[tuple[int, int], ...], last: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """The runs and one more, which becomes part of the one before when it starts where that ends."""
    if runs and runs[-1][1] == last[0]:
        return (*runs[:-1], (runs[-1][0], last[1]))
    return (*runs, last)


def _batch(
    items: Sequence[PackItem], pack: list[Piece], first_tokens: Sequence[int], pieces_of: NDArray[np.int64]
) -> TreeBatch:
    laid = [_lay_out(items[piece.item], piece, first_tokens[piece.item]) for piece in pack]
    lengths = np.array([piece.length for piece in pack], np.int64)
    shift = np.repeat(np.cumsum(lengths) - lengths, lengths)
    here = np.bincount([piece.item for piece in pack], minlength=len(items))
    return TreeBatch(
        token_ids=np.concatenate([part.token_ids for part in laid])[None],
        attention_mask=np.ones((1, shift.size), np.bool_),
        token_index=np.concatenate([part.token_index for part in laid])[None],
        num_trees=int((here > 0).sum()),
        whole=bool((here[here > 0] == pieces_of[here > 0]).all()),
        positions=np.concatenate([part.positions for part in laid])[None],
        predecessor=(np.concatenate([part.predecessor for part in laid]) + shift)[None],
        subtree_end=(np.concatenate([part.subtree_end for part in laid]) + shift)[None],
    )


class _LaidOut(NamedTuple):
    """One piece by itself; int64 [length] each."""

    token_ids: NDArray[np.int64]
    token_index: NDArray[np.int64]
    positions: NDArray[np.int64]
    predecessor: NDArray[np.int64]
    subtree_end: NDArray[np.int64]


def _lay_out(item: PackItem, piece: Piece, first_token: int) -> _LaidOut:
    group, spans = item.group, turn_spans(item.group)
    num_prompt = group.prompt_ids.size
    token_ids = np.empty(piece.length, np.int64)
    token_index = np.full(piece.length, -1, np.int64)
    positions = np.arange(piece.length)
    predecessor = np.maximum(positions - 1, 0)
    token_ids[:num_prompt] = group.prompt_ids
    placed = {-1: (0, num_prompt)}  # turn: start and end in the row, parents first
    start = num_prompt
    owned = {turn for row in piece.rows for turn in row.owned}
    for row in piece.rows:
        for turn in row.path:
            if turn in placed:
                continue
            above = placed[int(group.parent[turn])][1] - 1
            last = spans.action_end[turn] if turn == row.path[-1] else spans.end[turn]
            end = start + int(last - spans.start[turn])
            token_ids[start:end] = group.token_ids[spans.start[turn] : last]
            positions[start:end] = positions[above] + 1 + np.arange(end - start)
            predecessor[start] = above
            placed[turn] = (start, end)
            if turn in owned:
                first, actions = first_token + int(spans.logprob_start[turn]), int(group.action_lengths[turn])
                token_index[start : start + actions] = np.arange(first, first + actions)
            start = end
    return _LaidOut(token_ids, token_index, positions, predecessor, _subtree_ends(placed, group.parent))


def _subtree_ends(placed: dict[int, tuple[int, int]], parent: IntArray) -> NDArray[np.int64]:
    """[length]; a token's subtree ends with the last turn below its own."""
    last = {turn: end for turn, (_, end) in placed.items()}
    for turn in reversed([turn for turn in placed if turn >= 0]):
        above = int(parent[turn])
        last[above] = max(last[above], last[turn])
    return np.repeat([last[turn] for turn in placed], [end - start for start, end in placed.values()])
