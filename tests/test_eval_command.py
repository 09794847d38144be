"""`trace-async eval` from its command line: what is refused with which words, and one real evaluation with a model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.eval_kit import Quiz, QuizTasks
from tests.fakes import World
from trace_async.app import wiring
from trace_async.app.eval_folder import EvalFolder
from trace_async.app.eval_plan import Request, make_plan
from trace_async.cli import main
from trace_async.config import Config, EnvironmentConfig, EvaluationConfig
from trace_async.config_load import load_saved_config, save_config
from trace_async.core.types import Task
from trace_async.environment import CutText, EnvironmentKit
from trace_async.errors import UserError
from trace_async.rendering import load_renderer
from trace_async.run_folder import RunFolder

QUIZ = EnvironmentConfig(name="tests.test_eval_command:make_quiz")


class SmallTasks(QuizTasks):
    """Two dozen of "dev", no end of "heldout", and nothing else."""

    def size(self, split: str) -> int | None:
        if split not in ("dev", "heldout", "train"):
            raise UserError(f"unknown split {split!r}: quiz has dev, heldout, train")
        return 24 if split == "dev" else None


def make_quiz(options: Mapping[str, Any]) -> EnvironmentKit:
    def labels(task: Task) -> Mapping[str, str]:
        return {"side": task.task_id[-1]}

    world = World()
    return EnvironmentKit(lambda: Quiz(world), SmallTasks(), labels=labels)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    save_config(Config(environment=QUIZ), folder.config)
    return folder


def plan_of(folder: RunFolder, **changes: Any) -> Any:
    request = Request(source=folder.root, policy="builtin:frozenlake-tiny", **changes)
    return make_plan(request, seed=0)


# ---- what is asked -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--split", "tset"], "unknown split 'tset': quiz has dev, heldout, train"),
        (
            ["--split", "dev", "--num", "25"],
            "has 24 tasks; lower it",
        ),
        (["--num", "0"], "--num 0: expected at least 1"),
        (["--policy", "/nowhere"], "/nowhere is no transformers folder"),
        (["--policy", "builtin:nothing"], "one that ships with the package"),
        (["--set", "engine.knid=vllm"], "engine.knid: unknown key; did you mean engine.kind?"),
        (["--label", "before", "--num", "3"], "it goes with RUN and --policy alone"),
        (["--label", "after", "--out", "x"], "give --out FOLDER"),
        (["--set", "evaluation.num_prompts=0"], "say how many with --num"),
    ],
)
def test_what_cannot_be_had_ends_with_code_2_before_a_model_is_loaded(
    arguments: list[str], complaint: str, folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if "--policy" in arguments else ["--policy", "builtin:frozenlake-tiny"]
    assert main(["eval", str(folder.root), *given, *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_run_that_has_trained_no_policy_yet_and_a_source_that_is_not_there_are_refused(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(folder.root)]) == 2
    assert f"{folder.policy} is no transformers folder" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nothing.toml")]) == 2
    assert "there is no such run folder and no such TOML file" in capsys.readouterr().err
    assert main(["eval", str(tmp_path)]) == 2
    assert "is this a run folder?" in capsys.readouterr().err


def test_a_file_says_label_only_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.touch()
    assert main(["eval", str(path), "--label", "before"]) == 2
    assert "saves the evaluation of a run folder" in capsys.readouterr().err


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["eval", "x", "--mode", "beam"])
    assert caught.value.code == 2


def test_the_number_of_tasks_is_what_was_said_or_the_whole_split_or_what_the_configuration_says(
    folder: RunFolder,
) -> None:
    assert len(plan_of(folder, split="dev", num=5).tasks) == 5
    assert len(plan_of(folder, split="dev").tasks) == 24
    assert len(plan_of(folder, split="train").tasks) == 512
    assert len(plan_of(folder).tasks) == 512
    assert plan_of(folder, split="dev").tasks[3].task_id == "quiz/dev/3"
    assert plan_of(folder, split="dev").labels[3] == {"side": "3"}


def test_modes_are_what_was_said_or_what_the_configuration_says(folder: RunFolder) -> None:
    assert plan_of(folder).modes == ("sampled", "greedy")
    assert plan_of(folder, modes=("greedy", "greedy")).modes == ("greedy",)
    save_config(Config(environment=QUIZ, evaluation=EvaluationConfig(sampled=False)), folder.config)
    assert plan_of(folder).modes == ("greedy",)
    assert plan_of(folder, modes=("sampled",)).modes == ("sampled",)


def test_overrides_change_what_a_run_folder_says(folder: RunFolder) -> None:
    plan = plan_of(folder, overrides=("engine.temperature=0.5", "environment.options.k=3"))
    assert plan.config.engine.temperature == 0.5
    assert plan.config.environment.options == {"k": 3}
    assert load_saved_config(folder.config).engine.temperature == 1.0


# ---- kits ----------------------------------------------------------------------------------------------------------


def test_a_kit_is_bound_to_the_tokens_of_the_policy() -> None:
    cuts: list[CutText] = []

    def bind(cut: CutText) -> EnvironmentKit:
        cuts.append(cut)
        return bound

    bound = EnvironmentKit(lambda: Quiz(World()), QuizTasks())
    renderer = load_renderer(wiring.policy_path("builtin:frozenlake-tiny"))
    assert wiring.bind_kit(bound, renderer) is bound
    assert wiring.bind_kit(bound._replace(bind=bind), renderer) is bound
    assert cuts[0]("left right left", 2).split() == ["left", "right"]
    assert isinstance(wiring.build_kit(Config(), renderer), EnvironmentKit)


@pytest.mark.parametrize("broken", [False, True])
def test_closing_a_kit_never_fails(broken: bool, caplog: pytest.LogCaptureFixture) -> None:
    closed = []

    async def close() -> None:
        closed.append(True)
        if broken:
            raise OSError("connection lost")

    kit = EnvironmentKit(lambda: Quiz(World()), QuizTasks(), close=close)
    asyncio.run(wiring.close_kit(kit))
    asyncio.run(wiring.close_kit(kit._replace(close=None)))
    assert closed == [True]
    assert ("connection lost" in caplog.text) is broken


# ---- a real one ----------------------------------------------------------------------------------------------------


def test_a_real_evaluation_writes_everything_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text('environment.options = { style = "compact" }\n', encoding="utf-8")
    out = EvalFolder(tmp_path / "out")
    command = ["eval", str(path), "--out", str(out.root), "--num", "6", "--mode", "sampled"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith("sampled  success ")
    assert "means and 95 % intervals (sampled 6 tasks)" in said
    assert str(out.report) in said
    records = [record for _, _, record in out.records()]
    assert sorted(record["task_id"] for record in records) == [f"frozenlake/heldout/{index}" for index in range(6)]
    assert all(turn["text"] for record in records for turn in record["turns"])
    summary = json.loads(out.summary.read_text(encoding="utf-8"))
    measures = summary["modes"]["sampled"]["overall"]["measures"]
    assert set(measures) == {
        *("success", "outcome", "turns", "invalid_share"),
        *("sampled_tokens", "prompt_tokens", "context_tokens"),
    }
    wins = sum(record["outcome"] > 0.5 for record in records)
    assert measures["success"]["mean"] == wins / 6
    assert f"{100 * wins / 6:.1f} %" in out.report.read_text(encoding="utf-8")

    whole = out.episodes.read_bytes()
    out.episodes.write_bytes(whole[: whole[:-1].rfind(b"\n") + 9])
    out.summary.unlink()
    assert main(command) == 0
    assert json.loads(out.summary.read_text(encoding="utf-8")) == summary
    assert len(list(out.records())) == 6


def test_metrics_and_labels_of_an_environment_are_told_without_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'environment.name = "tests.test_eval_command:make_lake"\n[evaluation]\nnum_prompts = 4\ngreedy = false\n',
        encoding="utf-8",
    )
    assert main(["eval", str(path)]) == 0
    said = capsys.readouterr().out
    assert "sampled, by parity" in said
    assert not list(tmp_path.glob("*.jsonl"))


def make_lake(options: Mapping[str, Any]) -> EnvironmentKit:
    from envs.frozenlake import make_frozenlake

    return make_frozenlake(options)._replace(
        labels=lambda task: {"parity": "even" if int(task.task_id.rpartition("/")[2]) % 2 == 0 else "odd"}
    )
