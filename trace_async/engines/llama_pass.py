"""What one forward pass reads and writes: which tokens, whose key/values where, and attention over them.

A pass's tokens are the last one of every row, arena by arena, then segment by segment. All key/values of a layer are
written before any attention of that layer, so the order of segments does not matter.

Legend: N tokens of a pass, B rows of an arena, H heads, K key/value heads, G = H / K, D head_dim, L places read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from trace_async.engines.arenas import Arena, Arenas, Seat
from trace_async.engines.prefill import Segment
from trace_async.engines.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """Tokens of a pass whose key/values go into one arena."""

    arena: Arena
    source: slice | torch.Tensor  # places in the pass
    slots: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _RowPart:
    """The last tokens of all rows of one arena."""

    arena: Arena
    source: slice  # places in the pass
    length: int  # places read: the longest row's
    bias: torch.Tensor  # [B K, G, L]: 0 up to each row's end, -inf behind it


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentPart:
    """One segment's tokens, which see the places of one of its rows."""

    seat: Seat
    source: slice  # places in the pass
    end: int  # places read
    bias: torch.Tensor | None  # [tokens, end]; None: the segment starts at 0, where a causal mask does


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass."""

    ids: list[int]
    positions: list[int]
    order: torch.Tensor | None  # which of the pass's first tokens belongs to each of the given rows; None: the same one
    writes: tuple[_Write, ...]
    rows: tuple[_RowPart, ...]
    segments: tuple[_SegmentPart, ...]

    def on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and positions, int64 [N]."""
        both = torch.tensor([self.ids, self.positions]).to(device)
        return both[0], both[1]

    def attend(self, layer: int, qkv: torch.Tensor, *, num_heads: int) -> torch.Tensor:
        """Write a layer's keys and values and attend to them: [N, H + 2 K, D] in, [N, H D] out."""
        tokens, _, head_dim = qkv.shape
        queries, new = qkv[:, :num_heads], qkv[:, num_heads:].view(tokens, 2, -1, head_dim)
        for write in self.writes:
            write.arena.keys_values[layer][:, write.slots, :, write.places] = new[write.source]
        parts = [_attend_rows(part, layer, queries[part.source]) for part in self.rows]
        parts += [_attend_segment(part, layer, queries[part.source]) for part in self.segments]
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return attended.view(tokens, num_heads * head_dim)


def plan_pass(arenas: Arenas, *, rows: Sequence[Row], segments: Sequence[Segment]) -> Pass:
    """A pass over the last token of each of `rows` (all that have seats, or none) and over `segments`."""
    ids: list[int] = []
    positions: list[int] = []
    plan = _Planner(next(iter(arenas)).keys_values.device)
    ordered: list[Row] = []
    for arena in arenas if rows else ():
        plan.add_rows(arena, start=len(ids))
        ids += [row.tokens[-1] for row in arena.rows]
        positions += [len(row.tokens) - 1 for row in arena.rows]
        ordered += arena.rows
    for segment in segments:
        plan.add_segment(segment, [arenas.seat(row) for row in segment.rows], start=len(ids))
        ids += segment.tokens
        positions += range(segment.start, segment.end)
    order = None
    if ordered != list(rows):
        place = {row: index for index, row in enumerate(ordered)}
        order = torch.tensor([place[row] for row in rows], device=plan.device)
    return Pass(
        ids=ids,
        positions=positions,
        order=order,
        writes=plan.writes(),
        rows=tuple(plan.row_parts),
        segments=tuple(plan.segment_parts),
    )


class _Planner:
    """Collects the parts of a pass."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.row_parts: list[_RowPart] = []
        self.segment_parts: list[_SegmentPart] = []
        self._writes: dict[Arena, list[tuple[np.ndarray, ...]]] = {}

    def add_rows(self, arena: Arena, *, start: int) -> None:
        ends = np.array([len(row.tokens) for row in arena.rows])
        count, length = len(ends), int(ends.max())
        self._write(arena, np.arange(start, start + count), np.arange(count), ends - 1)
        heads = arena.num_heads
        visible = torch.from_numpy(np.arange(length) < ends[:, None]).to(self.device)
        bias = _bias(visible, arena.keys_values.dtype)
        self.row_parts.append(
            _RowPart(
                arena=arena,
                source=slice(start, start + count),
                length=length,
                bias=bias[:, None].expand(count, heads, length).reshape(count * heads, 1, length),
            )
        )

    def add_segment(self, segment: Segment, seats: list[Seat], *, start: int) -> None:
        size = segment.end - segment.start
        source, places = np.arange(start, start + size), np.arange(segment.start, segment.end)
        for seat in seats:
            self._write(seat.arena, source, np.full(size, seat.slot), places)
        bias = None
        if segment.start > 0:
            visible = torch.from_numpy(np.arange(segment.end) <= places[:, None]).to(self.device)
            bias = _bias(visible, seats[0].arena.keys_values.dtype)
        self.segment_parts.append(
            _SegmentPart(seat=seats[0], source=slice(start, start + size), end=segment.end, bias=bias)
        )

    def writes(self) -> tuple[_Write, ...]:
        found = []
        for arena, parts in self._writes.items():
            source, slots, places = (np.concatenate(column) for column in zip(*parts, strict=True))
            alone = len(parts) == 1  # then its tokens stand side by side, and a slice spares a copy in every layer
            found.append(
                _Write(
                    arena=arena,
                    source=slice(int(source[0]), int(source[-1]) + 1) if alone else self._on_device(source),
                    slots=self._on_device(slots),
                    places=self._on_device(places),
                )
            )
        return tuple(found)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _write(self, arena: Arena, source: np.ndarray, slots: np.ndarray, places: np.ndarray) -> None:
        self._writes.setdefault(arena, []).append((source, slots, places))


def _bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -math.inf)


def _attend_rows(part: _RowPart, layer: int, queries: torch.Tensor) -> torch.Tensor:
    """One token of each row: [B, H, D] in and out."""
    count, heads, head_dim = queries.shape
    keys, values = part.arena.places(layer, rows=count, length=part.length)  # [B K, L, D]
    grouped = queries.reshape(len(keys), -1, head_dim)  # [B K, G, D]
    bias = part.bias.expand(-1, grouped.shape[1], -1)
    scores = torch.baddbmm(bias, grouped, keys.transpose(1, 2), alpha=head_dim**-0.5)
    shares = scores.softmax(-1, dtype=torch.float32).to(values.dtype)
    return torch.bmm(shares, values).view(count, heads, head_dim)


def _attend_segment(part: _SegmentPart, layer: int, queries: torch.Tensor) -> torch.Tensor:
    """A stretch of one row's tokens: [tokens, H, D] in and out."""
    keys, values = part.seat.arena.keys_values[layer, :, part.seat.slot, None, :, : part.end]  # [1, K, end, D]
    attended = functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None], keys, values, attn_mask=part.bias, is_causal=part.bias is None, enable_gqa=True
    )
    return attended[0].transpose(0, 1)
