"""The whole real path with real processes: train, kill -9 anybody, go on; nothing lost, nothing trained twice."""

from __future__ import annotations

import json
import os
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
max_steps = {steps}
checkpoint_every_steps = 3

[evaluation]
num_prompts = 16
"""


@contextmanager
def training(folder: Path, *, steps: int, resume: bool = False) -> Iterator[subprocess.Popen[str]]:
    config = folder.parent / "config.toml"
    config.write_text(CONFIG.format(steps=steps))
    command = [sys.executable, "-m", "trace_async", "train", str(config), "--set", f"run.dir={folder}"]
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


@pytest.mark.timeout(240)
def test_a_run_trains_reports_and_leaves_a_policy_that_others_can_load(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with training(folder.root, steps=4) as process:
        output = finish(process)
    summary = json.loads((folder.root / "summary.json").read_text())
    assert output.splitlines()[-6:] == summary_lines(Summary(**summary), folder)
    assert (summary["versions"], summary["steps"]) == (4, 4)
    assert summary["groups_trained"] + summary["groups_flat"] == len(consumed(folder))
    assert summary["groups_rejected"] == 0
    assert 0 <= summary["max_age_steps"] <= 2
    assert 0 <= summary["success_before"] <= 1
    assert 0 <= summary["success_after"] <= 1
    assert summary["wall_s"] > 0
    rows = rows_of(folder)
    assert [row["training/global_step"] for row in rows] == [1, 2, 3, 4]
    assert summary["sampled_tokens"] == rows[-1]["rollout/sampled_tokens_total"] > 0
    for picture in ("curve.png", "reliability.png"):
        assert (folder.root / picture).read_bytes().startswith(b"\x89PNG")
    assert summary["costs"]["sampled_tokens"] == summary["sampled_tokens"]
    assert summary["costs"]["nominal_rollouts"] >= 4 * 12 * 1.5  # steps, roots, each with one continuation
    assert summary["calibration"]["prompts"]["outcomes"] >= 4 * 12
    assert 0 < summary["calibration"]["prefixes"]["brier"] < 1
    policy = AutoModelForCausalLM.from_pretrained(folder.policy, dtype=torch.float32)
    newest = sorted(folder.versions.glob("*_v000004.safetensors"))[-1]
    for name, tensor in load_file(newest).items():
        assert torch.equal(tensor, policy.state_dict()[name]), name
    assert AutoTokenizer.from_pretrained(folder.policy).chat_template


@pytest.mark.timeout(400)
def test_killed_actors_and_a_killed_learner_lose_no_group_and_train_none_twice(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with training(folder.root, steps=9) as process:
        wait_until(lambda: steps_made(folder) >= 1, process)
        os.kill(pid_of(folder, "actor"), signal.SIGKILL)
        at_kill = steps_made(folder)
        wait_until(lambda: steps_made(folder) >= at_kill + 3, process)  # another actor took over
        os.kill(pid_of(folder, "learner"), signal.SIGKILL)
        assert process.wait(timeout=60) == 1
    with training(folder.root, steps=9, resume=True) as process:
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
