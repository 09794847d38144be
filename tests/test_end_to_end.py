"""The whole real path with real processes: train, kill -9 anybody, go on; nothing lost, nothing trained twice.

With `configs/repeatable.toml` the run that was killed is the run that was not, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_async.app.report import Summary, summary_lines
from trace_async.core.types import GroupVerdict
from trace_async.metrics import read_rows
from trace_async.run_folder import RunFolder

REPEATABLE = Path(__file__).parent.parent / "configs" / "repeatable.toml"

SMALL = (
    "tree.roots_per_step=8",
    "tree.max_roots_per_prompt=2",
    "coordinator.dead_after_s=1.5",
    "learner.max_steps=6",
    "actor.drain_s=0.5",
)

FLOWING = ("coordinator.lockstep=false", "coordinator.max_age_steps=2", "engine.max_batch=64", "tree.in_order=false")

UP_TO_TIMING = (
    *("timing_s/", "cost/wall_s_total", "cost/generate_s_total", "cost/environment_s_total"),
    *("rollout/turns_per_s", "rollout/tokens_per_s", "engine/idle_share"),
    "publication/",  # seconds, files that are not retired yet, and sizes of manifests that name the epoch
    "wire/",  # bytes since the last row of this start
    "training/epoch",
)
"""Keys, or beginnings of keys, that tell of time or of one start; all others are equal to the bit."""


@contextmanager
def training(folder: Path, *settings: str, resume: bool = False) -> Iterator[subprocess.Popen[str]]:
    """`trace-async train` with the repeatable configuration and what `settings` change in it."""
    settings = (*SMALL, *settings, f"run.dir={folder}")
    command = [sys.executable, "-m", "trace_async", "train", str(REPEATABLE), *(f"--set={each}" for each in settings)]
    process = subprocess.Popen(
        [*command, "--resume"] if resume else command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        process.kill()  # its children notice and end
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def finish(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    output = process.stdout.read()
    assert process.wait() == 0, output
    return output


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline_s = time.monotonic() + 120.0
    while not condition():
        assert time.monotonic() < deadline_s, "nothing happened within 120 s"
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.1)
            pytest.fail("the run ended early")


def rows_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [dict(row) for row in read_rows(folder.metrics)]


def steps_made(folder: RunFolder) -> int:
    return len(rows_of(folder)) if folder.metrics.exists() else 0


def pid_of(folder: RunFolder, role: str) -> int:
    """The process of a role that works on this run folder."""
    found = subprocess.run(
        ["pgrep", "-f", f"trace_async {role} {folder.root}"], capture_output=True, text=True, check=True
    )
    return int(found.stdout.split()[0])


def consumed(folder: RunFolder) -> list[tuple[str, int]]:
    """Base lease and step of every group that was consumed, from the ledger itself."""
    with sqlite3.connect(folder.ledger) as ledger:
        rows = ledger.execute("SELECT lease_id, step FROM leases WHERE step IS NOT NULL").fetchall()
    ledger.close()
    return [(lease_id.rsplit(".", 1)[0], step) for lease_id, step in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, str]:
    """A run to which nothing happened, and what it said."""
    folder = RunFolder(tmp_path_factory.mktemp("whole") / "run")
    with training(folder.root, "evaluation.num_prompts=16") as process:
        return folder, finish(process)


@pytest.mark.timeout(240)
def test_a_run_trains_reports_and_leaves_a_policy_that_others_can_load(whole: tuple[RunFolder, str]) -> None:
    folder, output = whole
    summary = json.loads((folder.root / "summary.json").read_text())
    assert output.splitlines()[-6:] == summary_lines(Summary(**summary), folder)
    assert (summary["versions"], summary["steps"]) == (6, 6)
    assert summary["groups_trained"] + summary["groups_flat"] == len(consumed(folder))
    assert summary["groups_rejected"] == 0
    assert summary["max_age_steps"] == 1
    assert 0 <= summary["success_before"] <= 1
    assert 0 <= summary["success_after"] <= 1
    assert summary["wall_s"] > 0
    rows = rows_of(folder)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["staleness/age_mean"] for row in rows] == [0, 1, 1, 1, 1, 1]
    assert summary["sampled_tokens"] == rows[-1]["rollout/sampled_tokens_total"] > 0
    for picture in ("curve.png", "reliability.png"):
        assert (folder.root / picture).read_bytes().startswith(b"\x89PNG")
    assert summary["costs"]["sampled_tokens"] == summary["sampled_tokens"]
    assert summary["costs"]["nominal_rollouts"] >= 6 * 8 * 1.5  # steps, roots, each with one continuation
    assert summary["calibration"]["prompts"]["outcomes"] >= 6 * 8
    assert 0 < summary["calibration"]["prefixes"]["brier"] < 1
    policy = AutoModelForCausalLM.from_pretrained(folder.policy, dtype=torch.float32)
    newest = sorted(folder.versions.glob("*_v000006.safetensors"))[-1]
    for name, tensor in load_file(newest).items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(folder.policy).chat_template


# ---- exact resume --------------------------------------------------------------------------------------------------


def kill_after(role: str, steps: int, folder: RunFolder, process: subprocess.Popen[str], draw: random.Random) -> None:
    """kill -9 of the learner or the actor at a random moment after that many steps are recorded."""
    wait_until(lambda: steps_made(folder) >= steps, process)
    time.sleep(draw.uniform(0.0, 0.7))
    os.kill(pid_of(folder, role), signal.SIGKILL)


def exact(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith(UP_TO_TIMING)}


def digest(folder: RunFolder) -> str:
    return hashlib.sha256((folder.policy / "model.safetensors").read_bytes()).hexdigest()


def check_same(folder: RunFolder, whole: RunFolder) -> None:
    """Every row and the trained weights; each row is its step's last, made by whichever start came so far."""
    assert [exact(row) for row in rows_of(folder)] == [exact(row) for row in rows_of(whole)]
    assert digest(folder) == digest(whole)


@pytest.mark.timeout(240)
def test_a_run_whose_actor_and_learner_are_killed_is_to_the_bit_the_run_that_was_not(
    whole: tuple[RunFolder, str], tmp_path: Path
) -> None:
    folder, draw = RunFolder(tmp_path / "run"), random.Random(0)
    with training(folder.root, "evaluation.num_prompts=0") as process:
        kill_after("actor", 1, folder, process, draw)
        kill_after("learner", 4, folder, process, draw)
        assert process.wait(timeout=60) == 1
    with training(folder.root, "evaluation.num_prompts=0", resume=True) as process:
        finish(process)
    check_same(folder, whole[0])
    assert {row["training/epoch"] for row in rows_of(folder)} == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_the_same_at_random_points_again_and_again(whole: tuple[RunFolder, str], tmp_path: Path, seed: int) -> None:
    folder, draw = RunFolder(tmp_path / "run"), random.Random(seed)
    for number in range(4):
        with training(folder.root, "evaluation.num_prompts=0", resume=number > 0) as process:
            goal = lines_in(folder.metrics) + draw.randint(0, 3)
            while process.poll() is None and lines_in(folder.metrics) < goal:
                time.sleep(0.1)
            time.sleep(draw.uniform(0.0, 20.0 if goal == lines_in(folder.metrics) else 0.7))
            role = draw.choice(["actor", "learner", "learner"])
            with suppress(subprocess.CalledProcessError, subprocess.TimeoutExpired, ProcessLookupError):
                # the run may be over, or have just begun
                os.kill(pid_of(folder, role), signal.SIGKILL)
                process.wait(timeout=30 if role == "learner" else draw.uniform(5.0, 25.0))
    with training(folder.root, "evaluation.num_prompts=0", resume=True) as process:
        finish(process)
    check_same(folder, whole[0])


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# ---- runs that flow ------------------------------------------------------------------------------------------------


@pytest.mark.slow  # nothing lost and nothing twice is also in test_learner, with fakes, for many more points
@pytest.mark.timeout(400)
def test_killed_actors_and_a_killed_learner_lose_no_group_and_train_none_twice(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    settings = (*FLOWING, "learner.max_steps=9", "evaluation.num_prompts=0")
    with training(folder.root, *settings) as process:
        wait_until(lambda: steps_made(folder) >= 1, process)
        os.kill(pid_of(folder, "actor"), signal.SIGKILL)
        at_kill = steps_made(folder)
        wait_until(lambda: steps_made(folder) >= at_kill + 3, process)  # another actor took over
        os.kill(pid_of(folder, "learner"), signal.SIGKILL)
        assert process.wait(timeout=60) == 1
    with training(folder.root, *settings, resume=True) as process:
        finish(process)
    trained = consumed(folder)
    assert len({base for base, _ in trained}) == len(trained)
    rows = rows_of(folder)
    assert [row["training/global_step"] for row in rows] == list(range(1, 10))
    by_step = {step: sum(1 for _, at in trained if at == step) for step in range(1, 10)}
    verdicts = [verdict.name.lower() for verdict in GroupVerdict]
    assert [by_step[row["training/global_step"]] for row in rows] == [
        sum(row[f"groups/{verdict}"] for verdict in verdicts) for row in rows
    ]
    assert max(row["staleness/age_max"] or 0 for row in rows) <= 2
