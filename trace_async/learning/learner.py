"""The learner role: opens the run, holds its tasks together, and says what it does.

Owns the root of the learner's tasks, all under the one TaskGroup of `run`:

    channel  carries everything; calls the intake's handlers
    intake   sends leases and releases; woken by whatever frees permits, capacity or a fence
    house    one tick per heartbeat: expiry, status.json, naming of stalls; woken by the clock
    retire   deletes versions that nobody needs any more; woken by confirmations
    weights  waits for the end of the weight server's thread, so that its error is the run's
    (train)  consumes the shelf, produces versions; woken by groups, lost leases, ticks and stop requests

Invariants: actors are heard only after the ledger and the checkpoint agree and a version is published; what does not
move is named within 60 s. Never samples, and never looks into a model.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from trace_async.coordination.coordinator import Coordinator
from trace_async.core.types import VersionNotice
from trace_async.errors import InvariantError
from trace_async.learning.bounds import Bounds
from trace_async.learning.honesty import Honesty
from trace_async.learning.intake import Intake
from trace_async.learning.learner_parts import LearnerParts, LearnerSetup
from trace_async.learning.resume import open_coordinator, open_epoch, saved_state
from trace_async.learning.status import make_status, name_stall
from trace_async.learning.train_loop import OpenRun, TrainLoop
from trace_async.run_folder import RunFolder, read_text, write_json, write_text
from trace_async.transport import wire

log = logging.getLogger(__name__)


class Learner:
    """One start of a run; build one per process."""

    def __init__(
        self,
        parts: LearnerParts,
        *,
        setup: LearnerSetup,
        folder: RunFolder,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._parts = parts
        self._setup = setup
        self._folder = folder
        self._clock = clock
        self._wall_clock = wall_clock
        self._stop_reason = ""
        self._loop: TrainLoop | None = None  # None until the run is open

    def request_stop(self, reason: str) -> None:
        """Finish the step under way, stop the actors, write a checkpoint, end. Call it on the loop, at any time."""
        self._stop_reason = self._stop_reason or reason
        if self._loop is not None:
            self._loop.stop(self._stop_reason)

    async def run(self) -> None:
        """Train until `max_steps`, `max_sampled_tokens` or a stop request; goes on from what the run folder holds.

        Raises: an ExceptionGroup with whatever broke; InvariantError when checkpoint and ledger do not agree.
        """
        opened = await self._open()
        channel = self._parts.make_channel(opened.intake, read_text(self._folder.former_address))
        self._loop = loop = TrainLoop(
            self._parts, setup=self._setup, folder=self._folder, opened=opened, channel=channel, clock=self._clock
        )
        if self._stop_reason:
            loop.stop(self._stop_reason)
        await loop.publish()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(channel.run(), name="channel")]
            await channel.ready()
            tasks.append(group.create_task(opened.intake.run(channel), name="intake"))
            tasks.append(group.create_task(self._keep_house(loop, opened), name="house"))
            tasks.append(group.create_task(loop.retire(), name="retire"))
            if self._parts.server is not None:
                tasks.append(group.create_task(self._parts.server.watch(), name="weights"))
            for path in (self._folder.former_address, self._folder.address):
                write_text(path, channel.address + "\n")
            await loop.run()
            await loop.finish()
            for task in tasks:
                task.cancel()

    async def _open(self) -> OpenRun:
        """Brings checkpoint and ledger together; nobody listens yet, so short blocking is fine here."""
        epoch = open_epoch(self._folder)
        saved = saved_state(self._folder, config=self._setup.told_to_actors)
        trainer = self._parts.trainer
        if saved.trainer is not None:
            load = partial(trainer.load, saved.trainer)
            await asyncio.get_running_loop().run_in_executor(self._parts.worker, load)
        if trainer.version != saved.step:
            raise InvariantError(f"the trainer is at version {trainer.version}, the run at step {saved.step}")
        if saved.predictor is not None:
            self._parts.predictor.load(saved.predictor, version=trainer.version)
        coordinator, shelf = open_coordinator(
            saved, self._parts.ledger, make=partial(self._make_coordinator, epoch), now_s=self._clock()
        )
        intake = Intake(
            coordinator,
            self._parts.ledger,
            shelf=shelf,
            bounds=Bounds(
                epoch=epoch,
                vocabulary_size=self._setup.vocabulary_size,
                max_context_tokens=self._setup.tree.max_context_tokens,
            ),
            greet=partial(self._greet, epoch),
            roots_of_run=self._setup.learner.max_steps * self._setup.tree.roots_per_step,
            roots_per_step=self._setup.tree.roots_per_step,
            clock=self._clock,
        )
        return OpenRun(
            epoch=epoch,
            coordinator=coordinator,
            intake=intake,
            costs=saved.costs,
            honesty=Honesty(saved.honesty),
        )

    def _make_coordinator(self, epoch: int) -> Coordinator:
        setup = self._setup
        return Coordinator(self._parts.planner, config=setup.coordinator, tree=setup.tree, seed=setup.seed, epoch=epoch)

    def _greet(self, epoch: int, notice: VersionNotice | None) -> wire.Welcome:
        return wire.Welcome(
            epoch=epoch, run_name=self._setup.run_name, config=self._setup.told_to_actors, notice=notice
        )

    async def _keep_house(self, loop: TrainLoop, opened: OpenRun) -> None:
        """Consumes nothing, produces ticks; woken by the clock, once per heartbeat."""
        while True:
            await asyncio.sleep(self._setup.coordinator.heartbeat_s)
            opened.intake.tick()
            self._say_status(loop, opened)

    def _say_status(self, loop: TrainLoop, opened: OpenRun) -> None:
        now_s, intake, coordinator = self._clock(), opened.intake, opened.coordinator
        if intake.watch.is_due(now_s):
            still_s = intake.watch.still_s(now_s)
            log.warning("%s", name_stall(loop.phase, coordinator, intake.statuses, now_s=now_s, still_s=still_s))
        status = make_status(loop.phase, coordinator, intake.statuses, now_s=now_s, updated_unix_s=self._wall_clock())
        write_json(self._folder.status, {**status, "still_s": intake.watch.still_s(now_s)})
