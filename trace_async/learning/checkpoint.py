"""Checkpoints of a run: one folder per step, there as a whole or not at all.

Invariants: a folder has its final name only when every file in it is on disk (written aside, synced, renamed), so the
newest name is always usable; a checkpoint is never rewritten; the epoch grows with every start, also when no checkpoint
was made since the last. Never knows what is in a checkpoint, except that `STATE` is in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trace_async.core.types import Json
from trace_async.errors import UserError

STATE = "learner.json"
"""The file that `state` of `write_checkpoint` goes to."""

_NAME = re.compile(r"step_(\d{6,})", re.ASCII)
_ASIDE = ".tmp"


def write_checkpoint(root: Path, *, step: int, state: Json, fill: Callable[[Path], None], keep: int) -> int:
    """Writes root/step_XXXXXX unless it is there, and drops all but the `keep` newest; returns the oldest step kept.

    `fill` writes further files into the folder it is given. Blocks for as long as the disk takes.
    """
    final = root / f"step_{step:06d}"
    if not final.exists():
        aside = root / (final.name + _ASIDE)
        _remove_aside(root)
        aside.mkdir(parents=True)
        fill(aside)
        (aside / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
        for path in sorted(aside.rglob("*"), reverse=True):
            _sync(path)
        _sync(aside)
        os.replace(aside, final)
        _sync(root)
    steps = list_steps(root)
    for old in steps[:-keep]:
        shutil.rmtree(root / f"step_{old:06d}")
    return steps[-keep:][0]


def newest_checkpoint(root: Path) -> Path | None:
    """The folder of the highest step; None when there is none. Removes what a crash left half-written."""
    _remove_aside(root)
    steps = list_steps(root)
    return root / f"step_{steps[-1]:06d}" if steps else None


def read_state(folder: Path, name: str = STATE) -> Json:
    """The `state` of a checkpoint, or another JSON object in it. Raises UserError when somebody damaged it."""
    try:
        state = json.loads((folder / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / name} cannot be read ({error}); delete {folder} to go on from the one before"
        ) from error
    assert isinstance(state, dict)
    return state


def list_steps(root: Path) -> list[int]:
    """Steps with a checkpoint, in order."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))


def next_epoch(file: Path) -> int:
    """Number of this start, from 1; durable before it returns."""
    epoch = int(file.read_text(encoding="ascii")) + 1 if file.exists() else 1
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(file.name + _ASIDE)
    aside.write_text(str(epoch), encoding="ascii")
    _sync(aside)
    os.replace(aside, file)
    _sync(file.parent)
    return epoch


def _remove_aside(root: Path) -> None:
    for path in root.glob("step_*" + _ASIDE):
        shutil.rmtree(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
