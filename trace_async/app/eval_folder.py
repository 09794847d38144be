"""The folder of one evaluation: its settings, its episodes line by line, and who may add to them.

    OUT/settings.json    what was asked; an evaluation goes on only with the same
    OUT/episodes.jsonl   one line an episode, in the order of their ends
    OUT/summary.json     what they came to
    OUT/report.html      the same to read, with episodes
    OUT/lock             held by the one process that plays

Invariants: a line is there as a whole or is cut off at the next start; of several lines of one task the last counts; a
folder never mixes episodes of different settings. Never plays, never counts.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from trace_async.app.eval_recorder import Episode
from trace_async.app.eval_records import Row, make_line, make_row, read_row
from trace_async.core.types import Json
from trace_async.errors import UserError
from trace_async.run_folder import read_json, write_json

_ABSENT = "(absent)"

Key: TypeAlias = tuple[str, int]
"""Mode and index of an episode."""


@dataclass(frozen=True, slots=True)
class EvalFolder:
    """Paths inside an evaluation's folder."""

    root: Path

    @property
    def settings(self) -> Path:
        return self.root / "settings.json"

    @property
    def episodes(self) -> Path:
        return self.root / "episodes.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    def records(self) -> Iterator[tuple[int, int, Json]]:
        """Every line: the byte at which it starts, how many it has, and the record. A torn last line is left out.

        UserError for a line that is no record of an episode.
        """
        if not self.episodes.exists():
            return
        place = 0
        with self.episodes.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield place, len(line), self._parse(line, number)
                place += len(line)

    def read_at(self, place: int) -> Json:
        """The line that starts at a byte."""
        with self.episodes.open("rb") as file:
            file.seek(place)
            return self._parse(file.readline(), 0)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            record = json.loads(line)
            read_row(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.episodes}, line {number}: no record of an episode ({type(error).__name__}: {error}); delete "
                "the line and its task is played again, or choose another --out"
            ) from error
        assert isinstance(record, dict)
        return record


class EpisodeLog:
    """Episodes that have been played: their numbers, and where there is a file, a line of it for each."""

    def __init__(self, file: BinaryIO | None, rows: Mapping[Key, Row]) -> None:
        self._file = file
        self.rows = dict(rows)

    def add(self, episode: Episode, *, mode: str, labels: Mapping[str, str], seed: int) -> None:
        """Keeps the numbers of an episode; hands its line to the operating system."""
        row = make_row(episode, mode=mode, labels=labels)
        if self._file is not None:
            self._file.write(make_line(episode, row, seed=seed))
            self._file.flush()
        self.rows[mode, row.task_index] = row


@contextmanager
def open_log(folder: EvalFolder, settings: Json, *, fixed: Sequence[str]) -> Iterator[EpisodeLog]:
    """The folder's episodes, locked for the length of the block; a torn last line is cut off.

    UserError when another process has the folder, when it holds something else, or when `settings` differ from those it
    was begun with in one of the `fixed` keys.
    """
    with _locked(folder):
        _keep_settings(folder, settings, fixed=fixed)
        rows: dict[Key, Row] = {}
        for _, _, record in folder.records():
            row = read_row(record)
            rows[row.mode, row.task_index] = row
        with folder.episodes.open("ab") as file:
            file.truncate(_end_of_last_line(folder.episodes))
            yield EpisodeLog(file, rows)


@contextmanager
def _locked(folder: EvalFolder) -> Iterator[None]:
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"--out {folder.root}: cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {folder.root}: another evaluation writes there; wait for it, or choose another folder"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _keep_settings(folder: EvalFolder, settings: Json, *, fixed: Sequence[str]) -> None:
    """Refuses settings that the folder's episodes do not have; writes those that may differ."""
    try:
        begun = read_json(folder.settings)
    except ValueError as error:
        raise UserError(f"{folder.settings}: not the settings of an evaluation ({error})") from error
    now = json.loads(json.dumps(settings))
    if begun is None:
        _check_empty(folder)
    elif changes := [change for key in fixed for change in _differences(begun.get(key), now.get(key), key)]:
        raise UserError(
            f"--out {folder.root} was begun with other settings, so its episodes would not be comparable:\n"
            + "\n".join(f"  {change}" for change in changes)
            + "\nchoose another --out, or ask for what was asked there"
        )
    if begun != now:
        write_json(folder.settings, settings)


def _check_empty(folder: EvalFolder) -> None:
    others = sorted(path.name for path in folder.root.iterdir() if path != folder.lock)
    if others:
        raise UserError(
            f"--out {folder.root}: holds {', '.join(others[:3])} and is no evaluation; choose another folder"
        )


def _differences(begun: object, now: object, path: str) -> Iterator[str]:
    """Each value that differs, by the path to it."""
    if isinstance(begun, dict) and isinstance(now, dict):
        for key in sorted({*begun, *now}):
            yield from _differences(begun.get(key, _ABSENT), now.get(key, _ABSENT), f"{path}.{key}")
    elif begun != now:
        yield f"{path}: {_shown(begun)} there, {_shown(now)} now"


def _shown(value: object) -> str:
    return _ABSENT if value in (None, _ABSENT) else json.dumps(value)


def _end_of_last_line(path: Path) -> int:
    """The byte behind the last line break."""
    end = 0
    with path.open("rb") as file:
        for line in file:
            end += len(line) if line.endswith(b"\n") else 0
    return end
