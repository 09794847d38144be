"""From groups on the shelf to what one optimizer step needs: judged, credited, packed.

Owns the verdict on a whole group. Invariants: ages are taken at consumption, with the version the step starts from;
every group of the batch gets exactly one verdict; masks, credit and denominator come from the same items. CPU work of
many milliseconds, so it runs in the trainer's thread. Never touches the shelf, the ledger or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trace_async.core.packing import PackItem, RowBatch, denominator, pack
from trace_async.core.rows import trainable_turns
from trace_async.core.staleness import ages, judge_turns
from trace_async.core.tree_packing import pack_trees
from trace_async.core.types import Group, GroupVerdict
from trace_async.methods.credit import CreditRule


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """How groups become a batch."""

    credit: CreditRule
    soft_age_steps: int
    max_age_steps: int
    pad_id: int
    micro_batch_tokens: int
    packs_trees: bool = True  # else path rows, for models that packed trees would change


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's groups after judgement."""

    items: list[PackItem]
    verdicts: list[GroupVerdict]  # of the items
    rows: list[RowBatch]  # empty when nothing is left to train on
    denominator: float  # over every played turn, whatever its verdict

    def by_group(self) -> dict[str, GroupVerdict]:
        """Verdict by group id."""
        return {item.group.group_id: verdict for item, verdict in zip(self.items, self.verdicts, strict=True)}


def make_batch(groups: Sequence[Group], *, rule: BatchRule, version: int, epoch: int) -> Batch:
    """Judge, credit and pack; `version` and `epoch` are the trainer's before the step.

    Raises: InvariantError for a turn from the future of this epoch, ConfigError when a path is over the micro-batch.
    """
    items = [_judge(group, rule, version, epoch) for group in groups]
    layout = pack_trees if rule.packs_trees else pack
    return Batch(
        items=items,
        verdicts=[judge_group(item) for item in items],
        rows=layout(items, pad_id=rule.pad_id, micro_batch_tokens=rule.micro_batch_tokens),
        denominator=denominator(items),
    )


def as_of(group: Group, *, version: int) -> Group:
    """The group with no version stamp above `version`, the trainer's.

    A restart takes versions back, and groups of the weights that it discarded carry higher numbers.
    """
    if group.version_max.max(initial=0) <= version:
        return group
    low, high = (np.minimum(stamps, np.int32(version)) for stamps in (group.version_min, group.version_max))
    return replace(group, version_min=low, version_max=high)


def judge_group(item: PackItem) -> GroupVerdict:
    """What becomes of a group: looks at the very numbers that the loss will use."""
    if np.isnan(item.group.outcome).all():
        return GroupVerdict.BROKEN
    if not ((item.credit.advantage != 0) & (item.credit.mass > 0)).any():
        return GroupVerdict.FLAT
    return GroupVerdict.TRAINED if trainable_turns(item).any() else GroupVerdict.STALE


def _judge(group: Group, rule: BatchRule, version: int, epoch: int) -> PackItem:
    age = ages(group, trainer_version=version, trainer_epoch=epoch)
    return PackItem(
        group=group,
        credit=rule.credit(group),
        verdicts=judge_turns(age, soft=rule.soft_age_steps, hard=rule.max_age_steps),
        ages=age,
    )
