"""The line of an episode in episodes.jsonl, and the few numbers of it that statistics need.

Invariants: a line has everything that was said and everything that was measured, so a report needs the file alone; what
is unknown is null, never 0; a row read from a line equals the row the line was made of. Never files, never statistics.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trace_async.app.eval_recorder import Episode, Step
from trace_async.core.types import Json, Message, Turn


class Row(NamedTuple):
    """What statistics need of one episode."""

    mode: str
    task_index: int
    task_id: str
    labels: Mapping[str, str]
    failed: bool
    outcome: float  # NaN when it failed
    num_turns: int
    num_invalid: int
    sampled_tokens: int
    prompt_tokens: int
    context_tokens: int
    metrics: Mapping[str, float]  # NaN where unknown


def make_row(episode: Episode, *, mode: str, labels: Mapping[str, str]) -> Row:
    """The numbers of an episode."""
    return Row(
        mode=mode,
        task_index=episode.index,
        task_id=episode.task.task_id,
        labels=labels,
        failed=bool(episode.failure),
        outcome=episode.outcome,
        num_turns=len(episode.turns),
        num_invalid=episode.num_invalid,
        sampled_tokens=episode.sampled_tokens,
        prompt_tokens=episode.prompt_tokens,
        context_tokens=episode.context_tokens,
        metrics=episode.metrics,
    )


def make_line(episode: Episode, row: Row, *, seed: int) -> bytes:
    """One line of JSON with its line break; lone surrogates in what was said are escaped."""
    turns = [_turn(turn, step) for turn, step in zip(episode.turns, episode.steps, strict=True)]
    versions = [turn.version_min for turn in episode.turns] + [turn.version_max for turn in episode.turns]
    record = {
        "mode": row.mode,
        "index": row.task_index,
        "task_id": row.task_id,
        "labels": row.labels,
        "failure": episode.failure or None,
        "outcome": or_null(row.outcome),
        "end": episode.end,
        "metrics": {name: or_null(value) for name, value in row.metrics.items()},
        "num_turns": row.num_turns,
        "num_invalid": row.num_invalid,
        "sampled_tokens": row.sampled_tokens,
        "prompt_tokens": row.prompt_tokens,
        "context_tokens": row.context_tokens,
        "versions": [min(versions), max(versions)] if versions else None,
        "seed": seed,
        "wall_s": round(episode.wall_s, 4),
        "task": episode.task.data,
        "opening": _messages(episode.opening),
        "turns": turns,
    }
    return (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def read_row(record: Json) -> Row:
    """The numbers of a line that was read. KeyError, TypeError or ValueError when it is something else."""
    return Row(
        mode=str(record["mode"]),
        task_index=int(record["index"]),
        task_id=str(record["task_id"]),
        labels={str(name): str(value) for name, value in record["labels"].items()},
        failed=record["failure"] is not None,
        outcome=or_nan(record["outcome"]),
        num_turns=int(record["num_turns"]),
        num_invalid=int(record["num_invalid"]),
        sampled_tokens=int(record["sampled_tokens"]),
        prompt_tokens=int(record["prompt_tokens"]),
        context_tokens=int(record["context_tokens"]),
        metrics={str(name): or_nan(value) for name, value in record["metrics"].items()},
    )


def or_null(value: float) -> float | None:
    """What JSON can say of a number."""
    return value if math.isfinite(value) else None


def or_nan(value: float | None) -> float:
    """What JSON said."""
    return math.nan if value is None else float(value)


def _turn(turn: Turn, step: Step) -> dict[str, Any]:
    return {
        "role": "assistant",
        "text": step.action,
        "tokens": int(turn.action_ids.size),
        "valid": turn.valid,
        "reward": turn.reward,
        "process_score": or_null(turn.process_score),
        "stop": turn.stop.name.lower(),
        "versions": [turn.version_min, turn.version_max],
        "generate_s": round(turn.generate_s, 4),
        "environment_s": round(turn.environment_s, 4),
        "reply": _messages(step.result.messages),
        "reply_tokens": int(turn.observation_ids.size),
    }


def _messages(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "text": message.content} for message in messages]
