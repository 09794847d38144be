"""The frames of every message, byte for byte: a change of format cannot slip in without a new schema number.

After a change on purpose: raise `wire.SCHEMA`, run `python -m tests.wire.test_golden`, look at the difference.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.wire.messages import EXAMPLES, Message, same
from trace_async.transport import wire

GOLDEN = Path(__file__).with_name("golden_frames.json")


def readable(frames: wire.Frames) -> dict[str, object]:
    """Kind and header as text, arrays as hexadecimal."""
    return {"kind": frames[0].decode(), "header": frames[1].decode(), "arrays": [frame.hex() for frame in frames[2:]]}


def unreadable(entry: dict[str, object]) -> wire.Frames:
    arrays = entry["arrays"]
    assert isinstance(arrays, list)
    return [str(entry["kind"]).encode(), str(entry["header"]).encode(), *(bytes.fromhex(frame) for frame in arrays)]


def golden() -> list[dict[str, object]]:
    entries: list[dict[str, object]] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return entries


@pytest.mark.parametrize(("number", "message"), list(enumerate(EXAMPLES)), ids=lambda item: type(item).__name__)
def test_the_frames_of_every_message_are_the_pinned_ones(number: int, message: Message) -> None:
    pinned = golden()[number]
    assert readable(wire.encode(message)) == pinned
    assert same(wire.decode(unreadable(pinned)), message)


def test_every_pinned_message_is_still_said() -> None:
    assert len(golden()) == len(EXAMPLES)


if __name__ == "__main__":
    entries = [readable(wire.encode(message)) for message in EXAMPLES]
    GOLDEN.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
