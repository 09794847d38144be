"""Checkpoints are there as a whole or not at all, a damaged one is never started from, and the epoch always grows."""

from __future__ import annotations

import json
import logging
import math
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trace_async.errors import UserError
from trace_async.learning.checkpoint import (
    drop_old,
    find_fault,
    list_steps,
    newest_checkpoint,
    next_epoch,
    read_state,
    write_checkpoint,
)


def fill(directory: Path) -> None:
    (directory / "weights").mkdir()
    (directory / "weights" / "a.bin").write_bytes(b"abc")
    (directory / "empty").touch()


def write(root: Path, step: int, *, value: int = 0, success: float = math.nan) -> None:
    write_checkpoint(root, step=step, state={"value": value}, fill=fill, success=success)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ---- whole or not at all -------------------------------------------------------------------------------------------


def test_the_newest_checkpoint_holds_state_and_files(tmp_path: Path) -> None:
    write(tmp_path, 5)
    write(tmp_path, 20, value=7)

    newest = newest_checkpoint(tmp_path)

    assert newest == tmp_path / "step_000020"
    assert read_state(newest) == {"value": 7}
    assert (newest / "weights" / "a.bin").read_bytes() == b"abc"


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
        write_checkpoint(tmp_path, step=2, state={}, fill=break_off)

    assert newest_checkpoint(tmp_path) == tmp_path / "step_000001"
    assert names(tmp_path) == ["step_000001"]
    write(tmp_path, 2)
    assert newest_checkpoint(tmp_path) == tmp_path / "step_000002"


def test_a_checkpoint_is_never_written_again(tmp_path: Path) -> None:
    write(tmp_path, 3, value=1)
    write(tmp_path, 3, value=2)

    assert read_state(tmp_path / "step_000003") == {"value": 1}


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "missing") is None
    assert newest_checkpoint(tmp_path) is None


# ---- damage --------------------------------------------------------------------------------------------------------

FILES = ("files.json", "learner.json", "weights/a.bin", "empty")


def damage(file: Path, how: str) -> None:
    match how:
        case "missing":
            file.unlink()
        case "torn":
            file.write_bytes(file.read_bytes()[:-1] if file.stat().st_size else b"more")
        case "flipped":
            data = bytearray(file.read_bytes() or b"x")
            data[len(data) // 2] ^= 1
            file.write_bytes(data)


@pytest.mark.parametrize("how", ["missing", "torn", "flipped"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_set_aside_with_a_warning_that_names_the_file(
    tmp_path: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, 3, value=3)
    write(tmp_path, 6, value=6)
    damage(tmp_path / "step_000006" / name, how)

    with caplog.at_level(logging.WARNING):
        newest = newest_checkpoint(tmp_path)

    assert newest == tmp_path / "step_000003"
    assert names(tmp_path) == ["step_000003", "step_000006.damaged"]
    assert "step_000006 is damaged (" in caplog.text
    assert "step_000003 is used" in caplog.text
    write(tmp_path, 6, value=60)  # the run comes to that step again
    assert read_state(newest_checkpoint(tmp_path) or tmp_path) == {"value": 60}


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_change_of_any_byte_of_any_file_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    write(tmp_path / "x", 3)
    folder = tmp_path / "x" / "step_000003"
    assert find_fault(folder) is None
    name = data.draw(st.sampled_from(FILES[1:3]))
    before = (folder / name).read_bytes()
    after = data.draw(st.binary(max_size=len(before) + 2))

    (folder / name).write_bytes(after)

    fault = find_fault(folder)
    assert (fault is None) == (after == before)
    assert fault is None or name in fault


def test_what_was_set_aside_before_makes_room_for_the_same_step_damaged_again(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for _ in range(2):
        write(tmp_path, 2)
        (tmp_path / "step_000002" / "learner.json").write_text("{")
        assert newest_checkpoint(tmp_path) == tmp_path / "step_000001"

    assert names(tmp_path) == ["step_000001", "step_000002.damaged"]


def test_a_run_whose_every_checkpoint_is_damaged_is_refused_and_nothing_is_moved(tmp_path: Path) -> None:
    for step in (3, 6):
        write(tmp_path, step)
        (tmp_path / f"step_{step:06d}" / "weights" / "a.bin").write_bytes(b"abd")

    with pytest.raises(UserError, match=r"whole \(step_000006: weights/a\.bin has .*; step_000003: weights/a\.bin has"):
        newest_checkpoint(tmp_path)

    assert names(tmp_path) == ["step_000003", "step_000006"]


def test_a_list_that_names_no_state_is_no_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 3)
    (tmp_path / "step_000003" / "files.json").write_text(json.dumps({"files": {}}))

    assert find_fault(tmp_path / "step_000003") == "files.json does not list learner.json"


# ---- which are kept ------------------------------------------------------------------------------------------------


def test_only_the_newest_are_kept_and_the_oldest_kept_is_told(tmp_path: Path) -> None:
    told = []
    for step in (2, 4, 6):
        write(tmp_path, step)
        told.append(drop_old(tmp_path, keep=2, keep_best=True))

    assert told == [2, 2, 4]
    assert names(tmp_path) == ["step_000004", "step_000006"]


def test_the_most_successful_is_kept_beside_them_under_a_name_that_no_run_starts_from(tmp_path: Path) -> None:
    for step, success in ((1, 0.1), (2, 0.7), (3, math.nan), (4, 0.5), (5, 0.7), (6, 0.2), (7, 0.3)):
        write(tmp_path, step, value=step, success=success)
        drop_old(tmp_path, keep=2, keep_best=True)
        if step == 4:
            assert names(tmp_path) == ["best_000002", "step_000003", "step_000004"]

    assert names(tmp_path) == ["best_000005", "step_000006", "step_000007"]
    assert read_state(tmp_path / "best_000005") == {"value": 5}
    shutil.rmtree(tmp_path / "step_000006")
    shutil.rmtree(tmp_path / "step_000007")
    assert newest_checkpoint(tmp_path) is None


def test_without_keep_best_the_best_goes_too(tmp_path: Path) -> None:
    for step, success in ((1, 0.9), (2, 0.1)):
        write(tmp_path, step, success=success)
        drop_old(tmp_path, keep=1, keep_best=True)
    assert names(tmp_path) == ["best_000001", "step_000002"]

    drop_old(tmp_path, keep=1, keep_best=False)

    assert names(tmp_path) == ["step_000002"]


@given(
    successes=st.lists(st.sampled_from([0.1, 0.2, 0.3, math.nan]), min_size=1, max_size=12),
    keep=st.integers(min_value=1, max_value=3),
)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_kept_is_the_newest_and_the_newest_of_the_best(
    tmp_path: Path, successes: list[float], keep: int
) -> None:
    shutil.rmtree(tmp_path / "x", ignore_errors=True)
    for step, success in enumerate(successes, start=1):
        write(tmp_path / "x", step, success=success)
        drop_old(tmp_path / "x", keep=keep, keep_best=True)

    newest = list(range(1, len(successes) + 1))[-keep:]
    rated = [(success, step) for step, success in enumerate(successes, start=1) if not math.isnan(success)]
    best = max(rated)[1] if rated else newest[0]
    expected = [f"step_{step:06d}" for step in newest]
    assert names(tmp_path / "x") == [*([] if best in newest else [f"best_{best:06d}"]), *expected]


# ---- epochs --------------------------------------------------------------------------------------------------------


def test_every_start_has_an_epoch_of_its_own(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path / "run" / "epoch") for _ in range(3)] == [1, 2, 3]
