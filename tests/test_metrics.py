"""The metrics file: rows survive a crash, readers tolerate what a crash leaves."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.metrics import STEP, MetricsWriter, RowReader, column, read_rows


class Curves:
    """A ScalarWriter that remembers."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []
        self.closed = 0

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.closed += 1


def test_a_row_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({STEP: 1, "actor/grad_norm": 0.5})
        assert read_rows(path) == [{STEP: 1, "actor/grad_norm": 0.5}]


def test_unknown_numbers_are_written_as_null_and_read_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write({STEP: 1, "a/x": math.nan, "a/y": math.inf})
    rows = read_rows(path)
    assert rows == [{STEP: 1, "a/x": None, "a/y": None}]
    assert math.isnan(column(rows, "a/x")[0])
    assert math.isnan(column(rows, "a/absent")[0])


@given(cut=st.integers(1, 60))
def test_a_torn_last_line_counts_as_never_written(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(1, 5):
            writer.write({STEP: step, "a/x": 1.5})
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    complete = whole[:-cut].count(b"\n")
    assert [row[STEP] for row in read_rows(path)] == list(range(1, complete + 1))


def test_a_writer_continues_behind_what_a_crash_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"{STEP}":1}}\n{{"{STEP}":2,"a/', encoding="utf-8")
    with MetricsWriter(path) as writer:
        writer.write({STEP: 2, "a/x": 1.0})
    assert read_rows(path) == [{STEP: 1}, {STEP: 2, "a/x": 1.0}]


def test_a_step_that_was_made_again_counts_once_with_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step, value in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.4)):
            writer.write({STEP: step, "a/x": value})
    assert column(read_rows(path), "a/x") == [0.1, 0.4, 0.3]


def test_a_reader_gives_each_complete_row_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = RowReader(path)
    assert reader.read_new() == []
    path.write_bytes(b'{"a":1}\n{"a":')
    assert reader.read_new() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b"2}\n")
    assert reader.read_new() == [{"a": 2}]
    assert reader.read_new() == []


def test_numbers_also_go_to_the_curves_under_their_step(tmp_path: Path) -> None:
    curves = Curves()
    with MetricsWriter(tmp_path / "metrics.jsonl", scalars=curves) as writer:
        writer.write({STEP: 7, "a/x": 0.5, "a/name": "word", "a/unknown": math.nan})
        writer.write({"a/x": 0.6})
    assert curves.points == [("a/x", 0.5, 7)]
    assert curves.closed == 1
