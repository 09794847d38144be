"""One episode as HTML: a row to find it by, and everything that was said.

What policies and environments say is hostile: every word of it is escaped here, and nothing of it ever becomes a tag,
an attribute's name or a class. Never reads files.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from trace_async.app.eval_records import or_nan, read_row
from trace_async.core.outcomes import is_success
from trace_async.core.types import Json

MAX_TEXT_CHARS = 12_000
"""Of one text on the page; the rest is in episodes.jsonl."""

_MAX_TITLE_CHARS = 300
_MAX_DATA_CHARS = 6_000
_MAX_LAST_CHARS = 4_000  # looked at for the last pair of tags, which takes quadratic time
_MARKS = {"right": "✓", "wrong": "✗", "failed": "–"}
_ENDS = {
    "terminated": "the task ended",
    "truncated": "ended at the environment's own limit",
    "turn_limit": "ended at tree.max_turns",
    "context": "ended at a full context",
    "failed": "not played",
}
_STOPS = {"length": "cut at the token limit", "abort": "given up by the engine"}
_IN_ROW = ("em", "f1")
"""Metrics that are shown without opening an episode, where there are such."""

_TAG = r"</?[A-Za-z_|][\w|:.-]{0,40}>"
_LAST_PAIR = re.compile(r".*<([A-Za-z_][\w:.-]{0,40})>(.*?)</\1>", re.DOTALL)
_CONTROLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}


def state_of(record: Json, success_above: float) -> str:
    """right, wrong or failed."""
    if record["failure"] is not None:
        return "failed"
    return "right" if is_success(or_nan(record["outcome"]), success_above) else "wrong"


class PageShape(NamedTuple):
    """What all episodes of a page have in common."""

    criteria: tuple[str, ...]  # names of labels
    shows_mode: bool  # there are several
    success_above: float  # of the outcome


def episode_html(record: Json, *, shape: PageShape, whole: bool) -> Iterator[str]:
    """The episode's element in pieces; with everything that was said if `whole`, else only its row."""
    state = state_of(record, shape.success_above)
    data = {"mode": record["mode"], "state": state}
    data |= {f"l{place}": record["labels"].get(name, "") for place, name in enumerate(shape.criteria)}
    attributes = " ".join(f'data-{name}="{clean(value)}"' for name, value in data.items())
    row = _row(record, state, shows_mode=shape.shows_mode)
    if not whole:
        yield f'<div class="episode {state}" {attributes}><div class="row">{row}</div></div>\n'
        return
    yield f'<details class="episode {state}" {attributes}><summary class="row">{row}</summary>'
    yield '<div class="body">'
    yield _facts(record, state)
    yield from _transcript(record)
    yield "</div></details>\n"


def clean(text: object, *, limit: int = MAX_TEXT_CHARS) -> str:
    """Escaped for text and for attributes in double quotes; control characters as pictures of themselves."""
    words = str(text)
    left_out = len(words) - limit
    safe = escape(words[:limit].translate(_CONTROLS))
    return f"{safe} … ({left_out:,} more characters)" if left_out > 0 else safe


def say(text: str, pattern: re.Pattern[str]) -> str:
    """A text in <pre>, with tags coloured and gold answers marked. `pattern` is of `highlights`."""
    pieces = []
    for place, piece in enumerate(pattern.split(text[:MAX_TEXT_CHARS])):
        safe = escape(piece.translate(_CONTROLS))
        if place % 2 == 0:
            pieces.append(safe)
        else:
            pieces.append(f'<span class="tag">{safe}</span>' if piece.startswith("<") else f"<mark>{safe}</mark>")
    if len(text) > MAX_TEXT_CHARS:
        more = f"{len(text) - MAX_TEXT_CHARS:,}"
        pieces.append(f'\n<span class="left">… {more} more characters in episodes.jsonl</span>')
    return f"<pre>{''.join(pieces)}</pre>"


def highlights(answers: Sequence[str]) -> re.Pattern[str]:
    """Splits a text at tags and at these answers; one group, so that every second piece is one of them."""
    golds = sorted(
        {answer.strip() for answer in answers if len(answer.strip()) > 1}, key=lambda gold: (-len(gold), gold)
    )
    words = [rf"(?<!\w){re.escape(gold)}(?!\w)" for gold in golds]
    return re.compile(f"({'|'.join([_TAG, *words])})", re.IGNORECASE)


def last_words(text: str) -> str:
    """What an answer boils down to: behind the thoughts, inside the last pair of tags where there is one."""
    spoken = text.rpartition("</think>")[2][-_MAX_LAST_CHARS:]
    pair = _LAST_PAIR.match(spoken)
    return (pair.group(2) if pair else spoken).strip()


def question_of(record: Json) -> str:
    """The question of a task that has one, else its name."""
    question = record["task"].get("question") if isinstance(record["task"], Mapping) else None
    return question if isinstance(question, str) and question.strip() else str(record["task_id"])


def answers_of(record: Json) -> list[str]:
    """Gold answers of a task that has some, under `answers` or `answer`."""
    task = record["task"] if isinstance(record["task"], Mapping) else {}
    found = task.get("answers", task.get("answer"))
    found = [found] if isinstance(found, str) else found
    return [answer for answer in found if isinstance(answer, str)] if isinstance(found, list) else []


def _row(record: Json, state: str, *, shows_mode: bool) -> str:
    row = read_row(record)
    chips = [*([record["mode"]] if shows_mode else []), *(value for value in row.labels.values() if value)]
    shown = [f"{name} {_brief(row.metrics[name])}" for name in _IN_ROW if name in row.metrics]
    shown.append("not played" if row.failed else "1 turn" if row.num_turns == 1 else f"{row.num_turns} turns")
    return (
        f'<span class="state">{_MARKS[state]}</span>'
        f'<span class="title">{clean(question_of(record), limit=_MAX_TITLE_CHARS)}</span>'
        + "".join(f'<span class="chip">{clean(chip, limit=60)}</span>' for chip in chips)
        + f'<span class="numbers">{clean(" · ".join(shown))}</span>'
    )


def _facts(record: Json, state: str) -> str:
    row, answers = read_row(record), answers_of(record)
    facts: list[tuple[str, str, str]] = [("task", clean(record["task_id"]), "")]
    if row.failed:
        facts.append(("failure", clean(record["failure"]), "wrong"))
    if answers:
        facts.append(("gold", " &nbsp;·&nbsp; ".join(clean(answer, limit=500) for answer in answers), ""))
        if record["turns"]:
            ended = record["end"] == "terminated"
            said = last_words(record["turns"][-1]["text"]) if ended else f"(none: {_ENDS.get(record['end'], '')})"
            facts.append(("prediction", clean(said, limit=1000) or "(empty)", state))
    if row.labels:
        facts.append(("labels", clean(", ".join(f"{name} {value}" for name, value in row.labels.items())), ""))
    if not row.failed:
        measured = {"outcome": row.outcome, **row.metrics}
        measures = ", ".join(f"{name} {_brief(value)}" for name, value in measured.items())
        facts += [("measures", clean(measures), ""), ("spent", clean(_spent(record)), "")]
    return "<dl>" + "".join(f'<dt>{name}</dt><dd class="{css}">{value}</dd>' for name, value, css in facts) + "</dl>"


def _spent(record: Json) -> str:
    row, versions = read_row(record), "–".join(map(str, dict.fromkeys(record["versions"])))
    return (
        f"{row.num_turns} turns ({row.num_invalid} unreadable), {row.sampled_tokens:,} sampled tokens, context of "
        f"{row.context_tokens:,}; {record['wall_s']:.1f} s, policy version {versions}; "
        f"{_ENDS.get(record['end'], record['end'])}"
    )


def _transcript(record: Json) -> Iterator[str]:
    pattern, plain = highlights(answers_of(record)), highlights([])
    data = json.dumps(record["task"], ensure_ascii=False, indent=1)
    yield f'<details class="fold"><summary>task data</summary><pre>{clean(data, limit=_MAX_DATA_CHARS)}</pre></details>'
    if record["opening"]:
        yield f'<details class="fold"><summary>opening ({clean(record["prompt_tokens"])} tokens)</summary>'
        for message in record["opening"]:
            yield _box("prompt", f"<b>{clean(message['role'])}</b>", say(str(message["text"]), plain))
        yield "</details>"
    for number, turn in enumerate(record["turns"], start=1):
        yield _box("policy", f"<b>turn {number}</b> · {_turn_facts(turn)}", say(str(turn["text"]), pattern))
        for message in turn["reply"]:
            head = f"<b>{clean(message['role'])}</b> · {clean(turn['reply_tokens'])} tokens"
            yield _box("world", head, say(str(message["text"]), pattern))


def _brief(value: float) -> str:
    """A number of one episode."""
    return "-" if math.isnan(value) else f"{round(value, 3):g}"


def _turn_facts(turn: Mapping[str, Any]) -> str:
    facts = [f"{turn['tokens']} tokens"]
    if turn["stop"] in _STOPS:
        facts.append(_STOPS[turn["stop"]])
    if turn["reward"]:
        facts.append(f"reward {turn['reward']:g}")
    words = clean(" · ".join(facts))
    return words if turn["valid"] else f'{words} · <span class="bad">unreadable</span>'


def _box(kind: str, head: str, body: str) -> str:
    return f'<div class="say {kind}"><h4>{head}</h4>{body}</div>'
