"""Following versions in virtual time: whatever is announced, lost or refused, what is confirmed is proven."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import virtual_time
from tests.fakes import LoopLearner, ScriptedEngine, ScriptedFetcher, loop_clock, unit
from trace_async.acting.versions import ATTEMPTS, VersionFollower
from trace_async.core.types import Json
from trace_async.errors import EngineError, PolicyError
from trace_async.publication.staging import Stager


def a_stager_fits(stager: Stager) -> VersionFollower:
    """For the type checker."""
    return VersionFollower(
        road=LoopLearner().channel,
        engine=ScriptedEngine(),
        fetcher=stager,
        load_predictor=lambda state, version: None,
        on_loaded=lambda: None,
    )


class Scene:
    """One follower with its engine, fetcher and learner; made inside the loop that runs it."""

    def __init__(self) -> None:
        self.learner = LoopLearner()
        self.engine = ScriptedEngine(version=-1)
        self.fetcher = ScriptedFetcher()
        self.predictors: list[tuple[Json, int]] = []
        self.loaded_s: list[float] = []
        self.follower = VersionFollower(
            road=self.learner.channel,
            engine=self.engine,
            fetcher=self.fetcher,
            load_predictor=lambda state, version: self.predictors.append((state, version)),
            on_loaded=lambda: self.loaded_s.append(loop_clock()),
        )

    @property
    def confirmed(self) -> list[tuple[int, int]]:
        """(epoch, version), in order."""
        return [(epoch, version) for _, version, epoch in self.learner.confirmed]


def follow(script: Callable[[Scene], Coroutine[Any, Any, None]]) -> Scene:
    scenes: list[Scene] = []

    async def main() -> None:
        scene = Scene()
        scenes.append(scene)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(scene.follower.run())
            await script(scene)
            running.cancel()

    virtual_time.run(main(), limit_s=100_000.0)
    return scenes[0]


def test_sampling_goes_on_unfenced_while_a_newer_version_is_fetched_and_loaded() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.latency, scene.engine.load_s = (lambda call: 5.0), 2.0
        assert scene.follower.fenced
        scene.learner.announce(1)
        await asyncio.sleep(8.0)
        scene.learner.announce(2)
        for _ in range(6):
            await asyncio.sleep(1.0)
            assert (scene.follower.fenced, scene.engine.version) == (False, 1)
        await asyncio.sleep(2.0)
        assert scene.engine.version == 2

    assert follow(script).learner.confirmed == [(7.0, 1, 1), (15.0, 2, 1)]


def test_only_the_newest_of_what_was_announced_meanwhile_is_fetched() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.latency = lambda call: 5.0
        for version in (3, 1, 2):
            scene.learner.announce(version)
        await asyncio.sleep(1.0)
        for version in (4, 6, 5):
            scene.learner.announce(version)
        await asyncio.sleep(20.0)

    scene = follow(script)
    assert scene.fetcher.asked == [3, 6]
    assert scene.confirmed == [(1, 3), (1, 6)]


@pytest.mark.parametrize("how", ["fetch", "unusable", "unproven"])
def test_a_failure_puts_the_fence_up_until_a_load_succeeds(how: str) -> None:
    async def script(scene: Scene) -> None:
        scene.learner.announce(1)
        await asyncio.sleep(0.1)
        if how == "fetch":
            scene.fetcher.fault = lambda call: PolicyError("digest differs")
        else:
            setattr(scene.engine, how, frozenset({2}))
        scene.learner.announce(2)
        await asyncio.sleep(0.5)
        assert scene.follower.fenced
        assert scene.engine.version == (-1 if how == "unproven" else 1)  # what was proven may be sampled with
        scene.fetcher.fault, scene.engine.unusable, scene.engine.unproven = (
            (lambda call: None),
            frozenset(),
            frozenset(),
        )
        await asyncio.sleep(1.0)
        assert not scene.follower.fenced

    scene = follow(script)
    assert scene.learner.confirmed == [(0.0, 1, 1), (1.1, 2, 1)]
    assert scene.follower.counters() == {"failed_loads": 1, "engine_losses": 0}


def test_a_newer_version_is_tried_at_once_and_one_that_stays_newest_after_growing_pauses() -> None:
    tried_s: list[float] = []

    async def script(scene: Scene) -> None:
        def fault(call: str) -> Exception | None:
            tried_s.append(loop_clock())
            return PolicyError("it was retired") if call != "fetch:3" else None

        scene.fetcher.fault = fault
        scene.learner.announce(1)
        await asyncio.sleep(10.0)
        scene.learner.announce(2)
        await asyncio.sleep(1.0)
        scene.learner.announce(3)
        await asyncio.sleep(1.0)

    assert follow(script).learner.confirmed == [(11.0, 3, 1)]
    assert tried_s == [0.0, 1.0, 3.0, 7.0, 10.0, 11.0]


@pytest.mark.parametrize("error", [PolicyError, EngineError])
def test_failures_in_a_row_end_the_actor_with_the_last_reason(error: type[Exception]) -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.fault = lambda call: error(f"{call} is nowhere")
        scene.learner.announce(1)
        await asyncio.sleep(60.0)
        scene.learner.announce(2)
        await asyncio.sleep(1000.0)

    with pytest.raises(ExceptionGroup) as caught:
        follow(script)
    assert caught.group_contains(error, match="fetch:2 is nowhere")


def test_a_busy_learner_does_not_shorten_the_time_that_failures_are_given() -> None:
    ended_s: list[float] = []

    async def script(scene: Scene) -> None:
        scene.fetcher.fault = lambda call: (
            PolicyError("the disk is full") if asyncio.get_running_loop().time() < 80 else None
        )
        for version in range(1, 100):
            scene.learner.announce(version)
            await asyncio.sleep(2.0)
        ended_s.append(asyncio.get_running_loop().time())

    assert follow(script).confirmed[-1] == (1, 99)
    assert ended_s == [198.0]


def test_failures_that_successes_part_do_not_add_up() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.fault = lambda call: (
            PolicyError("now and then") if unit(call, len(scene.fetcher.asked)) < 0.5 else None
        )
        for version in range(40):
            scene.learner.announce(version)
            await asyncio.sleep(200.0)

    scene = follow(script)
    assert scene.confirmed == [(1, version) for version in range(40)]
    assert scene.follower.counters()["failed_loads"] > ATTEMPTS


def test_a_fetch_that_takes_too_long_is_given_up_and_tried_again() -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.latency = lambda call: math.inf if len(scene.fetcher.asked) == 1 else 1.0
        scene.learner.announce(1)
        await asyncio.sleep(700.0)

    assert follow(script).learner.confirmed == [(602.0, 1, 1)]


def test_an_engine_that_never_finishes_loading_ends_the_actor() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.load_s = 10_000.0
        scene.learner.announce(1)
        await asyncio.sleep(1000.0)

    with pytest.raises(ExceptionGroup) as caught:
        follow(script)
    assert caught.group_contains(TimeoutError)


def test_a_lost_engine_gets_the_newest_version_again() -> None:
    async def script(scene: Scene) -> None:
        scene.engine.load_s = 2.0
        scene.learner.announce(4)
        await asyncio.sleep(10.0)
        scene.engine.lose()
        assert scene.follower.fenced  # in the same moment, before anybody else runs
        await asyncio.sleep(1.0)
        assert scene.follower.fenced
        await asyncio.sleep(5.0)
        assert (scene.follower.fenced, scene.engine.version) == (False, 4)

    scene = follow(script)
    assert scene.learner.confirmed == [(2.0, 4, 1), (12.0, 4, 1)]
    assert scene.follower.counters()["engine_losses"] == 1


@pytest.mark.parametrize("lost_s", [0.0, 0.5, 1.0, 1.5, 3.0, 3.5, 10.0])
def test_weights_that_are_lost_at_any_moment_of_a_change_come_again_and_are_confirmed_only_then(lost_s: float) -> None:
    async def script(scene: Scene) -> None:
        scene.fetcher.latency, scene.engine.load_s = (lambda call: 1.0), 2.0
        scene.learner.announce(4)
        await asyncio.sleep(10.0)
        scene.learner.announce(5)
        await asyncio.sleep(lost_s)
        told = len(scene.confirmed)
        scene.engine.lose()
        await asyncio.sleep(0.0)
        assert scene.follower.fenced or len(scene.confirmed) > told
        await asyncio.sleep(30.0)
        assert (scene.follower.fenced, scene.engine.version) == (False, 5)

    assert follow(script).confirmed[-1] == (1, 5)


def test_an_engine_that_loses_every_version_at_once_ends_the_actor() -> None:
    class Sieve(ScriptedEngine):
        async def load(self, **version: Any) -> None:
            await super().load(**version)
            self.lose()

    async def main() -> None:
        scene = Scene()
        scene.learner.announce(1)
        follower = VersionFollower(
            road=scene.learner.channel,
            engine=Sieve(version=-1),
            fetcher=scene.fetcher,
            load_predictor=lambda state, version: None,
            on_loaded=lambda: None,
        )
        await follower.run()

    with pytest.raises(EngineError, match="lost version 1 as soon as it was loaded"):
        virtual_time.run(main(), limit_s=10_000.0)


@settings(max_examples=150, deadline=None)
@given(
    notices=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 20)), min_size=1, max_size=8),
    losses_s=st.lists(st.floats(0, 20), max_size=3),
    seed=st.integers(0, 2**32),
)
def test_whatever_comes_in_whatever_order_the_newest_is_loaded_in_the_end_and_confirmations_only_rise(
    notices: list[tuple[int, int, float]], losses_s: list[float], seed: int
) -> None:
    async def script(scene: Scene) -> None:
        scene.engine.load_s = 0.7 * unit(seed, "load")
        scene.fetcher.latency = lambda call: 3 * unit(seed, call, len(scene.fetcher.asked))
        scene.fetcher.fault = lambda call: (
            PolicyError("not there") if unit(seed, "fault", call, len(scene.fetcher.asked)) < 0.3 else None
        )

        async def announce(epoch: int, version: int, at_s: float) -> None:
            await asyncio.sleep(at_s)
            scene.learner.announce(version, epoch=epoch)

        async def lose(at_s: float) -> None:
            await asyncio.sleep(at_s)
            scene.engine.lose()

        async with asyncio.TaskGroup() as group:
            for epoch, version, at_s in notices:
                group.create_task(announce(epoch, version, at_s))
            for at_s in losses_s:
                group.create_task(lose(at_s))
        await asyncio.sleep(500.0)
        newest = max((epoch, version) for epoch, version, _ in notices)
        assert not scene.follower.fenced
        assert (scene.follower.epoch, scene.follower.version) == newest
        assert (scene.engine.loads[-1][1], scene.engine.version) == newest
        assert scene.confirmed == sorted(scene.confirmed)
        again = len(scene.confirmed) - len(set(scene.confirmed))
        assert again <= len(losses_s)
        assert [version for _, version in scene.confirmed] == [version for _, version in scene.predictors]

    follow(script)
