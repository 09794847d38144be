"""The predictor inside a learner: no hindsight, no held-up road, nothing forgotten or learned twice over a crash."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tests.learner_world import ROADS, TREES, FakeActor, LearnerWorld, grow_mixed
from tests.virtual_time import run
from trace_async.config import LearnerConfig, TreeConfig
from trace_async.core.types import ActorStatus, FloatArray, Group, Json, Lease, Prefix
from trace_async.predictors.protocol import Belief, Predictor
from trace_async.predictors.registry import make_predictor


class NotingPredictor:
    """Its parameters are the names of the groups that it has observed, in order."""

    quick_batch = 64

    def __init__(self) -> None:
        self.version = 0
        self.seen: list[str] = []
        self.threads: set[int] = set()

    def prepare(self, prefixes: Sequence[Prefix]) -> None:
        raise AssertionError("a quick predictor needs no preparation")

    def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
        return [Belief(1.0, 1.0)] * len(prefixes)

    def predict(self, prefixes: Sequence[Prefix]) -> FloatArray:
        return np.full(len(prefixes), 0.5, np.float32)

    def observe(self, groups: Sequence[Group]) -> None:
        self.threads.add(threading.get_ident())
        self.seen = self.seen + [group.group_id for group in groups]

    def parameters(self) -> Json:
        return {"seen": self.seen}

    def state(self) -> Json:
        return {"seen": self.seen}

    def load(self, state: Json, *, version: int) -> None:
        self.seen, self.version = list(state["seen"]), version


def world_of(root: Path, *actors: FakeActor, max_steps: int = 5, tree: TreeConfig = TREES) -> LearnerWorld:
    return LearnerWorld(
        root=root,
        actors=actors or (FakeActor("a"), FakeActor("b")),
        learner=LearnerConfig(max_steps=max_steps, checkpoint_every_steps=2, keep_checkpoints=2),
        road=ROADS,
        tree=tree,
    )


def test_the_predictions_stamped_on_a_group_were_made_by_parameters_that_had_not_seen_it(tmp_path: Path) -> None:
    grown: dict[str, tuple[int, int]] = {}  # versions of the root's and of the newest prefix's prediction

    def grow(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
        grown[lease.lease_id] = (lease.root_score.predictor_version, version)
        return grow_mixed(lease, version=version, epoch=epoch, number=number)

    world = world_of(tmp_path, FakeActor("a", grow=grow), FakeActor("b", grow=grow))
    world.make_predictor = NotingPredictor
    run(world.train())
    seen_at = [set(parameters["seen"]) for parameters in world.store.predictors]  # by version
    assert len(seen_at[-1]) >= 10
    assert max(version for _, version in grown.values()) >= 2
    for group_id, versions in grown.items():
        assert all(group_id not in seen_at[version] for version in versions)


def test_every_consumed_group_is_observed_once_also_over_a_crash(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=6)
    world.make_predictor = NotingPredictor
    run(world.train_and_kill(60.0, after_effects=20))
    kept = len(world.store.predictors)
    assert 2 < len(world.trainer.minibatches) < 6
    run(world.train())
    (resumed, *_, last) = (list(parameters["seen"]) for parameters in world.store.predictors[kept:])
    assert resumed
    assert last[: len(resumed)] == resumed
    assert len(last) == len(set(last))
    assert len(world.trainer.weights) == len(last)  # the trainer's tokens name the groups it has learned from


def test_a_learned_predictor_goes_on_to_the_bit_after_a_kill(tmp_path: Path) -> None:
    def make_hashed() -> Predictor:
        return make_predictor("hashed", {"steps": 2, "minibatch": 16, "buckets": 64}, seed=5, text_of=str)

    worlds = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        actor = FakeActor("a", capacity=99)
        world = world_of(tmp_path / name, actor, max_steps=5, tree=replace(TREES, root_allocator="trace"))
        world.road = replace(ROADS, max_age_steps=0, soft_age_steps=0)  # every step waits for its own round
        world.make_predictor = make_hashed
        worlds.append(world)
    whole, killed = worlds
    run(whole.train())
    run(killed.train_and_kill(60.0, after_effects=18))
    assert 2 < len(killed.trainer.minibatches) < 5
    run(killed.train())
    assert killed.trainer.weights == whole.trainer.weights
    assert killed.store.predictors[-1] == whole.store.predictors[-1]
    assert whole.store.predictors[-1] != whole.store.predictors[-2]


def test_the_road_goes_on_while_the_predictor_learns(tmp_path: Path) -> None:
    alive = threading.Event()

    class LiveActor(FakeActor):
        def status(self) -> ActorStatus:
            alive.set()
            return super().status()

    class PatientPredictor(NotingPredictor):
        def observe(self, groups: Sequence[Group]) -> None:
            alive.clear()
            assert alive.wait(20.0), "no heartbeat was heard while the predictor learned"
            super().observe(groups)

    made: list[PatientPredictor] = []

    def make() -> Predictor:
        made.append(PatientPredictor())
        return made[-1]

    world = world_of(tmp_path, LiveActor("a"), max_steps=1)
    world.make_predictor = make
    asyncio.run(world.train())
    learning, planning = made
    assert learning.seen
    assert threading.get_ident() not in learning.threads
    assert (planning.threads, planning.version) == (set(), 1)
    assert planning.seen == learning.seen


def test_a_slow_predictor_has_looked_at_every_prompt_before_the_planner_asks_on_the_loop(tmp_path: Path) -> None:
    class SlowPredictor(NotingPredictor):
        quick_batch = 0

        def __init__(self) -> None:
            super().__init__()
            self.prepared: set[str] = set()

        def prepare(self, prefixes: Sequence[Prefix]) -> None:
            self.prepared |= {prefix.prompt_id for prefix in prefixes}

        def score_prompts(self, prefixes: Sequence[Prefix]) -> list[Belief]:
            asked.extend(prefix.prompt_id for prefix in prefixes)
            assert self.prepared.issuperset(prefix.prompt_id for prefix in prefixes)
            return super().score_prompts(prefixes)

    asked: list[str] = []
    world = world_of(tmp_path, max_steps=6, tree=replace(TREES, root_allocator="trace"))
    world.make_predictor = SlowPredictor
    run(world.train_and_kill(60.0, after_effects=20))
    run(world.train())
    assert len(set(asked)) >= 6 * 12
