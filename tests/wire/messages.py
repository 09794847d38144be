"""Every message for the wire tests: one example of each, strategies for all of them, and equality that knows NaN."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from hypothesis import strategies as st

from tests.builders import random_group
from trace_async.core.types import (
    ActorStatus,
    Failure,
    Group,
    Lease,
    Score,
    Task,
    TreeBudget,
    TreePhase,
    VersionNotice,
)
from trace_async.transport import wire

Message: TypeAlias = wire.ActorMessage | wire.LearnerMessage
NAN = math.nan


def same(left: object, right: object) -> bool:
    """Equal in type and value, with NaN equal to NaN."""
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=True)
    if is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list) and isinstance(right, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right or (left != left and right != right)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def small_bytes(*values: int) -> Any:
    return np.array(values, np.uint8)


EXAMPLE_GROUP = Group(
    group_id="r0-p3.0",
    lease_id="r0-p3.0",
    actor_id="actor-1",
    epoch=2,
    prompt_id="p3",
    environment="frozenlake",
    budget=TreeBudget(roots=2, continuations=1),
    root_score=Score(success=0.25, predictor_version=7, strength=3.5),
    success_above=-0.75,
    prompt_ids=ints(1, 2, 3),
    parent=ints(-1, 0, -1),
    action_lengths=ints(2, 1, 0),
    observation_lengths=ints(1, 0, 0),
    token_ids=ints(10, 11, 20, 12),
    logprobs=floats(-0.5, -0.25, -1.5),
    version_min=ints(7, 7, -1),
    version_max=ints(7, 8, -1),
    kv_version_min=ints(7, 7, -1),
    score=floats(0.5, NAN, NAN),
    score_version=ints(7, -1, -1),
    reward=floats(0.0, 1.0, NAN),
    outcome=floats(NAN, 1.0, NAN),
    process_score=floats(NAN, NAN, NAN),
    state=small_bytes(2, 4, 5),
    grown_by=small_bytes(0, 1, 0),
    stop=small_bytes(0, 0, 2),
    valid=small_bytes(1, 1, 0),
    generate_s=floats(0.25, 0.5, 0.0),
    environment_s=floats(0.125, 0.0, 0.0),
    failures=(Failure(node_id=3, kind="EnvironmentTimeout", message="no reply in 30 s — “gone”"),),
)
EXAMPLE_LEASE = Lease(
    lease_id="r0-p3.0",
    prompt_id="p3",
    task=Task("p3", {"size": 4, "slippery": False, "map": ["SF", "HG"], "hint": None, "noise": 0.5}),
    budget=TreeBudget(roots=2, continuations=1),
    seed=2**62 + 1,
    round_index=3,
    attempt=0,
    issued_version=7,
    deadline_s=120.0,
    root_score=Score(success=NAN, predictor_version=-1),
)
EXAMPLE_NOTICE = VersionNotice(
    version=8,
    epoch=2,
    manifest_digest="ab" * 32,
    directory="/runs/x/versions",
    address="tcp://10.0.0.7:5571",
)
EXAMPLE_STATUS = ActorStatus(
    actor_id="actor-1",
    host="node-7",
    pid=4711,
    version=8,
    live_roots=2,
    counters={"turns": 12.0, "wall_s": 3.25},
    trees=(
        TreePhase(lease_id="r0-p3.0", prompt_id="p3", phase="generate", node_id=4, age_s=1.5, waiting_s=0.25, turns=3),
    ),
    epoch=2,
)
EXAMPLES: tuple[Message, ...] = (
    wire.Hello(
        actor_id="actor-1", host="node-7", pid=4711, capacity_roots=64, live_leases=("r0-p1.0",), incarnation="f"
    ),
    wire.GroupMessage(group=EXAMPLE_GROUP),
    wire.Heartbeat(status=EXAMPLE_STATUS),
    wire.Confirm(actor_id="actor-1", version=8, epoch=2),
    wire.Return(actor_id="actor-1", lease_ids=("r0-p1.0", "r0-p2.0"), reason="draining"),
    wire.Bye(actor_id="actor-1"),
    wire.Welcome(epoch=2, run_name="run", config={"run": {"seed": 0}}, notice=EXAMPLE_NOTICE),
    wire.LeaseMessage(lease=EXAMPLE_LEASE),
    wire.Ack(group_id="r0-p3.0", accepted=False, reason="duplicate"),
    wire.Notice(notice=None),
    wire.Release(lease_ids=(), reason="nobody waits"),
    wire.Refuse(reason="who are you?", hello_again=True),
    wire.Stop(reason="60 steps done"),
    wire.Farewell(),
)
"""One of every kind, in the order of the schema."""

_TEXT = st.text(max_size=12)
_ID = st.text(min_size=1, max_size=12)
_INT = st.integers(-(2**63), 2**63 - 1)
_NUMBER = st.floats(allow_infinity=False)  # NaN included: it travels as null
_IDS = st.lists(_ID, max_size=4).map(tuple)
_ACTOR_ID = st.text("abcdefghij-0123456789.é", min_size=1, max_size=40)
_SCALAR = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _TEXT
_JSON = st.dictionaries(
    _TEXT,
    st.recursive(_SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3)),
    max_size=3,
)
_SCORE = st.builds(Score, success=_NUMBER, predictor_version=_INT, strength=_NUMBER)
_NOTICE = st.builds(VersionNotice, version=_INT, epoch=_INT, manifest_digest=_TEXT, directory=_TEXT, address=_TEXT)
_LEASE = st.builds(
    Lease,
    lease_id=_ID, prompt_id=_ID, task=st.builds(Task, _TEXT, _JSON),
    budget=st.builds(TreeBudget, roots=_INT, continuations=_INT),
    seed=_INT, round_index=_INT, attempt=_INT, issued_version=_INT, deadline_s=_NUMBER, root_score=_SCORE,
)  # fmt: skip
_PHASE = st.builds(
    TreePhase, lease_id=_ID, prompt_id=_ID, phase=_TEXT, node_id=_INT, age_s=_NUMBER, waiting_s=_NUMBER, turns=_INT
)
_STATUS = st.builds(
    ActorStatus,
    actor_id=_ACTOR_ID, host=_TEXT, pid=_INT, version=_INT, live_roots=_INT,
    counters=st.dictionaries(_TEXT, _NUMBER, max_size=4), trees=st.lists(_PHASE, max_size=3).map(tuple),
    epoch=_INT,
)  # fmt: skip


def groups() -> st.SearchStrategy[Group]:
    """Any legal group with a prompt id, an actor id and failure texts of any characters."""
    return st.builds(
        lambda seed, name, above: replace(
            random_group(np.random.default_rng(seed), prompt_id=name, failures=0.2), success_above=above
        ),
        st.integers(0, 2**32 - 1),
        _ID,
        st.floats(allow_nan=False, allow_infinity=False),
    )


def messages() -> st.SearchStrategy[Message]:
    """Any message of any kind."""
    return st.one_of(
        st.builds(
            wire.Hello, actor_id=_ACTOR_ID, host=_TEXT, pid=_INT, capacity_roots=st.integers(1, 2**31 - 1),
            live_leases=_IDS, incarnation=st.text("0123456789abcdef", max_size=16),
        ),
        st.builds(wire.GroupMessage, group=groups()),
        st.builds(wire.Heartbeat, status=_STATUS),
        st.builds(wire.Confirm, actor_id=_ACTOR_ID, version=_INT, epoch=_INT),
        st.builds(wire.Return, actor_id=_ACTOR_ID, lease_ids=_IDS, reason=_TEXT),
        st.builds(wire.Bye, actor_id=_ACTOR_ID),
        st.builds(wire.Welcome, epoch=_INT, run_name=_TEXT, config=_JSON, notice=st.none() | _NOTICE),
        st.builds(wire.LeaseMessage, lease=_LEASE),
        st.builds(wire.Ack, group_id=_ID, accepted=st.booleans(), reason=_TEXT),
        st.builds(wire.Notice, notice=st.none() | _NOTICE),
        st.builds(wire.Release, lease_ids=_IDS, reason=_TEXT),
        st.builds(wire.Refuse, reason=_TEXT, hello_again=st.booleans()),
        st.builds(wire.Stop, reason=_TEXT),
        st.just(wire.Farewell()),
    )  # fmt: skip
