"""One turn: context budget, ends, deadlines, and whose error is whose."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from tests import virtual_time
from tests.fakes import STOP_ID, CoinEnvironment, ScriptedEngine, WordRenderer, World, loop_clock
from trace_async.acting.turns import Engine, TurnPlayer
from trace_async.core.types import GenerateRequest, Generation, IntArray, Message, StopReason, Task, Turn
from trace_async.environment import Branching, StepResult
from trace_async.errors import EngineError, EnvironmentFailure, EnvironmentTimeout, InvariantError

PREFIX: IntArray = np.array([5, 6, 7, 8], dtype=np.int32)
REPLY = StepResult(messages=(Message("user", "you see nothing"),), reward=0.25, terminated=False)
REPLY_IDS = WordRenderer().reply_ids(REPLY.messages, closed=True).tolist()


@dataclass(slots=True)
class FixedEngine:
    """Answers every request with the same tokens."""

    token_ids: tuple[int, ...] = (2, 3, STOP_ID)
    logprobs: tuple[float, ...] = (-0.5, -0.25, -0.125)
    seen: GenerateRequest | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        self.seen = request
        return Generation(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            version_min=3,
            version_max=4,
            kv_version_min=2,
            stop=StopReason.STOP,
            generate_s=0.75,
        )


class OneReply(CoinEnvironment):
    """Gives one reply, after a while."""

    name: ClassVar[str] = "one-reply"
    branching: ClassVar[Branching] = Branching.FORK

    def __init__(self, reply: StepResult = REPLY, *, step_s: float = 0.0, raises: BaseException | None = None) -> None:
        super().__init__(World())
        self.reply, self.step_s, self.raises = reply, step_s, raises
        self.heard: list[str] = []

    async def step(self, action: str) -> StepResult:
        self.heard.append(action)
        await asyncio.sleep(self.step_s)
        if self.raises is not None:
            raise self.raises
        return self.reply


def player(
    engine: Engine | None = None, *, max_turn_tokens: int = 3, max_context_tokens: int = 100, max_turns: int = 8
) -> TurnPlayer:
    return TurnPlayer(
        engine or FixedEngine(),
        WordRenderer(),
        max_turn_tokens=max_turn_tokens,
        max_context_tokens=max_context_tokens,
        max_turns=max_turns,
        request_deadline_s=60.0,
        step_deadline_s=30.0,
        clock=loop_clock,
    )


def play(
    by: TurnPlayer, env: OneReply, *, depth: int = 1, on_phase: Callable[[str], None] = lambda phase: None
) -> Turn:
    return virtual_time.run(
        by.play(
            env=env,
            prefix_ids=PREFIX,
            depth=depth,
            reward_so_far=0.5,
            seed=11,
            request_id="lease-0/1",
            on_phase=on_phase,
        )
    )


def test_a_turn_records_what_engine_and_environment_said_and_nothing_else() -> None:
    env, phases = OneReply(step_s=2.0), list[str]()
    turn = play(player(), env, on_phase=phases.append)
    assert env.heard == ["2 3"]
    assert turn.action_ids.tolist() == [2, 3, STOP_ID]
    assert turn.action_logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert turn.observation_ids.tolist() == REPLY_IDS
    assert (turn.version_min, turn.version_max, turn.kv_version_min) == (3, 4, 2)
    assert (turn.reward, turn.valid, turn.stop) == (0.25, True, StopReason.STOP)
    assert (turn.generate_s, turn.environment_s) == (0.75, 2.0)
    assert math.isnan(turn.outcome)
    assert math.isnan(turn.process_score)
    assert phases == ["generate", "environment"]


def test_a_turn_without_stop_token_is_closed_by_the_reply() -> None:
    turn = play(player(FixedEngine(token_ids=(2, 3, 4))), OneReply())
    assert turn.observation_ids.tolist() == [STOP_ID, *REPLY_IDS]


@pytest.mark.parametrize("ending", ["terminated", "truncated"])
def test_an_episode_that_the_environment_ends_has_the_sum_of_rewards_as_outcome(ending: str) -> None:
    reply = replace(REPLY, terminated=ending == "terminated", truncated=ending == "truncated", valid=False)
    turn = play(player(), OneReply(reply))
    assert (turn.outcome, turn.reward, turn.valid, turn.stop) == (0.75, 0.25, False, StopReason.STOP)
    assert turn.observation_ids.size == 0


def test_the_last_turn_that_the_limit_allows_ends_the_episode() -> None:
    assert math.isnan(play(player(max_turns=3), OneReply(), depth=2).outcome)
    turn = play(player(max_turns=3), OneReply(), depth=3)
    assert (turn.outcome, turn.stop, turn.observation_ids.size) == (0.75, StopReason.TURN_LIMIT, 0)


def test_an_episode_ends_where_the_next_turn_would_not_have_one_token_of_room() -> None:
    used = PREFIX.size + 3 + len(REPLY_IDS)
    assert math.isnan(play(player(max_context_tokens=used + 1), OneReply()).outcome)
    turn = play(player(max_context_tokens=used), OneReply())
    assert (turn.outcome, turn.stop, turn.observation_ids.size) == (0.75, StopReason.CONTEXT, 0)


@pytest.mark.parametrize(("max_context_tokens", "expected"), [(100, 9), (13, 9), (12, 8), (5, 1)])
def test_the_engine_is_asked_for_no_more_tokens_than_fit(max_context_tokens: int, expected: int) -> None:
    engine = FixedEngine(token_ids=(2,), logprobs=(-1.0,))
    play(player(engine, max_turn_tokens=9, max_context_tokens=max_context_tokens), OneReply())
    assert engine.seen is not None
    assert engine.seen.max_tokens == expected
    assert engine.seen.seed == 11
    assert engine.seen.prefix_ids.tolist() == PREFIX.tolist()


def test_a_prompt_without_room_for_a_turn_is_refused_with_the_cure() -> None:
    with pytest.raises(EngineError, match=r"lease-0/1: 4 tokens leave no room .* raise tree\.max_context_tokens"):
        play(player(max_context_tokens=4), OneReply())


@pytest.mark.parametrize(
    ("token_ids", "logprobs"),
    [
        ((), ()),
        ((2, 3), (-1.0,)),
        ((2, 3, 4, 5), (-1.0,) * 4),
        ((2,), (math.nan,)),
        ((2,), (0.5,)),
        ((2,), (-math.inf,)),
    ],
)
def test_an_impossible_answer_of_the_engine_is_an_engine_error(
    token_ids: tuple[int, ...], logprobs: tuple[float, ...]
) -> None:
    with pytest.raises(EngineError, match="lease-0/1: engine answered"):
        play(player(FixedEngine(token_ids=token_ids, logprobs=logprobs)), OneReply())


def test_a_plain_error_of_the_engine_becomes_an_engine_error_with_its_cause() -> None:
    engine = ScriptedEngine(fault=lambda call: RuntimeError("out of memory"))
    with pytest.raises(EngineError, match="lease-0/1: engine failed: RuntimeError: out of memory") as caught:
        play(player(engine), OneReply())
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_engine_that_does_not_answer_misses_its_deadline() -> None:
    with pytest.raises(EngineError, match="lease-0/1: engine took longer than 60 s"):
        play(player(ScriptedEngine(latency=lambda call: 61.0)), OneReply())


def test_a_broken_promise_is_not_taken_for_a_failed_engine() -> None:
    with pytest.raises(InvariantError, match="ledger"):
        play(player(ScriptedEngine(fault=lambda call: InvariantError("ledger"))), OneReply())


def test_an_engine_that_drops_its_future_fails_the_turn_and_does_not_cancel_it() -> None:
    with pytest.raises(EngineError, match="engine dropped the call"):
        play(player(ScriptedEngine(fault=raise_cancelled)), OneReply())


def raise_cancelled(call: str) -> Exception | None:
    raise asyncio.CancelledError


def test_a_plain_error_of_the_environment_becomes_an_environment_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="lease-0/1: step failed: OSError: disk full") as caught:
        play(player(), OneReply(raises=OSError("disk full")))
    assert not isinstance(caught.value, EnvironmentTimeout)


def test_a_timeout_inside_the_environment_is_a_failure_and_not_our_deadline() -> None:
    with pytest.raises(EnvironmentFailure, match="TimeoutError: its own") as caught:
        play(player(), OneReply(raises=TimeoutError("its own")))
    assert not isinstance(caught.value, EnvironmentTimeout)


def test_an_environment_that_misses_its_deadline_times_out() -> None:
    with pytest.raises(EnvironmentTimeout, match="lease-0/1: step took longer than 30 s"):
        play(player(), OneReply(step_s=30.5))


def test_a_reward_that_is_no_number_is_a_failure_of_the_environment() -> None:
    with pytest.raises(EnvironmentFailure, match="reward nan"):
        play(player(), OneReply(replace(REPLY, reward=math.nan)))


def test_cancellation_passes_through_unchanged() -> None:
    async def main() -> None:
        async with asyncio.timeout(1.0):
            await player(ScriptedEngine(latency=lambda call: 50.0)).play(
                env=OneReply(), prefix_ids=PREFIX, depth=1, reward_so_far=0.0, seed=0, request_id="r", on_phase=print
            )

    with pytest.raises(TimeoutError):
        virtual_time.run(main())


def test_a_replayed_turn_must_be_answered_as_it_was() -> None:
    async def main(replayed: StepResult) -> None:
        turn = await player().play(
            env=OneReply(), prefix_ids=PREFIX, depth=1, reward_so_far=0.0, seed=0, request_id="r", on_phase=print
        )
        await player().replay(OneReply(replayed), turn, what="lease-0/7")

    virtual_time.run(main(REPLY))
    other = replace(REPLY, messages=(Message("user", "you see a door"),))
    with pytest.raises(EnvironmentFailure, match="lease-0/7: the environment replied"):
        virtual_time.run(main(other))
    with pytest.raises(EnvironmentFailure, match="lease-0/7: the replayed turn ended"):
        virtual_time.run(main(replace(REPLY, terminated=True)))


def test_an_opening_is_the_rendered_messages_of_a_reset() -> None:
    task = Task("t1", {})
    ids = virtual_time.run(player().open(CoinEnvironment(World()), task, seed=3, what="lease-0 prompt"))
    assert ids.tolist() == WordRenderer().opening_ids((Message("user", "toss t1 please"),)).tolist()
