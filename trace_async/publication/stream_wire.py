"""Words of the weight stream: a request for one chunk of one file, and its two answers, as ZeroMQ frames.

    request   [header]                       this chunk of this file, please
    chunk     [header, bytes]                here it is, and the length of the whole file
    refusal   [header, reason]               why not

A header is MAGIC, kind, code, chunk number, file length and the file's name. Invariants: decoding bounds every length
before it looks inside, knows no pickle, and raises WireError and nothing else; requests and answers carry the name
and the number, so they may be lost, repeated and reordered. Never: sockets, files, or what the bytes mean.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from trace_async.errors import WireError
from trace_async.publication.manifest import CHUNK_BYTES

MAX_NAME_BYTES = 64
MAX_REASON_BYTES = 512
MAX_REQUEST_BYTES = 256
"""The server's socket drops a sender of longer frames."""
MAX_ANSWER_BYTES = CHUNK_BYTES + 1024
"""The client's socket drops a sender of longer frames."""
MAX_OUTSTANDING = 16
"""Answers that the server keeps ready for one client; a request beyond them is dropped."""

_MAGIC = b"TAW1"
_HEADER = struct.Struct("!4sBBIQ")  # magic, kind, code, chunk number, bytes of the file; the name follows
_REQUEST, _CHUNK, _REFUSAL = 1, 2, 3
_MAX_INDEX = 2**32 - 1

Buffer: TypeAlias = bytes | memoryview


class Refused(IntEnum):
    """Why there is no chunk."""

    GONE = 1  # no such file (any more); a newer version is on its way
    BEYOND = 2  # the file ends before this chunk
    MALFORMED = 3  # that was no request
    UNREADABLE = 4  # the server cannot read the file


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRequest:
    """One chunk of one published file."""

    name: str
    index: int  # chunk number; bytes from index * CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkAnswer:
    """The bytes of one chunk."""

    name: str
    index: int
    file_bytes: int  # length of the whole file
    data: Buffer


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No chunk, and why."""

    name: str  # "" when the request could not be read
    index: int
    code: Refused
    reason: str


def encode_request(request: ChunkRequest) -> list[Buffer]:
    """Frames of a request. Raises WireError when name or number do not fit."""
    return [_header(_REQUEST, 0, request.index, 0, request.name)]


def decode_request(frames: Sequence[Buffer]) -> ChunkRequest:
    """The request; raises WireError for anything else."""
    if len(frames) != 1:
        raise WireError(f"a request has one frame, not {len(frames)}")
    kind, _, index, _, name = _read_header(frames[0])
    if kind != _REQUEST:
        raise WireError(f"kind {kind} is no request")
    return ChunkRequest(name=name, index=index)


def encode_answer(answer: ChunkAnswer | Refusal) -> list[Buffer]:
    """Frames of an answer; the bytes of a chunk are passed on, not copied."""
    if isinstance(answer, ChunkAnswer):
        return [_header(_CHUNK, 0, answer.index, answer.file_bytes, answer.name), answer.data]
    reason = answer.reason.encode()[:MAX_REASON_BYTES]
    return [_header(_REFUSAL, answer.code, answer.index, 0, answer.name), reason]


def decode_answer(frames: Sequence[Buffer]) -> ChunkAnswer | Refusal:
    """The answer; its `data` is the frame itself. Raises WireError for anything else."""
    if len(frames) != 2:
        raise WireError(f"an answer has two frames, not {len(frames)}")
    kind, code, index, file_bytes, name = _read_header(frames[0])
    payload = frames[1]
    if kind == _CHUNK:
        expected = min(CHUNK_BYTES, file_bytes - index * CHUNK_BYTES)
        if len(payload) != expected or expected < 1:
            raise WireError(f"chunk {index} of {file_bytes} bytes has {expected} bytes, not {len(payload)}")
        return ChunkAnswer(name=name, index=index, file_bytes=file_bytes, data=payload)
    if kind != _REFUSAL or code not in set(Refused) or len(payload) > MAX_REASON_BYTES:
        raise WireError(f"kind {kind}, code {code} with {len(payload)} bytes is no answer")
    reason = bytes(payload).decode(errors="replace")
    return Refusal(name=name, index=index, code=Refused(code), reason=reason)


def _header(kind: int, code: int, index: int, file_bytes: int, name: str) -> bytes:
    told = name.encode()
    if len(told) > MAX_NAME_BYTES or not 0 <= index <= _MAX_INDEX:
        raise WireError(f"chunk {index} of {name[:MAX_NAME_BYTES]!r} cannot be asked for")
    return _HEADER.pack(_MAGIC, kind, code, index, file_bytes) + told


def _read_header(frame: Buffer) -> tuple[int, int, int, int, str]:
    """Kind, code, chunk number, bytes of the file, name."""
    if not _HEADER.size <= len(frame) <= _HEADER.size + MAX_NAME_BYTES:
        raise WireError(f"a header of {len(frame)} bytes")
    magic, kind, code, index, file_bytes = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError(f"the header begins with {magic!r}, expected {_MAGIC!r}: another program or another release")
    try:
        name = bytes(frame[_HEADER.size :]).decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError("the file's name is not ASCII") from error
    return kind, code, index, file_bytes, name
