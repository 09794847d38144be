"""Everything around a learner, faked at its interfaces: trainer, policy files, metrics, and actors in memory.

Actors live across restarts of the learner, as processes do: they keep their leases and their unacknowledged groups, and
say hello to each new channel. Their trees take virtual seconds, drawn from the lease's id.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from tests.builders import group_from_spec, spec
from tests.fleet_world import bare_prefix
from trace_async.config import CoordinatorConfig, LearnerConfig, TreeConfig
from trace_async.coordination.rounds import RoundPlanner
from trace_async.core.packing import Minibatch
from trace_async.core.types import (
    ActorStatus,
    Adapter,
    Canary,
    Group,
    IntArray,
    Json,
    Lease,
    Task,
    TreePhase,
    VersionNotice,
)
from trace_async.learning.batching import BatchRule
from trace_async.learning.learner import Learner
from trace_async.learning.learner_parts import LearnerParts, LearnerSetup, WeightServer
from trace_async.ledger import Ledger
from trace_async.methods.credit import sibling_credit
from trace_async.methods.root_allocators import make_root_allocator
from trace_async.metrics import Row
from trace_async.predictors.protocol import Predictor
from trace_async.predictors.registry import make_predictor
from trace_async.prompts import PromptStream
from trace_async.publication.store import Published
from trace_async.run_folder import RunFolder
from trace_async.transport import wire
from trace_async.transport.channel_learner import ChannelHandler

ROADS = CoordinatorConfig(
    max_age_steps=2, soft_age_steps=1, lease_deadline_s=30.0, max_attempts=3, heartbeat_s=1.0, dead_after_s=10.0
)
TREES = TreeConfig(
    allocator="uniform", root_allocator="even", roots_per_step=6, max_roots_per_prompt=3, continuations_per_root=0
)


def pure(*words: object) -> random.Random:
    """A generator that depends on `words` only, so that draws do not depend on the order of tasks."""
    return random.Random("|".join(map(str, words)))


def loop_clock() -> float:
    """The running loop's clock, virtual when the loop is."""
    return asyncio.get_running_loop().time()


class Tasks:
    """Tasks without end."""

    def size(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> Task:
        return Task(f"{split}-{index}", {"index": index})


class Killed(Exception):
    """The learner process died in the middle of something."""


@dataclass
class Fuse:
    """Kills the learner at its n-th effect; None = never."""

    effects_left: int | None = None

    def burn(self) -> None:
        if self.effects_left is not None:
            self.effects_left -= 1
            if self.effects_left < 0:
                self.effects_left = None
                raise Killed


class FakeTrainer:
    """Its weights are the tokens it has learned from, in order; one token id stands for one group."""

    def __init__(self, events: list[str], fuse: Fuse) -> None:
        self.version = 0
        self.weights: list[int] = []
        self.minibatches: list[list[Minibatch]] = []  # by step
        self.events = events
        self.fuse = fuse
        self.on_step: Callable[[], None] = lambda: None

    def step(self, minibatches: Sequence[Minibatch]) -> Mapping[str, float]:
        self.on_step()
        self.fuse.burn()
        batches = [batch for part in minibatches for batch in part.rows]
        groups = [int(token) for batch in batches for token in np.unique(batch.token_ids[batch.scored])]
        self.weights += sorted(set(groups))
        self.minibatches.append(list(minibatches))
        self.version += 1
        self.events.append(f"step {self.version}")
        self.fuse.burn()
        return {"actor/grad_norm": 1.0}

    adapter: Adapter | None = None

    def canary(self, prompts: Sequence[IntArray]) -> Canary:
        said = [np.full(len(prompt) - 1, -float(self.version), np.float32) for prompt in prompts]
        return Canary(prompts=tuple(prompts), logprobs=tuple(said))

    def save_weights(self, path: Path) -> None:
        path.write_text(json.dumps(self.weights))

    def save(self, directory: Path) -> None:
        self.fuse.burn()
        (directory / "weights.json").write_text(json.dumps([self.version, self.weights]))
        self.fuse.burn()
        self.events.append("save")

    def load(self, directory: Path) -> None:
        self.version, self.weights = json.loads((directory / "weights.json").read_text())

    def export(self, directory: Path) -> None:
        self.events.append("export")


class FakeStore:
    """Publishes nothing but the fact."""

    def __init__(self, events: list[str], fuse: Fuse) -> None:
        self.events = events
        self.fuse = fuse
        self.notices: list[VersionNotice] = []
        self.predictors: list[Json] = []  # published with the notices
        self.canaries: list[Canary] = []
        self.retired: list[tuple[int, int]] = []  # newest version then, and since when versions were needed

    @property
    def num_versions(self) -> int:
        return len(self.notices)

    def publish(
        self,
        *,
        version: int,
        epoch: int,
        write: Callable[[Path], None],
        predictor: Json,
        canary: Canary,
        adapter: Adapter | None,
    ) -> Published:
        self.fuse.burn()
        self.events.append(f"publish {version}")
        self.predictors.append(predictor)
        self.canaries.append(canary)
        self.notices.append(VersionNotice(version=version, epoch=epoch, manifest_digest="", directory="", address=""))
        return Published(self.notices[-1], 100 + version)

    def retire(self, *, keep: int, needed_since: int) -> None:
        self.retired.append((self.notices[-1].version, needed_since))


class Rows:
    """The rows of metrics."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse
        self.rows: list[dict[str, float]] = []

    def write(self, row: Row) -> None:
        self.fuse.burn()
        self.rows.append({key: value for key, value in row.items() if isinstance(value, int | float)})


class Grower(Protocol):
    """Makes the group of a lease, sampled at a version."""

    def __call__(self, lease: Lease, *, version: int, epoch: int, number: int) -> Group: ...


def grow_mixed(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
    """One-turn rollouts, the first a success and the others not; every sampled token is `number`."""
    outcomes = [1.0, *[0.0] * (lease.budget.roots - 1)]
    roots = [spec(outcome=outcome, version=version) for outcome in outcomes]
    return stamp(group_from_spec(roots, lease_id=lease.lease_id, epoch=epoch), lease, number)


def grow_flat(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
    """Every rollout a success."""
    roots = [spec(outcome=1.0, version=version) for _ in range(lease.budget.roots)]
    return stamp(group_from_spec(roots, lease_id=lease.lease_id, epoch=epoch), lease, number)


def grow_broken(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
    """Every rollout failed."""
    roots = [spec(failed=True) for _ in range(lease.budget.roots)]
    return stamp(group_from_spec(roots, lease_id=lease.lease_id, epoch=epoch), lease, number)


def stamp(group: Group, lease: Lease, number: int) -> Group:
    """The group as of that lease, its tokens telling which it is."""
    return replace(
        group,
        prompt_id=lease.prompt_id,
        budget=lease.budget,
        root_score=lease.root_score,
        token_ids=np.full_like(group.token_ids, number),
    )


class FakeChannel:
    """The learner's road in memory."""

    address = "memory"

    def __init__(self, handler: ChannelHandler, actors: Sequence[FakeActor], events: list[str]) -> None:
        self.handler = handler
        self.actors = actors
        self.events = events
        self.inboxes: dict[str, asyncio.Queue[wire.LearnerMessage]] = {}
        self._left = asyncio.Event()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for actor in self.actors:
                group.create_task(actor.live(self))
            await asyncio.Event().wait()

    async def ready(self) -> None:
        return

    def send(self, actor_id: str, message: wire.LearnerMessage) -> bool:
        if actor_id not in self.inboxes:
            return False
        self.inboxes[actor_id].put_nowait(message)
        return True

    def announce(self, notice: VersionNotice) -> None:
        for actor_id in self.inboxes:
            self.send(actor_id, wire.Notice(notice=notice))

    async def stop(self, reason: str, *, deadline_s: float) -> None:
        self.events.append("stop")
        for actor_id in list(self.inboxes):
            self.send(actor_id, wire.Stop(reason=reason))
        try:
            async with asyncio.timeout(deadline_s):
                while self.inboxes:
                    await self._left.wait()
                    self._left.clear()
        except TimeoutError:
            self.events.append("not all left")

    def leave(self, actor_id: str) -> None:
        """An actor's Bye."""
        del self.inboxes[actor_id]
        self.events.append(f"bye {actor_id}")
        self.handler.on_bye(actor_id)
        self._left.set()


@dataclass
class FakeActor:
    """One actor process; `run` of each new channel calls `live`."""

    name: str
    grow: Grower = grow_mixed
    capacity: int = 9
    mute: bool = False  # grows nothing, only lives
    stays: bool = False  # does not leave when told to
    frozen_version: int | None = None  # what it stamps, whatever it has loaded
    ack_lost: Callable[[str], bool] = lambda group_id: False
    leases: dict[str, Lease] = field(default_factory=dict)
    unacked: dict[str, Group] = field(default_factory=dict)
    acks: list[wire.Ack] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    breathless: tuple[float, float] = (0.0, 0.0)  # no heartbeat arrives between these times, the road stands
    hellos_s: list[float] = field(default_factory=list)  # when it said hello
    on_lease: Callable[[], None] = lambda: None
    confirm_after_s: float = 0.0  # from a notice until its weights are proven
    refuses: frozenset[int] = frozenset()  # versions that it never gets to load
    version: int = -1
    epoch: int = 0

    async def live(self, channel: FakeChannel) -> None:
        inbox: asyncio.Queue[wire.LearnerMessage] = asyncio.Queue()
        channel.inboxes[self.name] = inbox
        self._greet(channel)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._beat(channel))]
            for sent in list(self.unacked.values()):
                self._ship(channel, sent)
            tasks += [group.create_task(self._work(channel, lease)) for lease in list(self.leases.values())]
            while not isinstance(message := await inbox.get(), wire.Stop):
                if isinstance(message, wire.LeaseMessage):
                    self.on_lease()
                    self.leases[message.lease.lease_id] = message.lease
                    tasks.append(group.create_task(self._work(channel, message.lease)))
                elif isinstance(message, wire.Notice):
                    self._follow(channel, message.notice)
                elif isinstance(message, wire.Release):
                    self.releases += message.lease_ids
                    for lease_id in message.lease_ids:
                        self.leases.pop(lease_id, None)
            if self.stays:
                await asyncio.Event().wait()
            for task in tasks:
                task.cancel()
            channel.leave(self.name)

    def _greet(self, channel: FakeChannel) -> None:
        live = (*self.leases, *self.unacked)
        hello = wire.Hello(actor_id=self.name, host="host", pid=1, capacity_roots=self.capacity, live_leases=live)
        self.hellos_s.append(loop_clock())
        self._follow(channel, channel.handler.on_hello(hello).notice)

    def _follow(self, channel: FakeChannel, notice: VersionNotice | None) -> None:
        assert notice is not None, "actors are heard only after a version is published"
        if self.confirm_after_s:
            asyncio.get_running_loop().call_later(self.confirm_after_s, self._load, channel, notice)
        else:
            self._load(channel, notice)

    def _load(self, channel: FakeChannel, notice: VersionNotice) -> None:
        if notice.version in self.refuses:
            self.version = -1
        elif (notice.epoch, notice.version) > (self.epoch, self.version):
            self.version, self.epoch = notice.version, notice.epoch
            channel.handler.on_confirm(self.name, notice.version, notice.epoch)

    async def _beat(self, channel: FakeChannel) -> None:
        while True:
            await asyncio.sleep(1.0)
            if self.breathless[0] <= loop_clock() < self.breathless[1]:
                continue
            if not channel.handler.on_heartbeat(self.status()):
                self._greet(channel)

    def status(self) -> ActorStatus:
        trees = tuple(
            TreePhase(
                lease_id=lease_id,
                prompt_id=lease.prompt_id,
                phase="generate",
                node_id=1,
                age_s=1.0,
                waiting_s=float("nan"),
                turns=0,
            )
            for lease_id, lease in self.leases.items()
        )
        counters = {"busy_s": 3 * loop_clock(), "idle_s": loop_clock()}
        return ActorStatus(
            actor_id=self.name,
            host="host",
            pid=1,
            version=self.version,
            epoch=self.epoch,
            live_roots=0,
            counters=counters,
            trees=trees,
        )

    async def _work(self, channel: FakeChannel, lease: Lease) -> None:
        if self.mute:
            return
        version = self.version if self.frozen_version is None else self.frozen_version
        epoch = self.epoch
        await asyncio.sleep(pure("tree", lease.lease_id).expovariate(1.0))
        if self.leases.pop(lease.lease_id, None) is None:
            return  # released meanwhile
        group = self.grow(lease, version=version, epoch=epoch, number=number_of(lease.lease_id))
        self.unacked[group.group_id] = group
        self._ship(channel, group)
        if group.group_id in self.unacked:
            await asyncio.sleep(2.0)
            self._ship(channel, group)

    def _ship(self, channel: FakeChannel, group: Group) -> None:
        ack = channel.handler.on_group(self.name, replace(group, actor_id=self.name))
        self.acks.append(ack)
        if (len(self.acks) > 1 and self.acks[-2].group_id == ack.group_id) or not self.ack_lost(group.group_id):
            self.unacked.pop(group.group_id, None)


def number_of(lease_id: str) -> int:
    """A token id that is the same for every attempt at one tree, in whatever epoch it was issued."""
    _, round_number, rest = lease_id.split("-")
    return 1000 + 100 * int(round_number) + int(rest.split(".")[0])


@dataclass
class LearnerWorld:
    """One run folder, with whatever learners and actors a test starts in it."""

    root: Path
    actors: Sequence[FakeActor]
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(max_steps=4, checkpoint_every_steps=2))
    road: CoordinatorConfig = ROADS
    tree: TreeConfig = TREES
    events: list[str] = field(default_factory=list)
    former_addresses: list[str] = field(default_factory=list)  # what each start was told
    fuse: Fuse = field(default_factory=Fuse)
    worker: Executor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))
    server: WeightServer | None = None
    told: Json = field(default_factory=lambda: {"run": {"name": "test"}})  # the resolved configuration
    make_predictor: Callable[[], Predictor] = lambda: make_predictor("beta", {}, seed=5, text_of=str)

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.root)
        self.store = FakeStore(self.events, self.fuse)
        self.trainer = FakeTrainer(self.events, self.fuse)
        self.rows = Rows(self.fuse)

    def make_learner(self, ledger: Ledger, *, clock: Callable[[], float] = loop_clock) -> Learner:
        """A learner process: everything in memory is new, the run folder and the actors are not."""
        self.trainer = FakeTrainer(self.events, self.fuse)
        predictor, beliefs = self.make_predictor(), self.make_predictor()
        prompts = PromptStream(Tasks(), num_train=0, seed=5)
        root_allocator = make_root_allocator(self.tree.root_allocator, self.tree.root_options)
        parts = LearnerParts(
            trainer=self.trainer,
            predictor=predictor,
            beliefs=beliefs,
            planner=RoundPlanner(
                prompts, beliefs, root_allocator, prefix_of=bare_prefix, tree=self.tree, candidates=12, seed=5
            ),
            store=self.store,
            server=self.server,
            ledger=ledger,
            metrics=self.rows,
            make_channel=self._make_channel,
            worker=self.worker,
        )
        setup = LearnerSetup(
            run_name="test",
            seed=5,
            learner=self.learner,
            coordinator=self.road,
            tree=self.tree,
            rule=BatchRule(
                credit=sibling_credit,
                soft_age_steps=self.road.soft_age_steps,
                max_age_steps=self.road.max_age_steps,
                pad_id=0,
                micro_batch_tokens=64,
            ),
            vocabulary_size=10_000,
            canary_prompts=(np.array([5, 6, 7], np.int32),),
            keep_versions=3,
            drain_s=5.0,
            told_to_actors=self.told,
        )
        return Learner(parts, setup=setup, folder=self.folder, clock=clock, wall_clock=lambda: 0.0)

    def _make_channel(self, handler: ChannelHandler, former_address: str) -> FakeChannel:
        self.former_addresses.append(former_address)
        return FakeChannel(handler, self.actors, self.events)

    async def train(self) -> None:
        """One learner from start to end."""
        with Ledger(self.folder.ledger) as ledger:
            await self.make_learner(ledger).run()

    async def train_and_kill(
        self, after_s: float, *, after_effects: int | None = None, ledger: type[Ledger] = Ledger
    ) -> None:
        """One learner that is killed after that time, or at that effect, unless it has ended before."""
        self.fuse.effects_left = after_effects
        with ledger(self.folder.ledger) as opened:
            try:
                async with asyncio.timeout(after_s):
                    await self.make_learner(opened).run()
            except* (TimeoutError, Killed):
                pass
        self.fuse.effects_left = None
