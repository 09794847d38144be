"""No corrupted group gets past the door, whichever single field is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.builders import chain_group, failure_of, random_group
from trace_async.core.group import check_group
from trace_async.core.types import Group, GrownBy, NodeState, Score, StopReason, TreeBudget
from trace_async.errors import WireError

SEEDS = st.integers(min_value=0, max_value=2**32)
ARRAYS = [
    field.name for field in dataclasses.fields(Group) if isinstance(getattr(chain_group(), field.name), np.ndarray)
]
PER_TURN = [name for name in ARRAYS if name not in ("prompt_ids", "token_ids", "logprobs")]
NAN, INF = float("nan"), float("inf")

Corruption = Callable[[Group, np.random.Generator], Any]


def at(name: str, value: Any, where: Callable[[Group], Any] | None = None) -> Corruption:
    """Set one entry of an array, among the turns for which `where` holds; nothing to do when there is none."""

    def corrupt(group: Group, rng: np.random.Generator) -> Any:
        array = np.array(getattr(group, name))
        places = np.flatnonzero(where(group)) if where else np.arange(array.size)
        if places.size == 0:
            return None
        place = int(rng.choice(places))
        array[place] = value(group, place) if callable(value) else value
        return array

    return corrupt


def played(group: Group) -> Any:
    return group.state != NodeState.FAILED


def failed(group: Group) -> Any:
    return group.state == NodeState.FAILED


def leaf(group: Group) -> Any:
    return group.state == NodeState.LEAF


def not_leaf(group: Group) -> Any:
    return group.state != NodeState.LEAF


def scored(group: Group) -> Any:
    return (group.state == NodeState.EXPANDED) | (group.state == NodeState.CLOSED)


def unscored(group: Group) -> Any:
    return ~scored(group)


def known(group: Group) -> Any:
    return np.isfinite(group.score)


def below(group: Group) -> Any:
    return group.parent >= 0


def at_prompt(group: Group) -> Any:
    return group.parent < 0


def spent(group: Group, *reasons: GrownBy) -> int:
    return int(np.isin(group.grown_by, reasons).sum())


CORRUPTIONS: dict[str, list[Corruption]] = {
    **{name: [lambda group, rng: "", lambda group, rng: 3] for name in ("group_id", "lease_id", "actor_id")},
    **{name: [lambda group, rng: "", lambda group, rng: None] for name in ("prompt_id", "environment")},
    "epoch": [lambda group, rng: -1, lambda group, rng: 0.5],
    "budget": [
        lambda group, rng: TreeBudget(roots=spent(group, GrownBy.ROOT) - 1, continuations=99),
        lambda group, rng: TreeBudget(roots=99, continuations=spent(group, GrownBy.CONTINUATION, GrownBy.SELECTED) - 1),
    ],
    "root_score": [
        lambda group, rng: Score(success=1.5, predictor_version=0),
        lambda group, rng: Score(success=0.5, predictor_version=-1),
        lambda group, rng: Score(success=NAN, predictor_version=-2),
        lambda group, rng: Score(success=0.5, predictor_version=0, strength=0.0),
        lambda group, rng: Score(success=NAN, predictor_version=0, strength=2.0),
    ],
    "success_above": [lambda group, rng: NAN, lambda group, rng: -INF, lambda group, rng: "0.5"],
    "prompt_ids": [at("prompt_ids", -1), lambda group, rng: group.prompt_ids[:0]],
    "parent": [
        at("parent", lambda group, turn: turn),
        at("parent", lambda group, turn: turn + 1),
        at("parent", -2),
        at("parent", -1, lambda group: below(group) & (group.grown_by == GrownBy.CHAIN)),
        at("parent", 0, lambda group: np.arange(group.num_turns) * (group.state[0] != NodeState.EXPANDED) > 0),
    ],
    "action_lengths": [
        at("action_lengths", 0, played),
        at("action_lengths", lambda group, turn: group.action_lengths[turn] + 1),
        at("action_lengths", -1),
        at("action_lengths", 2**31 - 1),
    ],
    "observation_lengths": [
        at("observation_lengths", -1),
        at("observation_lengths", lambda group, turn: group.observation_lengths[turn] + 1),
        at("observation_lengths", 2**31 - 1),
    ],
    "token_ids": [at("token_ids", -1)],
    "logprobs": [at("logprobs", bad) for bad in (NAN, INF, -INF, 0.01)],
    "version_min": [
        at("version_min", -1, played),
        at("version_min", 0, failed),
        at("version_min", lambda group, turn: group.version_max[turn] + 1),
    ],
    "version_max": [at("version_max", -1, played), at("version_max", 3, failed)],
    "kv_version_min": [
        at("kv_version_min", -1, played),
        at("kv_version_min", 0, failed),
        at("kv_version_min", lambda group, turn: group.version_min[turn] + 1, played),
    ],
    "score": [at("score", bad) for bad in (1.5, -0.1, INF)] + [at("score", 0.5, unscored)],
    "score_version": [at("score_version", -2), at("score_version", -1, known), at("score_version", 0, unscored)],
    "reward": [at("reward", NAN, played), at("reward", INF), at("reward", 0.0, failed)],
    "outcome": [at("outcome", NAN, leaf), at("outcome", 0.0, not_leaf), at("outcome", INF)],
    "process_score": [at("process_score", bad) for bad in (INF, -INF)],
    "state": [
        at("state", lambda group, turn, value=value: value if group.state[turn] != value else 6)
        for value in (*NodeState, 6, 255)
    ],
    "grown_by": [
        at("grown_by", 4),
        at("grown_by", GrownBy.ROOT, below),
        at("grown_by", GrownBy.CHAIN, at_prompt),
        at(
            "grown_by",
            GrownBy.CHAIN,
            lambda group: (
                (group.grown_by != GrownBy.CHAIN) & np.isin(group.parent, group.parent[group.grown_by == GrownBy.CHAIN])
            ),
        ),
    ],
    "stop": [at("stop", 5), at("stop", StopReason.CONTEXT, scored), at("stop", StopReason.TURN_LIMIT, scored)],
    "valid": [at("valid", 2)],
    "generate_s": [at("generate_s", bad) for bad in (NAN, INF, -0.5)],
    "environment_s": [at("environment_s", bad) for bad in (NAN, INF, -0.5)],
    "failures": [
        lambda group, rng: (*group.failures, failure_of(group.num_turns + 1)),
        lambda group, rng: group.failures[1:] if group.failures else None,
        lambda group, rng: group.failures[::-1] if len(group.failures) > 1 else None,
        lambda group, rng: (failure_of(group.failures[0].node_id, ""), *group.failures[1:]) if group.failures else None,
        lambda group, rng: ("no failure",),
    ],
}


def malformed(array: Any) -> Iterator[Any]:
    """What no array of a group may be."""
    yield array.astype(np.float64 if array.dtype != np.float32 else np.float16)
    yield array.astype(array.dtype.newbyteorder(">")) if array.dtype.itemsize > 1 else array.astype(np.int8)
    yield array.reshape(1, -1)
    yield array.tolist()
    yield None


def refused(group: Group, name: str, value: Any) -> None:
    with pytest.raises(WireError, match="group"):
        check_group(dataclasses.replace(group, **{name: value}))


def test_every_field_of_a_group_has_its_corruptions() -> None:
    assert set(CORRUPTIONS) == {field.name for field in dataclasses.fields(Group)}


@given(SEEDS)
def test_every_legal_group_passes(seed: int) -> None:
    check_group(random_group(np.random.default_rng(seed)))


@pytest.mark.parametrize("name", CORRUPTIONS)
@settings(max_examples=15)
@given(seed=SEEDS)
def test_a_group_with_one_false_field_is_refused(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    group = random_group(rng, failures=0.3)
    for corrupt in CORRUPTIONS[name]:
        value = corrupt(group, rng)
        if value is not None or name in ("prompt_id", "environment"):
            refused(group, name, value)


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_another_kind_or_shape_is_refused(name: str) -> None:
    group = random_group(np.random.default_rng(3))
    for value in malformed(getattr(group, name)):
        refused(group, name, value)


@pytest.mark.parametrize("name", [name for name in ARRAYS if name != "prompt_ids"])
@settings(max_examples=5)
@given(seed=SEEDS)
def test_an_entry_too_many_or_too_few_is_refused(name: str, seed: int) -> None:
    group = random_group(np.random.default_rng(seed))
    array = getattr(group, name)
    assume(array.size)
    refused(group, name, array[:-1])
    refused(group, name, np.append(array, array[-1:]))


def test_a_group_without_turns_is_refused() -> None:
    group = chain_group()
    nothing = {name: getattr(group, name)[:0] for name in (*PER_TURN, "token_ids", "logprobs")}
    with pytest.raises(WireError, match="0 turns"):
        check_group(dataclasses.replace(group, **nothing))


LIES: dict[str, dict[str, Any]] = {
    "a turn that waits for its score": {
        "state": np.array([NodeState.UNSCORED], np.uint8),
        "outcome": np.array([NAN], np.float32),
    },
    "a played turn without tokens": {
        "action_lengths": np.array([0], np.int32),
        "token_ids": np.zeros(0, np.int32),
        "logprobs": np.zeros(0, np.float32),
    },
    "an observation after the end": {
        "observation_lengths": np.array([1], np.int32),
        "token_ids": np.array([5, 6, 7], np.int32),
    },
}


@pytest.mark.parametrize("name", LIES)
def test_fields_that_agree_on_a_lie_are_refused_too(name: str) -> None:
    group = chain_group((1.0,), turns=1)
    with pytest.raises(WireError, match="at turns"):
        check_group(dataclasses.replace(group, **LIES[name]))


def test_a_refusal_names_the_group_its_actor_and_the_turns() -> None:
    group = chain_group((1.0, 0.0), turns=2, lease_id="lease-5")
    outcome = np.array([NAN, 1.0, NAN, NAN], np.float32)
    with pytest.raises(WireError, match=r"group 'lease-5' from actor 'actor-0': outcome .* at turns \[3\]"):
        check_group(dataclasses.replace(group, outcome=outcome))


def test_lengths_that_overflow_32_bits_do_not_pass_as_small_ones() -> None:
    group = chain_group((1.0, 0.0), turns=1)
    huge = np.full(2, 2**31 - 1, np.int32)
    with pytest.raises(WireError, match="4294967294"):
        check_group(dataclasses.replace(group, action_lengths=huge))
