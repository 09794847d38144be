"""Checkpoints of a run: one folder per step, there as a whole or not at all.

    step_XXXXXX          a resumed run may start from it: the `keep` newest
    best_XXXXXX          kept for its policy only; the ledger may have forgotten what a run from there would need
    step_XXXXXX.tmp      being written, or left by a crash
    step_XXXXXX.damaged  was found damaged at a start and set aside

Invariants: a folder has its final name only when every file in it is on disk (written aside, synced, renamed);
`files.json`, written last, names every other file with size and sha256, and a folder that is not exactly that is never
started from; a checkpoint is never rewritten; the epoch grows with every start, also when no checkpoint was made since
the last. Never knows what is in a checkpoint, except that `STATE` is in it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from trace_async.core.types import Json
from trace_async.disk import sync
from trace_async.errors import UserError

log = logging.getLogger(__name__)

STATE = "learner.json"
"""The file that `state` of `write_checkpoint` goes to."""

FILES = "files.json"
"""The list of the other files."""

_NAME = re.compile(r"step_(\d{6,})", re.ASCII)
_BEST = re.compile(r"best_(\d{6,})", re.ASCII)
_ASIDE, _DAMAGED = ".tmp", ".damaged"


def write_checkpoint(
    root: Path, *, step: int, state: Json, fill: Callable[[Path], None], success: float = math.nan
) -> None:
    """Writes root/step_XXXXXX unless it is there.

    `fill` writes further files into the folder it is given; `success` is what `drop_old` goes by, NaN for unknown.
    Blocks for as long as the disk takes.
    """
    final = root / f"step_{step:06d}"
    if final.exists():
        return
    aside = root / (final.name + _ASIDE)
    _remove_aside(root)
    aside.mkdir(parents=True)
    fill(aside)
    (aside / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    paths = sorted(aside.rglob("*"), reverse=True)
    files = {str(path.relative_to(aside)): _entry(path) for path in reversed(paths) if path.is_file()}
    for path in paths:
        sync(path)
    listed = {"step": step, "success": None if math.isnan(success) else success, "files": files}
    (aside / FILES).write_text(json.dumps(listed, allow_nan=False, indent=1), encoding="utf-8")
    sync(aside / FILES)
    sync(aside)
    os.replace(aside, final)
    sync(root)


def drop_old(root: Path, *, keep: int, keep_best: bool) -> int:
    """Deletes all but the `keep` newest and, with `keep_best`, the most successful; returns the oldest step kept.

    Of equally successful ones the newest is the best. It is renamed when it is not among the newest any more.
    """
    steps = list_steps(root)
    folders = {step: root / f"step_{step:06d}" for step in steps}
    kept = steps[-keep:]
    former = [path for path in root.iterdir() if _BEST.fullmatch(path.name)]
    best = next(iter(_by_success([*former, *folders.values()])), None) if keep_best else None
    for step in steps[:-keep]:
        if folders[step] == best:
            best = root / f"best_{step:06d}"
            os.replace(folders[step], best)
            sync(root)
        else:
            shutil.rmtree(folders[step])
    for path in former:
        if path != best:
            shutil.rmtree(path)
    return kept[0]


def newest_checkpoint(root: Path) -> Path | None:
    """The folder of the highest step that is whole; None when there is none at all.

    Removes what a crash left half-written, sets damaged ones aside, and says so. Raises UserError when there are
    checkpoints and all are damaged: the ledger has forgotten what a run from the start would need.
    """
    _remove_aside(root)
    damaged: dict[Path, str] = {}
    for step in reversed(list_steps(root)):
        folder = root / f"step_{step:06d}"
        if (fault := find_fault(folder)) is None:
            _set_aside(damaged, instead=folder)
            return folder
        damaged[folder] = fault
    if damaged:
        said = "; ".join(f"{folder.name}: {fault}" for folder, fault in damaged.items())
        raise UserError(f"no checkpoint in {root} is whole ({said}); restore one from a copy, or start a new run")
    return None


def find_checkpoint(root: Path, *, best: bool = False) -> Path | None:
    """The newest whole checkpoint, or the most successful; None without any. Changes nothing, so a run may go on."""
    steps = [root / f"step_{step:06d}" for step in reversed(list_steps(root))]
    former = [path for path in root.iterdir() if _BEST.fullmatch(path.name)] if root.is_dir() else []
    folders = _by_success([*steps, *former]) if best else [*steps, *former]
    return next((folder for folder in folders if find_fault(folder) is None), None)


def find_fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint's files; None when they are those that were written. Reads all of them."""
    try:
        listed = json.loads((folder / FILES).read_text(encoding="utf-8"))["files"]
        if STATE not in listed:
            return f"{FILES} does not list {STATE}"
        for name, entry in listed.items():
            if (found := _entry(folder / name)) != entry:
                return f"{name} has {found}, written was {entry}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def read_state(folder: Path, name: str = STATE) -> Json:
    """The `state` of a checkpoint, or another JSON object in it."""
    state = json.loads((folder / name).read_text(encoding="utf-8"))
    assert isinstance(state, dict)
    return state


def list_steps(root: Path) -> list[int]:
    """Steps with a checkpoint that a run might start from, in order."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for path in root.iterdir() if (match := _NAME.fullmatch(path.name)))


def next_epoch(file: Path) -> int:
    """Number of this start, from 1; durable before it returns."""
    epoch = int(file.read_text(encoding="ascii")) + 1 if file.exists() else 1
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(file.name + _ASIDE)
    aside.write_text(str(epoch), encoding="ascii")
    sync(aside)
    os.replace(aside, file)
    sync(file.parent)
    return epoch


def _entry(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _by_success(folders: list[Path]) -> list[Path]:
    """Those of known success, the best first, of equal ones the newest."""
    rated: list[tuple[float, int, Path]] = []
    for folder in folders:
        try:
            listed = json.loads((folder / FILES).read_text(encoding="utf-8"))
            rated.append((float(listed["success"]), int(listed["step"]), folder))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # damaged, or nothing is known of its success: not the best
    return [folder for _, _, folder in sorted(rated, reverse=True)]


def _set_aside(damaged: dict[Path, str], *, instead: Path) -> None:
    for folder, fault in damaged.items():
        aside = folder.with_name(folder.name + _DAMAGED)
        log.warning("checkpoint %s is damaged (%s); it is now %s, %s is used", folder, fault, aside.name, instead.name)
        if aside.exists():
            shutil.rmtree(aside)
        os.replace(folder, aside)


def _remove_aside(root: Path) -> None:
    for path in root.glob("step_*" + _ASIDE):
        shutil.rmtree(path)
