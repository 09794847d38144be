"""`trace-async where RUN`: every live lease and tree of a run as text, from the content of RUN/status.json.

Never talks to the run; a status that nobody renews says how old it is. What is missing shows as a dash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trace_async.core.types import Json

_STALE_S = 15.0
"""The learner renews the status every second; one much older than that belongs to a run that ended or hangs."""

_LEASE_HEAD = ("lease", "prompt", "state", "age", "actor", "host", "tree: node", "phase", "waiting", "turns", "old")
_ACTOR_HEAD = ("actor", "host", "pid", "version", "roots", "capacity", "last heard")


def describe(status: Json, *, now_unix_s: float) -> list[str]:
    """Lines for a terminal: the learner, the actors, then the leases, oldest first."""
    actors = _records(status, "actors")
    leases = _records(status, "leases")
    permits, shelf = _record(status, "permits"), _record(status, "shelf")
    lines = [
        f"learner: {_text(status, 'phase')} for {_seconds(status, 'phase_s')}, step {_text(status, 'step')}, "
        f"version {_text(status, 'version')}; permits {_text(permits, 'in_use')} of {_text(permits, 'max')}, "
        f"shelf {_text(shelf, 'groups')} groups with {_text(shelf, 'roots')} roots",
        *_say_if_old(status, now_unix_s),
        "",
    ]
    lines += _table(_ACTOR_HEAD, [_actor_row(actor) for actor in actors]) if actors else ["no actors"]
    hosts = {_text(actor, "actor_id"): _text(actor, "host") for actor in actors}
    lines.append("")
    lines += _table(_LEASE_HEAD, [_lease_row(lease, hosts) for lease in leases]) if leases else ["no live leases"]
    return lines


def _say_if_old(status: Json, now_unix_s: float) -> list[str]:
    written = status.get("updated_unix_s")
    if not isinstance(written, int | float) or now_unix_s - written <= _STALE_S:
        return []
    return [f"written {now_unix_s - written:.0f} s ago: the run has ended, or its learner hangs (see RUN/logs)"]


def _actor_row(actor: Json) -> tuple[str, ...]:
    keys = ("actor_id", "host", "pid", "version", "held_roots", "capacity_roots")
    texts = ["fenced" if (key, actor.get(key)) == ("version", -1) else _text(actor, key) for key in keys]
    return (*texts, _seconds(actor, "silent_s"))


def _lease_row(lease: Json, hosts: Mapping[str, str]) -> tuple[str, ...]:
    tree, actor = _record(lease, "tree"), _text(lease, "actor_id")
    return (
        _text(lease, "lease_id"),
        _text(lease, "prompt_id"),
        _text(lease, "state"),
        _seconds(lease, "age_s"),
        actor,
        hosts.get(actor, "-"),
        _text(tree, "node_id"),
        _text(tree, "phase"),
        _seconds(tree, "waiting_s"),
        _text(tree, "turns"),
        _seconds(tree, "age_s"),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    cells = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (head, *rows)]
    return ["  ".join(row).rstrip() for row in cells]


def _record(data: Json, key: str) -> Json:
    value = data.get(key)
    return value if isinstance(value, Mapping) else {}


def _records(data: Json, key: str) -> list[Json]:
    value = data.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _text(data: Json, key: str) -> str:
    value = data.get(key)
    return "-" if value is None else str(value)


def _seconds(data: Json, key: str) -> str:
    value = data.get(key)
    return f"{value:.1f} s" if isinstance(value, int | float) else "-"
