"""A coordinator among actors that join, leave, die, lose, repeat and delay: the model that its tests drive.

`World` owns a real coordinator, a real ledger in memory, and actors that are sets of leases. Every event is a method;
after each one `check` holds the invariants that do not depend on what happened.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trace_async.config import CoordinatorConfig, TreeConfig
from trace_async.coordination.coordinator import Coordinator
from trace_async.coordination.leases import Counts
from trace_async.coordination.rounds import RoundPlanner
from trace_async.coordination.slots import Arrival, SlotState, parse_lease_id
from trace_async.core.types import GroupVerdict, Json, Lease, Prefix, Task
from trace_async.ledger import Ledger
from trace_async.methods.root_allocators import make_root_allocator
from trace_async.prompts import PromptStream

FAR = 10**9
"""Wanted roots of a run without end."""


class Belief(NamedTuple):
    alpha: float
    beta: float


class HashedBeliefs:
    """Some belief per prompt, always the same."""

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        draws = [random.Random(prefix.prompt_id) for prefix in prefixes]
        return [Belief(0.5 + 3 * draw.random(), 0.5 + 3 * draw.random()) for draw in draws]


class ManyTasks:
    """Tasks without end."""

    def size(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> Task:
        return Task(f"{split}-{index}", {"index": index})


def bare_prefix(task: Task) -> Prefix:
    """A prompt of which only the name is known."""
    return Prefix(prompt_id=task.task_id, turn_index=0, token_ids=np.empty(0, np.int32))


def make_tree_config(*, root_allocator: str = "trace", roots_per_step: int = 6, max_roots: int = 3) -> TreeConfig:
    return TreeConfig(
        root_allocator=root_allocator,
        roots_per_step=roots_per_step,
        max_roots_per_prompt=max_roots,
        continuations_per_root=1,
    )


def make_road_config(*, max_age_steps: int = 2, max_attempts: int = 3, lockstep: bool = False) -> CoordinatorConfig:
    return CoordinatorConfig(
        lockstep=lockstep,
        max_age_steps=max_age_steps,
        soft_age_steps=min(1, max_age_steps),
        lease_deadline_s=30.0,
        dead_after_s=10.0,
        max_attempts=max_attempts,
    )


def make_planner(prompts: PromptStream, *, tree: TreeConfig, seed: int = 3) -> RoundPlanner:
    allocator = make_root_allocator(tree.root_allocator, tree.root_options)
    return RoundPlanner(prompts, HashedBeliefs(), allocator, prefix_of=bare_prefix, tree=tree, candidates=8, seed=seed)


def make_coordinator(*, tree: TreeConfig, road: CoordinatorConfig, epoch: int = 1, num_train: int = 0) -> Coordinator:
    prompts = PromptStream(ManyTasks(), num_train=num_train, seed=3)
    planner = make_planner(prompts, tree=tree)
    return Coordinator(planner, config=road, tree=tree, seed=3, epoch=epoch)


@dataclass
class FakeActor:
    """What one actor process holds, and the groups that it has not seen acknowledged."""

    version: int = -1
    alive: bool = True
    leases: dict[str, Lease] = field(default_factory=dict)
    finished: dict[str, Lease] = field(default_factory=dict)


@dataclass
class World:
    """One run; `restart` kills and resumes the learner."""

    tree: TreeConfig = field(default_factory=make_tree_config)
    road: CoordinatorConfig = field(default_factory=make_road_config)

    def __post_init__(self) -> None:
        self.coordinator = make_coordinator(tree=self.tree, road=self.road)
        self.ledger = Ledger(Path(":memory:"))
        self.actors: dict[str, FakeActor] = {}
        self.now_s = 0.0
        self.epoch = 1
        self.dies_at_next_issue = False  # so that what follows a ledger's `issue` is not entered
        self.step = 0
        self.checkpoint: tuple[int, Json] = (0, self.coordinator.state())
        self.trained: list[tuple[int, list[str]]] = []  # (step, leases) that the present weights have learned from
        self.lease_ids: set[str] = set()
        self.round_roots: Counter[int] = Counter()
        self.seen_bases: set[str] = set()
        self.oldest_age = 0
        self.sampled_at: dict[str, int] = {}

    # ---- what actors do ------------------------------------------------------------------------------------------

    def join(self, actor_id: str, *, capacity: int = 8) -> None:
        """A process says hello: a new one, or one that lost its connection."""
        actor = self.actors.setdefault(actor_id, FakeActor())
        held = [*actor.leases, *actor.finished]
        self.coordinator.join(actor_id, capacity_roots=capacity, live_leases=held, now_s=self.now_s)
        self.settle()

    def confirm(self, actor_id: str, version: int | None = None) -> None:
        actor = self.actors[actor_id]
        actor.version = self.step if version is None else version
        self.coordinator.confirm(actor_id, version=actor.version, epoch=self.epoch)
        self.settle()

    def finish(self, actor_id: str, lease_id: str) -> None:
        """The tree is complete; its group is not sent yet."""
        actor = self.actors[actor_id]
        actor.finished[lease_id] = actor.leases.pop(lease_id)

    def ship(self, actor_id: str, lease_id: str, *, ack_lost: bool = False) -> Arrival:
        """The group arrives, for the first time or again."""
        actor = self.actors[actor_id]
        arrival = self.coordinator.group_arrived(lease_id, self.now_s)
        if arrival is Arrival.ACCEPT:
            assert self.ledger.receive(lease_id, [b"group"])
        if not ack_lost:
            actor.finished.pop(lease_id)
        self.settle()
        return arrival

    def give_back(self, actor_id: str, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            del self.actors[actor_id].leases[lease_id]
        self.coordinator.returned(actor_id, lease_ids, self.now_s)
        self.settle()

    def kill(self, actor_id: str, *, noticed: bool) -> None:
        """The process dies with all it has; the learner may notice only by its silence."""
        del self.actors[actor_id]
        if noticed:
            self.coordinator.leave(actor_id, self.now_s)
        self.settle()

    def lose_connection(self, actor_id: str) -> None:
        """The learner believes it gone; the process lives."""
        self.coordinator.leave(actor_id, self.now_s)
        self.settle()

    def pass_time(self, seconds: float, *, silent: Sequence[str] = ()) -> None:
        self.now_s += seconds
        for actor_id, actor in self.actors.items():
            if actor_id not in silent:
                self.coordinator.heartbeat(actor_id, self.now_s, version=actor.version, epoch=self.epoch)
        self.coordinator.expire(self.now_s)
        self.settle()

    # ---- what the learner does -----------------------------------------------------------------------------------

    def consume(self, verdict: GroupVerdict = GroupVerdict.TRAINED) -> bool:
        """One step, when there is a batch."""
        batch = self.coordinator.next_batch(version=self.step, wanted_roots=FAR)
        if batch is None:
            return False
        self.oldest_age = max([self.oldest_age, *(self.step - self.sampled_at[lease_id] for lease_id in batch)])
        self.step += 1
        verdicts = dict.fromkeys(batch, verdict)
        self.ledger.mark_consumed(self.step, verdicts)
        self.coordinator.consumed(verdicts, step=self.step, now_s=self.now_s)
        self.trained.append((self.step, batch))
        self.settle()
        return True

    def save(self) -> None:
        self.checkpoint = (self.step, json.loads(json.dumps(self.coordinator.state())))
        self.ledger.forget(self.step)

    def restart(self) -> None:
        """kill -9 and resume: the weights are those of the checkpoint, the ledger knows everything."""
        self.step, state = self.checkpoint
        self.epoch += 1
        self.trained = [(step, batch) for step, batch in self.trained if step <= self.step]
        self.ledger.rewind(self.step)
        ids = [lease_id for lease_id, _ in self.ledger.shelved()]
        shelved = [self.leases[lease_id] for lease_id in ids]
        self.coordinator = make_coordinator(tree=self.tree, road=self.road, epoch=self.epoch)
        over = self.coordinator.load(state, live=self.ledger.live(), shelved=shelved, now_s=self.now_s)
        assert not {ended.lease_id for ended in over} & set(ids), "what waits to be consumed is not over"
        for ended in over:
            self.ledger.reject(ended.lease_id, ended.reason)
        for actor in self.actors.values():
            actor.version = -1
        self.settle()
        self.check_ledger()
        on_shelf = {slot.group_id for slot in self.coordinator.slots if slot.state is SlotState.SHELVED}
        assert on_shelf | set(self.coordinator.early.shelved) == set(ids), "a group of the ledger's shelf is lost"

    # ---- invariants ----------------------------------------------------------------------------------------------

    leases: dict[str, Lease] = field(default_factory=dict)

    def settle(self) -> Counts:
        """Issue what can be issued, deliver it, check."""
        if self.dies_at_next_issue:
            self.dies_at_next_issue = False
            self._issue()
            self._check_rounds()
            self.restart()
            return self.check()
        issued = self._issue()
        for ended in self.coordinator.take_ended():
            self.ledger.reject(ended.lease_id, ended.reason)
        for release in self.coordinator.take_releases():
            if (actor := self.actors.get(release.actor_id)) is not None:
                actor.leases.pop(release.lease_id, None)
        for actor_id, lease in issued:
            if (actor := self.actors.get(actor_id)) is not None:  # it may have died without notice
                actor.leases[lease.lease_id] = lease
                self.sampled_at[lease.lease_id] = actor.version
        return self.check()

    def _issue(self) -> list[tuple[str, Lease]]:
        issued = self.coordinator.next_leases(self.now_s, version=self.step, wanted_roots=FAR)
        for _, lease in issued:
            assert lease.lease_id not in self.leases, f"{lease.lease_id} was used twice"
            self.leases[lease.lease_id] = lease
        self.ledger.issue(*(lease for _, lease in issued))
        return issued

    def check(self) -> Counts:
        counts = self.coordinator.reconcile()
        self._check_rounds()
        bases = [parsed.base for _, batch in self.trained for x in batch if (parsed := parse_lease_id(x)) is not None]
        assert len(bases) == len(set(bases)), "a tree was trained twice"
        ledger, early = self.ledger.counts(), self.coordinator.early
        assert ledger.live == counts.live - counts.shelved + len(early.live)
        assert ledger.shelved == counts.shelved + len(early.shelved)
        assert ledger.consumed == len(bases)
        return counts

    def check_ledger(self) -> None:
        """The ids themselves, which cost more to look at than their number."""
        waiting = [slot for slot in self.coordinator.slots if slot.attempt >= 0 and slot.state is not SlotState.SHELVED]
        known = {slot.lease_id for slot in waiting} | set(self.coordinator.early.live)
        assert {lease.lease_id for lease in self.ledger.live()} == known

    def _check_rounds(self) -> None:
        for slot in self.coordinator.slots:
            _, _, place = slot.base.partition("-")  # the epoch part may change over a restart
            if place not in self.seen_bases:
                self.seen_bases.add(place)
                self.round_roots[slot.round_number] += slot.budget.roots
        assert set(self.round_roots.values()) <= {self.tree.roots_per_step}, self.round_roots
