"""Run folders: earlier runs are kept, two runs never share one, a resumed run is the one that was begun."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from trace_async.app.run_claim import claim, sole_learner
from trace_async.config import Config, LearnerConfig, RunConfig
from trace_async.config_load import load_saved_config
from trace_async.errors import ConfigError, UserError
from trace_async.run_folder import RunFolder

SAID: list[str] = []
"""What the last claims said."""


def config(tmp_path: Path, *, seed: int = 0, max_steps: int = 60) -> Config:
    run = RunConfig(dir=str(tmp_path / "runs" / "x"), seed=seed)
    return Config(run=run, learner=LearnerConfig(max_steps=max_steps))


def test_a_fresh_folder_gets_the_resolved_configuration(tmp_path: Path) -> None:
    with claim(config(tmp_path), resume=False, say=SAID.append) as folder:
        assert load_saved_config(folder.config) == config(tmp_path)


def test_an_earlier_run_is_set_aside_and_kept(tmp_path: Path) -> None:
    for number in range(3):
        with claim(config(tmp_path, seed=number), resume=False, say=SAID.append) as folder:
            assert not folder.metrics.exists()
            folder.metrics.write_text(str(number), encoding="utf-8")
    runs = tmp_path / "runs"
    assert {path.name: (path / "metrics.jsonl").read_text(encoding="utf-8") for path in runs.iterdir()} == {
        "x": "2",
        "x.1": "0",
        "x.2": "1",
    }
    assert SAID[-1] == f"the earlier run in {runs / 'x'} is now {runs / 'x.2'} (--resume would have gone on with it)"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with (
        claim(config(tmp_path), resume=False, say=SAID.append),
        pytest.raises(UserError, match=r"in use by another run \(pid \d+\)"),
        claim(config(tmp_path), resume=False, say=SAID.append),
    ):
        pass


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "x").mkdir(parents=True)
    (tmp_path / "runs" / "x" / "thesis.tex").touch()
    with (
        pytest.raises(UserError, match=r"holds thesis\.tex and is no run folder"),
        claim(config(tmp_path), resume=False, say=SAID.append),
    ):
        pass


def test_a_resumed_run_keeps_its_folder_and_may_train_for_longer(tmp_path: Path) -> None:
    with claim(config(tmp_path), resume=False, say=SAID.append) as folder:
        folder.metrics.touch()
    with claim(config(tmp_path, max_steps=100), resume=True, say=SAID.append) as folder:
        assert folder.metrics.exists()
        assert load_saved_config(folder.config).learner.max_steps == 100
    assert SAID[-1] == "learner.max_steps is 100 from here on, it was 60"


def test_a_resumed_run_cannot_change_what_it_hangs_on(tmp_path: Path) -> None:
    with claim(config(tmp_path), resume=False, say=SAID.append):
        pass
    with pytest.raises(ConfigError, match=r"run\.seed is 1, but the run .* began with 0"):
        claim(config(tmp_path, seed=1), resume=True, say=SAID.append).__enter__()
    other = dataclasses.replace(config(tmp_path, seed=1), learner=LearnerConfig(lora_alpha=2.0, learning_rate=1.0))
    with pytest.raises(ConfigError) as refused:
        claim(other, resume=True, say=SAID.append).__enter__()
    seed, alpha, cure = str(refused.value).splitlines()
    assert seed.startswith("run.seed is 1, but the run")
    assert alpha.startswith("learner.lora_alpha is 2.0, but the run")
    assert cure == "set it back, or start a new run in another folder"


def test_there_must_be_something_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to resume"):
        claim(config(tmp_path), resume=True, say=SAID.append).__enter__()


def test_a_folder_that_cannot_be_made_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = dataclasses.replace(config(tmp_path), run=RunConfig(dir=str(tmp_path / "file" / "x")))
    with pytest.raises(UserError, match="cannot be written"):
        claim(bad, resume=False, say=SAID.append).__enter__()


def test_a_learner_waits_for_one_that_is_about_to_end_and_refuses_to_work_beside_one_that_is_not(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    first = sole_learner(folder)
    first.__enter__()
    with pytest.raises(UserError, match=r"another learner has worked on .* for 0\.3 s; stop it first"):
        sole_learner(folder, patience_s=0.3).__enter__()
    end = threading.Timer(0.3, first.__exit__, (None, None, None))
    end.start()

    with sole_learner(folder, patience_s=30.0):
        end.join()
