"""The picture of a running run: what it says, and that it reads files only."""

from __future__ import annotations

import asyncio
import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.fakes import FakeClock
from trace_async.app.display import (
    Display,
    View,
    draw_line,
    draw_panel,
    format_count,
    format_seconds,
    format_share,
    smooth,
    sparkline,
)
from trace_async.metrics import STEP, MetricsWriter
from trace_async.run_folder import RunFolder

ROW: dict[str, object] = {
    STEP: 12,
    "training/version": 12,
    "rollout/success": 0.512,
    "rollout/sampled_tokens_total": 48123,
    "rollout/turns_per_s": 331.4,
    "staleness/age_mean": 1.234,
    "staleness/age_max": 3,
}


def drawn(view: View) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(draw_panel(view))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_line_and_panel_show_success_tokens_version_age_speed_and_steps() -> None:
    view = View("quickstart", 60, "training", 100.0, [ROW])
    for part in ("12/60", "51.2 %", "48,123", "mean 1.23 max 3", "331"):
        assert part in draw_line(view)
        assert part in drawn(view)
    assert "1:40" in drawn(view)


def test_before_the_first_step_everything_unknown_is_a_dash() -> None:
    view = View("quickstart", 60)
    assert "0/60" in draw_line(view)
    assert "success -" in draw_line(view)
    assert "starting" in drawn(view)


def test_the_display_picks_up_rows_as_they_are_written(tmp_path: Path) -> None:
    clock = FakeClock()
    display = Display(View("x", 60), folder=RunFolder(tmp_path), console=Console(file=io.StringIO()), clock=clock)
    assert display.refresh().steps == 0
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write({STEP: 1, "rollout/success": 0.5})
        clock.advance(3.0)
        view = display.refresh()
    assert (view.steps, view.last("rollout/success"), view.elapsed_s) == (1, 0.5, 3.0)


def test_without_a_terminal_each_phase_is_a_line(tmp_path: Path) -> None:
    out, clock = io.StringIO(), FakeClock()
    display = Display(View("x", 60), folder=RunFolder(tmp_path), console=Console(file=out), clock=clock)
    clock.advance(61.0)
    display.say_phase("training [now]")
    assert out.getvalue() == "[1:01] training [now]\n"


def test_on_a_terminal_the_panel_is_drawn_until_cancelled(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    display = Display(View("x", 60), folder=RunFolder(tmp_path), console=console, clock=FakeClock())

    async def draw_once() -> None:
        async with asyncio.TaskGroup() as group:
            drawing = group.create_task(display.run())
            await asyncio.sleep(0)
            display.say_phase("done")
            drawing.cancel()

    asyncio.run(draw_once())
    assert "starting" in out.getvalue()
    assert "done" in out.getvalue()


def test_a_sparkline_rises_with_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0], width=10) == "▁▅█"
    assert sparkline([0.0, math.nan, 1.0], width=10) == "▁ █"
    assert sparkline([0.3, 0.3], width=10) == "▁▁"
    assert sparkline([0.0, 1.0], width=10, unicode=False) == "_#"
    assert sparkline([math.nan], width=10) == ""


@given(values=st.lists(st.floats(0, 1) | st.just(math.nan), max_size=200), width=st.integers(1, 50))
def test_a_sparkline_never_exceeds_its_width(values: list[float], width: int) -> None:
    assert len(sparkline(values, width=width)) <= width


def test_smoothing_averages_a_value_with_those_before_it() -> None:
    assert smooth([1.0, 2.0, 3.0, math.nan], window=2) == [1.0, 1.5, 2.5, 3.0]
    assert math.isnan(smooth([math.nan])[0])


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.9, "1:01"), (3661, "1:01:01")])
def test_seconds_read_like_a_clock(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_unknown_numbers_are_dashes() -> None:
    assert (format_share(math.nan), format_count(math.nan)) == ("-", "-")
