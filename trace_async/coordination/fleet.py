"""The actors as the coordinator sees them, and which of them holds which lease.

Owns capacity and load. Invariants: a holding is written at the actor and at the slot together, here and nowhere else;
an actor's load counts every lease that it may still be working on, also one that was given up because it is overdue.
Pure: times are handed in. Never decides what becomes of a lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from trace_async.coordination.slots import Slot


class Release(NamedTuple):
    """Word to an actor that a lease is not wanted any more."""

    actor_id: str
    lease_id: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Member:
    """One actor."""

    actor_id: str
    last_seen_s: float
    joined: bool = False  # False: known from before a restart only
    capacity_roots: int = 0
    version: int = -1  # newest version it is known to sample with; -1 = none, so that it gets no leases
    held: dict[str, int] = field(default_factory=dict)  # lease id -> its roots
    held_roots: int = 0

    def has_room(self, roots: int) -> bool:
        """A lease larger than the whole capacity fits when nothing else is held, or it would wait for ever."""
        return not self.held or self.held_roots + roots <= self.capacity_roots


class Fleet:
    """Actors in the order in which they joined."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._releases: list[Release] = []

    def __iter__(self) -> Iterator[Member]:
        """All actors; a copy, so they may leave on the way."""
        return iter(list(self._members.values()))

    def get(self, actor_id: str) -> Member | None:
        """The actor of that id."""
        return self._members.get(actor_id)

    def expect(self, actor_id: str, *, now_s: float) -> Member:
        """An actor that a saved state names and that has not said hello; it counts as seen now."""
        return self._members.setdefault(actor_id, Member(actor_id=actor_id, last_seen_s=now_s))

    def join(self, actor_id: str, *, capacity_roots: int, now_s: float) -> Member:
        """A hello, the first or a later one; perhaps of a new process, so what it samples with is to be said again."""
        member = self.expect(actor_id, now_s=now_s)
        member.joined, member.capacity_roots, member.last_seen_s, member.version = True, capacity_roots, now_s, -1
        return member

    def remove(self, actor_id: str) -> None:
        """The actor is gone; its leases must have been taken from it before."""
        member = self._members.pop(actor_id)
        assert not member.held, f"{actor_id} leaves with {list(member.held)}"
        self._releases = [release for release in self._releases if release.actor_id != actor_id]

    def silent_since(self, time_s: float) -> list[Member]:
        """Actors that were not heard of after `time_s`."""
        return [member for member in self if member.last_seen_s < time_s]

    def pick(self, *, roots: int, version: int, allowed_lag: int, slot: Slot | None = None) -> Member | None:
        """Who may take a tree of `roots`: an actor at most `allowed_lag` versions behind, with room.

        Prefers one that is not at work on the same tree, then the one with most room, then the first to join.
        """
        oldest = max(0, version - allowed_lag)
        able = [m for m in self if m.joined and oldest <= m.version <= version and m.has_room(roots)]
        busy = set(slot.holders.values()) if slot is not None else set()
        return max(able, key=lambda m: (m.actor_id not in busy, m.capacity_roots - m.held_roots), default=None)

    # ---- holdings ------------------------------------------------------------------------------------------------

    def hold(self, member: Member, slot: Slot, attempt: int) -> None:
        """From now on the actor may be working on this attempt."""
        slot.holders[attempt] = member.actor_id
        member.held[f"{slot.base}.{attempt}"] = slot.budget.roots
        member.held_roots += slot.budget.roots

    def unhold(self, slot: Slot, attempt: int) -> None:
        """The attempt is over, for better or worse; nothing happens when nobody holds it."""
        actor_id = slot.holders.pop(attempt, None)
        if actor_id is not None:
            self._members[actor_id].held_roots -= self._members[actor_id].held.pop(f"{slot.base}.{attempt}")

    def release(self, actor_id: str, lease_id: str, reason: str) -> None:
        """The actor will be told to drop a lease."""
        self._releases.append(Release(actor_id, lease_id, reason))

    def release_holders(self, slot: Slot, reason: str) -> None:
        """Everyone at work on this tree will be told to stop."""
        for attempt, actor_id in list(slot.holders.items()):
            self.unhold(slot, attempt)
            self.release(actor_id, f"{slot.base}.{attempt}", reason)

    def take_releases(self) -> list[Release]:
        """Releases to send, each once."""
        taken, self._releases = self._releases, []
        return taken

    def holdings(self) -> set[tuple[str, str]]:
        """Every (actor id, lease id), as the actors' side has it."""
        return {(member.actor_id, lease_id) for member in self for lease_id in member.held}
