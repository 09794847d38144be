"""A resumed run keeps what it hangs on and what it promised; everything else may change and is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trace_async.config import Config
from trace_async.config_check import leaf_values
from trace_async.config_load import from_json, to_json
from trace_async.config_resume import FIXED, FIXED_IN_LOCKSTEP, Change, complain, find_changes

KEYS = [key for key, _ in leaf_values(Config())]


def changed(key: str, value: object, *, of: Config | None = None) -> dict[str, Any]:
    """The JSON of a configuration with one key changed; it need not be one that can run."""
    config: dict[str, Any] = to_json(of or Config())
    section, _, name = key.partition(".")
    assert name in config[section]
    config[section][name] = value
    return config


@pytest.mark.parametrize(
    "key",
    [
        *("run.seed", "policy.path", "environment.name", "environment.options", "prompts.num_train"),
        "environment.success_above",
        *("tree.allocator", "tree.options", "tree.root_allocator", "tree.roots_per_step", "tree.in_order"),
        *("predictor.kind", "predictor.options", "coordinator.lockstep", "engine.temperature"),
        *("learner.lora_rank", "learner.lora_alpha", "learner.credit", "objective.kind", "objective.options"),
    ],
)
def test_what_a_run_hangs_on_or_promised_cannot_change(key: str) -> None:
    fixed, free = find_changes(to_json(Config()), changed(key, "other"))

    assert [change.key for change in fixed] == [key]
    assert free == []


@pytest.mark.parametrize(
    "key",
    [
        *(
            "learner.learning_rate",
            "learner.max_steps",
            "learner.device",
            "learner.threads",
            "learner.keep_checkpoints",
        ),
        *("coordinator.address", "coordinator.heartbeat_s", "coordinator.max_age_steps", "actor.count", "run.name"),
        *("publication.keep_versions", "engine.kind", "engine.device", "evaluation.num_prompts"),
    ],
)
def test_how_and_how_long_it_runs_may_change(key: str) -> None:
    fixed, free = find_changes(to_json(Config()), changed(key, "other"))

    assert fixed == []
    assert [change.key for change in free] == [key]


def test_in_lockstep_the_age_bound_cannot_change_either() -> None:
    lockstep = Config(coordinator=replace(Config().coordinator, lockstep=True))

    fixed, _ = find_changes(to_json(lockstep), changed("coordinator.max_age_steps", 7, of=lockstep))

    assert fixed == [Change("coordinator.max_age_steps", 4, 7)]


def test_every_contradiction_is_named_with_both_values_and_the_cure() -> None:
    now = changed("run.seed", 1)
    now["learner"]["lora_rank"] = 4

    fixed, _ = find_changes(to_json(Config()), now)

    assert complain(fixed, where="runs/x").splitlines() == [
        "run.seed is 1, but the run in runs/x began with 0",
        "learner.lora_rank is 4, but the run in runs/x began with 0",
        "set it back, or start a new run in another folder",
    ]


def test_a_key_that_is_younger_than_the_run_had_its_default() -> None:
    begun = to_json(Config())
    section = begun["coordinator"]
    assert isinstance(section, dict)
    del section["lockstep"]

    assert find_changes(begun, to_json(Config())) == ([], [])
    assert [change.key for change in find_changes(begun, changed("coordinator.lockstep", True))[0]] == [
        "coordinator.lockstep"
    ]


def test_what_is_compared_is_what_was_written() -> None:
    assert find_changes(to_json(Config()), to_json(from_json(to_json(Config())))) == ([], [])


@pytest.mark.parametrize("fixed", [*FIXED, *FIXED_IN_LOCKSTEP])
def test_every_fixed_name_is_a_key_or_a_section(fixed: str) -> None:
    assert any(key == fixed or (fixed.endswith(".") and key.startswith(fixed)) for key in KEYS)
