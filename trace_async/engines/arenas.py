"""Key/values of the running rows, written in place: no copying from token to token.

Rows live in arenas by length: an arena has slots of one capacity, and capacities grow by half, so an attention call
over an arena's rows reads few places beyond their ends. A row that outgrows its slot moves one arena up. The rows of an
arena fill its first slots: who leaves is replaced by the last one.

Invariants: slot i of an arena belongs to `arena.rows[i]`; places at and beyond a row's `computed` hold nothing of use.
Memory: an arena has a power of two of slots. What is unused is given back before the total would pass that of
2 x (max_rows + 1) x max_tokens tokens, so it never does, but for the moment in which an arena's slots are copied.
Never: what a token is, attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from trace_async.engines.rows import Row

_SMALLEST = 64  # places; below, the cost of a call outweighs what it reads
_ROOM = 16  # places a new row gets at least for its next tokens


class Shape(NamedTuple):
    """What the key/values of one token look like."""

    layers: int
    heads: int  # key/value heads
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.heads * self.head_dim * self.dtype.itemsize


class Arena:
    """Slots of one capacity: `keys_values` [layers, 2, slots, heads, capacity, head_dim]."""

    def __init__(self, shape: Shape, capacity: int, *, slots: int) -> None:
        self.capacity = capacity
        self.rows: list[Row] = []
        self.num_heads = shape.heads
        self._shape = shape
        self.keys_values = self._empty(slots)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self.keys_values.numel() * self.keys_values.element_size()

    @property
    def num_slots(self) -> int:
        """Rows that fit."""
        return self.keys_values.shape[2]

    def add(self, row: Row) -> int:
        """Seat a row in the next slot; what the slot held before is of no use."""
        assert len(self.rows) < self.num_slots
        self.rows.append(row)
        return len(self.rows) - 1

    def resize(self, slots: int) -> None:
        """Hold this many slots; at least one for each row."""
        old, rows = self.keys_values, len(self.rows)
        if slots != old.shape[2]:
            self.keys_values = self._empty(slots)
            self.keys_values[:, :, :rows] = old[:, :, :rows]

    def remove(self, slot: int) -> Row | None:
        """Free a slot; the last row moves into it and is returned, unless it was the last."""
        last = self.rows.pop()
        if slot == len(self.rows):
            return None
        self.rows[slot] = last
        self.place(slot)[:, :, :, : last.computed] = self.place(len(self.rows))[:, :, :, : last.computed]
        return last

    def place(self, slot: int) -> torch.Tensor:
        """A slot's key/values [layers, 2, heads, capacity, head_dim]."""
        return self.keys_values[:, :, slot]

    def places(self, layer: int, *, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `length` keys and values of the first rows in one layer, each [rows x heads, length, head_dim]."""
        keys, values = self.keys_values[layer, :, :rows].flatten(1, 2)[:, :, :length]
        return keys, values

    def _empty(self, slots: int) -> torch.Tensor:
        shape = self._shape
        sizes = (shape.layers, 2, slots, shape.heads, self.capacity, shape.head_dim)
        # zeros, because places beyond a row's end are multiplied by weights of zero, and a NaN would stay one
        return torch.zeros(sizes, dtype=shape.dtype, device=shape.device)


class Seat(NamedTuple):
    """Where a row's key/values are."""

    arena: Arena
    slot: int

    @property
    def keys_values(self) -> torch.Tensor:
        """[layers, 2, heads, capacity, head_dim]."""
        return self.arena.place(self.slot)


class Arenas:
    """All rows' seats."""

    def __init__(self, shape: Shape, *, max_rows: int, max_tokens: int) -> None:
        """`max_tokens`: no row ever gets longer; `max_rows`: nor are there ever more."""
        self._shape = shape
        self._max_tokens = max_tokens
        self.max_bytes = 2 * (max_rows + 1) * max_tokens * shape.token_bytes  # one row may be moving
        self._by_capacity: dict[int, Arena] = {}
        self._seats: dict[Row, Seat] = {}

    def __contains__(self, row: Row) -> bool:
        return row in self._seats

    def __iter__(self) -> Iterator[Arena]:
        """Those with rows, the smallest capacity first."""
        return (arena for _, arena in sorted(self._by_capacity.items()) if arena.rows)

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return sum(arena.num_bytes for arena in self._by_capacity.values())

    def seat(self, row: Row) -> Seat:
        """Where this row's key/values are."""
        return self._seats[row]

    def join(self, rows: Sequence[Row]) -> None:
        """Seats for new rows, with room for the tokens they have and the next ones."""
        joining: dict[int, list[Row]] = {}
        for row in rows:
            joining.setdefault(self._capacity(len(row.tokens) + _ROOM), []).append(row)
        for capacity, together in joining.items():
            arena = self._arena(capacity, seats=len(together))
            for row in together:
                self._seats[row] = Seat(arena, arena.add(row))

    def move_up(self, row: Row) -> None:
        """Move the row to where there is room for the tokens it has and the next ones."""
        old = self._seats[row]
        arena = self._arena(self._capacity(len(row.tokens) + _ROOM), seats=1)
        new = self._seats[row] = Seat(arena, arena.add(row))
        new.keys_values[:, :, :, : row.computed] = old.keys_values[:, :, :, : row.computed]
        self._vacate(old)

    def rows(self) -> list[Row]:
        """All that have a seat."""
        return list(self._seats)

    def leave(self, row: Row) -> None:
        """The row's seat is free."""
        self._vacate(self._seats.pop(row))

    def _vacate(self, seat: Seat) -> None:
        moved = seat.arena.remove(seat.slot)
        if moved is not None:
            self._seats[moved] = seat

    def _capacity(self, length: int) -> int:
        """The smallest one for `length` tokens."""
        capacity = min(_SMALLEST, self._max_tokens)
        while capacity < min(length, self._max_tokens):
            capacity = min(capacity + capacity // 2, self._max_tokens)
        return capacity

    def _arena(self, capacity: int, *, seats: int) -> Arena:
        """The arena of this capacity, with room for that many more rows."""
        arena = self._by_capacity.get(capacity)
        held = 0 if arena is None else arena.num_slots
        needed = _power(seats + (0 if arena is None else len(arena.rows)))
        if needed > held and self.num_bytes + (needed - held) * capacity * self._shape.token_bytes > self.max_bytes:
            self._tidy()
            arena = self._by_capacity.get(capacity)
        if arena is None:
            arena = self._by_capacity[capacity] = Arena(self._shape, capacity, slots=needed)
        elif arena.num_slots < needed:
            arena.resize(needed)
        return arena

    def _tidy(self) -> None:
        """Give back every slot beyond the next power of two of an arena's rows."""
        self._by_capacity = {size: arena for size, arena in self._by_capacity.items() if arena.rows}
        for arena in self._by_capacity.values():
            arena.resize(_power(len(arena.rows)))


def _power(count: int) -> int:
    """The smallest power of two that is not below."""
    return 1 << (count - 1).bit_length()
