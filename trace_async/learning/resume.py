"""Opens a run: a new one, or one that a crash or a stop left behind.

Owns the agreement of checkpoint and ledger at start. Invariants: weights, cursor, predictor and counters
are those of one checkpoint; every group that is finished and not in those weights is on the shelf; the epoch is new.
A run without a checkpoint starts from its start weights, and keeps the groups that its ledger has.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trace_async.config_resume import complain, find_changes
from trace_async.coordination.coordinator import Coordinator
from trace_async.coordination.slots import lease_of_group
from trace_async.core.types import Group, Json
from trace_async.errors import UserError
from trace_async.learning.checkpoint import newest_checkpoint, next_epoch, read_state
from trace_async.learning.costs import Costs
from trace_async.ledger import Ledger
from trace_async.run_folder import RunFolder
from trace_async.transport.wire import decode_group

log = logging.getLogger(__name__)


class LoadablePredictor(Protocol):
    """The part of a predictor that is restored."""

    def load(self, state: Json, *, version: int) -> None:
        """Become the predictor that `state` came from."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """What a checkpoint holds beside the trainer's own files."""

    step: int = 0
    costs: Costs = field(default_factory=Costs)
    honesty: Json | None = None
    coordinator: Json | None = None
    predictor: Json | None = None
    trainer: Path | None = None  # folder for `Trainer.load`
    issued: int = 0  # leases that the ledger had


def saved_state(folder: RunFolder, *, config: Json) -> SavedState:
    """The newest whole checkpoint, or the state of a run that has none.

    Raises UserError when `config`, the resolved configuration, contradicts it, naming the keys.
    """
    newest = newest_checkpoint(folder.checkpoints)
    if newest is None:
        return SavedState()
    state = read_state(newest)
    fixed, free = find_changes(state["config"], config)
    if fixed:
        raise UserError(f"checkpoint {newest}: {complain(fixed, where=str(folder.root))}")
    for key, begun, now in free:
        log.info("%s is %r, it was %r at checkpoint %s", key, now, begun, newest.name)
    return SavedState(
        step=int(state["step"]),
        costs=Costs(**state["costs"]),
        honesty=state["honesty"],
        coordinator=state["coordinator"],
        predictor=read_state(newest, PREDICTOR),
        trainer=newest / TRAINER,
        issued=int(state["ledger"]["issued"]),
    )


TRAINER = "trainer"
"""Folder of the trainer's files in a checkpoint."""

PREDICTOR = "predictor.json"
"""The predictor's state in a checkpoint."""


def open_epoch(folder: RunFolder) -> int:
    """The number of this start; durable."""
    return next_epoch(folder.root / "epoch")


def open_coordinator(
    saved: SavedState, ledger: Ledger, *, make: Callable[[], Coordinator], now_s: float
) -> tuple[Coordinator, dict[str, Group]]:
    """The coordinator and the shelf as the ledger has them, seen from the checkpoint's step.

    Raises UserError when the ledger is older than the checkpoint.
    """
    coordinator = make()
    if (found := ledger.counts().issued) < saved.issued:
        raise UserError(
            f"the ledger knows {found} leases, the checkpoint of step {saved.step} was made with {saved.issued}: it is "
            "of another run or an older copy; put the run's own ledger.sqlite (and -wal, if there is one) back"
        )
    returned = ledger.rewind(saved.step)
    shelf = {group_id: decode_group(frames) for group_id, frames in ledger.shelved()}
    live = ledger.live()
    over = coordinator.load(
        coordinator.state() if saved.coordinator is None else saved.coordinator,
        live=live,
        shelved=[lease_of_group(group) for group in shelf.values()],
        now_s=now_s,
    )
    for lease_id, reason in over:
        ledger.reject(lease_id, reason)
        shelf.pop(lease_id, None)
    if saved.step or live or shelf:
        log.info(
            "resumed after step %d: %d groups to be consumed again, %d on the shelf in all, %d leases under way",
            *(saved.step, len(returned), len(shelf), len(live)),
        )
    return coordinator, shelf
