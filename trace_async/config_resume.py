"""Which keys a resumed run may change, and what is said of those that changed.

Invariants: a key that the prompts, the ledger or the checkpoint of a run hang on, or that says which method the run
promised to be, stays as it was; every other key may change. Configurations are compared as the JSON of `to_json`; a key
that the begun one does not know had today's default. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trace_async.config import Config
from trace_async.config_check import leaf_values

FIXED = (
    *("run.seed", "environment.name", "environment.options", "environment.success_above"),
    *("policy.path", "engine.temperature", "engine.max_turn_tokens", "tree.", "predictor.kind", "predictor.options"),
    *("prompts.num_train", "prompts.candidates_per_round"),
    *("coordinator.lockstep", "learner.lora_rank", "learner.lora_alpha", "learner.credit"),
    *("objective.kind", "objective.options", "objective.proximal"),
)
"""Keys, or beginnings of keys."""

FIXED_IN_LOCKSTEP = ("coordinator.max_age_steps",)
"""Rounds that are under way were leased by it."""


class Change(NamedTuple):
    """One key that is not what it was."""

    key: str
    begun: object
    now: object


def find_changes(begun: Mapping[str, object], now: Mapping[str, object]) -> tuple[list[Change], list[Change]]:
    """(changes that a run cannot go on with, other changes), in the order of the keys."""
    fixed: list[Change] = []
    free: list[Change] = []
    for key, default in leaf_values(Config()):
        change = Change(key, _value(begun, key, default), _value(now, key, default))
        if change.begun != change.now:
            (fixed if _is_fixed(key, begun) else free).append(change)
    return fixed, free


def complain(changes: list[Change], *, where: str) -> str:
    """Every change on a line of its own, and the cure."""
    lines = [f"{key} is {now!r}, but the run in {where} began with {begun!r}" for key, begun, now in changes]
    return "\n".join([*lines, "set it back, or start a new run in another folder"])


def _is_fixed(key: str, begun: Mapping[str, object]) -> bool:
    if _value(begun, "coordinator.lockstep", False) and key in FIXED_IN_LOCKSTEP:
        return True
    return any(key == fixed or (fixed.endswith(".") and key.startswith(fixed)) for fixed in FIXED)


def _value(config: Mapping[str, object], key: str, default: object) -> object:
    section, _, name = key.partition(".")
    values = config.get(section)
    return values.get(name, default) if isinstance(values, Mapping) else default
