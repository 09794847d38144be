"""`warm-start`: any environment with a script, from a configuration to a folder."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from envs.frozenlake import FrozenLakeOptions
from envs.frozenlake_play import demonstration
from envs.registry import load_environment
from trace_async.app.supervise import USER_ERROR
from trace_async.app.warm_start import Recipe, train_on_script, warm_start
from trace_async.app.warm_start_script import Script, load_encoder
from trace_async.app.wiring import build_kit, policy_path
from trace_async.cli import main
from trace_async.config import Config
from trace_async.config_load import from_json, load_config
from trace_async.core.types import Message, Task
from trace_async.environment import Demonstration, EnvironmentKit
from trace_async.errors import ConfigError, PolicyError, UserError
from trace_async.publication.manifest import file_digest
from trace_async.rendering import load_renderer

TINY = "builtin:frozenlake-tiny"
TOML = """
[environment.options]
sizes = [2, 3]
"""


@pytest.fixture
def config_path(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(TOML)
    return path


def run(config_path: Path, out: Path, overrides: tuple[str, ...] = (), **changed: Any) -> dict[str, Any]:
    settings = {"steps": 20, "mistakes": 0.0, "seed": 3, "batch": 8, "learning_rate": 1e-3} | changed
    assert warm_start(config_path, overrides, out, **settings) == 0
    recipe: dict[str, Any] = json.loads((out / "recipe.json").read_text())
    return recipe


def test_the_policy_learns_to_play_as_the_script_and_the_same_call_gives_the_same_bytes(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = run(config_path, tmp_path / "a")
    losses = recipe["losses"]
    assert len(losses) == 20
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert recipe["played"]["demonstrations"] == 160
    assert recipe["played"]["mean_reward"] == 1.0  # no mistakes
    assert recipe["sha256"] == file_digest(tmp_path / "a" / "model.safetensors")
    assert recipe["start_sha256"] == {"model.safetensors": file_digest(policy_path(TINY) / "model.safetensors")}
    assert recipe["sha256"] in capsys.readouterr().out

    again = run(config_path, tmp_path / "b")
    assert again == recipe
    other = run(config_path, tmp_path / "c", seed=4, steps=2)
    assert other["played"]["sha256"] != run(config_path, tmp_path / "d", seed=3, steps=2)["played"]["sha256"]


def test_the_folder_is_one_that_transformers_and_the_engines_load(config_path: Path, tmp_path: Path) -> None:
    run(config_path, tmp_path / "out", steps=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True)
    start = AutoModelForCausalLM.from_pretrained(policy_path(TINY), local_files_only=True)
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True)]
    assert sum(changed) > len(changed) / 2  # words that no game used keep their place
    assert policy_path(str(tmp_path / "out")) == tmp_path / "out"
    load_renderer(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_command_line_says_what_is_wrong_and_does_what_is_right(
    config_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["warm-start", str(config_path), str(tmp_path / "out"), "--steps=1", "--batch=2", "--seed=5"]
    assert main([*command, "--mistakes=2"]) == USER_ERROR
    assert "--mistakes: need a rate within 0..1, got 2.0" in capsys.readouterr().err
    assert main([*command, "--mistakes=0.5", "--learning-rate=1e-4", "--set", "environment.options.sizes=[2]"]) == 0
    recipe = json.loads((tmp_path / "out" / "recipe.json").read_text())
    told = {name: recipe[name] for name in ("steps", "batch", "seed", "mistakes", "learning_rate")}
    assert told == {"steps": 1, "batch": 2, "seed": 5, "mistakes": 0.5, "learning_rate": 1e-4}
    assert recipe["environment"]["options"]["sizes"] == [2]


def test_mistakes_reach_the_script(config_path: Path, tmp_path: Path) -> None:
    assert run(config_path, tmp_path / "out", mistakes=1.0, steps=2, batch=32)["played"]["mean_reward"] < 1.0


def test_an_environment_without_a_script_is_refused(config_path: Path, tmp_path: Path) -> None:
    overrides = ("environment.name=tests.test_warm_start:without_script", "environment.options={}")
    with pytest.raises(ConfigError, match=r"tests\.test_warm_start:without_script.*no `demonstrate`"):
        run(config_path, tmp_path / "out", overrides)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_exists_is_refused_before_anything_is_read(config_path: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        run(config_path, tmp_path, ("policy.path=nowhere",))


def test_a_policy_that_is_none_is_refused(config_path: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="nowhere"):
        run(config_path, tmp_path / "out", ("policy.path=nowhere",))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"steps": 0}, "--steps: need >= 1"),
        ({"batch": 0}, "--batch: need >= 1"),
        ({"mistakes": 1.5}, "--mistakes: need a rate within 0..1"),
        ({"mistakes": float("nan")}, "--mistakes"),
        ({"seed": -1}, "--seed: need >= 0"),
        ({"learning_rate": 0.0}, "--learning-rate: need > 0"),
        ({"learning_rate": float("inf")}, "--learning-rate"),
    ],
)
def test_settings_out_of_range_are_refused(
    config_path: Path, tmp_path: Path, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(config_path, tmp_path / "out", **changed)


def test_what_rollouts_could_not_have_sampled_is_left_out_and_counted(config_path: Path, tmp_path: Path) -> None:
    config = load_config(config_path, ("environment.options.sizes=[4]",))
    lengths = [len(one.ids) for one in _play(config, 200)]
    limit = int(np.median(lengths))
    recipe = run(
        config_path,
        tmp_path / "out",
        ("environment.options.sizes=[4]", f"tree.max_context_tokens={limit}"),
        steps=5,
        batch=20,
    )
    taken, place = 0, 0
    while taken < 100:  # slow oracle: the same play without a limit, walked until enough of it fits
        taken += lengths[place] <= limit
        place += 1
    assert recipe["played"]["skipped_over_max_context_tokens"] == place - 100 > 0
    assert recipe["played"]["skipped_over_max_turn_tokens"] == 0
    assert recipe["played"]["tokens"] == sum(length for length in lengths[:place] if length <= limit)


def test_limits_that_leave_nothing_are_refused(config_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_turn_tokens = 1 .* longest turn 2"):
        run(config_path, tmp_path / "out", ("engine.max_turn_tokens=1",))


def test_the_kit_is_bound_to_the_policys_tokens_and_closed_at_the_end(tmp_path: Path) -> None:
    Watched.closed = 0
    config = from_json({"environment": {"name": "tests.test_warm_start:watched", "options": {}}})
    recipe = Recipe(steps=2, mistakes=0.25, seed=0, batch=3)
    train_on_script(config, tmp_path / "out", recipe, on_step=lambda *_: None)
    assert Watched.closed == 1
    assert Watched.mistakes == {0.25}
    assert Watched.cuts == {
        "a1S"
    }  # one token of the policy's, where cutting by characters or words gave something else


def test_the_kit_is_closed_when_the_script_fails(tmp_path: Path) -> None:
    Watched.closed = 0
    config = from_json({"environment": {"name": "tests.test_warm_start:watched", "options": {"fails": True}}})
    with pytest.raises(ValueError, match="no page"):
        train_on_script(config, tmp_path / "out", Recipe(steps=1, mistakes=0.0, seed=0), on_step=lambda *_: None)
    assert Watched.closed == 1
    assert not (tmp_path / "out").exists()


def test_frozenlake_has_a_script_that_knows_its_options() -> None:
    kit = load_environment("frozenlake", {"sizes": [3], "style": "full"})
    task = kit.tasks.task("train", 0)

    async def play() -> Demonstration:
        assert kit.demonstrate is not None
        return await kit.demonstrate(task, np.random.default_rng(0), 0.0)

    played = asyncio.run(play())
    assert played == demonstration(
        task, np.random.default_rng(0), 0.0, options=FrozenLakeOptions(sizes=(3,), style="full")
    )
    assert played.reward == 1.0
    assert len(played.turns) == task.data["shortest"]
    assert played.opening[0].role == "system"  # the full style, not the compact one


class Watched:
    """What the kit below was asked."""

    closed = 0
    mistakes: set[float] = set()  # noqa: RUF012
    cuts: set[str] = set()  # noqa: RUF012


class _Tasks:
    def size(self, split: str) -> int:
        return 1024

    def task(self, split: str, index: int) -> Task:
        return Task(f"watched/{split}/{index}", {})


def without_script(options: dict[str, Any]) -> EnvironmentKit:
    return EnvironmentKit(lambda: pytest.fail("no episode is needed"), _Tasks())


def watched(options: dict[str, Any]) -> EnvironmentKit:
    async def unbound(task: Task, rng: np.random.Generator, mistake_rate: float) -> Demonstration:
        raise AssertionError("not bound to a policy")

    async def close() -> None:
        Watched.closed += 1

    def bind(cut: Any) -> EnvironmentKit:
        async def demonstrate(task: Task, rng: np.random.Generator, mistake_rate: float) -> Demonstration:
            if options.get("fails"):
                raise ValueError("no page")
            Watched.mistakes.add(mistake_rate)
            Watched.cuts.add(cut("a1S b1.", 1).strip())
            return Demonstration((Message("user", "a1S b1G"),), [("right", "")], 1.0)

        return kit._replace(demonstrate=demonstrate)

    kit = EnvironmentKit(
        lambda: pytest.fail("no episode is needed"), _Tasks(), demonstrate=unbound, bind=bind, close=close
    )
    return kit


def _play(config: Config, count: int) -> list[Any]:
    encoder = load_encoder(policy_path(config.policy.path))
    script = Script(build_kit(config), encoder, config, batch=count, mistakes=0.0, seed=3)
    return asyncio.run(script.batch())
