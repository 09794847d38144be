"""What is checked before any process starts."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.fakes import ScriptedEngine, WordRenderer
from trace_async.app import checks, wiring
from trace_async.config import Config, EnvironmentConfig, PolicyConfig, TreeConfig
from trace_async.errors import ConfigError, PolicyError


def test_the_default_configuration_passes() -> None:
    checks.check_parts(Config())


def test_a_context_longer_than_the_models_positions_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"max_context_tokens is 600, more than the 512 positions"):
        checks.check_parts(Config(tree=TreeConfig(max_context_tokens=600)))


def test_shipped_weights_that_are_not_their_recipes_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "frozenlake-tiny"
    shutil.copytree(wiring.policy_path("builtin:frozenlake-tiny"), shipped)
    weights = shipped / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    monkeypatch.setattr(wiring, "_POLICIES", tmp_path)
    with pytest.raises(PolicyError, match="its recipe says"):
        wiring.policy_path("builtin:frozenlake-tiny")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(policy=PolicyConfig(path="/nowhere")), "no transformers folder"),
        (Config(environment=EnvironmentConfig(name="chess")), "no environment 'chess'"),
        (Config(tree=replace(TreeConfig(), allocator="tracer")), "tracer"),
        (Config(tree=replace(TreeConfig(), root_allocator="evn")), "tree.root_allocator = 'evn'.*did you mean 'even'"),
        (Config(tree=replace(TreeConfig(), root_options={"clipp": 0.1})), "tree.root_options.clipp is no option here"),
    ],
)
def test_names_that_stand_for_nothing_are_refused_with_what_is_known(config: Config, message: str) -> None:
    with pytest.raises((ConfigError, PolicyError), match=message):
        checks.check_parts(config)


def test_a_floor_that_the_roots_of_a_step_cannot_pay_is_refused_before_the_run() -> None:
    tree = TreeConfig(root_options={"least": 1})
    with pytest.raises(ConfigError, match=r"64 root rollouts cannot be spent on 128 prompts, which take 128 to 1024"):
        checks.check_parts(Config(tree=tree))


def test_an_actor_grows_trees_with_the_configured_threshold_of_success(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wiring, "ActorChannel", lambda *address, **parts: None)
    monkeypatch.setattr(wiring, "Actor", lambda **parts: parts["parts"])
    config = Config(environment=EnvironmentConfig(success_above=0.25))
    engine, renderer, stager = cast(Any, ScriptedEngine()), cast(Any, WordRenderer()), cast(Any, None)
    kit = wiring.build_kit(config)
    parts = cast(Any, wiring._build_actor(config, engine, renderer, name="a", address="", kit=kit, stager=stager))
    assert parts.success_above == 0.25
