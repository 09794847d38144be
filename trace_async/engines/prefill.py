"""What rows with unknown tokens must compute, each common stretch once: a forest of segments. Pure.

Rows are grouped by how much of them is known. Within a group tokens are compared from there on; a stretch that several
rows share becomes one segment, whose key/values all of them get. Sharing is by exact tokens, so it is never wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trace_async.engines.rows import Row


class Segment(NamedTuple):
    """Tokens [start, end) of every one of `rows`, which agree on all tokens before `end`."""

    start: int
    end: int
    rows: tuple[Row, ...]

    @property
    def tokens(self) -> list[int]:
        """The segment's own tokens."""
        return self.rows[0].tokens[self.start : self.end]


def shared_segments(rows: Sequence[Row]) -> list[Segment]:
    """All tokens of `rows` that are not computed, but the last of each; ancestors stand before descendants."""
    by_known: dict[int, list[Row]] = {}
    for row in rows:
        if row.computed < len(row.tokens) - 1:
            by_known.setdefault(row.computed, []).append(row)
    return [segment for known, group in by_known.items() for segment in _split(group, known)]


def _split(group: list[Row], known: int) -> Iterator[Segment]:
    """Rows that know equally much need not agree on what they know; those that do are treated together."""
    ordered = sorted(group, key=lambda row: row.tokens)
    first = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place].tokens[: known + 1] != ordered[first].tokens[: known + 1]:
            yield from _stretch(ordered[first:place], known)
            first = place


def _stretch(rows: list[Row], start: int) -> Iterator[Segment]:
    """The segment that sorted `rows`, which agree up to and at `start`, share, and then those of its branches."""
    end = min(_common(rows[0].tokens, rows[-1].tokens), min(len(row.tokens) - 1 for row in rows))
    if end > start:
        yield Segment(start, end, tuple(rows))
    deeper = [row for row in rows if len(row.tokens) - 1 > end]
    if deeper:
        yield from _branches(deeper, end)


def _branches(rows: list[Row], start: int) -> Iterator[Segment]:
    first = 0
    for place in range(1, len(rows) + 1):
        if place == len(rows) or rows[place].tokens[start] != rows[first].tokens[start]:
            yield from _stretch(rows[first:place], start)
            first = place


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    if one[: len(other)] == other[: len(one)]:
        return min(len(one), len(other))
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def chunks(segments: Sequence[Segment], *, max_tokens: int) -> list[list[Segment]]:
    """The segments in their order, cut where needed, at most `max_tokens` tokens at a time; one empty chunk of none."""
    found: list[list[Segment]] = [[]]
    room = max_tokens
    for segment in segments:
        start = segment.start
        while start < segment.end:
            if room == 0:
                found.append([])
                room = max_tokens
            end = min(segment.end, start + room)
            found[-1].append(segment._replace(start=start, end=end))
            room -= end - start
            start = end
    return found
