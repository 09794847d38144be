"""What a person sees while a run goes: a live panel on a terminal, a plain line every few seconds elsewhere.

Reads RUN/metrics.jsonl and RUN/status.json, nothing else, so it can never disturb a run; a missing or half-known file
shows as a dash.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trace_async.metrics import STEP, RowReader, column
from trace_async.run_folder import RunFolder

_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII_BLOCKS = "_.-=+*%#"
_SPARK_WIDTH = 40
_DASH = "-"

_TICK_S = 0.5
"""Between two looks at the files; the eye needs no more and the run has better uses for the core."""

_LINE_EVERY_TICKS = 10
"""Without a terminal a line is printed this often, when something changed."""


@dataclass(slots=True)
class View:
    """What is known of a run right now."""

    name: str
    max_steps: int
    phase: str = "starting"
    elapsed_s: float = 0.0
    rows: list[dict[str, object]] = field(default_factory=list)

    def last(self, key: str) -> float:
        """Newest value of a metric, NaN when unknown."""
        return column(self.rows[-1:], key)[0] if self.rows else math.nan

    @property
    def steps(self) -> int:
        """Optimizer steps made."""
        step = self.last(STEP)
        return 0 if math.isnan(step) else int(step)


class Display:
    """The screen of a run. `run` draws until it is cancelled; `say_phase` may be called at any time."""

    def __init__(self, view: View, *, folder: RunFolder, console: Console, clock: Callable[[], float]) -> None:
        self._view = view
        self._reader = RowReader(folder.metrics)
        self._console = console
        self._clock = clock
        self._started_s = clock()

    def say_phase(self, phase: str) -> None:
        """What the run does from now on; shown at once where there is no terminal to redraw."""
        self._view.phase = phase
        if not self._console.is_terminal:
            self._say(phase)

    async def run(self) -> None:
        """Produces pictures; waits for its own tick; ended by cancellation, after which the last picture stays."""
        if self._console.is_terminal:
            await self._run_live()
        else:
            await self._run_plain()

    async def _run_live(self) -> None:
        with Live(console=self._console, auto_refresh=False, transient=False) as live:
            try:
                while True:
                    self.refresh()
                    live.update(draw_panel(self._view, unicode=self._console.encoding == "utf-8"), refresh=True)
                    await asyncio.sleep(_TICK_S)
            finally:
                self.refresh()
                live.update(draw_panel(self._view, unicode=self._console.encoding == "utf-8"), refresh=True)

    async def _run_plain(self) -> None:
        said = -1
        while True:
            await asyncio.sleep(_TICK_S * _LINE_EVERY_TICKS)
            self.refresh()
            if self._view.steps != said and self._view.rows:
                said = self._view.steps
                self._say(draw_line(self._view))

    def refresh(self) -> View:
        """Reads what is new."""
        self._view.elapsed_s = self._clock() - self._started_s
        self._view.rows.extend(self._reader.read_new())
        return self._view

    def _say(self, text: str) -> None:
        self._console.print(
            f"[{format_seconds(self._clock() - self._started_s)}] {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,  # one line in a pipe stays one line
        )


def draw_line(view: View) -> str:
    """The run in one line."""
    return (
        f"step {view.steps}/{view.max_steps}  "
        f"success {format_share(view.last('rollout/success'))}  "
        f"tokens {format_count(view.last('rollout/sampled_tokens_total'))}  "
        f"version {format_count(view.last('training/version'))}  "
        f"age {_describe_age(view)}  "
        f"turns/s {format_count(view.last('rollout/turns_per_s'))}"
    )


def draw_panel(view: View, *, unicode: bool = True) -> RenderableType:
    """The run as a panel."""
    success = column(view.rows, "rollout/success")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True)
    progress = Table.grid(padding=(0, 1))
    progress.add_row(
        ProgressBar(total=view.max_steps, completed=view.steps, width=30), f"{view.steps}/{view.max_steps}"
    )
    grid.add_row("now", Text(view.phase, style="bold"))
    grid.add_row("steps", progress)
    grid.add_row(
        "success",
        Text.assemble(
            (format_share(view.last("rollout/success")), "bold green"),
            "  ",
            (sparkline(smooth(success), width=_SPARK_WIDTH, unicode=unicode), "green"),
        ),
    )
    grid.add_row("tokens", f"{format_count(view.last('rollout/sampled_tokens_total'))} sampled and trained on")
    grid.add_row("version", format_count(view.last("training/version")))
    grid.add_row("age", f"{_describe_age(view)} steps")
    grid.add_row("speed", f"{format_count(view.last('rollout/turns_per_s'))} turns/s")
    grid.add_row("elapsed", format_seconds(view.elapsed_s))
    return Panel(grid, title=view.name, title_align="left", expand=False)


def sparkline(values: Sequence[float], *, width: int, unicode: bool = True) -> str:
    """The newest values as bars between the smallest and the largest of them; NaN is a gap.

    More values than `width` are averaged in equal pieces.
    """
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return ""
    blocks = _BLOCKS if unicode else _ASCII_BLOCKS
    pieces = _shrink(values, width)
    shown = [value for value in pieces if not math.isnan(value)]
    low, high = min(shown), max(shown)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if math.isnan(value) else blocks[round((value - low) * scale)] for value in pieces)


def smooth(values: Sequence[float], *, window: int = 5) -> list[float]:
    """Mean of each value and the up to `window - 1` before it, NaN left out: single steps are noisy."""
    means = []
    for end in range(1, len(values) + 1):
        known = [value for value in values[max(0, end - window) : end] if not math.isnan(value)]
        means.append(sum(known) / len(known) if known else math.nan)
    return means


def format_share(value: float) -> str:
    """0.512 as 51.2 %."""
    return _DASH if math.isnan(value) else f"{100 * value:.1f} %"


def format_number(value: float) -> str:
    """Two digits behind the point."""
    return _DASH if math.isnan(value) else f"{value:.2f}"


def format_digits(value: float) -> str:
    """Three digits behind the point."""
    return _DASH if math.isnan(value) else f"{value:.3f}"


def format_count(value: float) -> str:
    """A whole number with thousands apart."""
    return _DASH if math.isnan(value) else f"{value:,.0f}"


def format_seconds(seconds: float) -> str:
    """Minutes and seconds, hours when there are any."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def _describe_age(view: View) -> str:
    return f"mean {format_number(view.last('staleness/age_mean'))} max {format_count(view.last('staleness/age_max'))}"


def _shrink(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [round(index * len(values) / width) for index in range(width + 1)]
    pieces = (values[start:end] for start, end in itertools.pairwise(edges))
    return [smooth(piece, window=len(piece))[-1] for piece in pieces]
