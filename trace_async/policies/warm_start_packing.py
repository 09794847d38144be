"""Encoded conversations as rows of one forward pass: packed without padding, or padded where a model needs that.

Packed, a batch is one tree (`core/tree_packing.py`): the beginning that all conversations share, mostly the
instructions, stands once, and the rest of each conversation is a branch of its own. Invariants: every token the
assistant said is scored in exactly one row, with its whole conversation before it; no batch is over the bound.

Never: a model, a tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from trace_async.core.packing import RowBatch
from trace_async.core.tree_packing import TreeBatch


class Encoded(NamedTuple):
    """A conversation as tokens. The first one is never the assistant's."""

    ids: list[int]
    said: list[bool]  # which of them the assistant said

    @property
    def longest_said(self) -> int:
        """Tokens of the longest turn."""
        return max((len(list(run)) for said, run in groupby(self.said) if said), default=0)


def pack_conversations(conversations: Sequence[Encoded], *, bound: int) -> list[RowBatch]:
    """Batches of at most `bound` tokens in which each conversation stands once; long ones first, first fit.

    Raises ValueError for a conversation over the bound.
    """
    shared = _shared_tokens(conversations)
    packs: list[list[Encoded]] = []
    room: list[int] = []
    for one in sorted(conversations, key=lambda one: -len(one.ids)):
        _check_length(one, bound)
        rest = len(one.ids) - shared
        place = next((index for index, left in enumerate(room) if rest <= left), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(bound - shared)
        packs[place].append(one)
        room[place] -= rest
    return [_tree(pack, shared) for pack in packs]


def pad_conversations(conversations: Sequence[Encoded], *, bound: int, pad_id: int) -> list[RowBatch]:
    """Padded rows, those of like length side by side; rows x longest is at most `bound`.

    Raises ValueError for a conversation over the bound.
    """
    waiting = sorted(conversations, key=lambda one: -len(one.ids))
    batches: list[RowBatch] = []
    while waiting:
        _check_length(waiting[0], bound)
        count = bound // len(waiting[0].ids)
        batches.append(_rows(waiting[:count], pad_id))
        waiting = waiting[count:]
    return batches


def _check_length(one: Encoded, bound: int) -> None:
    if len(one.ids) > bound:
        raise ValueError(f"a conversation of {len(one.ids)} tokens does not fit a batch of {bound}")


def _shared_tokens(conversations: Sequence[Encoded]) -> int:
    """Length of the beginning that all have in common and that nobody said; something is left of each."""
    limit = min(min(_first_said(one), len(one.ids) - 1) for one in conversations)
    first = np.array(conversations[0].ids[:limit])
    for one in conversations[1:]:
        limit = min(limit, _first(first[:limit] != np.array(one.ids[:limit])))
    return limit


def _first_said(one: Encoded) -> int:
    return one.said.index(True) if True in one.said else len(one.said)


def _first(flags: np.ndarray) -> int:
    found = np.flatnonzero(flags)
    return int(found[0]) if found.size else len(flags)


def _tree(pack: Sequence[Encoded], shared: int) -> TreeBatch:
    rests = [len(one.ids) - shared for one in pack]
    starts = shared + np.cumsum([0, *rests[:-1]])
    total = shared + sum(rests)
    positions, predecessor, end = np.arange(total), np.maximum(np.arange(total) - 1, 0), np.full(total, total)
    for start, rest in zip(starts.tolist(), rests, strict=True):
        positions[start : start + rest] = np.arange(shared, shared + rest)
        predecessor[start] = shared - 1 if shared else start
        end[start : start + rest] = start + rest
    token_ids = np.concatenate([pack[0].ids[:shared], *(one.ids[shared:] for one in pack)]).astype(np.int64)
    said = np.concatenate([np.zeros(shared, np.bool_), *(np.array(one.said[shared:], np.bool_) for one in pack)])
    return TreeBatch(
        token_ids=token_ids[None],
        attention_mask=np.ones((1, total), np.bool_),
        token_index=_numbered(said[None]),
        num_trees=1,
        whole=True,
        positions=positions[None],
        predecessor=predecessor[None],
        subtree_end=end[None],
    )


def _rows(pack: Sequence[Encoded], pad_id: int) -> RowBatch:
    shape = (len(pack), len(pack[0].ids))
    token_ids, real, said = np.full(shape, pad_id, np.int64), np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
    for row, one in enumerate(pack):
        token_ids[row, : len(one.ids)] = one.ids
        real[row, : len(one.ids)] = True
        said[row, : len(one.said)] = one.said
    return RowBatch(
        token_ids=token_ids, attention_mask=real, token_index=_numbered(said), num_trees=len(pack), whole=True
    )


def _numbered(said: np.ndarray) -> np.ndarray:
    """Consecutive numbers where said, -1 elsewhere."""
    return np.where(said, np.cumsum(said).reshape(said.shape) - 1, -1)


def num_said(conversations: Sequence[Encoded]) -> int:
    """Tokens of the assistant."""
    return sum(sum(one.said) for one in conversations)
