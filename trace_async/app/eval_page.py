"""report.html: one page that needs nothing but itself, with every number and the episodes behind them.

Invariants: no word of a policy, an environment or a task gets into the page unescaped, and the page's policy lets no
script run but its own; its size is bounded, and what was left out is told; the page is replaced in one piece. It is
written episode by episode, so memory does not grow with their number.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence

from trace_async.app.eval_folder import EvalFolder, Key
from trace_async.app.eval_page_episode import PageShape, clean, episode_html
from trace_async.app.eval_page_style import SCRIPT, STYLE
from trace_async.app.eval_records import read_row
from trace_async.app.eval_summary import Measure, ModeSummary, Part, natural
from trace_async.app.eval_text import SHOWN_BY_LABEL, format_interval, format_measure
from trace_async.core.types import Json

MAX_TRANSCRIPTS = 1_000
MAX_TRANSCRIPT_BYTES = 16_000_000
MAX_ROWS = 10_000
"""Of episodes on the page, with everything that was said and without."""

_FEW = 20
"""Groups of fewer episodes are shown in grey: their intervals say little."""


def write_page(
    folder: EvalFolder, summaries: Mapping[str, ModeSummary], *, keys: Sequence[Key], settings: Json
) -> None:
    """Writes the page with the episodes of `keys`, in that order."""
    draft = folder.report.with_name(f".{folder.report.name}.{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", errors="replace") as file:
            file.writelines(_page(folder, summaries, keys=keys, settings=settings))
        draft.replace(folder.report)
    finally:
        draft.unlink(missing_ok=True)


def _page(
    folder: EvalFolder, summaries: Mapping[str, ModeSummary], *, keys: Sequence[Key], settings: Json
) -> Iterator[str]:
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    yield '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
    yield (
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{script_hash}'; base-uri 'none'; form-action 'none'\">\n"
    )
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    yield f"<title>Evaluation: {clean(settings['policy'])}</title>\n<style>{STYLE}</style></head>\n<body>\n"
    yield from _head(settings, summaries)
    yield "<h2>Results</h2>\n"
    yield _overall(summaries)
    for mode, summary in summaries.items():
        for criterion, parts in summary.by_label.items():
            yield _by_label(f"by {criterion}" if len(summaries) == 1 else f"{mode}, by {criterion}", parts)
    yield "<h2>Episodes</h2>\n"
    yield from _episodes(folder, summaries, keys=keys, success_above=settings["success_above"])
    yield f"<script>{SCRIPT}</script>\n</body></html>\n"


def _head(settings: Json, summaries: Mapping[str, ModeSummary]) -> Iterator[str]:
    environment = settings["environment"]["name"]
    yield f"<h1>{clean(settings['policy'])}</h1>\n"
    yield (
        f'<p class="facts">on the first <b>{settings["num"]:,}</b> tasks of <b>{clean(environment)}</b>, split '
        f"<b>{clean(settings['split'])}</b>; seed {settings['seed']}, engine {clean(settings['engine']['kind'])}, "
        f"temperature {settings['engine']['temperature']}, policy {clean(settings['policy_sha256'][:12])}; "
        f"a success is an outcome above {settings['success_above']:g}</p>\n"
    )
    failed = {mode: summary.overall.num_failed for mode, summary in summaries.items() if summary.overall.num_failed}
    if failed:
        told = ", ".join(f"{number:,} {mode}" for mode, number in failed.items())
        yield f'<p class="note">{told} episodes could not be played and count nowhere.</p>\n'


def _overall(summaries: Mapping[str, ModeSummary]) -> str:
    names = dict.fromkeys(name for summary in summaries.values() for name in summary.overall.measures)
    heads = "".join(f"<th>{mode}</th><th>95 % interval</th><th></th>" for mode in summaries)
    rows = []
    for name in names:
        cells = "".join(_wide_cells(name, summary.overall.measures.get(name)) for summary in summaries.values())
        rows.append(f"<tr><td>{clean(name.replace('_', ' '))}</td>{cells}</tr>")
    return f'<div class="card"><table class="wide"><tr><th></th>{heads}</tr>{"".join(rows)}</table></div>\n'


def _wide_cells(name: str, measure: Measure | None) -> str:
    if measure is None:
        return "<td></td><td></td><td></td>"
    interval = format_interval(name, measure).partition("  ")[2].strip("[]").replace(", ", " to ")
    return (
        f"<td><b>{clean(format_measure(name, measure.mean))}</b></td><td><small>{clean(interval)}</small></td>"
        f'<td class="bar">{_bar(measure)}</td>'
    )


def _bar(measure: Measure) -> str:
    """Mean and interval on a track from 0 to 1; nothing for measures that are no shares."""
    if not 0.0 <= measure.mean <= 1.0 or measure.high > 1.0:
        return ""
    whisker = ""
    if measure.low == measure.low:  # known
        left, width = 100 * measure.low, 100 * (measure.high - measure.low)
        whisker = f'<u style="left:{left:.1f}%;width:{width:.1f}%"></u>'
    return f'<div class="track"><i style="width:{100 * measure.mean:.1f}%"></i>{whisker}</div>'


def _by_label(title: str, parts: Mapping[str, Part]) -> str:
    measures = next(iter(parts.values())).measures
    names = [name for name in SHOWN_BY_LABEL if name in measures]
    heads = "".join(f"<th>{clean(name.replace('_', ' '))}</th>" for name in names)
    rows = []
    for value, part in parts.items():
        css = ' class="few"' if part.num_played < _FEW else ""
        cells = "".join(f"<td{css}>{_narrow_cell(name, part.measures[name])}</td>" for name in names)
        rows.append(f"<tr><td>{clean(value) or '(none)'}</td><td{css}>{part.num_played:,}</td>{cells}</tr>")
    return (
        f'<div class="card"><h3>{clean(title)}</h3><table><tr><th></th><th>n</th>{heads}</tr>{"".join(rows)}'
        "</table></div>\n"
    )


def _narrow_cell(name: str, measure: Measure) -> str:
    interval = format_interval(name, measure).partition("  ")[2].strip("[]").replace(", ", "–").replace(" %", "")
    bar = _bar(measure) if name == "success" else ""
    return f"{clean(format_measure(name, measure.mean))}<br><small>{clean(interval)}</small>{bar}"


def _episodes(
    folder: EvalFolder, summaries: Mapping[str, ModeSummary], *, keys: Sequence[Key], success_above: float
) -> Iterator[str]:
    places: dict[Key, tuple[int, int]] = {}  # of the last line of each: where it starts, how long it is
    for place, size, record in folder.records():
        row = read_row(record)
        places[row.mode, row.task_index] = (place, size)
    shown = _spread(keys, MAX_ROWS)
    total = sum(places[key][1] for key in shown)
    affordable = MAX_TRANSCRIPTS if total <= MAX_TRANSCRIPT_BYTES else MAX_TRANSCRIPT_BYTES * len(shown) // total
    whole = set(_spread(shown, min(MAX_TRANSCRIPTS, affordable)))
    if len(whole) < len(keys):
        yield (
            f'<p class="note">Of {len(keys):,} episodes, {len(shown):,} are listed and {len(whole):,} can be opened, '
            f"evenly spread over the tasks; all of them are in {folder.episodes.name}.</p>\n"
        )
    criteria = sorted({name for summary in summaries.values() for name in summary.by_label})
    yield _tools(summaries, criteria)
    shape = PageShape(tuple(criteria), shows_mode=len(summaries) > 1, success_above=success_above)
    left = MAX_TRANSCRIPT_BYTES
    for key in shown:
        place, size = places[key]
        left -= size if key in whole else 0
        yield from episode_html(folder.read_at(place), shape=shape, whole=key in whole and left >= 0)


def _spread(keys: Sequence[Key], most: int) -> list[Key]:
    """At most so many, evenly spread."""
    if len(keys) <= most:
        return list(keys)
    return [keys[place * len(keys) // most] for place in range(most)]


def _tools(summaries: Mapping[str, ModeSummary], criteria: Sequence[str]) -> str:
    """What the script filters by; hidden where no script runs."""
    selects = [_select("state", "all outcomes", ("right", "wrong", "failed"))]
    if len(summaries) > 1:
        selects.append(_select("mode", "mode: all", list(summaries)))
    for place, name in enumerate(criteria):
        values = {value for summary in summaries.values() for value in summary.by_label.get(name, {})}
        selects.append(_select(f"l{place}", f"{name}: all", sorted(values, key=natural)))
    return (
        '<div class="tools" hidden><input id="search" type="search" placeholder="words to find" aria-label="words">'
        + "".join(selects)
        + '<button id="open" type="button">open 50</button><button id="close" type="button">close all</button>'
        '<output id="count"></output></div>\n'
        '<p class="note"><span class="key" style="background:var(--policy);margin-left:0"></span>policy'
        '<span class="key" style="background:var(--world)"></span>environment'
        '<span class="key" style="background:var(--mark)"></span>gold answer</p>\n'
    )


def _select(key: str, everything: str, values: Sequence[str]) -> str:
    # values get a letter in front, so that an empty label differs from no choice
    options = "".join(f'<option value="={clean(value)}">{clean(value) or "(none)"}</option>' for value in values)
    return (
        f'<select data-filter="{key}" aria-label="{clean(everything)}"><option value="">{clean(everything)}</option>'
        f"{options}</select>"
    )
