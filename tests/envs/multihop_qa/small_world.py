"""One small generated world for all tests of this folder, and kits on it."""

from __future__ import annotations

from functools import cache
from typing import Any

from envs.registry import load_environment
from trace_async.environment import EnvironmentKit

WORLD: dict[str, Any] = {
    "pages": 600,
    "questions": 150,
    "kinds": ["chain", "comparison", "superlative", "count"],
    "style": "plain",
}
OPTIONS: dict[str, Any] = {
    "world": WORLD,
    "tags": {"style": "words"},
    "retriever": {"kind": "fts5"},
    "top_k": 1,
    "max_turns": 9,
}


def make_kit(**options: Any) -> EnvironmentKit:
    """A new kit; these options over OPTIONS."""
    return load_environment("multihop_qa", {**OPTIONS, **options})


@cache
def small_kit() -> EnvironmentKit:
    """The kit of OPTIONS, its world and index made once."""
    return make_kit()
