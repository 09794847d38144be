"""Whatever arrives, decoding ends in a message or in WireError: no other error, no warning, no big allocation."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import random_group
from tests.wire.messages import EXAMPLE_GROUP, EXAMPLES, Message, floats, ints, messages, small_bytes
from trace_async.errors import WireError
from trace_async.transport import wire

KINDS = [wire.encode(message)[0] for message in EXAMPLES]
WRONG_VALUES: list[Any] = [None, True, 0, -1, 2**63, 10**400, 0.5, "", "x", "\ud800", [], {}, [[]], {"x": 1}, [None]]


def decodes_or_refuses(frames: wire.Frames) -> None:
    """The whole promise; a message that got through must be sayable again."""
    try:
        message = wire.decode(frames)
    except WireError:
        return
    wire.encode(message)


def with_header(frames: wire.Frames, change: Callable[[Any], object]) -> wire.Frames:
    header = json.loads(frames[1])
    change(header)
    return [frames[0], json.dumps(header).encode(), *frames[2:]]


GROUP_FRAMES = wire.encode(wire.GroupMessage(group=EXAMPLE_GROUP))
HELLO_FRAMES = wire.encode(EXAMPLES[0])


@settings(max_examples=150)
@given(st.lists(st.binary(max_size=64), max_size=6))
def test_random_bytes_are_refused(frames: wire.Frames) -> None:
    with pytest.raises(WireError):
        wire.decode(frames)


@settings(max_examples=150)
@given(st.sampled_from(KINDS), st.binary(max_size=200), st.lists(st.binary(max_size=8), max_size=3))
def test_random_bytes_behind_a_known_kind_are_refused(kind: bytes, header: bytes, arrays: wire.Frames) -> None:
    with pytest.raises(WireError):
        wire.decode([kind, header, *arrays])


@settings(max_examples=100)
@given(messages(), st.data())
def test_a_truncated_message_is_refused(message: Message, data: st.DataObject) -> None:
    frames = wire.encode(message)
    frame = data.draw(st.integers(0, len(frames) - 1))
    if frames[frame]:
        cut = data.draw(st.integers(0, len(frames[frame]) - 1))
        with pytest.raises(WireError):
            wire.decode([*frames[:frame], frames[frame][:cut], *frames[frame + 1 :]])
    with pytest.raises(WireError):
        wire.decode(frames[:frame])
    with pytest.raises(WireError):
        wire.decode([*frames, b"\0\0\0\0"])


@settings(max_examples=150)
@given(messages(), st.data())
def test_flipped_bytes_and_swapped_frames_are_refused_or_still_a_message(message: Message, data: st.DataObject) -> None:
    frames = wire.encode(message)
    index = st.integers(0, len(frames) - 1)
    changed, other = data.draw(index), data.draw(index)
    buffer = bytearray(frames[changed])
    if buffer:
        buffer[data.draw(st.integers(0, len(buffer) - 1))] ^= data.draw(st.integers(1, 255))
    decodes_or_refuses([*frames[:changed], bytes(buffer), *frames[changed + 1 :]])
    frames[changed], frames[other] = frames[other], frames[changed]
    decodes_or_refuses(frames)


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, item in items for deeper in paths_of(item, (*path, key)))]


@settings(max_examples=150)
@given(messages(), st.data())
def test_mutated_headers_are_refused_or_still_a_message(message: Message, data: st.DataObject) -> None:
    frames = wire.encode(message)
    header = json.loads(frames[1])
    *way, last = data.draw(st.sampled_from(paths_of(header)[1:]))
    place = header
    for key in way:
        place = place[key]
    match data.draw(st.sampled_from(["replace", "delete", "add"])):
        case "replace":
            place[last] = data.draw(st.sampled_from(WRONG_VALUES))
        case "delete":
            del place[last]
        case "add" if isinstance(place, dict):
            place["surprise"] = 1
    decodes_or_refuses([frames[0], json.dumps(header).encode(), *frames[2:]])


def drop(name: str, header: Any) -> None:
    del header["fields"][name]


def mistype(name: str, header: Any) -> None:
    header["fields"][name] = [{"a": []}]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_missing_an_unknown_and_a_mistyped_field_are_refused(message: Message) -> None:
    frames = wire.encode(message)
    names = list(json.loads(frames[1])["fields"])
    with pytest.raises(WireError, match="unknown keys"):
        wire.decode(with_header(frames, lambda header: header["fields"].update(surprise=1)))
    for name in names:
        with pytest.raises(WireError, match="missing keys"):
            wire.decode(with_header(frames, partial(drop, name)))
        with pytest.raises(WireError):
            wire.decode(with_header(frames, partial(mistype, name)))


@pytest.mark.parametrize("schema", [0, 4, 6, -5, 5.0, True, "5", None, [5]])
def test_a_wrong_schema_number_is_named(schema: object) -> None:
    with pytest.raises(WireError, match="this end speaks 5"):
        wire.decode(with_header(HELLO_FRAMES, lambda header: header.update(schema=schema)))


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"1e-"])
@pytest.mark.parametrize("field", [b'"pid":4711', b'"schema":5'])
def test_numbers_that_are_none_are_refused(number: bytes, field: bytes) -> None:
    header = HELLO_FRAMES[1].replace(field, field.split(b":")[0] + b":" + number)
    assert header != HELLO_FRAMES[1]
    with pytest.raises(WireError):
        wire.decode([b"hello", header])


@pytest.mark.parametrize(
    "entry",
    [
        ["GroupMessage.group.prompt_ids", "<f8", [3]],
        ["GroupMessage.group.prompt_ids", ">i4", [3]],
        ["GroupMessage.group.prompt_ids", "|O", [3]],
        ["GroupMessage.group.prompt_ids", "<f4", [3]],
        ["GroupMessage.group.parent", "<i4", [3]],
        ["GroupMessage.group.prompt_ids", "<i4", [2]],
        ["GroupMessage.group.prompt_ids", "<i4", [-3]],
        ["GroupMessage.group.prompt_ids", "<i4", [3, 1]],
        ["GroupMessage.group.prompt_ids", "<i4", 3],
        ["GroupMessage.group.prompt_ids", "<i4", [3.0]],
        ["GroupMessage.group.prompt_ids", "<i4", [True]],
        ["GroupMessage.group.prompt_ids", "<i4"],
        [None, None, None],
        {},
        "",
    ],
    ids=repr,
)
def test_a_wrong_array_declaration_is_refused(entry: object) -> None:
    assert json.loads(GROUP_FRAMES[1])["arrays"][0] == ["GroupMessage.group.prompt_ids", "<i4", [3]]
    with pytest.raises(WireError, match="array"):
        wire.decode(with_header(GROUP_FRAMES, lambda header: header["arrays"].__setitem__(0, entry)))


@pytest.mark.parametrize("length", [2**31, 2**40, 2**62, 2**64, 10**400])
def test_a_huge_declared_size_allocates_nothing(length: int) -> None:
    frames = with_header(GROUP_FRAMES, lambda header: header["arrays"][0].__setitem__(2, [length]))
    assert peak_bytes_of_refusing(frames) < 2**20


@pytest.mark.parametrize("filler", [b"[],", b"{},", b"0,", b'"",', b"[", b'{"a":'])
def test_a_header_made_to_swell_stays_within_thirty_times_its_bound(filler: bytes) -> None:
    text = b'{"schema":5,"arrays":[],"fields":[' + filler * (wire.MAX_HEADER_BYTES // len(filler) - 20) + b"0]}"
    assert peak_bytes_of_refusing([b"hello", text]) < 30 * wire.MAX_HEADER_BYTES


@pytest.mark.parametrize(
    "frames",
    [
        [b"hello", b" " * (wire.MAX_HEADER_BYTES + 1)],
        [b"welcome", b" " * (wire.MAX_CONFIG_BYTES + 1)],
        [b"group", b"{}", bytes(wire.MAX_FRAME_BYTES + 1)],
        [b"x" * (wire.MAX_FRAME_BYTES + 1), b"{}"],
        [b"group", b"{}", *([b""] * (wire.MAX_ARRAYS + 1))],
    ],
    ids=["header", "state", "array", "kind", "frames"],
)
def test_what_exceeds_a_bound_is_refused_unread(frames: wire.Frames) -> None:
    assert peak_bytes_of_refusing(frames) < 2**20


def peak_bytes_of_refusing(frames: wire.Frames) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            wire.decode(frames)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_json_nested_to_the_bound_is_taken_and_deeper_is_refused() -> None:
    def welcome(depth: int) -> wire.Frames:
        config = "{}" if depth == 0 else '{"a":' * depth + "0" + "}" * depth
        fields_ = f'{{"epoch":1,"run_name":"r","config":{config},"notice":null}}'
        return [b"welcome", f'{{"schema":5,"arrays":[],"fields":{fields_}}}'.encode()]

    wire.decode(welcome(31))
    for depth in (32, 500, 950, 1000, 100_000):
        with pytest.raises(WireError):
            wire.decode(welcome(depth))


@pytest.mark.parametrize("actor_id", ["", "x" * 251, "é" * 126, "a\0b", "line\nbreak"])
def test_an_actor_id_that_cannot_be_a_routing_id_is_refused(actor_id: str) -> None:
    with pytest.raises(WireError):
        wire.decode(with_header(HELLO_FRAMES, lambda header: header["fields"].update(actor_id=actor_id)))


@pytest.mark.parametrize("capacity", [0, -1, 2**31])
def test_an_actor_without_room_is_refused(capacity: int) -> None:
    with pytest.raises(WireError, match="room for"):
        wire.decode(with_header(HELLO_FRAMES, lambda header: header["fields"].update(capacity_roots=capacity)))


def test_an_illegal_group_is_refused_at_the_door_with_its_id() -> None:
    group = replace(EXAMPLE_GROUP, parent=ints(-1, 2, -1))
    with pytest.raises(WireError, match=r"r0-p3\.0.*parent"):
        wire.decode_group(wire.encode_group(group))


_HOSTILE_ARRAYS = {
    np.dtype(np.int32): ints(-(2**31), -2, -1, 0, 1, 2, 3, 1000, 2**31 - 1),
    np.dtype(np.float32): floats(float("nan"), float("inf"), float("-inf"), -1.0, 0.0, 0.5, 1.0, 3e38),
    np.dtype(np.uint8): small_bytes(0, 1, 2, 3, 4, 5, 6, 255),
}


@settings(max_examples=200)
@given(st.integers(0, 2**32 - 1), st.data())
def test_a_group_with_any_numbers_in_its_arrays_is_refused_or_still_legal(seed: int, data: st.DataObject) -> None:
    group = random_group(np.random.default_rng(seed))
    names = [f.name for f in fields(group) if isinstance(getattr(group, f.name), np.ndarray)]
    for name in data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        values = getattr(group, name).copy()
        choice = data.draw(st.sampled_from(["one", "all", "shorter", "longer"]))
        hostile = data.draw(st.sampled_from(_HOSTILE_ARRAYS[values.dtype].tolist()))
        if choice == "one" and values.size:
            values[data.draw(st.integers(0, values.size - 1))] = hostile
        elif choice == "all":
            values[:] = hostile
        elif choice == "shorter":
            values = values[1:]
        else:
            values = np.append(values, np.array(hostile, values.dtype))
        group = replace(group, **{name: values})
    decodes_or_refuses(wire.encode_group(group))
