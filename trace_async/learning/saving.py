"""What a checkpoint of a run consists of, and the order in which it becomes durable.

Owns the content: the trainer's files, the predictor, and one JSON object with cursor, leases, counters, costs, the
ledger's mark and the configuration. Groups that wait are in the ledger, whose commits up to the mark are on disk before
the checkpoint has its name: so the ledger is never older than a checkpoint, whatever the machine loses. Invariants: the
content is taken in one piece, between two steps; the ledger forgets what no checkpoint to start from could ask for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from trace_async.core.types import Json
from trace_async.disk import sync
from trace_async.learning.checkpoint import drop_old, write_checkpoint
from trace_async.learning.costs import Costs
from trace_async.learning.learner_parts import LearnerParts, LearnerSetup
from trace_async.learning.resume import PREDICTOR, TRAINER
from trace_async.run_folder import RunFolder


class Saver:
    """Makes the checkpoints of one start."""

    def __init__(self, parts: LearnerParts, *, setup: LearnerSetup, folder: RunFolder, costs: Costs) -> None:
        """`costs`: those of the checkpoint that the run starts from."""
        self._parts = parts
        self._setup = setup
        self._folder = folder
        self._last = costs

    def prepare(self, *, step: int, costs: Costs, state: Json) -> Callable[[], int]:
        """The writing of a checkpoint of now, for the worker thread; it returns the oldest step that is kept.

        `state`: what the train loop adds to the content.
        """
        whole = {
            **state,
            "step": step,
            "version": self._parts.trainer.version,
            "costs": asdict(costs),
            "ledger": {"issued": self._parts.ledger.counts().issued},
            "config": self._setup.told_to_actors,
        }
        success, self._last = success_since(self._last, costs), costs
        learner = self._setup.learner

        def write() -> int:
            self._parts.ledger.sync()
            for path in (self._folder.metrics, self._folder.root):
                if path.exists():
                    sync(path)  # rows of steps that are not made again
            root = self._folder.checkpoints
            write_checkpoint(root, step=step, state=whole, fill=self._fill, success=success)
            return drop_old(root, keep=learner.keep_checkpoints, keep_best=learner.keep_best)

        return write

    def _fill(self, directory: Path) -> None:
        (directory / TRAINER).mkdir()
        self._parts.trainer.save(directory / TRAINER)
        predictor = json.dumps(self._parts.predictor.state(), allow_nan=False)
        (directory / PREDICTOR).write_text(predictor, encoding="utf-8")


def success_since(before: Costs, now: Costs) -> float:
    """Share of the root rollouts consumed in between that succeeded; NaN when none came to an outcome."""
    ends = now.chains - before.chains
    return (now.successes - before.successes) / ends if ends else math.nan
