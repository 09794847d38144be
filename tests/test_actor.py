"""An actor in virtual time: what it starts, ships, gives back and tells, whatever its learner and engine do."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests import virtual_time
from tests.builders import make_lease
from tests.fakes import (
    CoinEnvironment,
    LoopLearner,
    ScatterAllocator,
    ScriptedEngine,
    ScriptedFetcher,
    TableScorer,
    WordRenderer,
    World,
    loop_clock,
    now_and_then,
    pareto,
    unit,
)
from trace_async.acting.actor import Actor, Channel
from trace_async.acting.expansion import GrowthParts
from trace_async.acting.turns import TurnPlayer
from trace_async.core.types import Json, Lease, NodeState
from trace_async.errors import EngineError, InvariantError, PolicyError
from trace_async.transport import channel


def a_real_channel_fits(real: channel.ActorChannel) -> Channel:
    """For the type checker."""
    return real


class Scene:
    """One actor with its engine, environments and learner; made inside the loop that runs it."""

    def __init__(
        self,
        *,
        learner: LoopLearner | None = None,
        engine: ScriptedEngine | None = None,
        max_live_roots: int = 16,
        drain_s: float = 10.0,
        request_deadline_s: float = 600.0,
    ) -> None:
        self.learner = learner or LoopLearner()
        self.engine = engine or ScriptedEngine(latency=lambda call: 1.0)
        self.world = World()
        self.scorer = TableScorer()
        self.predictors: list[tuple[Json, int]] = []
        self.fetcher = ScriptedFetcher()
        player = TurnPlayer(
            self.engine,
            WordRenderer(),
            max_turn_tokens=3,
            max_context_tokens=90,
            max_turns=6,
            request_deadline_s=request_deadline_s,
            step_deadline_s=30.0,
            clock=loop_clock,
        )
        self.actor = Actor(
            actor_id="actor-7",
            channel=self.learner.channel,
            engine=self.engine,
            fetcher=self.fetcher,
            load_predictor=lambda state, version: self.predictors.append((state, version)),
            parts=GrowthParts(
                player=player,
                make_environment=lambda: CoinEnvironment(self.world),
                make_allocator=lambda lease: ScatterAllocator(lease.lease_id),
                scorer=self.scorer,
                score_deadline_s=20.0,
                max_turns=6,
            ),
            environment="coin",
            clock=loop_clock,
            drain_s=drain_s,
            max_live_roots=max_live_roots,
        )
        self.learner.channel.status = self.actor.status
        self.learner.channel.on_release = self.actor.release

    def check_nothing_is_left(self) -> None:
        assert self.world.open_episodes == set()
        assert self.engine.in_flight == 0
        assert self.actor.status().trees == ()
        assert self.actor.hello().live_leases == ()


def lease_of(number: int, *, roots: int = 2, continuations: int = 2) -> Lease:
    return replace(
        make_lease(lease_id=f"lease-{number}", roots=roots, continuations=continuations), prompt_id=f"prompt-{number}"
    )


def act(script: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> Scene:
    """Run an actor and beside it a script, which ends by draining the actor unless it has ended before."""
    scenes: list[Scene] = []

    async def main() -> None:
        scene = Scene(**options)
        scenes.append(scene)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(scene.actor.run(), name="actor")
            await script(scene)
            if not running.done():
                scene.actor.drain()
        scene.check_nothing_is_left()

    virtual_time.run(main(), limit_s=10_000.0)
    return scenes[0]


# ---- versions ------------------------------------------------------------------------------------------------------


def test_no_tree_starts_before_a_version_is_loaded() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.load_s = 2.0
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(10.0)
        assert scene.world.opened == 0
        assert scene.actor.status().version == -1
        assert scene.actor.hello().live_leases == ("lease-0",)
        scene.learner.announce(5)
        await asyncio.sleep(1.9)
        assert scene.world.opened == 0
        await asyncio.sleep(40.0)

    scene = act(script)
    assert scene.learner.confirmed == [(12.0, 5, 1)]
    assert scene.engine.loads == [(5, 1, "e001_v000005.safetensors")]
    assert scene.predictors == [({"of": 5}, 5)]
    assert list(scene.learner.groups) == ["lease-0"]


def test_each_turn_carries_the_versions_that_the_engine_held_while_it_was_sampled() -> None:
    async def script(scene: Scene) -> None:
        scene.world.end_probability = 0.0
        scene.learner.announce(3)
        scene.learner.issue(lease_of(0, roots=1, continuations=0))
        await asyncio.sleep(2.5)  # turns are sampled in [0, 1], [1, 2], [2, 3], ...
        scene.learner.announce(4)
        await asyncio.sleep(20.0)

    group = act(script).learner.groups["lease-0"]
    assert group.version_min.tolist() == [3, 3, 3, 4, 4, 4]
    assert group.version_max.tolist() == [3, 3, 4, 4, 4, 4]
    assert (group.actor_id, group.environment, group.epoch) == ("actor-7", "coin", 1)


def test_the_newest_epoch_wins_even_with_a_lower_version_and_an_old_tree_keeps_its_own() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(9, epoch=1)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(0.5)
        scene.learner.announce(7, epoch=2)
        await asyncio.sleep(0.1)
        scene.learner.issue(lease_of(1))
        await asyncio.sleep(60.0)

    scene = act(script)
    assert [(version, epoch) for _, version, epoch in scene.learner.confirmed] == [(9, 1), (7, 2)]
    assert {group_id: group.epoch for group_id, group in scene.learner.groups.items()} == {"lease-0": 1, "lease-1": 2}


def test_a_weight_file_that_is_gone_is_tried_again_with_a_newer_version_at_once() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.fault = lambda call: PolicyError("it was retired") if call == "fetch:1" else None
        scene.learner.announce(1)
        await asyncio.sleep(6.0)
        scene.learner.announce(2)
        await asyncio.sleep(1.0)

    assert act(script).learner.confirmed == [(6.0, 2, 1)]


def test_a_version_that_the_engine_cannot_load_is_tried_again_with_a_newer_one_at_once() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(1)
        await asyncio.sleep(6.0)
        scene.learner.announce(2)
        await asyncio.sleep(1.0)

    assert act(script, engine=ScriptedEngine(unusable=frozenset({1}))).learner.confirmed == [(6.0, 2, 1)]


def test_a_weight_file_that_never_comes_ends_the_actor_with_the_reason() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.fault = lambda call: PolicyError("digest differs")
        scene.learner.announce(1)
        await asyncio.sleep(100.0)

    with pytest.raises(ExceptionGroup) as caught:
        act(script)
    assert caught.group_contains(PolicyError, match="digest differs")


def test_a_lost_engine_lets_trees_wait_and_takes_no_new_ones_until_its_weights_are_back() -> None:
    async def script(scene: Scene) -> None:
        scene.world.end_probability = 0.0
        scene.world.latency = lambda call: 1.0 if call.startswith("step") else 0.0
        scene.engine.load_s = 5.0
        scene.learner.announce(3)
        scene.learner.issue(lease_of(0, roots=1, continuations=0))
        await asyncio.sleep(6.5)  # turns are sampled in [5, 6], [7, 8], ...
        scene.engine.lose()
        scene.learner.issue(lease_of(1, roots=1, continuations=0))
        await asyncio.sleep(4.0)
        assert scene.actor.status().version == -1
        assert scene.actor.hello().live_leases == ("lease-0", "lease-1")
        assert [tree.lease_id for tree in scene.actor.status().trees] == ["lease-0"]
        await asyncio.sleep(60.0)

    scene = act(script)
    assert [(version, time_s) for time_s, version, _ in scene.learner.confirmed] == [(3, 5.0), (3, 11.5)]
    assert set(scene.learner.groups) == {"lease-0", "lease-1"}
    assert not any(group.failures for group in scene.learner.groups.values())
    assert scene.learner.statuses[-1].counters["engine_losses"] == 1


def test_while_a_version_cannot_be_had_trees_go_on_with_the_old_one_and_no_new_ones_start() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(3)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(0.5)
        scene.fetcher.fault = lambda call: PolicyError("the network is down")
        scene.learner.announce(4)
        await asyncio.sleep(0.1)
        scene.learner.issue(lease_of(1))
        await asyncio.sleep(40.0)
        assert list(scene.learner.groups) == ["lease-0"]
        assert scene.actor.status().version == -1
        scene.fetcher.fault = lambda call: None
        await asyncio.sleep(60.0)
        assert scene.actor.status().version == 4

    groups = act(script).learner.groups
    assert set(groups["lease-0"].version_max.tolist()) == {3}
    assert set(groups["lease-1"].version_min.tolist()) == {4}


# ---- groups and leases ---------------------------------------------------------------------------------------------


def test_a_group_whose_acknowledgement_is_lost_is_sent_again_and_exists_once() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(60.0)
        assert scene.actor.status().counters["groups"] == 1

    learner = LoopLearner(lose_ack=lambda group_id, attempt: attempt <= 2)
    act(script, learner=learner)
    assert learner.deliveries == {"lease-0": 3}
    assert list(learner.groups) == ["lease-0"]
    shipping = [s.trees[0] for s in learner.statuses if s.trees and s.trees[0].phase == "ship"]
    assert shipping
    assert shipping[-1].waiting_s > 10.0


def test_a_group_that_is_not_wanted_any_more_is_let_go() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.unwanted.add("lease-0")
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(60.0)
        assert scene.actor.status().counters["refused_groups"] == 1
        assert scene.actor.hello().live_leases == ()

    assert act(script).learner.deliveries == {"lease-0": 1}


def test_failed_requests_fail_their_nodes_and_the_group_is_shipped_all_the_same() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.fault = lambda call: EngineError("no memory") if call == "lease-0/2" else None
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0, roots=3, continuations=0))
        await asyncio.sleep(60.0)
        assert scene.actor.status().counters["failed_nodes"] == 1

    group = act(script).learner.groups["lease-0"]
    assert [(failure.node_id, failure.kind, failure.message) for failure in group.failures] == [
        (2, "EngineError", "no memory")
    ]
    assert group.state.tolist().count(NodeState.FAILED) == 1


def test_a_lease_whose_prompt_cannot_be_opened_goes_back_with_the_reason() -> None:
    async def script(scene: Scene) -> None:
        scene.world.fault = lambda call: OSError("no image") if call.startswith("reset") else None
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(1.0)
        scene.world.fault = lambda call: None
        scene.learner.issue(lease_of(1))
        await asyncio.sleep(60.0)

    learner = act(script).learner
    assert learner.returned == {"lease-0": "EnvironmentFailure: lease-0 prompt: reset failed: OSError: no image"}
    assert list(learner.groups) == ["lease-1"]


def test_live_roots_never_exceed_the_capacity_and_every_lease_gets_its_turn() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.latency = pareto("capacity", longest_s=15.0)
        scene.learner.announce(0)
        for number in range(30):
            scene.learner.issue(lease_of(number, roots=1 + number % 4))
        await asyncio.sleep(2000.0)

    scene = act(script, max_live_roots=5)
    assert sorted(scene.learner.groups) == sorted(scene.learner.issued)
    live = [status.live_roots for status in scene.learner.statuses]
    assert max(live) == 5


def test_a_lease_larger_than_the_capacity_runs_alone() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(0)
        for number, roots in enumerate((2, 9, 2)):
            scene.learner.issue(lease_of(number, roots=roots))
        await asyncio.sleep(300.0)

    scene = act(script, max_live_roots=4)
    assert len(scene.learner.groups) == 3
    assert {status.live_roots for status in scene.learner.statuses} <= {0, 2, 9}


def test_a_released_lease_is_dropped_whether_it_grows_or_waits_and_others_go_on() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(0)
        for number in range(3):
            scene.learner.issue(lease_of(number, roots=2))
        await asyncio.sleep(0.5)  # lease-0 grows, lease-1 waits for room
        scene.learner.release("lease-1")
        scene.learner.release("lease-0")
        scene.learner.release("lease-of-nobody")
        await asyncio.sleep(100.0)

    scene = act(script, max_live_roots=2)
    assert list(scene.learner.groups) == ["lease-2"]
    assert scene.learner.returned == {}


def test_a_lease_that_is_told_twice_grows_once() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(60.0)

    assert act(script).learner.deliveries == {"lease-0": 1}


# ---- leaving -------------------------------------------------------------------------------------------------------


def test_draining_finishes_what_grows_gives_back_what_waits_and_says_bye() -> None:
    ended_s: list[float] = []

    async def script(scene: Scene) -> None:
        scene.world.end_probability = 0.0
        scene.learner.announce(0)
        for number in range(3):
            scene.learner.issue(lease_of(number, continuations=0))
        await asyncio.sleep(2.5)
        scene.actor.drain()
        scene.actor.drain()
        scene.learner.issue(lease_of(3))
        await asyncio.sleep(0.1)
        assert set(scene.learner.returned) == {"lease-1", "lease-2", "lease-3"}
        assert scene.actor.hello().live_leases == ("lease-0",)
        await asyncio.sleep(5.0)
        ended_s.append(loop_clock())

    learner = act(script, max_live_roots=2).learner
    assert list(learner.groups) == ["lease-0"]
    assert set(learner.returned.values()) == {"the actor is leaving"}
    assert learner.byes == 1


def test_a_tree_that_does_not_finish_in_time_goes_back_and_its_environments_are_closed() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.latency = lambda call: math.inf
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(1.0)
        scene.actor.drain()
        await asyncio.sleep(4.5)
        assert scene.learner.byes == 0
        await asyncio.sleep(1.0)

    learner = act(script, drain_s=5.0).learner
    assert learner.returned == {"lease-0": "unfinished after 5 s of draining"}
    assert (learner.byes, learner.groups) == (1, {})


def test_when_the_learner_says_stop_the_actor_abandons_its_trees_says_bye_and_leaves() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.latency = lambda call: math.inf
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(1.0)
        scene.learner.stop()
        await asyncio.sleep(0.0)

    async def main() -> float:
        scene = Scene()
        async with asyncio.TaskGroup() as group:
            group.create_task(scene.actor.run())
            await script(scene)
        scene.check_nothing_is_left()
        assert scene.learner.byes == 1  # or the learner would wait until it takes the actor for lost
        return loop_clock()

    assert virtual_time.run(main()) == 1.25  # what the bye takes on its way


def test_when_the_learner_says_stop_to_an_actor_that_drains_already_it_finishes_its_trees() -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(1.0)
        scene.actor.drain()
        scene.learner.stop()
        await asyncio.sleep(0.0)

    learner = act(script, drain_s=60.0).learner
    assert set(learner.groups) == {"lease-0"}
    assert (learner.byes, learner.returned) == (1, {})


def test_cancelling_an_actor_at_any_moment_leaves_nothing() -> None:
    for seed in range(30):

        async def main(seed: int = seed) -> None:
            scene = Scene()
            scene.engine.latency = scene.world.latency = scene.scorer.latency = pareto(seed)
            scene.learner.announce(0)
            for number in range(4):
                scene.learner.issue(lease_of(number))
            async with asyncio.TaskGroup() as group:
                running = group.create_task(scene.actor.run())
                await asyncio.sleep(20.0 * unit(seed, "cancel"))
                running.cancel()
            scene.check_nothing_is_left()

        virtual_time.run(main())


def test_an_engine_loop_that_ends_by_itself_ends_the_actor() -> None:
    class Tired(ScriptedEngine):
        async def run(self) -> None:
            await asyncio.sleep(3.0)

    async def script(scene: Scene) -> None:
        await asyncio.sleep(100.0)

    with pytest.raises(ExceptionGroup) as caught:
        act(script, engine=Tired())
    assert caught.group_contains(InvariantError, match="the actor's engine loop ended by itself")


def test_a_broken_promise_in_one_tree_ends_the_actor() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.fault = lambda call: InvariantError("two owners of one slot")
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0))
        await asyncio.sleep(100.0)

    with pytest.raises(ExceptionGroup) as caught:
        act(script)
    assert caught.group_contains(InvariantError, match="two owners")


# ---- what it tells -------------------------------------------------------------------------------------------------


def test_a_stalled_engine_is_named_with_tree_node_phase_age_and_line(caplog: pytest.LogCaptureFixture) -> None:
    async def script(scene: Scene) -> None:
        scene.engine.latency = lambda call: math.inf if call == "lease-1/2" else 1.0
        scene.world.end_probability = 1.0
        scene.learner.announce(0)
        scene.learner.issue(lease_of(0, roots=1, continuations=0))
        scene.learner.issue(lease_of(1, roots=2, continuations=0))
        await asyncio.sleep(59.0)
        (phase,) = scene.actor.status().trees
        assert (phase.lease_id, phase.prompt_id, phase.node_id, phase.phase) == ("lease-1", "prompt-1", 2, "generate")
        assert (phase.waiting_s, phase.age_s, phase.turns) == (59.0, 59.0, 1)
        await asyncio.sleep(100.0)

    with caplog.at_level(logging.WARNING):
        act(script)
    stalls = [record.getMessage() for record in caplog.records if "waits in phase" in record.getMessage()]
    assert len(stalls) == 1
    assert stalls[0].startswith(
        "actor actor-7: tree lease-1 node 2 waits in phase generate for 45 s (the tree is 45 s old) at "
    )
    assert "locks.py:" in stalls[0]


def test_counters_only_grow_and_count_what_was_shipped() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.latency = pareto("counters", longest_s=15.0)
        scene.learner.announce(0)
        for number in range(6):
            scene.learner.issue(lease_of(number))
        await asyncio.sleep(3.0)
        scene.learner.release("lease-2")
        await asyncio.sleep(500.0)

    scene = act(script)
    rows = [status.counters for status in scene.learner.statuses]
    for before, after in pairwise(rows):
        assert all(after[name] >= value for name, value in before.items())
    last, groups = rows[-1], scene.learner.groups.values()
    assert last["groups"] == len(groups) == 5
    assert last["turns"] >= sum(group.num_turns for group in groups)
    assert last["sampled_tokens"] >= sum(group.num_sampled_tokens for group in groups)
    assert (last["engine_busy_s"], last["engine_idle_s"]) == (1.5, 0.5)
    assert last["wall_s"] == pytest.approx(503.0, abs=1.1)


# ---- all at once ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_seeds", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_no_lease_is_lost_and_nothing_is_left_whatever_happens(num_seeds: int) -> None:
    ways = {"group": 0, "returned": 0, "released": 0, "failed nodes": 0}
    for seed in range(num_seeds):
        learner = virtual_time.run(chaos(seed), limit_s=10_000.0)
        for lease_id in learner.issued:
            if lease_id in learner.groups:
                ways["group"] += 1
            elif lease_id in learner.returned:
                ways["returned"] += 1
            else:
                assert lease_id in learner.released, f"seed {seed}: {lease_id} is lost"
                ways["released"] += 1
        ways["failed nodes"] += sum(len(group.failures) for group in learner.groups.values())
        assert learner.byes == 1
    assert min(ways.values()) > num_seeds // 5, ways


async def chaos(seed: int) -> LoopLearner:
    learner = LoopLearner(lose_ack=lambda group_id, attempt: unit(seed, "ack", group_id, attempt) < 0.3)
    scene = Scene(learner=learner, max_live_roots=6, drain_s=4.0, request_deadline_s=20.0)
    scene.engine.latency = scene.world.latency = scene.scorer.latency = pareto(seed, scale_s=0.3)
    scene.fetcher.latency, scene.engine.load_s = pareto(seed, scale_s=0.1, longest_s=2.0), 0.1
    errors = (lambda: RuntimeError("boom"), lambda: EngineError("lost"))
    scene.fetcher.fault = now_and_then(seed, (lambda: PolicyError("not there"),), probability=0.3)
    scene.engine.fault = scene.world.fault = scene.scorer.fault = now_and_then(seed, errors, probability=0.05)
    async with asyncio.TaskGroup() as group:
        group.create_task(scene.actor.run())
        learner.announce(0)
        for number in range(6):
            learner.issue(lease_of(number))
            await asyncio.sleep(3.0 * unit(seed, "pause", number))
            if unit(seed, "release", number) < 0.2:
                learner.release(f"lease-{number}")
            learner.announce(number)
            if unit(seed, "lose", number) < 0.2:
                scene.engine.lose()
        scene.actor.drain()
    scene.check_nothing_is_left()
    return learner
