"""Tables of the retrieval benchmark, printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def tell_speed(rows: Iterable[dict[str, Any]], *, num_passages: int, num_queries: int) -> None:
    _say(f"{num_passages} passages, {num_queries} single queries, top 3, CPU time\n")
    _table(
        ("engine", "index s", "median ms", "p95 ms", "p99 ms"),
        [(row["engine"], f"{row['index_s']:.1f}", *(f"{row[f'p{q}_ms']:.2f}" for q in (50, 95, 99))) for row in rows],
    )


def tell_recall(recall: Iterable[dict[str, Any]], oracle: Iterable[dict[str, Any]]) -> None:
    measures = ("R@3", "all@3", "R@5", "all@5")
    _say("The question as the query: share of gold paragraphs found, share of questions with all of them\n")
    _table(
        ("engine", "set", "questions", *measures),
        [
            (row["engine"], row["set"], str(row["questions"]), *(f"{row[name]:.2f}" for name in measures))
            for row in recall
        ],
    )
    _say("Knowing what to ask, top 3: share of pages found, share of questions with all of them\n")
    _table(
        ("engine", "set", "query", "pages", "all"),
        [
            (row["engine"], row["set"], row["query"], f"{row['hops_found']:.2f}", f"{row['all_hops_found']:.2f}")
            for row in oracle
        ],
    )


def tell_server(rows: Iterable[dict[str, Any]]) -> None:
    _say("The server, wall clock at the clients\n")
    _table(
        ("side", "clients", "requests", "errors", "queries/s", "p50 ms", "p95 ms", "p99 ms", "server CPU ms/query"),
        [
            (
                row["side"],
                *(str(row[name]) for name in ("clients", "requests", "errors")),
                f"{row['queries_per_s']:.0f}",
                *(f"{row[f'p{q}_ms']:.0f}" for q in (50, 95, 99)),
                f"{row['server_cpu_ms']:.2f}",
            )
            for row in rows
        ],
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    for row in (head, *rows):
        _say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    _say("")


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201
