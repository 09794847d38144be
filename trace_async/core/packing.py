"""Judged groups as padded batches of path rows, ready for a forward pass.

Owns the layout: tokens, masks and spans all come from the same rows (`rows.py`), so a turn's loss, log-probabilities,
advantage and mass cannot drift apart. The loss of a turn stands in exactly one place, with the whole path before it as
context. The denominator counts every turn that was played, trained or not, so a verdict never rescales the others.
Nothing here judges, assigns credit or touches a model.

Axes: B rows · T positions · J trained turns of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.group import TurnSpans, turn_spans
from trace_async.core.rows import PackItem, Row, plan_rows
from trace_async.core.types import ByteArray, FloatArray, IntArray
from trace_async.errors import ConfigError

__all__ = ["PackItem", "RowBatch", "denominator", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Rows of one forward pass. Position t is the PREDICTED token: its log-probability comes from the logits at t-1."""

    token_ids: NDArray[np.int64]  # [B, T] padded on the right
    attention_mask: NDArray[np.bool_]  # [B, T] a token, not padding
    loss_mask: NDArray[np.bool_]  # [B, T] this token is trained here; never on at position 0
    behaviour_logprobs: FloatArray  # [B, T] nats as sampled; 0 where loss_mask is off
    turn_index: IntArray  # [B, T] which of the J turns the token belongs to; -1 where loss_mask is off
    advantage: FloatArray  # [J]
    mass: FloatArray  # [J]
    age: IntArray  # [J] optimizer steps
    verdict: ByteArray  # [J] Verdict, TRAIN or TIGHT
    depth: IntArray  # [J] turns from the prompt; a first turn has 1
    turn_tokens: IntArray  # [J] sampled tokens

    @property
    def num_loss_tokens(self) -> int:
        """Tokens trained in this batch."""
        return int(self.turn_tokens.sum())


class TrainedTurn(NamedTuple):
    """One of the J turns of a batch."""

    item: PackItem
    turn: int
    depth: int  # turns from the prompt


def denominator(items: Sequence[PackItem]) -> float:
    """Sum of mass x sampled tokens over every played turn of all items, whatever its verdict or advantage.

    The loss is a mean over tokens of the flattened trees: a turn of n tokens shared by several leaves counts once per
    leaf, weighted by the leaf; by linearity that is its mass times n.
    """
    return float(sum(np.dot(item.credit.mass.astype(np.float64), item.group.action_lengths) for item in items))


def pack(items: Sequence[PackItem], *, pad_id: int, micro_batch_tokens: int) -> list[RowBatch]:
    """Batches in which every trainable turn of `items` is trained once; longest rows first, B x T <= the bound.

    Raises ConfigError when one row alone is over `micro_batch_tokens`.
    """
    rows = [row for index, item in enumerate(items) for row in plan_rows(item, index)]
    spans = [turn_spans(item.group) for item in items]
    return [_batch(items, spans, part, pad_id) for part in _parts(items, rows, micro_batch_tokens)]


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


def _batch(items: Sequence[PackItem], spans: Sequence[TurnSpans], rows: list[Row], pad_id: int) -> RowBatch:
    shape = (len(rows), rows[0].length)
    token_ids = np.full(shape, pad_id, np.int64)
    attention_mask = np.zeros(shape, np.bool_)
    logprobs = np.zeros(shape, np.float32)
    turn_index = np.full(shape, -1, np.int32)
    trained: list[TrainedTurn] = []
    for b, row in enumerate(rows):
        item, span = items[row.item], spans[row.item]
        attention_mask[b, : row.length] = True
        token_ids[b, : row.length] = _row_tokens(item, span, row)
        position = item.group.prompt_ids.size
        for depth, turn in enumerate(row.path, start=1):
            if turn in row.owned:
                actions = int(item.group.action_lengths[turn])
                first = int(span.logprob_start[turn])
                turn_index[b, position : position + actions] = len(trained)
                logprobs[b, position : position + actions] = item.group.logprobs[first : first + actions]
                trained.append(TrainedTurn(item, turn, depth))
            position += int(span.end[turn] - span.start[turn])
    return RowBatch(
        token_ids=token_ids,
        attention_mask=attention_mask,
        loss_mask=turn_index >= 0,
        behaviour_logprobs=logprobs,
        turn_index=turn_index,
        **opinions(trained),
    )


def opinions(trained: Sequence[TrainedTurn]) -> dict[str, NDArray[Any]]:
    """The fields [J] of a batch that say what the learner thinks of each trained turn."""
    return {
        "advantage": np.array([item.credit.advantage[turn] for item, turn, _ in trained], np.float32),
        "mass": np.array([item.credit.mass[turn] for item, turn, _ in trained], np.float32),
        "age": np.array([item.ages[turn] for item, turn, _ in trained], np.int32),
        "verdict": np.array([item.verdicts[turn] for item, turn, _ in trained], np.uint8),
        "depth": np.array([depth for _, _, depth in trained], np.int32),
        "turn_tokens": np.array([item.group.action_lengths[turn] for item, turn, _ in trained], np.int32),
    }


def _row_tokens(item: PackItem, span: TurnSpans, row: Row) -> IntArray:
    *above, tip = row.path
    tokens = item.group.token_ids
    parts = [item.group.prompt_ids, *(tokens[span.start[turn] : span.end[turn]] for turn in above)]
    return np.concatenate([*parts, tokens[span.start[tip] : span.action_end[tip]]])
