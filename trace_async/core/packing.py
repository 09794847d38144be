"""Judged groups as padded batches of path rows, ready for a forward pass.

Owns the layout: a row holds tokens, and for each token whose log-probability is wanted its place in the table of turns
(`turn_table.py`), where everything else about it stands once. The loss of a turn stands in exactly one place, with the
whole path before it as context. Denominators count every turn that was played, trained or not, so a verdict never
rescales the others. Nothing here judges, assigns credit or touches a model.

Axes: B rows · T positions · N sampled tokens of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trace_async.core.group import TurnSpans, turn_spans
from trace_async.core.rows import PackItem, Row, plan_rows
from trace_async.core.turn_table import TurnTable
from trace_async.core.types import IntArray
from trace_async.errors import ConfigError

__all__ = ["Denominators", "Minibatch", "PackItem", "RowBatch", "denominators", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows of one forward pass. Position t is the PREDICTED token: its log-probability comes from the logits at t-1."""

    token_ids: NDArray[np.int64]  # [B, T] padded on the right
    attention_mask: NDArray[np.bool_]  # [B, T] a token, not padding
    token_index: NDArray[np.int64]  # [B, T] place in the table's N tokens; -1 where no log-probability is wanted
    num_trees: int  # groups with a turn in here
    whole: bool  # all scored turns of those groups are in here

    @property
    def scored(self) -> NDArray[np.bool_]:
        """Positions whose log-probability is wanted, bool [B, T]; never position 0."""
        return np.asarray(self.token_index >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominators:
    """What a summed loss may be divided by, over everything that was played."""

    tokens: float  # sum of mass x sampled tokens: a mean over tokens of the flattened trees
    turns: float  # sum of mass
    prompts: int  # groups with an outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one optimizer update trains on."""

    turns: TurnTable
    rows: list[RowBatch]  # every scored turn of the table stands in exactly one of them; empty: nothing to train on
    denominators: Denominators


def denominators(items: Sequence[PackItem]) -> Denominators:
    """Sums over every played turn of all items, whatever its verdict or advantage.

    By linearity a turn of n tokens shared by several leaves, each weighted, counts its mass times n.
    """
    masses = [item.credit.mass.astype(np.float64) for item in items]
    return Denominators(
        tokens=float(sum(np.dot(mass, item.group.action_lengths) for mass, item in zip(masses, items, strict=True))),
        turns=float(sum(mass.sum() for mass in masses)),
        prompts=sum(bool((mass > 0).any()) for mass in masses),
    )


def pack(
    items: Sequence[PackItem], *, first_tokens: Sequence[int], micro_batch_tokens: int, pad_id: int = 0
) -> list[RowBatch]:
    """Batches in which every scored turn of `items` stands once; longest rows first, B x T <= the bound.

    `first_tokens`: where each item's sampled tokens start in the table. `pad_id`: any token. Raises ConfigError when
    one row alone is over `micro_batch_tokens`.
    """
    rows = [row for index, item in enumerate(items) for row in plan_rows(item, index)]
    spans = [turn_spans(item.group) for item in items]
    rows_of = np.bincount([row.item for row in rows], minlength=len(items))
    return [
        _batch(items, spans, part, first_tokens=first_tokens, rows_of=rows_of, pad_id=pad_id)
        for part in _parts(items, rows, micro_batch_tokens)
    ]


def first_tokens(items: Sequence[PackItem]) -> list[int]:
    """Where each item's sampled tokens start in the table of these items."""
    return [0, *np.cumsum([item.group.num_sampled_tokens for item in items]).tolist()][: len(items)]


def _parts(items: Sequence[PackItem], rows: list[Row], micro_batch_tokens: int) -> Iterator[list[Row]]:
    rows = sorted(rows, key=lambda row: -row.length)
    if rows and rows[0].length > micro_batch_tokens:
        raise ConfigError(
            f"a row of group {items[rows[0].item].group.group_id} has {rows[0].length} tokens, more than "
            f"learner.micro_batch_tokens = {micro_batch_tokens}; set it to tree.max_context_tokens or more"
        )
    while rows:
        count = micro_batch_tokens // rows[0].length
        yield rows[:count]
        rows = rows[count:]


def _batch(
    items: Sequence[PackItem],
    spans: Sequence[TurnSpans],
    rows: list[Row],
    *,
    first_tokens: Sequence[int],
    rows_of: NDArray[np.int64],
    pad_id: int,
) -> RowBatch:
    shape = (len(rows), rows[0].length)
    token_ids = np.full(shape, pad_id, np.int64)
    attention_mask = np.zeros(shape, np.bool_)
    token_index = np.full(shape, -1, np.int64)
    for b, row in enumerate(rows):
        item, span = items[row.item], spans[row.item]
        attention_mask[b, : row.length] = True
        token_ids[b, : row.length] = _row_tokens(item, span, row)
        position = item.group.prompt_ids.size
        for turn in row.path:
            if turn in row.owned:
                actions = int(item.group.action_lengths[turn])
                first = first_tokens[row.item] + int(span.logprob_start[turn])
                token_index[b, position : position + actions] = np.arange(first, first + actions)
            position += int(span.end[turn] - span.start[turn])
    here = np.bincount([row.item for row in rows], minlength=len(items))
    return RowBatch(
        token_ids=token_ids,
        attention_mask=attention_mask,
        token_index=token_index,
        num_trees=int((here > 0).sum()),
        whole=bool((here[here > 0] == rows_of[here > 0]).all()),
    )


def _row_tokens(item: PackItem, span: TurnSpans, row: Row) -> IntArray:
    *above, tip = row.path
    tokens = item.group.token_ids
    parts = [item.group.prompt_ids, *(tokens[span.start[turn] : span.end[turn]] for turn in above)]
    return np.concatenate([*parts, tokens[span.start[tip] : span.action_end[tip]]])
