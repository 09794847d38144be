"""What must be computed of new rows: every unknown token of every row, each common stretch once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trace_async.engines.prefill import chunks, shared_segments
from trace_async.engines.rows import Row

ROWS = st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=7), st.integers(0, 7)), max_size=8)


def rows_of(drawn: list[tuple[list[int], int]]) -> list[Row]:
    """`computed` leaves the last token at least, as a decoder sees to."""
    return [
        Row(tokens=tokens, num_prefix=len(tokens), seed=0, greedy=False, computed=min(known, len(tokens) - 1))
        for tokens, known in drawn
    ]


@given(ROWS, st.integers(1, 5))
def test_each_rows_unknown_tokens_are_covered_once_in_order_and_common_ones_once_in_all(
    drawn: list[tuple[list[int], int]], room: int
) -> None:
    rows = rows_of(drawn)
    known = {id(row): row.computed for row in rows}
    pieces = chunks(shared_segments(rows), max_tokens=room)
    assert all(sum(segment.end - segment.start for segment in chunk) <= room for chunk in pieces)
    cost = 0
    for segment in (segment for chunk in pieces for segment in chunk):
        cost += segment.end - segment.start
        for row in segment.rows:
            assert row.tokens[: segment.end] == segment.rows[0].tokens[: segment.end]
            assert known[id(row)] == segment.start  # ancestors came before, and nothing is left out or done twice
            known[id(row)] = segment.end
    assert all(known[id(row)] == len(row.tokens) - 1 for row in rows)
    needed = {
        (row.computed, tuple(row.tokens[: end + 1])) for row in rows for end in range(row.computed, len(row.tokens) - 1)
    }
    assert cost == len(needed)


def test_rows_without_unknown_tokens_need_nothing() -> None:
    rows = rows_of([([1, 2, 3], 2), ([4], 0)])
    assert chunks(shared_segments(rows), max_tokens=8) == [[]]
