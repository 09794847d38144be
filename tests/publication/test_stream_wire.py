"""Frames of the weight stream: what is encoded comes back, and nothing else gets in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_async.errors import WireError
from trace_async.publication.manifest import CHUNK_BYTES
from trace_async.publication.stream_wire import (
    MAX_NAME_BYTES,
    MAX_REASON_BYTES,
    MAX_REQUEST_BYTES,
    ChunkAnswer,
    ChunkRequest,
    Refusal,
    Refused,
    decode_answer,
    decode_request,
    encode_answer,
    encode_request,
)

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=MAX_NAME_BYTES)
INDICES = st.integers(0, 2**32 - 1)
GOLDEN_REQUEST = bytes.fromhex("5441573101000000000c0000000000000000") + b"e001_v000002.safetensors"
GOLDEN_HEADER = bytes.fromhex("544157310200000000010000000000400002") + b"e001_v000002.safetensors"


@given(NAMES, INDICES)
def test_a_request_comes_back_from_its_frames(name: str, index: int) -> None:
    request = ChunkRequest(name=name, index=index)
    frames = encode_request(request)
    assert decode_request(frames) == request
    assert max(map(len, frames)) <= MAX_REQUEST_BYTES


@given(NAMES, st.integers(0, 1000), st.integers(1, 64))
def test_a_chunk_comes_back_from_its_frames(name: str, index: int, length: int) -> None:
    answer = ChunkAnswer(name=name, index=index, file_bytes=index * CHUNK_BYTES + length, data=b"x" * length)
    assert decode_answer(encode_answer(answer)) == answer


@given(NAMES, INDICES, st.sampled_from(Refused), st.text(max_size=100))
def test_a_refusal_comes_back_from_its_frames(name: str, index: int, code: Refused, reason: str) -> None:
    refusal = Refusal(name=name, index=index, code=code, reason=reason)
    assert decode_answer(encode_answer(refusal)) == refusal


def test_the_frames_are_those_of_every_release() -> None:
    name = "e001_v000002.safetensors"
    assert encode_request(ChunkRequest(name=name, index=12)) == [GOLDEN_REQUEST]
    answer = ChunkAnswer(name=name, index=1, file_bytes=CHUNK_BYTES + 2, data=b"ab")
    assert encode_answer(answer) == [GOLDEN_HEADER, b"ab"]


def test_a_long_reason_is_cut_and_still_understood() -> None:
    refusal = Refusal(name="", index=0, code=Refused.GONE, reason="ü" * MAX_REASON_BYTES)
    told = decode_answer(encode_answer(refusal))
    assert isinstance(told, Refusal)
    assert told.reason.startswith("üü")


def test_a_name_too_long_for_a_request_is_refused_by_the_asker() -> None:
    with pytest.raises(WireError, match="cannot be asked for"):
        encode_request(ChunkRequest(name="x" * (MAX_NAME_BYTES + 1), index=0))


def mutated(frame: bytes) -> st.SearchStrategy[bytes]:
    """The frame with one byte changed, cut, or lengthened."""
    position = st.integers(0, len(frame) - 1)
    return st.one_of(
        st.builds(lambda at, new: frame[:at] + bytes([new]) + frame[at + 1 :], position, st.integers(0, 255)),
        position.map(lambda at: frame[:at]),
        st.binary(min_size=1, max_size=80).map(lambda more: frame + more),
    )


@given(st.lists(st.binary(max_size=100) | mutated(GOLDEN_REQUEST), max_size=3))
def test_hostile_requests_are_understood_or_refused_and_nothing_else(frames: list[bytes]) -> None:
    try:
        request = decode_request(frames)
    except WireError:
        return
    assert decode_request(encode_request(request)) == request


@given(st.lists(st.binary(max_size=100) | mutated(GOLDEN_HEADER), max_size=3))
def test_hostile_answers_are_understood_or_refused_and_nothing_else(frames: list[bytes]) -> None:
    try:
        answer = decode_answer(frames)
    except WireError:
        return
    if isinstance(answer, ChunkAnswer):
        assert 0 < len(answer.data) <= CHUNK_BYTES
        assert answer.index * CHUNK_BYTES + len(answer.data) <= answer.file_bytes
