"""The numbers of one step, as a row of metrics.jsonl; `costs.py` and `honesty.py` have those that need a memory.

Owns the keys and how each is reduced. Invariants: what a key says is measured on the groups that the step consumed,
unless its name says `total` (since the start of the run) or it is a gauge; unknown is NaN, never 0. Keys are those of
verl where verl has the quantity. Pure: reads records, changes none but its own last readings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trace_async.coordination.leases import REJECTED, Counts
from trace_async.core.outcomes import is_success
from trace_async.core.packing import PackItem
from trace_async.core.rows import trainable_turns
from trace_async.core.types import ActorStatus, Group, GroupVerdict, NodeState, Verdict
from trace_async.learning.batching import Batch
from trace_async.methods.forecasts import root_outcomes

Floats: TypeAlias = NDArray[np.float64]
Numbers: TypeAlias = Floats | NDArray[np.float32] | NDArray[np.int32] | NDArray[np.bool_]

MIXED_SPREAD = 1e-6
"""Outcomes of one group that differ by more are mixed; less is rounding."""

_ENGINE_BUSY, _ENGINE_IDLE = "busy_s", "idle_s"  # counters that engines keep


def batch_measures(batch: Batch, *, max_age_steps: int) -> dict[str, float]:
    """Outcomes, ages and waste over one step's groups."""
    groups = [item.group for item in batch.items]
    ends = _join([group.outcome[~np.isnan(group.outcome)] for group in groups])
    roots = _join([is_success(root_outcomes(group), group.success_above) for group in groups])
    played = sum(int((group.state != NodeState.FAILED).sum()) for group in groups)
    valid = sum(int((group.valid[group.state != NodeState.FAILED] != 0).sum()) for group in groups)
    return {
        "critic/score/mean": _mean(ends),
        "rollout/success": _mean(roots),
        "rollout/effective_ratio": _mean(np.array([_is_mixed(group) for group in groups])),
        "rollout/invalid_share": 1.0 - valid / played if played else math.nan,
        "rollout/failed_nodes": float(sum(len(group.failures) for group in groups)),
        "rollout/turns": float(played),
        **_age_measures(batch.items, max_age_steps),
        **{f"groups/{verdict.name.lower()}": float(batch.verdicts.count(verdict)) for verdict in GroupVerdict},
    }


def total_measures(counts: Counts, *, max_permits: int) -> dict[str, float]:
    """Trees since the start of the run, and the gauges of permits and shelf."""
    finished = dict(counts.finished)
    rejected = finished.pop(REJECTED)
    return {
        **{f"groups/{end}_total": float(count) for end, count in finished.items()},
        "groups/rejected_total": float(rejected),
        "groups/issued_total": float(counts.issued),
        "groups/live": float(counts.live),
        "permits/in_use": float(counts.committed_roots),
        "permits/max": float(max_permits),
        "shelf/groups": float(counts.shelved),
        "shelf/roots": float(counts.shelved_roots),
    }


@dataclass(slots=True)
class Rates:
    """Turns readings that only grow into rates between two rows."""

    time_s: float
    received_bytes: int = 0
    received_tokens: int = 0
    received_turns: int = 0
    _engines: dict[str, tuple[float, float]] = field(default_factory=dict)  # actor -> busy and idle seconds

    def receive(self, group: Group, *, num_bytes: int) -> None:
        """A group came in."""
        self.received_bytes += num_bytes
        self.received_tokens += group.num_sampled_tokens
        self.received_turns += int((group.state != NodeState.FAILED).sum())

    def read(self, now_s: float, actors: Mapping[str, ActorStatus]) -> dict[str, float]:
        """Rates since the last call."""
        seconds, tokens = now_s - self.time_s, self.received_tokens
        row = {
            "rollout/turns_per_s": self.received_turns / seconds if seconds > 0 else math.nan,
            "rollout/tokens_per_s": tokens / seconds if seconds > 0 else math.nan,
            "wire/bytes_per_sampled_token": self.received_bytes / tokens if tokens else math.nan,
            "engine/idle_share": self._idle_share(actors),
        }
        self.time_s, self.received_bytes, self.received_tokens, self.received_turns = now_s, 0, 0, 0
        return row

    def _idle_share(self, actors: Mapping[str, ActorStatus]) -> float:
        busy_s = idle_s = 0.0
        for actor_id, status in actors.items():
            if _ENGINE_BUSY not in status.counters or _ENGINE_IDLE not in status.counters:
                continue
            now = (status.counters[_ENGINE_BUSY], status.counters[_ENGINE_IDLE])
            before = self._engines.get(actor_id, (0.0, 0.0))
            if now[0] < before[0] or now[1] < before[1]:
                before = (0.0, 0.0)  # a new process under the same id counts from nothing
            busy_s, idle_s = busy_s + now[0] - before[0], idle_s + now[1] - before[1]
            self._engines[actor_id] = now
        total_s = busy_s + idle_s
        return idle_s / total_s if total_s > 0 else math.nan


def _age_measures(items: Sequence[PackItem], max_age_steps: int) -> dict[str, float]:
    trained = _join([item.ages[trainable_turns(item)] for item in items])
    played = _join([item.ages[item.ages >= 0] for item in items])
    over = [item.verdicts[item.ages >= 0] == Verdict.CONTEXT for item in items]
    return {
        "staleness/age_mean": _mean(trained),
        "staleness/age_max": float(trained.max()) if trained.size else math.nan,
        **{f"staleness/age_{age}_share": _mean(played == age) for age in range(max_age_steps + 1)},
        "staleness/over_age_share": _mean(_join(over)),
    }


def _is_mixed(group: Group) -> bool:
    ends = group.outcome[~np.isnan(group.outcome)]
    return bool(ends.size) and float(np.ptp(ends)) > MIXED_SPREAD


def _join(parts: Sequence[Numbers]) -> Floats:
    return np.concatenate([np.zeros(0), *parts])


def _mean(values: Numbers) -> float:
    return float(np.mean(values, dtype=np.float64)) if values.size else math.nan
