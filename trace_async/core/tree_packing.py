"""Judged groups as packed trees: every token that is needed is computed once, whoever shares it.

A row holds one group: the prompt, then its kept turns in their own order (parents first). A turn is kept when it is
trainable or something below it is. Attention goes to ancestors only, positions count along the path, and the token
that predicts the first token of a turn is the last one of its parent, wherever that stands. So each token sees
exactly what it saw when it was sampled, and gradients equal those of path rows (`packing.py`), which remain the layout
for groups longer than the bound, whose attention mask would be too large.

Axes: B rows · T positions · J trained turns of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.group import TurnSpans, turn_spans
from trace_async.core.packing import PackItem, RowBatch, TrainedTurn, opinions, pack
from trace_async.core.rows import trainable_turns
from trace_async.core.types import IntArray

MAX_TREE_TOKENS = 2048
"""Longest packed tree: its attention mask has this many squared entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBatch(RowBatch):
    """Packed trees of one forward pass."""

    positions: NDArray[np.int64]  # [B, T] tokens before this one on its path; 0 in padding
    predecessor: NDArray[np.int64]  # [B, T] where the logits stand that predict this token; 0 for the first
    visible: NDArray[np.bool_]  # [B, T, T] the row's token may attend to the column's; padding sees itself only


class _TreeRow(NamedTuple):
    item: int  # index into the items
    kept: tuple[int, ...]  # turns, parents first
    trained: frozenset[int]
    inner: frozenset[int]  # kept turns with a kept turn below; only these need their observation
    length: int  # tokens


def pack_trees(
    items: Sequence[PackItem], *, pad_id: int, micro_batch_tokens: int, max_tree_tokens: int = MAX_TREE_TOKENS
) -> list[RowBatch]:
    """Batches in which every trainable turn of `items` is trained once; B x T <= the bound, longest trees first.

    Groups longer than `max_tree_tokens` or the bound become path rows. ConfigError when a path is over the bound.
    """
    limit = min(max_tree_tokens, micro_batch_tokens)
    trees = [tree for index, item in enumerate(items) if (tree := _plan(item, index)).kept]
    rows = sorted((tree for tree in trees if tree.length <= limit), key=lambda tree: -tree.length)
    batches: list[RowBatch] = []
    while rows:
        count = micro_batch_tokens // rows[0].length
        batches.append(_batch(items, rows[:count], pad_id))
        rows = rows[count:]
    too_long = [items[tree.item] for tree in trees if tree.length > limit]
    return batches + pack(too_long, pad_id=pad_id, micro_batch_tokens=micro_batch_tokens)


def _plan(item: PackItem, index: int) -> _TreeRow:
    group = item.group
    trainable = trainable_turns(item)
    parent = group.parent.tolist()
    keep, inner = trainable.tolist(), set()
    for turn in range(len(parent) - 1, -1, -1):
        if keep[turn] and parent[turn] >= 0:
            keep[parent[turn]] = True
            inner.add(parent[turn])
    kept = tuple(turn for turn, kept in enumerate(keep) if kept)
    length = group.prompt_ids.size + sum(int(group.action_lengths[turn]) for turn in kept)
    length += sum(int(group.observation_lengths[turn]) for turn in inner)
    return _TreeRow(index, kept, frozenset(np.flatnonzero(trainable).tolist()), frozenset(inner), length)


def _batch(items: Sequence[PackItem], rows: list[_TreeRow], pad_id: int) -> TreeBatch:
    shape = (len(rows), rows[0].length)
    token_ids = np.full(shape, pad_id, np.int64)
    positions, predecessor = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    turn_index, logprobs = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    visible = np.zeros((*shape, shape[1]), np.bool_)
    visible[:, np.arange(shape[1]), np.arange(shape[1])] = True
    trained: list[TrainedTurn] = []
    for b, row in enumerate(rows):
        item = items[row.item]
        laid = _lay_out(item, turn_spans(item.group), row)
        token_ids[b, : row.length] = laid.token_ids
        positions[b, : row.length] = laid.positions
        predecessor[b, : row.length] = laid.predecessor
        visible[b, : row.length, : row.length] = laid.visible
        for turn, start, depth in laid.trained:
            actions = int(item.group.action_lengths[turn])
            first = int(laid.spans.logprob_start[turn])
            turn_index[b, start : start + actions] = len(trained)
            logprobs[b, start : start + actions] = item.group.logprobs[first : first + actions]
            trained.append(TrainedTurn(item, turn, depth))
    return TreeBatch(
        token_ids=token_ids,
        attention_mask=np.arange(shape[1]) < np.array([[row.length] for row in rows]),
        loss_mask=turn_index >= 0,
        behaviour_logprobs=logprobs,
        turn_index=turn_index,
        **opinions(trained),
        positions=positions,
        predecessor=predecessor,
        visible=visible,
    )


class _LaidOut(NamedTuple):
    """One tree, flat; arrays [length]."""

    token_ids: IntArray
    positions: NDArray[np.int64]
    predecessor: NDArray[np.int64]
    visible: NDArray[np.bool_]  # [length, length]
    trained: list[tuple[int, int, int]]  # turn, place of its first token, depth in turns
    spans: TurnSpans


def _lay_out(item: PackItem, spans: TurnSpans, row: _TreeRow) -> _LaidOut:
    group = item.group
    num_prompt = group.prompt_ids.size
    tokens: list[IntArray] = [group.prompt_ids]
    segment = np.zeros(row.length, np.int64)  # 0 the prompt, i + 1 the i-th kept turn
    positions = np.arange(row.length)
    predecessor = positions - 1
    ancestors = np.eye(len(row.kept) + 1, dtype=np.bool_)  # [segments, segments] itself and what is above it
    ancestors[:, 0] = True
    place = {-1: (0, num_prompt, num_prompt, 0)}  # turn: segment, end in the row, end along its path, depth
    trained: list[tuple[int, int, int]] = []
    start = num_prompt
    for index, turn in enumerate(row.kept, start=1):
        above, parent_end, path_end, depth = place[int(group.parent[turn])]
        last = spans.end[turn] if turn in row.inner else spans.action_end[turn]
        part = group.token_ids[spans.start[turn] : last]
        end = start + part.size
        tokens.append(part)
        segment[start:end] = index
        positions[start:end] = path_end + np.arange(part.size)
        predecessor[start] = parent_end - 1
        ancestors[index] |= ancestors[above]
        place[turn] = (index, end, path_end + part.size, depth + 1)
        if turn in row.trained:
            trained.append((turn, start, depth + 1))
        start = end
    predecessor[0] = 0
    causal = np.tri(row.length, dtype=np.bool_)
    visible = ancestors[segment][:, segment] & causal
    return _LaidOut(np.concatenate(tokens), positions, predecessor, visible, trained, spans)
