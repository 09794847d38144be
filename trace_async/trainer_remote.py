"""One trainer spread over ranks: the leader's end, which a learner calls like any trainer, and the other ranks' end.

Each call is sent to the other ranks, with what it needs, and made on all of them at the same time. Invariants: one call
at a time; a call that fails anywhere ends the run on all ranks, with a message that names the rank and what was done.
Never: what a trainer computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from trace_async.core.packing import Minibatch
from trace_async.core.types import Adapter, Canary, IntArray
from trace_async.errors import RankError
from trace_async.trainer import Trainer
from trace_async.trainer_lifeline import Lifeline
from trace_async.trainer_ranks import Ranks
from trace_async.trainer_wire import decode, encode

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

_NEWS_S = 3.0
"""What passes at most between the failure of a collective and the news of who ended."""

_ELSEWHERE = Path()
"""Where other ranks are told to read and write, which they never do."""


class LeadingTrainer:
    """A trainer of several ranks, on rank 0."""

    def __init__(self, trainer: Trainer, *, ranks: Ranks, lifeline: Lifeline) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._lifeline = lifeline

    @property
    def version(self) -> int:
        """Training steps the weights have had."""
        return self._trainer.version

    @property
    def adapter(self) -> Adapter | None:
        """What `save_weights` writes."""
        return self._trainer.adapter

    @property
    def packs_trees(self) -> bool:
        """Whether packed trees leave the model unchanged."""
        return self._trainer.packs_trees

    def step(self, minibatches: Sequence[Minibatch]) -> Mapping[str, float]:
        """As `Trainer.step`."""
        return self._together("step", list(minibatches), lambda: self._trainer.step(minibatches))

    def canary(self, prompts: Sequence[IntArray]) -> Canary:
        """As `Trainer.canary`."""
        return self._together("canary", list(prompts), lambda: self._trainer.canary(prompts))

    def save_weights(self, path: Path) -> None:
        """As `Trainer.save_weights`."""
        self._together("save_weights", None, lambda: self._trainer.save_weights(path))

    def save(self, directory: Path) -> None:
        """As `Trainer.save`."""
        self._together("save", None, lambda: self._trainer.save(directory))

    def load(self, directory: Path) -> None:
        """As `Trainer.load`."""
        self._together("load", None, lambda: self._trainer.load(directory))

    def export(self, directory: Path) -> None:
        """As `Trainer.export`."""
        self._together("export", None, lambda: self._trainer.export(directory))

    def stop(self) -> None:
        """Let the other ranks end; only where no call has failed."""
        self._lifeline.expect_the_end()
        self._ranks.send({"do": "stop"}, torch.empty(0, dtype=torch.uint8))

    def _together(self, command: str, argument: object, work: Callable[[], T]) -> T:
        self._lifeline.phase = f"{command}, version {self._trainer.version}"
        try:
            header, payload = encode(argument)
            self._ranks.send({"do": command, "with": header}, payload)
            done = work()
        except RuntimeError as error:  # what torch raises when a collective fails, among others
            raise _verdict(error, self._lifeline) from error
        self._lifeline.phase = "waiting for the next call"
        return done


def follow(trainer: Trainer, *, ranks: Ranks, lifeline: Lifeline) -> None:
    """What every rank but the first does: obeys until it is told to stop.

    Woken by the leader's calls and its end. Raises RankError when the leader is lost, and whatever a call raises, of
    which the leader is told.
    """
    while True:
        lifeline.phase = "waiting for the next call"
        try:
            message, payload = ranks.receive()
        except RuntimeError as error:
            raise _verdict(error, lifeline) from error
        if message["do"] == "stop":
            lifeline.expect_the_end()
            return
        lifeline.phase = f"{message['do']}, version {trainer.version}"
        try:
            _obey(trainer, message["do"], decode(message["with"], payload))
        except Exception as error:  # whatever it is, the leader has to hear of it before this process ends
            verdict = _verdict(error, lifeline) if isinstance(error, RuntimeError) else error
            lifeline.say(f"{type(verdict).__name__}: {verdict}")
            if verdict is error:
                raise
            raise verdict from error


def _obey(trainer: Trainer, command: str, argument: Any) -> None:
    match command:
        case "step":
            trainer.step(argument)
        case "canary":
            trainer.canary(argument)
        case "save_weights":
            trainer.save_weights(_ELSEWHERE)
        case "save":
            trainer.save(_ELSEWHERE)
        case "load":
            trainer.load(_ELSEWHERE)
        case "export":
            trainer.export(_ELSEWHERE)
        case _:
            raise ValueError(f"unknown command {command!r} of the leader")


def _verdict(error: RuntimeError, lifeline: Lifeline) -> Exception:
    """Whose failure it was: a rank that has ended, one that does not answer, or this one's own."""
    if isinstance(error, torch.OutOfMemoryError):
        return error
    if (lost := lifeline.lost(wait_s=_NEWS_S)) is not None:
        return lost
    if "imed out" in str(error):
        return RankError(
            f"no rank has ended, but one did not answer within learner.rank_deadline_s while this process was at: "
            f"{lifeline.phase}. It hangs, or has far more work than the others: look at the ranks' logs and stacks "
            "(py-spy dump), or raise the deadline; the run goes on from its last checkpoint when it is started again"
        )
    return error
