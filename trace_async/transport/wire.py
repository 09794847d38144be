"""What actors and the learner say to each other, as records and as frames.

A message is a list of frames: its kind, a JSON header, and one raw frame per array. The header holds the schema
number, the record's fields and a table of the arrays (name, dtype, shape) in the order of their frames. Invariants:
frames are hostile until decoded; every size is compared with a bound and with the bytes really there before anything
of that size is made; `decode` raises WireError and nothing else; decoded arrays are read-only; a decoded group has
passed `check_group`, so nobody behind this door checks again. Knows no socket and no pickle.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, cast

import numpy as np

from trace_async.core.group import check_group
from trace_async.core.types import ActorStatus, Group, Json, Lease, VersionNotice
from trace_async.errors import WireError
from trace_async.transport.wire_codec import DTYPES, NamedArray, pack, unpack

SCHEMA = 5
"""Changes whenever a record below or its frames change; ends of different numbers refuse each other by name."""
MAX_FRAME_BYTES = 16 * 2**20
"""One frame; four million tokens of one tree."""
MAX_HEADER_BYTES = 2**20
"""A JSON header. Parsed JSON takes up to twenty times its text, so what strangers may send is small."""
MAX_CONFIG_BYTES = 16 * 2**20
"""A header that carries a configuration; only actors read these, and only from their learner."""
MAX_ARRAYS = 32
MAX_ROUTE_BYTES = 250
"""Actor id and incarnation together; ZeroMQ holds 255."""

Frames: TypeAlias = list[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """I am here and hold these leases; sent on every new connection, and again when the learner does not know me."""

    actor_id: str
    host: str
    pid: int
    capacity_roots: int  # root rollouts this actor holds at a time
    live_leases: tuple[str, ...]  # held by it, unacknowledged groups included; any other lease of it is lost
    incarnation: str = ""  # random per channel object; tells a reconnect from a second process of the same id


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMessage:
    """One finished tree; repeated until acknowledged."""

    group: Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """I live, and this is where my trees stand; answered by the newest notice."""

    status: ActorStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """My engine samples with this version."""

    actor_id: str
    version: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Return:
    """I will not finish these leases."""

    actor_id: str
    lease_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bye:
    """I am leaving and hold nothing; answered by Farewell."""

    actor_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Answer to Hello."""

    epoch: int
    run_name: str
    config: Json
    notice: VersionNotice | None  # None until a version is published


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseMessage:
    """Grow this tree."""

    lease: Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The group is durable here (or was not wanted); it must not be sent again."""

    group_id: str
    accepted: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Repeated state, newest wins; also the learner's sign of life, hence sent with None before the first version."""

    notice: VersionNotice | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Drop these leases: somebody else has them, or nobody needs them."""

    lease_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Your last frames were dropped."""

    reason: str
    hello_again: bool  # a Hello cures it; otherwise the two ends do not speak the same schema, which is fatal


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The run is over, or another process took your id: finish and leave."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Farewell:
    """Answer to Bye: it arrived, the connection may close."""


ActorMessage: TypeAlias = Hello | GroupMessage | Heartbeat | Confirm | Return | Bye
LearnerMessage: TypeAlias = Welcome | LeaseMessage | Ack | Notice | Release | Refuse | Stop | Farewell

_FROM_ACTOR: dict[bytes, type[Any]] = {
    b"hello": Hello, b"group": GroupMessage, b"heartbeat": Heartbeat,
    b"confirm": Confirm, b"return": Return, b"bye": Bye,
}  # fmt: skip
_FROM_LEARNER: dict[bytes, type[Any]] = {
    b"welcome": Welcome, b"lease": LeaseMessage, b"ack": Ack, b"notice": Notice,
    b"release": Release, b"refuse": Refuse, b"stop": Stop, b"farewell": Farewell,
}  # fmt: skip
_KIND = {record: kind for kind, record in (_FROM_ACTOR | _FROM_LEARNER).items()}
_COMPACT: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False, "separators": (",", ":")}
_ITEM_BYTES = {dtype: np.dtype(dtype).itemsize for dtype in DTYPES.values()}


def encode(message: ActorMessage | LearnerMessage) -> Frames:
    """Kind, header, arrays. Raises WireError when a value does not fit its field or a frame its bound."""
    kind = _KIND[type(message)]
    fields, arrays = pack(message)
    table = [[array.name, array.dtype, list(array.values.shape)] for array in arrays]
    header = json.dumps({"schema": SCHEMA, "fields": fields, "arrays": table}, **_COMPACT)
    frames = [kind, header.encode(), *(array.values.tobytes() for array in arrays)]
    _check_sizes(frames)
    return frames


def decode_from_actor(frames: Sequence[bytes]) -> ActorMessage:
    """What an actor said; raises WireError on anything else."""
    return cast(ActorMessage, _decode(frames, _FROM_ACTOR))


def decode_from_learner(frames: Sequence[bytes]) -> LearnerMessage:
    """What the learner said; raises WireError on anything else."""
    return cast(LearnerMessage, _decode(frames, _FROM_LEARNER))


def decode(frames: Sequence[bytes]) -> ActorMessage | LearnerMessage:
    """Either end's message, for files and tools; the channel's ends accept only what the other may say."""
    return cast(ActorMessage | LearnerMessage, _decode(frames, _FROM_ACTOR | _FROM_LEARNER))


def speaker(message: ActorMessage) -> str:
    """Id of the actor in whose name a message speaks."""
    match message:
        case GroupMessage(group=Group(actor_id=actor_id)) | Heartbeat(status=ActorStatus(actor_id=actor_id)):
            return actor_id
        case Hello() | Confirm() | Return() | Bye():
            return message.actor_id


def encode_group(group: Group) -> Frames:
    """Frames of a GroupMessage."""
    return encode(GroupMessage(group=group))


def decode_group(frames: Sequence[bytes]) -> Group:
    """The group of a GroupMessage's frames; raises WireError on anything else."""
    return cast(GroupMessage, _decode(frames, {b"group": GroupMessage})).group


def _decode(frames: Sequence[bytes], kinds: dict[bytes, type[Any]]) -> object:
    _check_sizes(frames)
    record_type = kinds.get(frames[0])
    if record_type is None:
        raise WireError(f"unknown kind {frames[0][:32]!r}; this end takes {[kind.decode() for kind in kinds]}")
    header = _parse(frames[1])
    if type(schema := header.get("schema")) is not int or schema != SCHEMA:
        raise WireError(f"schema {reprlib.repr(schema)}, this end speaks {SCHEMA}: run the same version on both")
    if header.keys() != {"schema", "fields", "arrays"}:
        raise WireError(f"header has keys {reprlib.repr(list(header))}, wants schema, fields, arrays")
    arrays = iter(_arrays(header["arrays"], frames[2:]))
    message = unpack(record_type, header["fields"], arrays)
    if extra := next(arrays, None):
        raise WireError(f"{record_type.__name__} has no array {extra.name[:80]!r}")
    _check_meaning(message)
    return message


def _check_sizes(frames: Sequence[bytes]) -> None:
    if not 2 <= len(frames) <= MAX_ARRAYS + 2:
        raise WireError(f"{len(frames)} frames, a message has 2 to {MAX_ARRAYS + 2}")
    if max(map(len, frames)) > MAX_FRAME_BYTES:
        raise WireError(f"frame of {max(map(len, frames))} bytes, the bound is {MAX_FRAME_BYTES}")
    bound = MAX_CONFIG_BYTES if frames[0] == b"welcome" else MAX_HEADER_BYTES
    if len(frames[1]) > bound:
        raise WireError(f"{frames[0][:32]!r} header of {len(frames[1])} bytes, the bound is {bound}")


def _parse(header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header.decode(), parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and over-long integers
        raise WireError(f"header of {len(header)} bytes is not JSON: {str(error)[:120]}") from error
    if not isinstance(value, dict):
        raise WireError(f"header is a JSON {type(value).__name__}, wants an object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise WireError(f"header holds {name}; unknown numbers travel as null")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise WireError(f"header holds the number {text[:32]}, which is infinite as a float")
    return number


def _arrays(table: object, frames: Sequence[bytes]) -> list[NamedArray]:
    if not isinstance(table, list) or len(table) != len(frames):
        raise WireError(f"array table {reprlib.repr(table)} has not one entry for each of {len(frames)} frames")
    return [_array(entry, frame) for entry, frame in zip(table, frames, strict=True)]


def _array(entry: object, frame: bytes) -> NamedArray:
    match entry:
        case [str(name), str(dtype), [length]] if _is_size(length, dtype, frame):
            values = np.frombuffer(frame, dtype) if frame else np.empty(0, dtype)
            values.flags.writeable = False
            return NamedArray(name=name, dtype=dtype, values=values)
    raise WireError(f"array table entry {reprlib.repr(entry)} is no [name, dtype, [length]] of {len(frame)} bytes")


def _is_size(length: object, dtype: str, frame: bytes) -> bool:
    return type(length) is int and length * _ITEM_BYTES.get(dtype, -1) == len(frame)


def _check_meaning(message: object) -> None:
    match message:
        case GroupMessage(group=group):
            check_group(group)
        case Hello(actor_id=actor_id, capacity_roots=capacity):
            routing_id(actor_id, message.incarnation)
            if not 1 <= capacity < 2**31:
                raise WireError(f"actor {actor_id} offers room for {capacity} root rollouts, wants at least 1")


def routing_id(actor_id: str, incarnation: str) -> bytes:
    """Where a process's messages come from; no two processes share it. WireError when ZeroMQ could not carry it."""
    route = f"{actor_id}/{incarnation}"
    if not actor_id or not route.isprintable() or len(route.encode()) > MAX_ROUTE_BYTES:
        raise WireError(f"actor id {route[:40]!r} is empty, unprintable or over {MAX_ROUTE_BYTES} bytes")
    return route.encode()
