"""FrozenLake as the policy meets it: tasks, phrasings, turns, branching."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.frozenlake import FrozenLake, FrozenLakeOptions, FrozenLakeTasks, make_frozenlake
from envs.frozenlake_map import MOVES, Lake, distances, split_of
from envs.frozenlake_play import demonstration
from trace_async.core.types import Message, Task
from trace_async.environment import StepResult
from trace_async.errors import ConfigError

SMALL = Task("small", {"map": ["SFH", "FFF", "HFG"], "slippery": False, "shortest": 4})
ICY = Task("icy", {"map": ["SFFF", "FFFF", "FFFF", "FFFG"], "slippery": True, "shortest": 6})


async def play(environment: FrozenLake, actions: list[str]) -> list[StepResult]:
    """Step until the actions or the episode end."""
    results: list[StepResult] = []
    for action in actions:
        results.append(await environment.step(action))
        if results[-1].terminated or results[-1].truncated:
            break
    return results


def replies(results: list[StepResult]) -> list[str]:
    return [result.messages[0].content if result.messages else "" for result in results]


def test_a_compact_episode_reads_as_written_here() -> None:
    async def episode() -> None:
        environment = FrozenLake(FrozenLakeOptions())
        opening = await environment.reset(SMALL, seed=0)
        assert opening == (Message("user", "a1S a2. a3O b1. b2. b3. c1O c2. c3G"),)
        results = await play(environment, ["up", " Right\n", "jump", "down", "DOWN", "right"])
        assert replies(results) == ["a1S", "a2.", "? a2.", "b2.", "c2.", ""]
        assert [result.valid for result in results] == [True, True, False, True, True, True]
        assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
        assert results[-1].terminated
        assert not results[-1].truncated

    asyncio.run(episode())


def test_a_hole_ends_the_episode_without_reward_and_the_turn_limit_truncates_it() -> None:
    async def episode() -> None:
        environment = FrozenLake(FrozenLakeOptions())
        await environment.reset(SMALL, seed=0)
        fallen = (await play(environment, ["right", "right"]))[-1]
        assert (fallen.reward, fallen.terminated, fallen.truncated, fallen.messages) == (0.0, True, False, ())
        with pytest.raises(RuntimeError, match="over after 2 turns"):
            await environment.step("left")

        await environment.reset(SMALL, seed=0)
        results = await play(environment, ["up", "?"] * 10)
        assert len(results) == 2 * 3
        assert (results[-1].reward, results[-1].terminated, results[-1].truncated) == (0.0, False, True)

    asyncio.run(episode())


def test_a_full_episode_tells_rules_grid_turns_left_and_what_was_wrong() -> None:
    async def episode() -> None:
        environment = FrozenLake(FrozenLakeOptions(style="full"))
        system, user = await environment.reset(SMALL, seed=0)
        assert system.role == "system"
        assert "<think>your reasoning</think><action>Right</action>" in system.content
        assert "slippery" not in system.content
        assert user == Message("user", "P _ O\n_ _ _\nO _ G\nTurns left: 6")
        moved, bumped, unreadable = await play(
            environment,
            [
                "<think>not <action>Left</action> but</think><action>Up</action> no: <action> down </action>",
                "<think>wall</think><action>LEFT</action>",
                "<think><action>Right</action></think> I go right",
            ],
        )
        assert moved.messages[0].content == "You moved.\n_ _ O\nP _ _\nO _ G\nTurns left: 5"
        assert bumped.messages[0].content == "You did not leave your cell.\n_ _ O\nP _ _\nO _ G\nTurns left: 4"
        assert not unreadable.valid
        assert unreadable.messages[0].content.startswith("No move could be read. End your answer with one of <action>")
        assert unreadable.messages[0].content.endswith("\n_ _ O\nP _ _\nO _ G\nTurns left: 3")

        icy_system, _ = await environment.reset(ICY, seed=0)
        assert "slippery: with probability 0.67" in icy_system.content

    asyncio.run(episode())


def test_an_unreadable_answer_ends_the_game_without_reward_where_the_options_say_so() -> None:
    async def episode() -> None:
        environment = FrozenLake(FrozenLakeOptions(unreadable_ends=True))
        await environment.reset(SMALL, seed=0)
        (result,) = await play(environment, ["sideways"])
        assert (result.valid, result.terminated, result.reward, result.messages) == (False, True, 0.0, ())

    asyncio.run(episode())


def test_tasks_are_json_the_same_for_ever_and_winnable_within_the_turn_limit() -> None:
    options = FrozenLakeOptions(sizes=(2, 3, 4, 9), slippery=True)
    for split in ("train", "heldout"):
        for index in range(150):
            task = FrozenLakeTasks(options).task(split, index)
            assert task == FrozenLakeTasks(options).task(split, index)
            assert json.loads(json.dumps(task.data)) == task.data
            lake = Lake.parse(task.data["map"])
            assert lake.size in options.sizes
            assert task.data["shortest"] == distances(lake)[lake.start]
            assert 1 <= task.data["shortest"] <= options.max_turns(lake.size)
            assert task.data["slippery"] is True
    assert FrozenLakeTasks(options).size("train") is None


def test_no_training_map_is_a_heldout_map_even_across_map_seeds_and_on_tiny_grids() -> None:
    seen: dict[str, set[tuple[str, ...]]] = {"train": set(), "heldout": set()}
    for map_seed in (0, 1):
        tasks = FrozenLakeTasks(FrozenLakeOptions(sizes=(2, 3, 4), map_seed=map_seed))
        for split, maps in seen.items():
            maps.update(tuple(tasks.task(split, index).data["map"]) for index in range(400))
    assert not seen["train"] & seen["heldout"]
    assert all(split_of(Lake.parse(rows)) == split for split, maps in seen.items() for rows in maps)
    first, second = (FrozenLakeTasks(FrozenLakeOptions(map_seed=s)).task("train", 0) for s in (0, 1))
    assert first.data != second.data


@pytest.mark.parametrize("frozen", [0.0, 1.0])
def test_both_splits_have_maps_at_every_size_even_with_no_ice_or_no_hole(frozen: float) -> None:
    for size in range(2, 10):
        tasks = FrozenLakeTasks(
            FrozenLakeOptions(sizes=(size,), min_frozen=frozen, max_frozen=frozen, max_turns_per_size=1)
        )
        for split in ("train", "heldout"):
            rows = tasks.task(split, 0).data["map"]
            assert len(rows) == size
            assert split_of(Lake.parse(rows)) == split


def test_goals_are_as_far_away_as_the_options_demand() -> None:
    options = FrozenLakeOptions(sizes=(3, 5), min_moves_per_size=1.0)
    tasks = [FrozenLakeTasks(options).task("train", index) for index in range(60)]
    assert {len(task.data["map"]) for task in tasks} == {3, 5}
    assert all(len(task.data["map"]) <= task.data["shortest"] <= 2 * len(task.data["map"]) for task in tasks)
    halves = FrozenLakeTasks(FrozenLakeOptions(sizes=(3,), min_moves_per_size=0.5))
    assert min(halves.task("train", index).data["shortest"] for index in range(60)) == 2  # rounded up


def test_options_that_no_map_fits_are_refused_with_the_cure() -> None:
    tasks = FrozenLakeTasks(FrozenLakeOptions(sizes=(4,), min_frozen=0.0, max_frozen=0.0, min_moves_per_size=2.0))
    with pytest.raises(ConfigError, match=r"8 to 8 moves .* raise min_frozen or lower min_moves_per_size"):
        tasks.task("train", 0)


def test_unknown_splits_and_negative_indices_are_refused() -> None:
    tasks = FrozenLakeTasks(FrozenLakeOptions())
    with pytest.raises(ConfigError, match="unknown split 'test'"):
        tasks.task("test", 0)
    with pytest.raises(IndexError, match="-1"):
        tasks.task("train", -1)


@given(st.lists(st.sampled_from([*MOVES, "?"]), max_size=5), st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_forks_with_equal_seeds_agree_and_leave_their_parent_alone(
    before: list[str], seed: int, fork_seed: int
) -> None:
    after = ["right", "down", "left"]

    async def episode() -> None:
        parent, twin = FrozenLake(FrozenLakeOptions()), FrozenLake(FrozenLakeOptions())
        for environment in (parent, twin):
            await environment.reset(ICY, seed=seed)
            results = await play(environment, before)
        if any(result.terminated for result in results):
            return
        first, second = await parent.fork(seed=fork_seed), await parent.fork(seed=fork_seed)
        assert parent.snapshot() == twin.snapshot()
        assert replies(await play(first, after)) == replies(await play(second, after))
        assert first.snapshot() == second.snapshot()
        assert replies(await play(parent, after)) == replies(await play(twin, after))

    asyncio.run(episode())


def test_forks_with_different_seeds_slip_differently() -> None:
    async def ends(seeds: range) -> set[bytes]:
        parent = FrozenLake(FrozenLakeOptions())
        await parent.reset(ICY, seed=0)
        cells = set()
        for seed in seeds:
            child = await parent.fork(seed=seed)
            cells.add("/".join(replies(await play(child, ["right", "down", "right"]))).encode())
        return cells

    assert len(asyncio.run(ends(range(40)))) > 5


@given(st.lists(st.sampled_from([*MOVES, "?"]), max_size=5), st.integers(0, 2**63 - 1))
@settings(max_examples=60, deadline=None)
def test_a_restored_snapshot_continues_exactly_as_the_original_randomness_included(
    actions: list[str], seed: int
) -> None:
    async def episode() -> None:
        original, restored = FrozenLake(FrozenLakeOptions()), FrozenLake(FrozenLakeOptions())
        await original.reset(ICY, seed=seed)
        results = await play(original, actions)
        restored.restore(original.snapshot())
        assert restored.snapshot() == original.snapshot()
        if not (results and results[-1].terminated):
            assert replies(await play(restored, ["down"] * 3)) == replies(await play(original, ["down"] * 3))

    asyncio.run(episode())


def test_a_snapshot_that_names_a_cell_outside_its_map_is_refused() -> None:
    async def episode() -> None:
        environment = FrozenLake(FrozenLakeOptions())
        await environment.reset(SMALL, seed=0)
        state = json.loads(environment.snapshot())
        with pytest.raises(ValueError, match="cell 99 is outside"):
            environment.restore(json.dumps({**state, "cell": 99}).encode())
        await environment.close()
        await environment.close()
        with pytest.raises(RuntimeError, match="reset or restore first"):
            await environment.step("left")

    asyncio.run(episode())


def test_a_demonstration_is_an_episode_that_the_environment_plays_back() -> None:
    async def played_back(options: FrozenLakeOptions) -> None:
        for index in range(30):
            task = FrozenLakeTasks(options).task("train", index)
            script = demonstration(task, np.random.default_rng(index), 0.5, options=options)
            environment = FrozenLake(options)
            assert await environment.reset(task, seed=0) == script.opening
            results = await play(environment, [action for action, _ in script.turns])
            assert replies(results) == [reply for _, reply in script.turns]
            assert all(result.valid for result in results)
            assert results[-1].terminated or results[-1].truncated
            assert sum(result.reward for result in results) == script.reward

    asyncio.run(played_back(FrozenLakeOptions(sizes=(3, 5))))
    asyncio.run(played_back(FrozenLakeOptions(style="full")))


def test_perfect_demonstrations_walk_a_shortest_path_and_random_ones_mostly_fail() -> None:
    tasks = [FrozenLakeTasks(FrozenLakeOptions()).task("train", index) for index in range(200)]
    rng = np.random.default_rng(5)
    perfect = [demonstration(task, rng, 0.0) for task in tasks]
    assert all(script.reward == 1.0 for script in perfect)
    assert [len(script.turns) for script in perfect] == [task.data["shortest"] for task in tasks]
    random = [demonstration(task, rng, 1.0) for task in tasks]
    assert np.mean([script.reward for script in random]) < 0.35


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"slipery": True}, "did you mean 'slippery'"),
        ({"zzz": 1}, "known options: sizes, min_frozen"),
        ({"slippery": 1}, "expected bool, got 1"),
        ({"sizes": 4}, "expected a list of int, got 4"),
        ({"sizes": [4, "5"]}, "expected int, got '5'"),
        ({"sizes": []}, "within 2..9"),
        ({"sizes": [10]}, "within 2..9"),
        ({"min_frozen": 0.9}, "min_frozen <= max_frozen"),
        ({"success_rate": 0}, "0 < rate <= 1"),
        ({"style": "verbose"}, "one of compact, full"),
        ({"max_turns_per_size": 0}, ">= 1"),
        ({"min_moves_per_size": 3.0}, "need 0 <= it <= max_turns_per_size = 2"),
        ({"map_seed": -1}, ">= 0"),
    ],
)
def test_a_wrong_option_is_refused_with_the_cure(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make_frozenlake(options)
