"""An evaluation in words and tables: for the terminal, and the numbers as JSON. Never counts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trace_async.app.display import format_share
from trace_async.app.eval_records import or_null
from trace_async.app.eval_summary import Measure, ModeSummary, Part
from trace_async.app.evaluate import Evaluation

SHARES = ("success", "invalid_share")
"""Measures shown in percent; the environment's own are shown as the numbers they are."""

SHOWN_BY_LABEL = ("success", "em", "f1", "cover_em", "support_f1", "searches", "turns", "sampled_tokens")
"""Columns of the tables by label, narrow enough to read; `summary_json` has every measure."""

_DASH = "-"


def evaluation_line(mode: str, result: Evaluation) -> str:
    """One mode in one line."""
    return (
        f"{mode:8} success {format_share(result.success)} (95 %: {format_share(result.success_low)} to "
        f"{format_share(result.success_high)}), {result.mean_turns:.1f} turns, "
        f"{format_share(result.invalid_share)} unreadable, {result.num_played} tasks, {result.num_failed} failed\n"
    )


def tables(summaries: Mapping[str, ModeSummary]) -> Iterator[RenderableType]:
    """Every measure with its interval, all modes side by side; then means by each label."""
    yield _overall_table(summaries)
    for mode, summary in summaries.items():
        for criterion, parts in summary.by_label.items():
            yield _label_table(f"{mode}, by {criterion}", parts)


def _overall_table(summaries: Mapping[str, ModeSummary]) -> Table:
    played = ", ".join(f"{mode} {summary.overall.num_played} tasks" for mode, summary in summaries.items())
    table = Table(title=f"means and 95 % intervals ({played})", title_justify="left", title_style="bold")
    table.add_column("measure", no_wrap=True)
    for mode in summaries:
        table.add_column(mode, no_wrap=True, justify="right")
    names = dict.fromkeys(name for summary in summaries.values() for name in summary.overall.measures)
    for name in names:
        cells = [summary.overall.measures.get(name) for summary in summaries.values()]
        table.add_row(Text(name), *("" if cell is None else Text(format_interval(name, cell)) for cell in cells))
    return table


def _label_table(title: str, parts: Mapping[str, Part]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    table.add_column("", overflow="fold")
    table.add_column("n", justify="right", no_wrap=True)
    first = next(iter(parts.values()))
    names = [name for name in SHOWN_BY_LABEL if name in first.measures]
    for name in names:
        words = name.split("_")
        table.add_column(" ".join(words), justify="right", min_width=max(map(len, words)))
    for value, part in parts.items():
        cells = [Text(format_measure(name, part.measures[name].mean)) for name in names]
        table.add_row(Text(value), str(part.num_played), *cells)
    return table


def format_measure(name: str, value: float) -> str:
    """A measure's value with as many digits as one reads."""
    if math.isnan(value):
        return _DASH
    if name in SHARES:
        return format_share(value)
    digits = 3 if abs(value) <= 1 else 2 if abs(value) < 10 else 1
    return f"{value:,.{digits}f}"


def format_interval(name: str, measure: Measure) -> str:
    """A mean with its interval in brackets."""
    mean = format_measure(name, measure.mean)
    if math.isnan(measure.low):
        return mean
    return f"{mean}  [{format_measure(name, measure.low)}, {format_measure(name, measure.high)}]"


def summary_json(summaries: Mapping[str, ModeSummary]) -> dict[str, Any]:
    """All numbers; null for what is not known."""
    return {
        mode: {
            "overall": _part_json(summary.overall),
            "by_label": {
                criterion: {value: _part_json(part) for value, part in parts.items()}
                for criterion, parts in summary.by_label.items()
            },
        }
        for mode, summary in summaries.items()
    }


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "num_played": part.num_played,
        "num_failed": part.num_failed,
        "measures": {
            name: {"mean": or_null(m.mean), "low": or_null(m.low), "high": or_null(m.high), "num": m.num}
            for name, m in part.measures.items()
        },
    }
