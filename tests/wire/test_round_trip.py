"""What one end says is what the other end hears, for every message; what would change on the way is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.builders import chain_group
from tests.wire.messages import (
    EXAMPLE_GROUP,
    EXAMPLE_LEASE,
    EXAMPLE_NOTICE,
    EXAMPLE_STATUS,
    EXAMPLES,
    Message,
    ints,
    messages,
    same,
)
from trace_async.core.types import Task
from trace_async.errors import WireError
from trace_async.transport import wire


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_example_comes_back_equal(message: Message) -> None:
    assert same(wire.decode(wire.encode(message)), message)


@settings(max_examples=100)
@given(messages())
def test_any_message_comes_back_equal(message: Message) -> None:
    frames = wire.encode(message)
    decoded = wire.decode(frames)
    assert same(decoded, message)
    assert wire.encode(decoded) == frames


def test_the_examples_have_one_message_of_every_kind() -> None:
    kinds = {wire.encode(message)[0] for message in EXAMPLES}
    assert len(kinds) == len(EXAMPLES) == 14


def test_each_end_understands_only_what_the_other_may_say() -> None:
    for message in EXAMPLES:
        frames = wire.encode(message)
        readers: list[Callable[[wire.Frames], Message]] = [wire.decode_from_learner, wire.decode_from_actor]
        if frames[0] in (b"hello", b"group", b"heartbeat", b"confirm", b"return", b"bye"):
            readers.reverse()
        assert same(readers[0](frames), message)
        with pytest.raises(WireError, match="unknown kind"):
            readers[1](frames)


def test_the_speaker_of_every_actor_message_is_its_actor() -> None:
    spoken = [wire.speaker(message) for message in EXAMPLES if isinstance(message, wire.ActorMessage)]
    assert spoken == ["actor-1"] * 6


def test_decoded_arrays_are_read_only() -> None:
    group = wire.decode_group(wire.encode_group(EXAMPLE_GROUP))
    with pytest.raises(ValueError, match="read-only"):
        group.token_ids[0] = 5


def test_strided_and_empty_arrays_travel_by_value() -> None:
    group = replace(EXAMPLE_GROUP, prompt_ids=np.arange(8, dtype=np.int32)[::2])
    assert wire.decode_group(wire.encode_group(group)).prompt_ids.tolist() == [0, 2, 4, 6]


def test_unknown_numbers_travel_as_null_and_come_back_as_nan() -> None:
    frames = wire.encode(wire.LeaseMessage(lease=EXAMPLE_LEASE))
    assert b'"success":null' in frames[1]
    message = wire.decode(frames)
    assert isinstance(message, wire.LeaseMessage)
    assert math.isnan(message.lease.root_score.success)


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (wire.GroupMessage(group=replace(EXAMPLE_GROUP, token_ids=np.zeros(4, np.int64))), "token_ids.*<i4.*int64"),
        (wire.GroupMessage(group=replace(EXAMPLE_GROUP, token_ids=ints(1, 2, 3, 4).reshape(2, 2))), r"\(2, 2\)"),
        (wire.LeaseMessage(lease=replace(EXAMPLE_LEASE, task=Task("t", {"at": (0, 1)}))), "at.*plain JSON"),
        (wire.LeaseMessage(lease=replace(EXAMPLE_LEASE, task=Task("t", {1: "a"}))), "wants a string"),  # type: ignore[dict-item]
        (wire.LeaseMessage(lease=replace(EXAMPLE_LEASE, task=Task("t", {"p": math.nan}))), "plain JSON"),
        (wire.LeaseMessage(lease=replace(EXAMPLE_LEASE, deadline_s=math.inf)), "deadline_s: infinite"),
        (wire.LeaseMessage(lease=replace(EXAMPLE_LEASE, seed=2**63)), "seed: integer of 64 bits"),
        (wire.Heartbeat(status=replace(EXAMPLE_STATUS, pid=True)), "pid: wants an integer"),
        (wire.Stop(reason="\ud800"), "reason: text is not valid Unicode"),
        (wire.Stop(reason="x" * (wire.MAX_HEADER_BYTES + 1)), "header of"),
    ],
)
def test_a_value_that_would_not_come_back_equal_is_refused_by_name(message: Any, fault: str) -> None:
    with pytest.raises(WireError, match=fault):
        wire.encode(message)


def test_numbers_from_numpy_are_taken_as_the_numbers_they_are() -> None:
    numbers: Any = {"version": np.int64(9), "deadline_s": np.float32(0.5)}
    notice = replace(EXAMPLE_NOTICE, version=numbers["version"])
    lease = replace(EXAMPLE_LEASE, deadline_s=numbers["deadline_s"])
    assert wire.decode(wire.encode(wire.Notice(notice=notice))) == wire.Notice(notice=replace(notice, version=9))
    assert b'"deadline_s":0.5,' in wire.encode(wire.LeaseMessage(lease=lease))[1]


def test_a_welcome_may_carry_much_more_configuration_than_an_actor_may_send() -> None:
    config = {"environment": {"text": "x" * (2 * wire.MAX_HEADER_BYTES)}}
    welcome = wire.Welcome(epoch=1, run_name="run", config=config, notice=EXAMPLE_NOTICE)
    frames = wire.encode(welcome)
    assert wire.MAX_HEADER_BYTES < len(frames[1]) < wire.MAX_CONFIG_BYTES
    assert same(wire.decode_from_learner(frames), welcome)


def test_a_notice_is_small_however_large_weights_and_predictor_are() -> None:
    assert sum(map(len, wire.encode(wire.Notice(notice=EXAMPLE_NOTICE)))) < 500


def test_the_cost_of_a_group_grows_with_its_size_and_not_faster() -> None:
    def least_seconds(rollouts: int) -> float:
        group = chain_group((1.0,) * rollouts, turns=50)
        least = math.inf
        for _ in range(5):
            start = time.perf_counter()
            wire.decode_group(wire.encode_group(group))
            least = min(least, time.perf_counter() - start)
        return least

    assert least_seconds(160) < 40 * least_seconds(10), (
        "16 times the turns; quadratic work would cost 256 times as much"
    )
