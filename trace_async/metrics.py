"""The run's numbers: one JSON object per line in `metrics.jsonl`, and the same scalars to TensorBoard when installed.

Invariants: a row is on disk when `write` returns; only the last line of a file can be torn (by a crash in the middle
of a write) and a torn line counts as never written; keys are `stage/what_unit` and are listed in docs/metrics.md;
unknown is null, never 0.

Never aggregates: whoever writes a row has reduced it.
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol, TypeAlias

Value: TypeAlias = float | int | str | bool | Sequence[Sequence[float]] | None
"""A scalar, or a small table of finite numbers, which TensorBoard does not get."""

Row: TypeAlias = Mapping[str, Value]

STEP = "training/global_step"
"""The key that orders rows; rows without it go to TensorBoard nowhere."""


class ScalarWriter(Protocol):
    """The part of `torch.utils.tensorboard.SummaryWriter` that is used here."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """One point of one curve."""
        ...

    def close(self) -> None:
        """Flush and stop."""
        ...


class MetricsWriter:
    """Appends rows; a context manager. Cuts a torn last line off when it opens a file that a crash left behind."""

    def __init__(self, path: Path, *, scalars: ScalarWriter | None = None) -> None:
        self._scalars = scalars
        _cut_torn_line(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, row: Row) -> None:
        """Appends one row and flushes it; NaN and infinities become null."""
        clean = {key: _finite(value) for key, value in row.items()}
        self._file.write(json.dumps(clean, allow_nan=False, separators=(",", ":")) + "\n")
        self._file.flush()
        step = clean.get(STEP)
        if self._scalars is None or not isinstance(step, int):
            return
        for key, value in clean.items():
            if isinstance(value, int | float) and key != STEP:
                self._scalars.add_scalar(key, float(value), step)

    def close(self) -> None:
        """Closes file and TensorBoard; may be called twice."""
        self._file.close()
        if self._scalars is not None:
            self._scalars.close()
            self._scalars = None


class RowReader:
    """Reads a growing file: each call returns the complete rows added since the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[dict[str, object]]:
        """New rows in file order; [] while the file does not exist. A file that shrank is read from its start."""
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return []
        if size < self._offset:
            self._offset = 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(size - self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines() if line.strip()]


def read_rows(path: Path) -> list[dict[str, object]]:
    """Every complete row, the last one winning for a step that a resumed run made again; rows ordered by step."""
    by_step: dict[int, dict[str, object]] = {}
    others: list[dict[str, object]] = []
    for row in RowReader(path).read_new():
        step = row.get(STEP)
        if isinstance(step, int):
            by_step[step] = row
        else:
            others.append(row)
    return [*others, *(by_step[step] for step in sorted(by_step))]


def column(rows: Sequence[Mapping[str, object]], key: str) -> list[float]:
    """One key over the rows; NaN where a row does not have it."""
    values = (row.get(key) for row in rows)
    return [float(value) if isinstance(value, int | float) else math.nan for value in values]


def open_tensorboard(directory: Path) -> ScalarWriter | None:
    """TensorBoard's writer when the `tensorboard` extra is installed, else None. Imports torch."""
    try:
        module = importlib.import_module("torch.utils.tensorboard")
    except ImportError:
        return None
    writer: ScalarWriter = module.SummaryWriter(str(directory))
    return writer


def _finite(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        data = file.read()
        keep = data.rfind(b"\n") + 1
        if keep < len(data):
            file.truncate(keep)
            file.flush()
            os.fsync(file.fileno())
