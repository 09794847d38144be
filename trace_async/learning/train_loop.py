"""The train loop: takes what is oldest from the shelf, makes a step of it, publishes, records; checkpoints in between.

Owns the order of a step's effects: train, observe, publish, enter in the ledger, count. So after a crash at any point
the next start finds each group either on the shelf or in the weights of the checkpoint it starts from, never both.
Invariants: nothing here blocks the loop, trainer and disk run in one worker thread; ages are judged with the version
the step starts from; counters reconcile at every step, or the run ends. Never talks to actors about leases.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from trace_async.coordination.coordinator import Coordinator
from trace_async.core.types import Group, Json
from trace_async.errors import InvariantError
from trace_async.learning.batching import Batch, as_of, make_batch
from trace_async.learning.costs import Costs
from trace_async.learning.honesty import Honesty
from trace_async.learning.intake import Intake
from trace_async.learning.learner_parts import Channel, LearnerParts, LearnerSetup
from trace_async.learning.measures import batch_measures, total_measures
from trace_async.learning.saving import Saver
from trace_async.learning.status import LearnerPhase
from trace_async.metrics import STEP, Row, Value
from trace_async.publication.store import Published
from trace_async.run_folder import RunFolder

log = logging.getLogger(__name__)
T = TypeVar("T")

_BYE_MARGIN_S = 5.0
"""What an actor may take to leave, beyond draining."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that was opened: what this start works on."""

    epoch: int
    coordinator: Coordinator
    intake: Intake
    costs: Costs  # so far
    honesty: Honesty


class TrainLoop:
    """Drives the trainer of one start; `run` once."""

    def __init__(
        self,
        parts: LearnerParts,
        *,
        setup: LearnerSetup,
        folder: RunFolder,
        opened: OpenRun,
        channel: Channel,
        clock: Callable[[], float],
    ) -> None:
        self._parts = parts
        self._setup = setup
        self._folder = folder
        self._epoch = opened.epoch
        self._coordinator = opened.coordinator
        self._intake = opened.intake
        self._channel = channel
        self._clock = clock
        self._costs = opened.costs
        self._honesty = opened.honesty
        self._saver = Saver(parts, setup=setup, folder=folder, costs=opened.costs)
        self._wall_until_s = clock()  # what the costs have of this start's wall time
        self._steps = parts.trainer.version  # made and recorded
        self._published_bytes = 0
        self._stop_reason = ""
        self._enter("start")

    @property
    def phase(self) -> LearnerPhase:
        """What the loop is at."""
        version = self._intake.notice.version if self._intake.notice is not None else -1
        return LearnerPhase(
            phase=self._phase, since_s=self._since_s, step=self._steps, version=version, epoch=self._epoch
        )

    def stop(self, reason: str) -> None:
        """End after the step under way."""
        self._stop_reason = self._stop_reason or reason
        self._intake.changed.set()

    async def run(self) -> None:
        """Consumes groups, produces versions; waits for a batch.

        Woken by the intake: an accepted group, a lost lease, a tick; and by `stop`. Ends when the run is over.
        """
        self._enter("wait")
        while not self._over():
            if (batch := self._next_batch()) is not None:
                await self._step(batch)
                self._enter("wait")
            else:
                await self._intake.changed.wait()
                self._intake.changed.clear()

    def _next_batch(self) -> list[str] | None:
        notice = self._intake.notice
        assert notice is not None, "a version is published before the loop runs"
        return self._coordinator.next_batch(version=notice.version, wanted_roots=self._intake.wanted_roots)

    async def publish(self) -> None:
        """Make the trainer's weights the version to sample with, and the predictor of now the one to plan with."""
        self._enter("publish")
        if not self._parts.beliefs.quick_batch:
            await self._look_ahead()
        published, predictor = await self._in_worker(partial(self._write_version, self._intake.spread.needed_since))
        self._published_bytes = published.num_bytes
        self._parts.beliefs.load(predictor, version=published.notice.version)
        self._intake.publish(published.notice)
        self._channel.announce(published.notice)

    async def retire(self) -> None:
        """Consumes confirmations, deletes files that nobody needs any more; until cancelled, woken by the intake.

        Waits for the worker thread behind a step under way.
        """
        while True:
            await self._intake.confirmed.wait()
            self._intake.confirmed.clear()
            await self._in_worker(partial(self._retire, self._intake.spread.needed_since))

    async def _look_ahead(self) -> None:
        """Let a slow predictor look at the prompts of the rounds to come before the planner asks for them on the loop.

        A step makes room for one round, and now and then for a second, since steps take a few roots more than a round
        has; the first publication of a start for all that may be out at once.
        """
        rounds = self._setup.coordinator.max_age_steps + 1 if self._intake.notice is None else 2
        upcoming = self._parts.planner.upcoming(rounds)
        await self._in_worker(partial(self._parts.beliefs.prepare, upcoming))

    async def finish(self) -> None:
        """Stop the actors, export the policy, write the last checkpoint."""
        reason = self._over()
        self._enter("stop")
        log.info("the run ends after step %d: %s", self._steps, reason)
        self._intake.close()
        if not self._stop_reason:
            self._intake.release_all(self._channel, reason)  # nobody will train on it
        await self._channel.stop(reason, deadline_s=self._setup.drain_s + _BYE_MARGIN_S)
        self._intake.send_due(self._channel)
        self._enter("export")
        await self._in_worker(partial(self._parts.trainer.export, self._folder.policy))
        await self._save()
        self._coordinator.reconcile()

    # ---- one step ------------------------------------------------------------------------------------------------

    async def _step(self, batch_ids: Sequence[str]) -> None:
        """One optimizer step on these groups, from judgement to the row of metrics."""
        waited_since_s, started_s = self._since_s, self._clock()
        self._enter("train")
        groups = [self._intake.shelf[group_id] for group_id in batch_ids]
        batch, stats = await self._in_worker(partial(self._train, groups))
        trained_s = self._clock()
        self._enter("observe")
        seen = [as_of(item.group, version=self._parts.trainer.version) for item in batch.items]
        await self._in_worker(partial(self._parts.predictor.observe, seen))
        observed_s = self._clock()
        await self.publish()
        self._steps += 1
        self._intake.consume(batch.by_group(), step=self._steps)
        # now, because leases go out at the next await
        totals = total_measures(self._coordinator.reconcile(), max_permits=self._coordinator.max_permits)
        published_s = self._clock()
        self._costs, measures = await self._in_worker(partial(self._measure, batch))
        now_s = self._clock()
        self._costs = replace(self._costs, wall_s=self._costs.wall_s + now_s - self._wall_until_s)
        self._wall_until_s = now_s
        times = {
            "timing_s/wait": started_s - waited_since_s,
            "timing_s/train": trained_s - started_s,
            "timing_s/observe": observed_s - trained_s,
            "timing_s/publish": published_s - observed_s,
            "timing_s/step": now_s - waited_since_s,
        }
        self._report({**totals, **measures, **stats, **times})
        if self._steps % self._setup.learner.checkpoint_every_steps == 0:
            await self._save()

    def _train(self, groups: Sequence[Group]) -> tuple[Batch, Mapping[str, float]]:
        """In the worker thread."""
        trainer = self._parts.trainer
        before = trainer.version
        batch = make_batch(groups, rule=self._setup.rule, version=before, epoch=self._epoch)
        stats = trainer.step(batch.minibatches)
        if trainer.version != before + 1:
            raise InvariantError(f"the trainer went from version {before} to {trainer.version} in one step")
        return batch, stats

    def _measure(self, batch: Batch) -> tuple[Costs, dict[str, Value]]:
        """In the worker thread: a large batch takes a tenth of a second."""
        groups = [item.group for item in batch.items]
        measures = batch_measures(batch, max_age_steps=self._setup.coordinator.max_age_steps)
        return self._costs.after(groups), {**measures, **self._honesty.measure(groups)}

    def _report(self, measures: Row) -> None:
        row: Row = {
            STEP: self._steps,
            "training/version": self._parts.trainer.version,
            "training/epoch": self._epoch,
            **self._costs.row(),
            **self._intake.rates.read(self._clock(), self._intake.statuses),
            **self._publication_measures(),
            **measures,
        }
        self._parts.metrics.write(row)
        log.info(
            "step %d: success %.3f, %d sampled tokens in all, ages up to %.0f, %.1f s",
            self._steps,
            measures["rollout/success"],
            self._costs.sampled_tokens,
            measures["staleness/age_max"],
            measures["timing_s/step"],
        )

    def _publication_measures(self) -> Row:
        server = self._parts.server
        return {
            **self._intake.spread.read(),
            "publication/bytes": self._published_bytes,
            "publication/versions": self._parts.store.num_versions,
            "publication/streamed_bytes_total": server.counters()["stream_bytes"] if server is not None else 0,
        }

    # ---- disk ----------------------------------------------------------------------------------------------------

    def _write_version(self, needed_since: int) -> tuple[Published, Json]:
        """A version, and the predictor's parameters that are in it. In the worker thread."""
        trainer = self._parts.trainer
        predictor = self._parts.predictor.parameters()
        published = self._parts.store.publish(
            version=trainer.version,
            epoch=self._epoch,
            write=trainer.save_weights,
            predictor=predictor,
            canary=trainer.canary(self._setup.canary_prompts),
            adapter=trainer.adapter,
        )
        self._retire(needed_since)
        return published, predictor

    def _retire(self, needed_since: int) -> None:
        """In the worker thread."""
        self._parts.store.retire(keep=self._setup.keep_versions, needed_since=needed_since)

    async def _save(self) -> None:
        """One checkpoint of this step; the ledger forgets what no kept checkpoint could ask for."""
        self._enter("checkpoint")
        state = {"epoch": self._epoch, "honesty": self._honesty.state(), "coordinator": self._coordinator.state()}
        write = self._saver.prepare(step=self._steps, costs=self._costs, state=state)
        self._parts.ledger.forget(await self._in_worker(write))

    async def _in_worker(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._parts.worker, work)

    # ---- inside --------------------------------------------------------------------------------------------------

    def _over(self) -> str:
        """Why the run is over; empty while it is not."""
        learner = self._setup.learner
        if self._stop_reason:
            return self._stop_reason
        if self._steps >= learner.max_steps:
            return f"all {learner.max_steps} steps are made"
        if 0 < learner.max_sampled_tokens <= self._costs.sampled_tokens:
            return f"{self._costs.sampled_tokens} of {learner.max_sampled_tokens} sampled tokens are trained on"
        return ""

    def _enter(self, phase: str) -> None:
        self._phase, self._since_s = phase, self._clock()
