"""Whole runs whose learner is several processes: to the end, on with one, and what a dead process does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from trace_async.config_load import load_config, save_config
from trace_async.metrics import read_rows
from trace_async.run_folder import RunFolder

CONFIG = """
[environment.options]
sizes = [3]
unreadable_ends = true

[tree]
roots_per_step = 12
continuations_per_root = 1
max_roots_per_prompt = 4

[prompts]
num_train = 64
candidates_per_round = 16
num_heldout = 16

[coordinator]
heartbeat_s = 0.2
dead_after_s = 3.0
max_age_steps = 2

[learner]
max_steps = 3
checkpoint_every_steps = 3
micro_batch_tokens = 600

[evaluation]
num_prompts = 0
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def command(arguments: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def settings(tmp_path: Path, **changes: object) -> tuple[Path, list[str]]:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    keys = {"run.dir": tmp_path / "run", **changes}
    return path, [f"{key}={value}" for key, value in keys.items()]


def train(tmp_path: Path, *options: str, **changes: object) -> int:
    path, overrides = settings(tmp_path, **changes)
    sets = [part for override in overrides for part in ("--set", override)]
    with command(["trace_async", "train", str(path), *sets, *options], tmp_path / "log") as process:
        return process.wait()


def rank_one(parent: int) -> int:
    """The process of rank 1 below `parent`."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(state[1]) == parent and b"\0RANK=1\0" in b"\0" + (folder / "environ").read_bytes():
                return int(folder.name)
        except (OSError, ValueError):
            continue  # it has ended, or is not ours
    raise AssertionError(f"no rank 1 below {parent}")


def until_step(folder: RunFolder, step: int) -> None:
    until_s = time.monotonic() + 200.0
    while not folder.metrics.exists() or len(read_rows(folder.metrics)) < step:
        assert time.monotonic() < until_s
        time.sleep(0.1)  # a file that another process writes wakes nobody


def test_a_run_of_two_processes_ends_and_goes_on_with_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    for processes, steps, options in ((2, 3, ()), (1, 5, ("--resume",))):
        code = train(tmp_path, *options, **{"learner.processes": processes, "learner.max_steps": steps})
        assert code == 0, (tmp_path / "log").read_text()
        rows = read_rows(folder.metrics)
        assert [row["training/global_step"] for row in rows] == list(range(1, steps + 1))
    assert (folder.policy / "model.safetensors").exists()


def test_torchrun_ends_with_the_name_of_a_rank_that_is_killed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    path, overrides = settings(tmp_path, **{"learner.max_steps": 1000})
    folder.root.mkdir()
    save_config(load_config(path, overrides), folder.config)
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "-m", "trace_async", "learner", str(folder.root)]
    log = tmp_path / "learner.log"
    with command(launch, log) as learner, command(["trace_async", "actor", str(folder.root)], tmp_path / "actor.log"):
        until_step(folder, 2)
        killed, killed_s = rank_one(learner.pid), time.monotonic()
        os.kill(killed, signal.SIGKILL)
        code = learner.wait(timeout=60.0)
        assert time.monotonic() - killed_s < 20.0
    assert code == 1
    said = log.read_text()
    assert f"trace-async: RankError: rank 1 (pid {killed} on " in said
    assert "Traceback" not in said.split("RankError")[0]
