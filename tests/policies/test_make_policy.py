"""The shipped policy's recipe at small scale: deterministic, loadable, and better than before."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from trace_async.app.make_policy import Recipe, make_policy
from trace_async.app.wiring import policy_path
from trace_async.policies.warm_start import WarmStartConfig
from trace_async.publication.manifest import file_digest
from trace_async.rendering import load_renderer

SMALL = Recipe(
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


def test_the_shipped_policy_is_the_one_its_recipe_names_and_small() -> None:
    folder = policy_path("builtin:frozenlake-tiny")
    recipe = json.loads((folder / "recipe.json").read_text())
    weights = folder / "model.safetensors"
    assert file_digest(weights) == recipe["sha256"]
    assert weights.stat().st_size <= 4_000_000
    assert recipe == {**json.loads(json.dumps(asdict(Recipe()))), "sha256": recipe["sha256"]}  # what the command does
