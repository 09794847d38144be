"""Plays one turn: the engine samples it, the environment replies, the reply becomes tokens.

Owns: the context budget before each request, the deadlines of every call to engine and environment, the turning of
their plain Python errors into this package's, and the decision where an episode ends; also the opening of an episode
and the replay of a recorded turn. Declares what it needs of an engine and a renderer.
Invariants: what was sampled is recorded as it came, never re-encoded; a turn that is returned leaves room for one
more token below it or carries an outcome; cancellation is never taken for a failure, nor a failure for cancellation.
Never: touches a tree, keeps state between turns, grants.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from trace_async.core.nodes import LOGPROB_SLACK
from trace_async.core.types import GenerateRequest, Generation, IntArray, Message, StopReason, Task, Turn
from trace_async.environment import Environment, StepResult
from trace_async.errors import EngineError, EnvironmentFailure, EnvironmentTimeout, Recoverable, TraceAsyncError

T = TypeVar("T")

OnPhase: TypeAlias = Callable[[str], None]
"""Told what a turn waits for from now on: "generate" or "environment"."""

_NO_IDS: IntArray = np.empty(0, dtype=np.int32)
_NO_IDS.flags.writeable = False


class Engine(Protocol):
    """Samples turns."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn. Raises EngineError when it cannot be had."""
        ...


class Renderer(Protocol):
    """Text and messages to token ids and back, by the policy's own chat template."""

    @property
    def stop_ids(self) -> Sequence[int]:
        """Token ids that end a turn."""
        ...

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        """Tokens int32 [P] of an episode's opening messages, up to where the first turn starts."""
        ...

    def reply_ids(self, messages: Sequence[Message], *, closed: bool) -> IntArray:
        """Tokens int32 [O] between a turn and the next; `closed`: the turn ended with its own stop token."""
        ...

    def text(self, action_ids: IntArray) -> str:
        """What the environment reads of a turn."""
        ...


class TurnPlayer:
    """Plays turns with one engine under fixed limits; holds no state of any episode."""

    def __init__(  # noqa: PLR0913 - the limits of a turn, all of them names
        self,
        engine: Engine,
        renderer: Renderer,
        *,
        max_turn_tokens: int,
        max_context_tokens: int,
        max_turns: int,
        request_deadline_s: float,
        step_deadline_s: float,
        clock: Callable[[], float],
        greedy: bool = False,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._max_turn_tokens = max_turn_tokens
        self._max_context_tokens = max_context_tokens
        self._max_turns = max_turns
        self._request_deadline_s = request_deadline_s
        self._step_deadline_s = step_deadline_s
        self._clock = clock
        self._greedy = greedy

    async def open(self, env: Environment, task: Task, *, seed: int, what: str) -> IntArray:
        """Reset `env` to `task`; the tokens int32 [P] of its opening messages.

        Raises: EnvironmentFailure, EnvironmentTimeout, with `what` in front of the message.
        """
        messages = await self._asked(env.reset(task, seed=seed), what=f"{what}: reset")
        return self._renderer.opening_ids(messages)

    async def fork(self, env: Environment, *, seed: int, what: str) -> Environment:
        """An independent episode in the state of `env`. Raises as `open`."""
        return await self._asked(env.fork(seed=seed), what=f"{what}: fork")

    async def replay(self, env: Environment, turn: Turn, *, what: str) -> None:
        """Step `env` with a recorded turn that did not end its episode. Raises as `open`, also for another reply."""
        result = await self._asked(env.step(self._renderer.text(turn.action_ids)), what=f"{what}: replay")
        if result.terminated or result.truncated:
            raise EnvironmentFailure(f"{what}: the replayed turn ended the episode, the recorded one did not")
        reply_ids = self._reply(result, turn.action_ids)
        if not np.array_equal(reply_ids, turn.observation_ids):
            raise EnvironmentFailure(
                f"{what}: the environment replied {reply_ids.tolist()} to a replayed turn and "
                f"{turn.observation_ids.tolist()} when it was recorded; declare branching none or make it repeatable"
            )

    async def play(
        self,
        *,
        env: Environment,
        prefix_ids: IntArray,
        depth: int,
        reward_so_far: float,
        seed: int,
        request_id: str,
        on_phase: OnPhase,
    ) -> Turn:
        """Play the turn at `depth` (1 for the first) after `prefix_ids` int32 [L] with `env`, which it steps once.

        The turn has an outcome (`reward_so_far` plus its own reward) when the environment ended the episode, when
        `depth` is the turn limit (stop TURN_LIMIT), or when no further turn would fit the context (stop CONTEXT).

        Raises: EngineError, EnvironmentFailure, EnvironmentTimeout; anything of this package that is not Recoverable.
        """
        on_phase("generate")
        generation = await self._generate(prefix_ids, seed=seed, request_id=request_id)
        on_phase("environment")
        started_s = self._clock()
        result = await self._step(env, generation.token_ids, request_id=request_id)
        environment_s = self._clock() - started_s
        stop, observation_ids = generation.stop, _NO_IDS
        ended = result.terminated or result.truncated
        if not ended and depth >= self._max_turns:
            ended, stop = True, StopReason.TURN_LIMIT
        if not ended:
            observation_ids = self._reply(result, generation.token_ids)
            length = prefix_ids.size + generation.token_ids.size + observation_ids.size
            if length + 1 > self._max_context_tokens:
                ended, stop, observation_ids = True, StopReason.CONTEXT, _NO_IDS
        return Turn(
            action_ids=generation.token_ids,
            action_logprobs=generation.logprobs,
            observation_ids=observation_ids,
            version_min=generation.version_min,
            version_max=generation.version_max,
            kv_version_min=generation.kv_version_min,
            stop=stop,
            valid=result.valid,
            reward=result.reward,
            outcome=reward_so_far + result.reward if ended else math.nan,
            process_score=result.process_score,
            generate_s=generation.generate_s,
            environment_s=environment_s,
        )

    async def _generate(self, prefix_ids: IntArray, *, seed: int, request_id: str) -> Generation:
        room = self._max_context_tokens - prefix_ids.size
        if room < 1:
            raise EngineError(
                f"{request_id}: {prefix_ids.size} tokens leave no room for a turn in a context of "
                f"{self._max_context_tokens}; raise tree.max_context_tokens or shorten the prompt"
            )
        request = GenerateRequest(
            request_id=request_id,
            prefix_ids=prefix_ids,
            max_tokens=min(self._max_turn_tokens, room),
            seed=seed,
            greedy=self._greedy,
        )
        generation = await answered(
            self._engine.generate(request),
            deadline_s=self._request_deadline_s,
            failure=EngineError,
            late=EngineError,
            what=f"{request_id}: engine",
        )
        fault = _generation_fault(generation, request.max_tokens)
        if fault:
            raise EngineError(f"{request_id}: engine answered {fault}")
        return generation

    async def _step(self, env: Environment, action_ids: IntArray, *, request_id: str) -> StepResult:
        result = await self._asked(env.step(self._renderer.text(action_ids)), what=f"{request_id}: step")
        if not math.isfinite(result.reward):
            raise EnvironmentFailure(f"{request_id}: step gave reward {result.reward}; a reward is a finite number")
        return result

    async def _asked(self, call: Coroutine[Any, Any, T], *, what: str) -> T:
        return await answered(
            call, deadline_s=self._step_deadline_s, failure=EnvironmentFailure, late=EnvironmentTimeout, what=what
        )

    def _reply(self, result: StepResult, action_ids: IntArray) -> IntArray:
        closed = int(action_ids[-1]) in self._renderer.stop_ids
        return self._renderer.reply_ids(result.messages, closed=closed)


def _generation_fault(generation: Generation, max_tokens: int) -> str | None:
    """What makes an answer unusable, or None; a broken answer fails one node here instead of ending the run later."""
    num_sampled, logprobs = generation.token_ids.size, generation.logprobs.tolist()  # short: numpy would cost more
    if not 1 <= num_sampled <= max_tokens or len(logprobs) != num_sampled:
        return f"{num_sampled} tokens and {len(logprobs)} log-probabilities to a request for 1 to {max_tokens}"
    if not math.isfinite(sum(logprobs)) or max(logprobs) > LOGPROB_SLACK:
        return f"log-probabilities from {min(logprobs)} to {max(logprobs)}; they must be finite and at most 0"
    return None


async def answered(
    call: Coroutine[Any, Any, T],
    *,
    deadline_s: float,
    failure: type[Recoverable],
    late: type[Recoverable],
    what: str,
) -> T:
    """The answer of foreign code within `deadline_s`; woken by that code, the deadline or cancellation.

    Raises: `late` past the deadline; `failure` for any plain Python error, and for a CancelledError that nobody asked
    of this task (an engine that drops its futures would otherwise end a node without a word). Errors of this package
    and true cancellation pass through.
    """
    limit = asyncio.timeout(deadline_s)
    try:
        started = Started(call)
        if (
            started.is_over
        ):  # it never waited, so there was nothing to cut short, and a timer costs more than most calls
            return started.result
        async with limit:
            return await started
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise failure(f"{what} dropped the call") from error
    except TraceAsyncError:
        raise
    except TimeoutError as error:
        if limit is not None and limit.expired():
            raise late(f"{what} took longer than {deadline_s:g} s") from error
        raise failure(f"{what} failed: TimeoutError: {error}") from error
    except Exception as error:  # the boundary to foreign code; becomes a typed failure with its cause
        raise failure(f"{what} failed: {type(error).__name__}: {error}") from error


class Started(Generator[Any, None, T]):
    """A coroutine that has run up to its first wait, or to its end; await it once for the rest."""

    __slots__ = ("_first", "_is_fresh", "call", "is_over", "result")

    result: T

    def __init__(self, call: Coroutine[Any, Any, T]) -> None:
        """Raises what `call` raises before its first wait."""
        self.call = call
        self.is_over = self._is_fresh = False
        try:
            self._first = call.send(None)
            self._is_fresh = True
        except StopIteration as end:
            self.is_over, self.result = True, end.value

    def __await__(self) -> Generator[Any, None, T]:
        return self

    def __next__(self) -> Any:
        """The next wait; first the one that the coroutine has come to already."""
        if self._is_fresh:
            self._is_fresh = False
            return self._first
        return self.call.send(None)

    def send(self, value: None) -> Any:
        """As `next`: an event loop sends nothing but None."""
        return next(self)

    def throw(self, *error: Any) -> Any:
        """Raise an error, cancellation for one, where the coroutine waits."""
        self._is_fresh = False
        return self.call.throw(*error)

    def close(self) -> None:
        """Give the coroutine up."""
        self.call.close()
