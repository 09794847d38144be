"""The shipped policies' recipes at small scale: deterministic, loadable, and better than before."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from trace_async.app.make_policy import RECIPES, make_policy, sorted_by_length
from trace_async.app.make_policy_frozenlake import FrozenLakeRecipe
from trace_async.app.make_policy_multihop import MultihopRecipe, Phase
from trace_async.app.wiring import policy_path
from trace_async.config_load import load_config
from trace_async.policies.warm_start import WarmStartConfig
from trace_async.policies.warm_start_packing import Encoded
from trace_async.publication.manifest import file_digest
from trace_async.rendering import load_renderer

REPO = Path(__file__).parent.parent.parent

SMALL = FrozenLakeRecipe(
    hidden_size=32,
    num_layers=1,
    sizes=(2, 3),
    threads=1,
    warm_start=WarmStartConfig(steps=30, conversations_per_step=16, learning_rate=1e-2, warmup_steps=5),
)


def test_the_recipe_learns_and_gives_the_same_bytes_again(tmp_path: Path) -> None:
    losses: list[float] = []
    digest = make_policy(tmp_path / "a", SMALL, on_step=lambda _, loss: losses.append(loss))
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert make_policy(tmp_path / "b", SMALL, on_step=lambda *_: None) == digest
    assert make_policy(tmp_path / "c", replace(SMALL, seed=1), on_step=lambda *_: None) != digest
    load_renderer(tmp_path / "a")  # probes the template


def test_the_recipe_for_worlds_has_drills_and_play_and_gives_the_same_bytes_again(tmp_path: Path) -> None:
    schedule = WarmStartConfig(steps=30, conversations_per_step=8, learning_rate=1e-2, warmup_steps=5)
    recipe = MultihopRecipe(
        families=(2,),
        worlds_per_family=1,
        pages=300,
        questions=200,
        hops=(1,),
        drill_names=2,
        hidden_size=32,
        num_layers=1,
        plan=(
            Phase(drills_first=160, mistakes=0.3, warm_start=schedule),
            Phase(drill_share=0.5, mistakes=0.1, warm_start=replace(schedule, steps=10)),
        ),
    )
    losses: list[float] = []
    digest = make_policy(tmp_path / "a", recipe, on_step=lambda _, loss: losses.append(loss))
    assert len(losses) == recipe.num_steps == 40
    assert sum(losses[-5:]) < 0.85 * sum(losses[:5])  # forty steps of a model that is far too small
    assert make_policy(tmp_path / "b", recipe, on_step=lambda *_: None) == digest


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_policy_is_the_one_its_recipe_names_and_small(name: str) -> None:
    folder = policy_path(f"builtin:{name}")
    recipe = json.loads((folder / "recipe.json").read_text())
    weights = folder / "model.safetensors"
    assert file_digest(weights) == recipe["sha256"]
    assert weights.stat().st_size <= 5_000_000
    default = asdict(RECIPES[name]())  # type: ignore[call-overload]
    assert recipe == {**json.loads(json.dumps(default)), "sha256": recipe["sha256"]}  # what the command does


def test_the_policy_for_worlds_was_warmed_on_worlds_like_that_of_its_configuration_but_others() -> None:
    config = load_config(REPO / "configs" / "multihop_tiny.toml", [])
    recipe = MultihopRecipe()
    assert config.environment.options["world"].get("name_family", 0) not in recipe.families
    assert 1 not in recipe.families  # that of the new world
    for family in recipe.families:
        own = recipe.options(family, seed=0)
        world = config.environment.options["world"]
        assert {**own["world"], "name_family": 0, "pages": 0, "questions": 0} == {
            **{**world, "name_family": 0, "pages": 0, "questions": 0}
        }
        assert {**own, "world": None} == {**config.environment.options, "world": None}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_cut_short_but_not_drawn_out(name: str) -> None:
    recipe = RECIPES[name]()
    assert recipe.shortened(10**9) == recipe
    assert 0 < recipe.shortened(3).num_steps < 10


def test_batches_are_of_like_length_and_nothing_is_lost() -> None:
    lengths = [(7 * index) % 61 + 1 for index in range(32 * 4)]
    stream = iter([Encoded([0] * length, [False] * length) for length in lengths])
    found = [len(one.ids) for one, _ in zip(sorted_by_length(stream, batch=4, seed=0), lengths, strict=False)]
    assert sorted(found) == sorted(lengths)
    assert found != sorted(lengths)
    assert all(max(found[place : place + 4]) - min(found[place : place + 4]) <= 3 for place in range(0, 128, 4))
