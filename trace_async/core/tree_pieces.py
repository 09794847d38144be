"""How trees are cut into pieces that fit a bound, and pieces put together into packs.

A piece is a run of neighbouring rows of one tree (`rows.py`), in depth-first order, with what they share held once. A
tree within the bound is one piece. A larger one is cut between rows; a piece then repeats the turns above its first
row, as context, so every scored turn still stands in one piece with its whole path. Where to cut is exact: of all ways
to cut this order of rows, the one with the fewest tokens. Builds no tokens, touches no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from trace_async.core.rows import PackItem, Row, plan_rows_depth_first
from trace_async.errors import ConfigError


class Piece(NamedTuple):
    """Rows of one tree that are computed together."""

    item: int  # index into the items
    rows: tuple[Row, ...]  # depth-first
    length: int  # tokens, each shared one once


def cut_tree(item: PackItem, index: int, *, bound: int) -> list[Piece]:
    """The pieces of one tree, none longer than `bound` tokens; none where nothing is scored.

    Raises ConfigError when one path alone is longer.
    """
    rows = plan_rows_depth_first(item, index)
    longest = max((row.length for row in rows), default=0)
    if longest > bound:
        raise ConfigError(
            f"a row of group {item.group.group_id} has {longest} tokens, more than "
            f"learner.micro_batch_tokens = {bound}; set it to tree.max_context_tokens or more"
        )
    shared = [0, *(_shared_tokens(item, above, row) for above, row in pairwise(rows))]
    cuts = _cheapest_cuts([row.length for row in rows], shared, bound)
    return [
        Piece(index, tuple(rows[start:end]), rows[start].length + _added(rows, shared, start, end))
        for start, end in pairwise(cuts)
    ]


def fill_packs(pieces: Sequence[Piece], *, bound: int) -> list[list[Piece]]:
    """Packs of at most `bound` tokens, first-fit decreasing: at most 11/9 of the fewest possible, plus 2/3.

    (Dosa, "The tight bound of first fit decreasing bin-packing algorithm is FFD(I) <= 11/9 OPT(I) + 6/9", 2007.)
    """
    packs: list[list[Piece]] = []
    room: list[int] = []
    for piece in sorted(pieces, key=lambda piece: -piece.length):
        place = next((index for index, left in enumerate(room) if piece.length <= left), len(packs))
        if place == len(packs):
            packs.append([])
            room.append(bound)
        packs[place].append(piece)
        room[place] -= piece.length
    return packs


def _cheapest_cuts(lengths: Sequence[int], shared: Sequence[int], bound: int) -> list[int]:
    """Where pieces start, and the end: fewest tokens over all pieces, by dynamic programming over the first rows."""
    cost, start_of = [0], [0]
    for end in range(1, len(lengths) + 1):
        size, best, best_start = 0, -1, -1
        for start in range(end - 1, -1, -1):
            # From the back: `size` is what rows start + 1 to end - 1 add, and the first one comes whole.
            if (whole := size + lengths[start]) > bound:
                break
            if best < 0 or cost[start] + whole < best:
                best, best_start = cost[start] + whole, start
            size += lengths[start] - shared[start]
        cost.append(best)
        start_of.append(best_start)
    cuts = [len(lengths)]
    while cuts[-1] > 0:
        cuts.append(start_of[cuts[-1]])
    return cuts[::-1]


def _added(rows: Sequence[Row], shared: Sequence[int], start: int, end: int) -> int:
    return sum(rows[index].length - shared[index] for index in range(start + 1, end))


def _shared_tokens(item: PackItem, one: Row, other: Row) -> int:
    """Tokens of the common start of two rows; common turns are never the tip of either."""
    group = item.group
    tokens = int(group.prompt_ids.size)
    for turn, same in zip(one.path, other.path, strict=False):
        if turn != same:
            break
        tokens += int(group.action_lengths[turn] + group.observation_lengths[turn])
    return tokens
