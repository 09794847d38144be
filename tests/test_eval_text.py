"""Tables of an evaluation: what they show, and that it fits a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from trace_async.app.eval_summary import Measure, ModeSummary, Part
from trace_async.app.eval_text import tables

MEASURES = (
    *("success", "outcome", "em", "f1", "cover_em", "support_precision", "support_recall", "support_f1", "searches"),
    *("unreadable", "turns", "invalid_share", "sampled_tokens", "prompt_tokens", "context_tokens"),
)


def printed(names: tuple[str, ...]) -> list[str]:
    values = {name: 1234.5 if name.endswith("tokens") else 0.987 for name in names}
    part = Part(512, 0, {name: Measure(value, value, value, 512) for name, value in values.items()})
    labels = {"kind": {"bridge_comparison": part}}
    out = io.StringIO()
    console = Console(file=out, width=80)
    for table in tables({"sampled": ModeSummary(part, labels)}):
        console.print(table)
    return out.getvalue().splitlines()


def test_tables_by_label_show_the_main_measures_whole_in_80_columns() -> None:
    lines = printed(MEASURES)
    begin = next(i for i, line in enumerate(lines) if "by kind" in line)
    shown = " ".join(lines[begin:]).split()
    assert {"n", "success", "em", "f1", "cover", "support", "searches", "turns", "sampled", "tokens"} <= set(shown)
    assert {"512", "98.7", "0.987", "1,234.5"} <= set(" ".join(shown).replace("%", "").split())
    assert not {"outcome", "precision", "unreadable", "invalid", "prompt", "context"} & set(shown)
    assert "…" not in "".join(shown)
    assert max(map(len, lines)) <= 80
    overall = "\n".join(lines[:begin])
    assert all(name in overall for name in MEASURES)


def test_measures_that_are_not_there_have_no_column() -> None:
    lines = printed(("success", "turns"))
    heading = next(line for line in lines[::-1] if "success" in line)
    assert heading.split() == ["n", "success", "turns"]
