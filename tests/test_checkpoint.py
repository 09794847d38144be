"""Checkpoints are there as a whole or not at all, and the epoch grows with every start."""

from __future__ import annotations

from pathlib import Path

import pytest

from trace_async.errors import UserError
from trace_async.learning.checkpoint import list_steps, newest_checkpoint, next_epoch, read_state, write_checkpoint


def fill(directory: Path) -> None:
    (directory / "weights").mkdir()
    (directory / "weights" / "a.bin").write_bytes(b"abc")


def write(root: Path, step: int, *, keep: int = 2, value: int = 0) -> int:
    return write_checkpoint(root, step=step, state={"value": value}, fill=fill, keep=keep)


def test_the_newest_checkpoint_holds_state_and_files(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write(tmp_path, 20, value=7)

    newest = newest_checkpoint(tmp_path)

    assert newest == tmp_path / "step_000020"
    assert read_state(newest) == {"value": 7}
    assert (newest / "weights" / "a.bin").read_bytes() == b"abc"


def test_only_the_newest_are_kept_and_the_oldest_kept_is_told(tmp_path: Path) -> None:
    assert [write(tmp_path, step) for step in (2, 4, 6)] == [2, 2, 4]
    assert list_steps(tmp_path) == [4, 6]


def test_steps_are_ordered_as_numbers_beyond_six_digits(tmp_path: Path) -> None:
    for step in (999_999, 1_000_000):
        write(tmp_path, step)

    assert list_steps(tmp_path) == [999_999, 1_000_000]


def test_a_write_that_breaks_off_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    def break_off(directory: Path) -> None:
        fill(directory)
        raise OSError("disk full")

    write(tmp_path, 1)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, step=2, state={}, fill=break_off, keep=2)

    assert newest_checkpoint(tmp_path) == tmp_path / "step_000001"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001"]
    write(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_000002"


def test_a_checkpoint_is_never_written_again(tmp_path: Path) -> None:
    write(tmp_path, 3, value=1)
    write(tmp_path, 3, value=2)

    assert read_state(tmp_path / "step_000003") == {"value": 1}


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None


def test_a_damaged_state_names_the_folder_to_delete(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step_000003" / "learner.json").write_text("{")

    with pytest.raises(UserError, match=r"delete .*step_000003 to go on from the one before"):
        read_state(tmp_path / "step_000003")


def test_every_start_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path / "run" / "epoch") for _ in range(3)] == [1, 2, 3]
