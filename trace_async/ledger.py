"""Durable states of leases and groups: which were issued, which arrived, which trained at which step.

    issued ──► shelved ──► consumed (at a step, with a verdict)
       │  ▲       │  ▲            │
       ▼  │       ▼  └── rewind ──┘
      rejected (with a reason; a late group may still come in)

Owns one SQLite file in the run folder. Invariants: a call that returned survives kill -9 of this process, so a group is
acknowledged only after `receive` returned; every lease stands in exactly one state; a group is consumed at most once
between two rewinds, and its bytes stay until `forget`. Never decides anything: the coordinator and the learner do.

Write-ahead log with synchronous=NORMAL: commits reach the operating system, which outlives the process; after a crash
of the whole machine the newest ones since `sync` may be missing, in order, and those leases are simply leased again. A
commit of one group takes 0.1 to 0.4 ms at 20 to 200 kB (4 ms if each waited for the disk), hence on the event loop.
"""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from itertools import accumulate, pairwise
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from trace_async.core.types import GroupVerdict, Lease
from trace_async.disk import sync
from trace_async.errors import InvariantError, UserError, WireError
from trace_async.transport.wire import MAX_ARRAYS, Frames, LeaseMessage, decode, encode

LAYOUT = 2
"""Changes with the tables below; stored in the file."""
_MAX_FRAMES = MAX_ARRAYS + 2

_TABLES = """
CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY,  -- also the group's id
    lease BLOB NOT NULL,        -- joined frames of its message
    state INTEGER NOT NULL,     -- LeaseState
    received INTEGER,           -- running number of its group's arrival
    step INTEGER,               -- optimizer step that consumed it
    verdict INTEGER,            -- GroupVerdict
    reason TEXT                 -- why it was rejected
) STRICT;
CREATE INDEX leases_by_state ON leases (state, received);
CREATE INDEX leases_by_arrival ON leases (received);
CREATE TABLE groups (           -- apart from the leases, so that a change of state does not rewrite the bytes
    lease_id TEXT PRIMARY KEY REFERENCES leases,
    frames BLOB NOT NULL
) STRICT;
"""


class LeaseState(IntEnum):
    """Where a lease stands."""

    ISSUED = 0
    SHELVED = 1
    CONSUMED = 2
    REJECTED = 3


class LedgerCounts(NamedTuple):
    """Leases ever issued, and how many stand where; the last four sum to the first."""

    issued: int
    live: int  # issued, no group yet
    shelved: int
    consumed: int
    rejected: int


class Ledger:
    """One run's ledger; a context manager. One process and one thread use it at a time."""

    def __init__(self, path: Path) -> None:
        """Open the file, or make it; UserError when it was made by another layout."""
        self._path = path
        self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            (layout,) = self._db.execute("PRAGMA user_version").fetchone()
            if layout == 0:
                for statement in _TABLES.split(";"):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {LAYOUT}")
            elif layout != LAYOUT:
                raise UserError(f"ledger {path} has layout {layout}, this version reads {LAYOUT}: use a new run folder")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Give the file back; may be called twice."""
        self._db.close()

    def issue(self, *leases: Lease) -> None:
        """Enter new leases, before they are sent; InvariantError when an id was issued before."""
        rows = [(lease.lease_id, _join(encode(LeaseMessage(lease=lease))), LeaseState.ISSUED) for lease in leases]
        with self._transaction():
            for row in rows:
                try:
                    self._db.execute("INSERT INTO leases (lease_id, lease, state) VALUES (?, ?, ?)", row)
                except sqlite3.IntegrityError as error:
                    raise InvariantError(f"lease {row[0]} was issued before") from error

    def receive(self, group_id: str, frames: Sequence[bytes]) -> bool:
        """Shelve an arrived group; False when it was here before. InvariantError when no such lease was issued.

        On return it is durable and may be acknowledged.
        """
        with self._transaction():
            if self._state(group_id) in (LeaseState.SHELVED, LeaseState.CONSUMED):
                return False
            self._db.execute("INSERT INTO groups VALUES (?, ?)", (group_id, _join(frames)))
            self._db.execute(
                "UPDATE leases SET state = ?, reason = NULL, "
                "received = (SELECT coalesce(max(received), 0) + 1 FROM leases) WHERE lease_id = ?",
                (LeaseState.SHELVED, group_id),
            )
        return True

    def reject(self, lease_id: str, reason: str) -> None:
        """Give up a lease that has not been consumed; its group's bytes, if any, go."""
        with self._transaction():
            if self._state(lease_id) is LeaseState.CONSUMED:
                raise InvariantError(f"lease {lease_id} was consumed and cannot be rejected ({reason})")
            self._db.execute(
                "UPDATE leases SET state = ?, reason = ?, received = NULL WHERE lease_id = ?",
                (LeaseState.REJECTED, reason, lease_id),
            )
            self._db.execute("DELETE FROM groups WHERE lease_id = ?", (lease_id,))

    def mark_consumed(self, step: int, verdicts: Mapping[str, GroupVerdict]) -> None:
        """Enter what `step` made of its groups, all or none; InvariantError when one is not on the shelf."""
        with self._transaction():
            for group_id, verdict in verdicts.items():
                if (state := self._state(group_id)) is not LeaseState.SHELVED:
                    raise InvariantError(f"group {group_id} is {state.name}, step {step} cannot consume it")
                self._db.execute(
                    "UPDATE leases SET state = ?, step = ?, verdict = ? WHERE lease_id = ?",
                    (LeaseState.CONSUMED, step, verdict, group_id),
                )

    def shelved(self) -> Iterator[tuple[str, Frames]]:
        """Groups that wait to be consumed, oldest arrival first; one is in memory at a time."""
        shelf = self._ids("state = ? ORDER BY received", LeaseState.SHELVED)
        for group_id in shelf:
            (blob,) = self._db.execute("SELECT frames FROM groups WHERE lease_id = ?", (group_id,)).fetchone()
            yield group_id, _split(blob)

    def live(self) -> list[Lease]:
        """Leases without a group, in the order they were issued."""
        rows = self._db.execute("SELECT lease FROM leases WHERE state = ? ORDER BY rowid", (LeaseState.ISSUED,))
        messages = [decode(_split(blob)) for (blob,) in rows]
        return [message.lease for message in messages if isinstance(message, LeaseMessage)]

    def rewind(self, step: int) -> list[str]:
        """Return groups consumed after `step` to the shelf: the weights that learned from them are gone.

        Their ids, oldest arrival first. InvariantError when `forget` has dropped the bytes of one.
        """
        with self._transaction():
            returned = self._ids("state = ? AND step > ? ORDER BY received", LeaseState.CONSUMED, step)
            lost = self._ids(
                "state = ? AND step > ? AND lease_id NOT IN (SELECT lease_id FROM groups)", LeaseState.CONSUMED, step
            )
            if lost:
                raise InvariantError(f"cannot rewind to step {step}: the bytes of groups {lost[:8]} were forgotten")
            self._db.execute(
                "UPDATE leases SET state = ?, step = NULL, verdict = NULL WHERE state = ? AND step > ?",
                (LeaseState.SHELVED, LeaseState.CONSUMED, step),
            )
        return returned

    def forget(self, step: int) -> int:
        """Drop the bytes of groups consumed at or before `step`, once a checkpoint of it is durable; how many."""
        with self._transaction():
            dropped = self._db.execute(
                "DELETE FROM groups WHERE EXISTS (SELECT 1 FROM leases WHERE leases.lease_id = groups.lease_id"
                " AND state = ? AND step <= ?)",
                (LeaseState.CONSUMED, step),
            )
        return dropped.rowcount

    def verdicts(self) -> dict[str, GroupVerdict]:
        """Verdict of every consumed group, by id."""
        rows = self._db.execute("SELECT lease_id, verdict FROM leases WHERE state = ?", (LeaseState.CONSUMED,))
        return {lease_id: GroupVerdict(verdict) for lease_id, verdict in rows}

    def sync(self) -> None:
        """What was committed before this call survives a crash of the whole machine. Blocks; in any thread."""
        # a commit is in the log, or in the database since SQLite moved and synced it
        for path in (Path(f"{self._path}-wal"), self._path, self._path.parent):
            if path.exists():
                sync(path)

    def counts(self) -> LedgerCounts:
        """How many leases stand where."""
        found = dict(self._db.execute("SELECT state, count(*) FROM leases GROUP BY state").fetchall())
        by_state = [int(found.get(state, 0)) for state in LeaseState]
        return LedgerCounts(sum(by_state), *by_state)

    def _state(self, lease_id: str) -> LeaseState:
        row = self._db.execute("SELECT state FROM leases WHERE lease_id = ?", (lease_id,)).fetchone()
        if row is None:
            raise InvariantError(f"lease {lease_id} was never issued by the run in {self._path}")
        return LeaseState(row[0])

    def _ids(self, where: str, *values: int) -> list[str]:
        rows = self._db.execute(f"SELECT lease_id FROM leases WHERE {where}", values)
        return [lease_id for (lease_id,) in rows]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def _join(frames: Iterable[bytes]) -> bytes:
    """Frames as one blob: their number, their lengths, their bytes."""
    parts = list(frames)
    return b"".join((struct.pack(f"<I{len(parts)}Q", len(parts), *map(len, parts)), *parts))


def _split(blob: bytes) -> Frames:
    """The frames of a blob; WireError when the lengths do not add up."""
    if len(blob) < 4:
        raise WireError(f"blob of {len(blob)} bytes has no frame count")
    (count,) = struct.unpack_from("<I", blob)
    start = 4 + 8 * count
    if count > _MAX_FRAMES or len(blob) < start:
        raise WireError(f"blob of {len(blob)} bytes cannot hold {count} frames")
    lengths = struct.unpack_from(f"<{count}Q", blob, 4)
    if start + sum(lengths) != len(blob):
        raise WireError(f"blob of {len(blob)} bytes declares frames of {sum(lengths)} bytes")
    return [blob[first:last] for first, last in pairwise(accumulate(lengths, initial=start))]
