"""From groups on the shelf to what one optimizer step needs: judged, credited, packed.

Owns the verdict on a whole group. Invariants: ages are taken at consumption, with the version the step starts from;
every group of the batch gets exactly one verdict; masks, credit and denominator come from the same items. CPU work of
many milliseconds, so it runs in the trainer's thread. Never touches the shelf, the ledger or a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from trace_async.core.packing import Minibatch, PackItem, denominators, first_tokens, pack
from trace_async.core.rows import Signal, carries_signal, scored_turns, trainable_turns
from trace_async.core.staleness import ages, judge_turns
from trace_async.core.tree_packing import pack_trees
from trace_async.core.turn_table import make_table
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
    signal: Signal = Signal.ADVANTAGE  # what the objective trains on
    whole_trees: bool = False  # the objective looks at all turns of a tree
    updates_per_step: int = 1  # optimizer updates that share a step's groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One step's groups after judgement."""

    items: list[PackItem]
    verdicts: list[GroupVerdict]  # of the items
    minibatches: list[Minibatch]  # one per optimizer update; every group is in exactly one

    def by_group(self) -> dict[str, GroupVerdict]:
        """Verdict by group id."""
        return {item.group.group_id: verdict for item, verdict in zip(self.items, self.verdicts, strict=True)}


def make_batch(groups: Sequence[Group], *, rule: BatchRule, version: int, epoch: int) -> Batch:
    """Judge, credit and pack; `version` and `epoch` are the trainer's before the step.

    Raises: InvariantError for a turn from the future of this epoch, ConfigError when a path is over the micro-batch.
    """
    items = [_judge(group, rule, version, epoch) for group in groups]
    shares = [items[start :: rule.updates_per_step] for start in range(rule.updates_per_step)]
    return Batch(
        items=items,
        verdicts=[judge_group(item) for item in items],
        minibatches=[make_minibatch(share, rule) for share in shares],
    )


def make_minibatch(items: Sequence[PackItem], rule: BatchRule) -> Minibatch:
    """One optimizer update's share of the items; those without a turn to train count in the denominators only."""
    kept = [item for item in items if scored_turns(item).any()]
    layout = pack_trees if rule.packs_trees else partial(pack, pad_id=rule.pad_id)
    rows = layout(kept, first_tokens=first_tokens(kept), micro_batch_tokens=rule.micro_batch_tokens)
    return Minibatch(turns=make_table(kept), rows=rows, denominators=denominators(items))


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
    if not carries_signal(item).any():
        return GroupVerdict.FLAT
    return GroupVerdict.TRAINED if trainable_turns(item).any() else GroupVerdict.STALE


def _judge(group: Group, rule: BatchRule, version: int, epoch: int) -> PackItem:
    age = ages(group, trainer_version=version, trainer_epoch=epoch)
    return PackItem(
        group=group,
        credit=rule.credit(group),
        verdicts=judge_turns(age, soft=rule.soft_age_steps, hard=rule.max_age_steps),
        ages=age,
        signal=rule.signal,
        whole_tree=rule.whole_trees,
    )
