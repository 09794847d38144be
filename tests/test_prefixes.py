"""A task as a predictor looks at it: the very tokens that an actor's tree of it starts with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from envs.registry import load_environment
from trace_async.acting.turns import Engine, TurnPlayer
from trace_async.app.wiring import build_player, policy_path
from trace_async.config import Config
from trace_async.core.types import GenerateRequest, Generation, IntArray, Message, Task
from trace_async.prefixes import MAX_OPENINGS, make_prefix_of
from trace_async.rendering import load_renderer


class NoEngine:
    """Never asked."""

    async def generate(self, request: GenerateRequest) -> Generation:
        raise AssertionError("nothing is sampled here")


@pytest.mark.parametrize("options", [{"sizes": [3, 4, 5]}, {"sizes": [4], "slippery": True}])
def test_an_opening_of_frozenlake_has_the_tokens_of_the_actors_tree(options: dict[str, object]) -> None:
    kit = load_environment("frozenlake", options)
    renderer = load_renderer(policy_path("builtin:frozenlake-tiny"))
    prefix_of = make_prefix_of(kit.opening, renderer.opening_ids)
    engine: Engine = NoEngine()
    player: TurnPlayer = build_player(Config(), engine=engine, renderer=renderer)
    for index in range(12):
        task = kit.tasks.task("train", index)
        opened = asyncio.run(player.open(kit.make_environment(), task, seed=index, what="test"))
        prefix = prefix_of(task)
        np.testing.assert_array_equal(prefix.token_ids, opened)
        assert (prefix.prompt_id, prefix.turn_index, prefix.token_ids.dtype) == (task.task_id, 0, opened.dtype)


def test_the_opening_in_words_of_a_language_model_is_the_one_that_reset_tells() -> None:
    kit = load_environment("frozenlake", {"style": "full", "sizes": [4, 5], "slippery": True})
    assert kit.opening is not None
    for index in range(8):
        task = kit.tasks.task("heldout", index)
        assert kit.opening(task) == asyncio.run(kit.make_environment().reset(task, seed=index))


class CountingRenderer:
    """One token per character; notes what it rendered."""

    def __init__(self) -> None:
        self.rendered: list[str] = []

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        self.rendered.append(messages[0].content)
        return np.frombuffer(messages[0].content.encode(), np.uint8).astype(np.int32)


def task_of(number: int) -> Task:
    return Task(f"task-{number}", {})


def test_an_opening_is_rendered_once_while_it_is_among_the_last_used() -> None:
    renderer = CountingRenderer()
    prefix_of = make_prefix_of(lambda task: (Message("user", task.task_id),), renderer.opening_ids)
    first = prefix_of(task_of(0))
    for number in range(1, MAX_OPENINGS):
        prefix_of(task_of(number))
    assert prefix_of(task_of(0)) is first
    assert len(renderer.rendered) == MAX_OPENINGS
    prefix_of(task_of(MAX_OPENINGS))  # number 1 has not been used for longest
    assert prefix_of(task_of(0)) is first
    prefix_of(task_of(1))
    assert renderer.rendered[-2:] == [f"task-{MAX_OPENINGS}", "task-1"]


def test_without_an_opening_a_prompt_has_a_name_and_no_words() -> None:
    prefix = make_prefix_of(None, CountingRenderer().opening_ids)(task_of(3))
    assert (prefix.prompt_id, prefix.turn_index, prefix.token_ids.tolist()) == ("task-3", 0, [])
    assert prefix.token_ids.dtype == np.int32
