"""The Markdown tables of benchmarks/engine.py's result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


def markdown(told: dict[str, Any]) -> str:
    """Tokens per second, then what is not speed; one pair of tables for each policy."""
    return "\n".join(line for name, result in told["policies"].items() for line in _policy(name, result)) + "\n"


def _policy(name: str, result: dict[str, Any]) -> Iterator[str]:
    sides = list(result["engines"])
    yield f"**{name}**, generated tokens/s (wall) and, in brackets, per CPU second\n"
    yield from _row(["dtype", "prefixes", "concurrency", *sides, "local / generate", "local / sorted"], head=True)
    for cell in result["cells"]:
        rates = [f"{cell['tokens_per_s'][side]:.0f} ({cell['tokens_per_cpu_s'][side]:.0f})" for side in sides]
        ratios = [
            f"{cell[key]['local']:.2f}" if "local" in cell[key] else "-"
            for key in ("vs_generate", "vs_generate_sorted")
        ]
        kind = "shared" if cell["shared"] else "unshared"
        yield from _row([cell["dtype"], kind, str(cell["concurrency"]), *rates, *ratios])
    yield ""
    yield from _row(["engine", "dtype", "gap max", "gap mean", "update s", "peak MB", "start s"], head=True)
    for side in sides:
        for dtype, found in result["engines"][side].items():
            update = "-" if found["update_s"] is None else f"{found['update_s']:.2f}"
            gaps = [f"{found['gap_max']:.1e}", f"{found['gap_mean']:.1e}"]
            yield from _row([side, dtype, *gaps, update, f"{found['peak_bytes'] / 1e6:.0f}", f"{found['start_s']:.1f}"])
    yield ""


def _row(cells: Sequence[str], *, head: bool = False) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
    if head:
        yield f"|{'---|' * len(cells)}"
