"""A generated world whose every state has a known probability of success, for benchmarks of tree allocation.

The value of a state, its success probability under the policy, walks from turn to turn without drift and never leaves
(0, 1); an episode ends after any turn with END_PROBABILITY, at the latest after MAX_TURNS, and then succeeds with the
value it has reached. So the value is what a perfect predictor says: the outcome below a state has that mean. A reply
tells it as one token. What a turn does, how long it is and how long it takes depends on the node's seeds, hence on its
path only: however a tree is scheduled, the same path meets the same fate.

Everything waits on the running loop's clock, meant to be a virtual one; slots are turns that an engine plays at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar, TypeAlias
from zlib import crc32

import numpy as np

from trace_async.core.types import (
    GenerateRequest,
    Generation,
    IntArray,
    Message,
    Prefix,
    Score,
    StopReason,
    Task,
    Turn,
)
from trace_async.environment import Branching, StepResult

MAX_TURNS = 16
END_PROBABILITY = 0.12
STEP = 0.8
"""How far a turn moves the value at most, as a share of the way to the nearer of 0 and 1."""
TOKENS_PER_S = 10.0
STOP_ID, VALUE_ID = 0, 10
SCALE = 1e6

Latency: TypeAlias = Callable[[Random], float]
"""Draws the seconds of one turn; its tokens are as many as that takes."""


def lognormal(draw: Random) -> float:
    """Median 2 s, one turn in a hundred longer than 20 s."""
    return 2.0 * math.exp(draw.gauss(0.0, 1.0))


def pareto(draw: Random) -> float:
    """At least 1 s, one turn in a hundred longer than 21 s; so heavy a tail that its variance is infinite uncut."""
    return min(300.0, math.pow(1.0 - draw.random(), -1.0 / 1.5))


LATENCIES: dict[str, Latency] = {"lognormal": lognormal, "pareto": pareto}


class ValueEnvironment:
    """An episode: its value, its turns so far, and the seed of what comes next."""

    name: ClassVar[str] = "values"
    branching: ClassVar[Branching] = Branching.FORK

    def __init__(self) -> None:
        self._value = 0.5
        self._turns = 0
        self._draw = Random(0)

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        self._value = float(task.data["value"])
        self._draw = Random(seed)
        return (Message("user", _word(self._value)),)

    async def step(self, action: str) -> StepResult:
        self._value += self._draw.uniform(-STEP, STEP) * min(self._value, 1.0 - self._value)
        self._turns += 1
        if self._draw.random() < END_PROBABILITY or self._turns == MAX_TURNS:
            return StepResult(messages=(), reward=float(self._draw.random() < self._value), terminated=True)
        return StepResult(messages=(Message("user", _word(self._value)),), reward=0.0, terminated=False)

    async def fork(self, *, seed: int) -> ValueEnvironment:
        copy = ValueEnvironment()
        copy._value, copy._turns, copy._draw = self._value, self._turns, Random(seed)
        return copy

    def snapshot(self) -> bytes:
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        return


class ValueRenderer:
    """One token a message: the value it tells."""

    stop_ids = (STOP_ID,)

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        return np.array([VALUE_ID + int(message.content) for message in messages], np.int32)

    def reply_ids(self, messages: Sequence[Message], *, closed: bool) -> IntArray:
        return self.opening_ids(messages)

    def text(self, action_ids: IntArray) -> str:
        return ""


class ValueScorer:
    """Predicts the value with an error: a normal one of standard deviation `noise` on the logit, fixed per prefix."""

    def __init__(self, noise: float) -> None:
        self._noise = noise

    async def score(self, prefix: Prefix) -> Score:
        value = _told(prefix.token_ids)
        error = self._noise * Random(crc32(prefix.token_ids.tobytes())).gauss(0.0, 1.0)
        logit = math.log(value) - math.log1p(-value) + error
        return Score(success=1.0 / (1.0 + math.exp(-logit)), predictor_version=0)


class SlottedEngine:
    """Plays `slots` turns at a time, first come first served. `busy_s`: seconds of turns played so far."""

    def __init__(self, slots: int, latency: Latency) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._latency = latency
        self.busy_s = 0.0

    async def generate(self, request: GenerateRequest) -> Generation:
        seconds = self._latency(Random(request.seed))
        async with self._slots:
            await asyncio.sleep(seconds)
        self.busy_s += seconds
        token_ids = np.ones(min(request.max_tokens, 1 + int(seconds * TOKENS_PER_S)), np.int32)
        token_ids[-1] = STOP_ID
        return Generation(
            token_ids=token_ids,
            logprobs=np.full(token_ids.size, -1.0, np.float32),
            version_min=0,
            version_max=0,
            kv_version_min=0,
            stop=StopReason.STOP,
            generate_s=seconds,
        )


class DepthEngine(SlottedEngine):
    """Answers all turns that a tree plays at a time together, when the slowest is done: no tree is uneven."""

    def __init__(self, slots: int, latency: Latency) -> None:
        super().__init__(slots, latency)
        self._playing: Counter[str] = Counter()
        self._done: dict[str, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> Generation:
        tree = request.request_id.rpartition("/")[0]
        done = self._done.setdefault(tree, asyncio.Event())
        self._playing[tree] += 1
        generation = await super().generate(request)
        self._playing[tree] -= 1
        if self._playing[tree] == 0:
            del self._done[tree]
            done.set()
        await done.wait()
        return generation


def value_after(turn: Turn) -> float:
    """The value of the state that a turn led to; the turn did not end its episode."""
    return _told(turn.observation_ids)


def _word(value: float) -> str:
    return str(round(min(max(value, 1e-5), 1.0 - 1e-5) * SCALE))


def _told(token_ids: IntArray) -> float:
    return (int(token_ids[-1]) - VALUE_ID) / SCALE
