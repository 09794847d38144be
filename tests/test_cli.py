"""The command line: exit codes, messages that name the cure, `where` on a fabricated run."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trace_async.app.where import describe
from trace_async.cli import build_parser, main
from trace_async.config import Config
from trace_async.config_load import save_config
from trace_async.run_folder import RunFolder, write_json

STATUS: dict[str, object] = {
    "updated_unix_s": 1000.0,
    "phase": "wait",
    "phase_s": 0.25,
    "step": 12,
    "version": 12,
    "epoch": 1,
    "permits": {"in_use": 192, "max": 320},
    "shelf": {"groups": 3, "roots": 12},
    "actors": [
        {
            "actor_id": "actor-0",
            "host": "laptop",
            "pid": 4242,
            "version": 11,
            "capacity_roots": 128,
            "held_roots": 64,
            "silent_s": 0.4,
            "counters": {"turns": 100.0},
        }
    ],
    "leases": [
        {
            "lease_id": "e1.r7.3.0",
            "prompt_id": "frozenlake/train/17",
            "state": "live",
            "actor_id": "actor-0",
            "roots": 8,
            "continuations": 16,
            "attempt": 0,
            "age_s": 3.25,
            "tree": {
                "lease_id": "e1.r7.3.0",
                "prompt_id": "frozenlake/train/17",
                "phase": "generate",
                "node_id": 5,
                "age_s": 3.1,
                "waiting_s": 0.75,
                "turns": 21,
            },
        },
        {"lease_id": "e1.r7.4.0", "prompt_id": "frozenlake/train/18", "state": "shelved", "tree": None},
    ],
}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    save_config(Config(), folder.config)
    return folder


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trace_async", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_where_names_every_lease_with_tree_phase_age_and_host(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(folder.status, STATUS)
    assert main(["where", str(folder.root)]) == 0
    out = capsys.readouterr().out
    assert "learner: wait for 0.2 s, step 12, version 12; permits 192 of 320, shelf 3 groups with 12 roots" in out
    lease = next(line for line in out.splitlines() if line.startswith("e1.r7.3.0"))
    assert " ".join(lease.split()) == (
        "e1.r7.3.0 frozenlake/train/17 live 3.2 s actor-0 laptop 5 generate 0.8 s 21 3.1 s"
    )
    assert "e1.r7.4.0" in out
    actor = next(line for line in out.splitlines() if line.startswith("actor-0"))
    assert " ".join(actor.split()) == "actor-0 laptop 4242 11 64 128 0.4 s"


def test_where_says_when_nobody_renews_the_status() -> None:
    assert not any("written" in line for line in describe(STATUS, now_unix_s=1002.0))
    assert "written 100 s ago: the run has ended" in describe(STATUS, now_unix_s=1100.0)[1]


def test_where_bears_a_status_without_anything_in_it() -> None:
    assert describe({}, now_unix_s=0.0)[-1] == "no live leases"


def test_where_refuses_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where", str(tmp_path)]) == 2
    assert "is no run folder" in capsys.readouterr().err


def test_where_on_a_run_without_a_status_says_so(folder: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["where", str(folder.root)]) == 2
    assert "does not exist (yet)" in capsys.readouterr().err


def test_an_unknown_key_ends_train_with_code_2_and_the_nearest_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[tree]\nroot_per_step = 3\n", encoding="utf-8")
    assert main(["train", str(path)]) == 2
    assert "tree.root_per_step: unknown key; did you mean tree.roots_per_step?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("tree.allocator=trase", "did you mean 'trace'?"),
        ("learner.credit=siblings", "did you mean 'sibling'?"),
        ("predictor.kind=gamma", "predictor.kind = 'gamma' is not known"),
        ("environment.name=frozen", "no environment 'frozen'; known: frozenlake"),
        ("environment.options={sizes = [99]}", "environment.options.sizes: need sizes within 2..9"),
        ("tree.options={nonsense = 1}", "tree.options.nonsense is no option here"),
        ("policy.path=/nowhere", "is no transformers folder"),
        ("policy.path=builtin:nothing", "one that ships with the package"),
    ],
)
def test_a_wrong_name_or_option_shows_before_any_process_starts(
    override: str, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    assert main(["train", str(path), "--set", f"run.dir={tmp_path / 'out'}", "--set", override]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_unknown_commands_and_missing_arguments_end_with_code_2() -> None:
    for arguments in (["dance"], ["train"], []):
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args(arguments)
        assert caught.value.code == 2


def test_the_module_runs_and_helps() -> None:
    result = run("--help")
    assert result.returncode == 0
    for command in ("train", "learner", "actor", "eval", "make-policy", "where"):
        assert command in result.stdout


def test_make_policy_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["make-policy", str(tmp_path)]) == 2
    assert "give the name of a new folder" in capsys.readouterr().err


def start_waiting_actor(folder: RunFolder, *arguments: str) -> subprocess.Popen[str]:
    """An actor process that listens to signals and looks for a learner that never comes."""
    command = [sys.executable, "-m", "trace_async", "actor", str(folder.root), *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "looking for the learner's address" in process.stderr.readline()
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_actor_that_still_looks_for_its_learner_stops_at_the_first_signal_with_code_130(
    folder: RunFolder, number: signal.Signals
) -> None:
    with start_waiting_actor(folder) as process:
        process.send_signal(number)
        assert process.wait(timeout=30) == 130


def test_an_actor_whose_supervisor_is_gone_ends_by_itself(folder: RunFolder) -> None:
    with start_waiting_actor(folder, "--supervised") as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 130
