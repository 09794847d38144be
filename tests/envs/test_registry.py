"""Environments by name, the user's own included."""

from __future__ import annotations

import asyncio

import pytest

from envs.registry import load_environment
from trace_async.environment import Branching
from trace_async.errors import ConfigError


def test_the_shipped_environment_is_found_by_its_name() -> None:
    kit = load_environment("frozenlake", {"sizes": [3]})
    assert kit.make_environment().name == "frozenlake"
    assert len(kit.tasks.task("train", 0).data["map"]) == 3


def test_a_users_own_environment_is_found_by_module_and_function() -> None:
    async def episode() -> None:
        kit = load_environment("tests.envs.counting:make_replaying", {"max_turns": 3})
        environment = kit.make_environment()
        assert environment.branching is Branching.REPLAY
        (opening,) = await environment.reset(kit.tasks.task("train", 0), seed=0)
        assert opening.content == "count to 6"
        unread, halfway, there = [await environment.step(action) for action in ("ten", " 4 ", "2")]
        assert (unread.valid, unread.messages[0].content) == (False, "0")
        assert (halfway.valid, halfway.messages[0].content) == (True, "4")
        assert (there.terminated, there.reward, there.truncated) == (True, 1.0, False)

    asyncio.run(episode())
    rootbound = load_environment("tests.envs.counting:make_rootbound", {})
    assert rootbound.make_environment().branching is Branching.NONE


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("frozenpond", "no environment 'frozenpond'; known: frozenlake"),
        ("tests.envs.nowhere:make", "cannot import module 'tests.envs.nowhere'"),
        (":make", "cannot import module ''"),
        ("tests.envs.counting:absent", "has no function 'absent'"),
        ("tests.envs.counting:", "has no function ''"),
        ("builtins:dict", "must return an EnvironmentKit, got dict"),
        ("tests.envs.counting:make_replaying", "no such option; did you mean 'max_turns'"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_cure(name: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load_environment(name, {"max_turn": 3})
