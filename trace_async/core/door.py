"""The judgement of a group at the door, once, before anyone reads it.

Owns what a `Group` must satisfy: types and shapes, ranges, lengths, parent order, agreement of state with outcome,
score, tokens and failure, version order, budgets. Whoever receives a group calls `check_group`; behind the door nobody
checks again. The first fault found is raised with the group id and the turns it was found at.
"""

from __future__ import annotations

import math
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from trace_async.core.nodes import EPISODE_STOPS, LOGPROB_SLACK
from trace_async.core.types import Failure, Group, GrownBy, NodeState, Score, StopReason
from trace_async.errors import WireError

_INT, _FLOAT, _BYTE = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.uint8)
_PER_TURN = {
    "parent": _INT,
    "action_lengths": _INT,
    "observation_lengths": _INT,
    "version_min": _INT,
    "version_max": _INT,
    "kv_version_min": _INT,
    "score": _FLOAT,
    "score_version": _INT,
    "reward": _FLOAT,
    "outcome": _FLOAT,
    "process_score": _FLOAT,
    "state": _BYTE,
    "grown_by": _BYTE,
    "stop": _BYTE,
    "valid": _BYTE,
    "generate_s": _FLOAT,
    "environment_s": _FLOAT,
}
_STREAMS = {"prompt_ids": _INT, "token_ids": _INT, "logprobs": _FLOAT}
_NAMES = ("group_id", "lease_id", "actor_id", "prompt_id", "environment")


def check_group(group: Group) -> None:
    """Raise WireError when `group` is not what a finished tree can look like."""
    _check_head(group)
    _check_shapes(group)
    _check_links(group)
    _check_states(group)
    _check_tokens(group)
    _check_versions(group)
    _check_budget(group)
    _check_failures(group)


def _refuse(group: Group, fault: str, turns: NDArray[np.bool_] | None = None) -> NoReturn:
    where = "" if turns is None else f" at turns {np.flatnonzero(turns)[:8].tolist()}"
    raise WireError(f"group {group.group_id!r} from actor {group.actor_id!r}: {fault}{where}")


def _expect(group: Group, holds: NDArray[np.bool_], fault: str) -> None:
    if not holds.all():
        _refuse(group, fault, ~holds)


def _check_head(group: Group) -> None:
    for name in _NAMES:
        value = getattr(group, name)
        if not isinstance(value, str) or not value:
            _refuse(group, f"{name} is {value!r}, not a name")
    numbers = {"epoch": group.epoch, "roots": group.budget.roots, "continuations": group.budget.continuations}
    for name, number in numbers.items():
        if not isinstance(number, int) or number < 0:
            _refuse(group, f"{name} is {number!r}, not a count")
    if not isinstance(group.success_above, float) or not math.isfinite(group.success_above):
        _refuse(group, f"success_above is {group.success_above!r}, not a finite number")
    root: Score = group.root_score
    known = 0.0 <= root.success <= 1.0 and root.predictor_version >= 0 and not root.strength <= 0.0
    unknown = np.isnan(root.success) and root.predictor_version >= -1 and np.isnan(root.strength)
    if not known and not unknown:
        _refuse(group, f"root score {root}")


def _check_shapes(group: Group) -> None:
    for name, dtype in (_PER_TURN | _STREAMS).items():
        array = getattr(group, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            _refuse(group, f"{name} is not a one-dimensional array of {dtype}")
    turns = group.num_turns
    for name in _PER_TURN:
        length = getattr(group, name).shape[0]
        if length != turns:
            _refuse(group, f"{name} has {length} entries for {turns} turns")
    if turns == 0 or group.prompt_ids.size == 0:
        _refuse(group, f"{turns} turns and {group.prompt_ids.size} prompt tokens; a tree has at least one of each")


def _check_links(group: Group) -> None:
    parent = group.parent
    _expect(group, (parent >= -1) & (parent < np.arange(group.num_turns)), "parent does not come first")
    _expect(group, group.grown_by <= max(GrownBy), "grown_by is no GrownBy")
    _expect(group, group.stop <= max(StopReason), "stop is no StopReason")
    _expect(group, group.valid <= 1, "valid is neither 0 nor 1")
    at_prompt = parent < 0
    _expect(group, (group.grown_by != GrownBy.ROOT) | at_prompt, "a root rollout does not start at the prompt")
    chained = group.grown_by == GrownBy.CHAIN
    _expect(group, ~(chained & at_prompt), "a rollout goes on below the prompt")
    _, first, count = np.unique(parent[chained], return_index=True, return_counts=True)
    if (count > 1).any():
        _refuse(group, f"turn {parent[chained][first[count > 1]][0]} has two turns that continue its own rollout")


def _check_states(group: Group) -> None:
    state = group.state
    failed, leaf, scored = _masks(group)
    _expect(group, failed | leaf | scored, "state is not one a finished tree can have")
    is_parent = np.zeros(group.num_turns, dtype=np.bool_)
    is_parent[group.parent[group.parent >= 0]] = True
    _expect(group, is_parent == (state == NodeState.EXPANDED), "EXPANDED turns, and only they, have children")
    _expect(group, np.where(leaf, np.isfinite(group.outcome), np.isnan(group.outcome)), "outcome and state disagree")
    _expect(group, np.where(failed, np.isnan(group.reward), np.isfinite(group.reward)), "reward and state disagree")
    _expect(group, ~np.isinf(group.process_score), "process_score is infinite")
    _expect(group, leaf | failed | ~np.isin(group.stop, EPISODE_STOPS), "an episode stop without an outcome")
    known = (group.score >= 0) & (group.score <= 1) & (group.score_version >= 0)
    unknown = np.isnan(group.score) & (group.score_version >= -1)
    _expect(group, known | unknown, "score is not a probability with a version")
    _expect(group, scored | (np.isnan(group.score) & (group.score_version == -1)), "a score where none was asked")
    for name in ("generate_s", "environment_s"):
        seconds = getattr(group, name)
        _expect(group, np.isfinite(seconds) & (seconds >= 0), f"{name} is not a duration")


def _check_tokens(group: Group) -> None:
    failed, leaf, _ = _masks(group)
    actions, observations = group.action_lengths, group.observation_lengths
    _expect(group, np.where(failed, actions == 0, actions > 0), "action length and state disagree")
    _expect(group, (observations >= 0) & ~((failed | leaf) & (observations > 0)), "observation length")
    sampled, total = int(actions.sum(dtype=np.int64)), int((actions.astype(np.int64) + observations).sum())
    if group.token_ids.size != total or group.logprobs.size != sampled:
        _refuse(
            group,
            f"{group.token_ids.size} tokens and {group.logprobs.size} log-probabilities "
            f"where the lengths say {total} and {sampled}",
        )
    if min(group.prompt_ids.min(), group.token_ids.min(initial=0)) < 0:
        _refuse(group, "negative token id")
    if not (np.isfinite(group.logprobs) & (group.logprobs <= LOGPROB_SLACK)).all():
        _refuse(group, "log-probabilities must be finite and at most 0")


def _check_versions(group: Group) -> None:
    failed, _, _ = _masks(group)
    oldest, newest, cached = group.version_min, group.version_max, group.kv_version_min
    played = (cached >= 0) & (cached <= oldest) & (oldest <= newest)
    nothing = (cached == -1) & (oldest == -1) & (newest == -1)
    _expect(group, np.where(failed, nothing, played), "versions must order 0 <= kv <= min <= max")


def _check_budget(group: Group) -> None:
    roots = int((group.grown_by == GrownBy.ROOT).sum())
    further = int(np.isin(group.grown_by, (GrownBy.CONTINUATION, GrownBy.SELECTED)).sum())
    if roots > group.budget.roots or further > group.budget.continuations:
        _refuse(group, f"{roots} roots and {further} continuations exceed {group.budget}")


def _check_failures(group: Group) -> None:
    failed, _, _ = _masks(group)
    if not all(isinstance(failure, Failure) and failure.kind for failure in group.failures):
        _refuse(group, "a failure without a kind")
    told = [failure.node_id for failure in group.failures]
    nodes = (np.flatnonzero(failed) + 1).tolist()
    if told != nodes:
        _refuse(group, f"failures of nodes {told[:8]}, but nodes {nodes[:8]} are FAILED")


def _masks(group: Group) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.bool_]]:
    state = group.state
    return (
        state == NodeState.FAILED,
        state == NodeState.LEAF,
        (state == NodeState.EXPANDED) | (state == NodeState.CLOSED),
    )
