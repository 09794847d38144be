"""FrozenLake as an environment: options, tasks, the game, and its asyncio face.

Rules as gymnasium's FrozenLake-v1 with reward 1 at the goal and 0 elsewhere; maps as in rLLM's FrozenLake (size drawn
from `sizes`, frozen share uniform in [min_frozen, max_frozen], random start and goal), kept only when the shortest path
fits the turn limit. Invariants: a task depends on (options, split, index) alone; equal reset or fork seeds and equal
actions give equal replies; an unreadable action costs a turn, or the game, and is never an error. What the policy reads
and writes is in `frozenlake_text`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from envs.frozenlake_map import SPLITS, Lake, distances, draw_transition, find_lake, transitions
from envs.frozenlake_text import PHRASINGS
from envs.options import read_options
from trace_async.core.types import Message, Task
from trace_async.environment import Branching, Demonstration, EnvironmentKit, StepResult
from trace_async.errors import ConfigError

_SHARES = 5
"""Frozen shares that are tried for one task; only far goals on little ice need a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLakeOptions:
    """What `[environment.options]` may say; ConfigError when a value is out of range."""

    sizes: tuple[int, ...] = (4,)  # side lengths, each equally likely
    min_frozen: float = 0.6  # share of frozen cells, drawn uniformly per task
    max_frozen: float = 0.85
    slippery: bool = False
    success_rate: float = 1.0 / 3.0  # slippery only: probability that the move goes where it was meant to
    style: str = "compact"  # "compact" for tiny policies, "full" for language models
    max_turns_per_size: int = 2  # turn limit = this times the side length
    min_moves_per_size: float = 0.0  # the goal is at least this times the side length away
    unreadable_ends: bool = False  # an answer that cannot be read ends the game, instead of costing a turn
    map_seed: int = 0

    def __post_init__(self) -> None:
        if not self.sizes or not all(2 <= size <= 9 for size in self.sizes):
            raise ConfigError(f"environment.options.sizes: need sizes within 2..9, got {list(self.sizes)}")
        if not 0.0 <= self.min_frozen <= self.max_frozen <= 1.0:
            raise ConfigError(
                "environment.options: need 0 <= min_frozen <= max_frozen <= 1, "
                f"got min_frozen={self.min_frozen}, max_frozen={self.max_frozen}"
            )
        if not 0.0 < self.success_rate <= 1.0:
            raise ConfigError(f"environment.options.success_rate: need 0 < rate <= 1, got {self.success_rate}")
        if self.style not in PHRASINGS:
            raise ConfigError(f"environment.options.style: need one of {', '.join(PHRASINGS)}, got {self.style!r}")
        if self.max_turns_per_size < 1:
            raise ConfigError(f"environment.options.max_turns_per_size: need >= 1, got {self.max_turns_per_size}")
        if not 0.0 <= self.min_moves_per_size <= self.max_turns_per_size:
            raise ConfigError(
                "environment.options.min_moves_per_size: need 0 <= it <= max_turns_per_size = "
                f"{self.max_turns_per_size}, got {self.min_moves_per_size}"
            )
        if self.map_seed < 0:
            raise ConfigError(f"environment.options.map_seed: need >= 0, got {self.map_seed}")

    def max_turns(self, size: int) -> int:
        """Turn limit on a map with this side length."""
        return self.max_turns_per_size * size

    def min_moves(self, size: int) -> int:
        """Length of the shortest path that a map with this side length must have."""
        return max(1, math.ceil(self.min_moves_per_size * size))


class FrozenLakeTasks:
    """Endless tasks of both splits.

    Task `index` walks the candidates of its own generator, seeded by (map_seed, index), and takes the first solvable
    map that its split owns. Different indices may meet in one map (small lakes are few); different splits never do.
    """

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options

    def size(self, split: str) -> int | None:
        _check_split(split)
        return None

    def task(self, split: str, index: int) -> Task:
        """Data: {"map": rows, "slippery": bool, "shortest": moves of a shortest path without slipping}."""
        _check_split(split)
        if index < 0:
            raise IndexError(f"task index must be >= 0, got {index}")
        options = self._options
        rng = np.random.default_rng((options.map_seed, index))
        size = options.sizes[int(rng.integers(len(options.sizes)))]
        lake = self._draw(rng, split=split, size=size)
        shortest = distances(lake)[lake.start]
        data = {"map": list(lake.rows), "slippery": options.slippery, "shortest": shortest}
        return Task(f"frozenlake/{split}/{index}", data)

    def _draw(self, rng: np.random.Generator, *, split: str, size: int) -> Lake:
        """A frozen share and a map with it; another share where no goal is so far. ConfigError when none has one."""
        options = self._options
        near, far = options.min_moves(size), options.max_turns(size)

        def draw() -> Lake:
            frozen = float(rng.uniform(options.min_frozen, options.max_frozen))
            return find_lake(rng, split=split, size=size, frozen=frozen, min_moves=near, max_moves=far)

        further = _SHARES - 1 if options.min_frozen < options.max_frozen else 0
        for _ in range(further):
            with suppress(ConfigError):
                return draw()
        return draw()


class Game:
    """One episode without asyncio: where the agent stands, turns used, and the ice's own randomness."""

    __slots__ = ("_options", "_phrasing", "_rng", "_seed", "cell", "lake", "over", "slippery", "turns")

    def __init__(self, task: Task, *, options: FrozenLakeOptions, seed: int) -> None:
        self._options = options
        self._phrasing = PHRASINGS[options.style]
        self.lake = Lake.parse(task.data["map"])
        self.slippery = bool(task.data["slippery"])
        self._seed = seed
        self._rng: np.random.Generator | None = None
        self.cell = self.lake.start
        self.turns = 0
        self.over = False

    @property
    def rng(self) -> np.random.Generator:
        """Made at first use: firm ice never draws, and seeding costs more than the rest of a turn."""
        if self._rng is None:
            self._rng = np.random.default_rng(self._seed)
        return self._rng

    @property
    def max_turns(self) -> int:
        return self._options.max_turns(self.lake.size)

    def opening(self) -> tuple[Message, ...]:
        slip = 1.0 - self._options.success_rate if self.slippery else 0.0
        return self._phrasing.opening(self.lake, max_turns=self.max_turns, slip=slip)

    def act(self, answer: str) -> StepResult:
        """One turn. RuntimeError when the episode is over."""
        if self.over:
            raise RuntimeError(f"FrozenLake episode is over after {self.turns} turns on map {self.lake.rows}: reset it")
        move = self._phrasing.read(answer)
        before = self.cell
        if move is not None:
            possible = self._possible(move)
            self.cell = draw_transition(possible, self.rng) if len(possible) > 1 else possible[0][1]
        self.turns += 1
        kind = self.lake.text[self.cell]
        terminated = kind in "HG" or (move is None and self._options.unreadable_ends)
        truncated = not terminated and self.turns >= self.max_turns
        self.over = terminated or truncated
        return StepResult(
            messages=() if self.over else (Message("user", self._reply(before, readable=move is not None)),),
            reward=1.0 if kind == "G" else 0.0,
            terminated=terminated,
            truncated=truncated,
            valid=move is not None,
        )

    def write(self, move: int) -> str:
        """The answer text of a move."""
        return self._phrasing.write(move)

    def fork(self, seed: int) -> Game:
        """An independent game in the same state on ice of its own; every other part is immutable and may be shared."""
        child = object.__new__(Game)
        child._options, child._phrasing, child._seed, child._rng = self._options, self._phrasing, seed, None
        child.lake, child.slippery, child.cell = self.lake, self.slippery, self.cell
        child.turns, child.over = self.turns, self.over
        return child

    def state(self) -> dict[str, Any]:
        """Everything but the options, as JSON."""
        return {
            "map": list(self.lake.rows),
            "slippery": self.slippery,
            "cell": self.cell,
            "turns": self.turns,
            "over": self.over,
            "rng": self.rng.bit_generator.state,
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any], *, options: FrozenLakeOptions) -> Game:
        """The game that `state` described; ValueError or KeyError when it is not such a state."""
        game = cls(Task("resumed", state), options=options, seed=0)
        game.rng.bit_generator.state = state["rng"]
        if not 0 <= int(state["cell"]) < len(game.lake.text):
            raise ValueError(f"cell {state['cell']} is outside map {game.lake.rows}")
        game.cell, game.turns, game.over = int(state["cell"]), int(state["turns"]), bool(state["over"])
        return game

    def _possible(self, move: int) -> tuple[tuple[float, int], ...]:
        rate = self._options.success_rate
        return transitions(self.lake, self.cell, move, slippery=self.slippery, success_rate=rate)

    def _reply(self, before: int, *, readable: bool) -> str:
        turns_left = self.max_turns - self.turns
        return self._phrasing.reply(self.lake, before, self.cell, turns_left=turns_left, readable=readable)


class FrozenLake:
    """One episode behind the Environment protocol."""

    name: ClassVar[str] = "frozenlake"
    branching: ClassVar[Branching] = Branching.FORK

    def __init__(self, options: FrozenLakeOptions) -> None:
        self._options = options
        self._game: Game | None = None

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        """Start the task; ValueError or KeyError when its data is no lake."""
        self._game = Game(task, options=self._options, seed=seed)
        return self._game.opening()

    async def step(self, action: str) -> StepResult:
        return self._started().act(action)

    async def fork(self, *, seed: int) -> FrozenLake:
        child = FrozenLake(self._options)
        child._game = self._started().fork(seed)
        return child

    def snapshot(self) -> bytes:
        return json.dumps(self._started().state()).encode()

    def restore(self, state: bytes) -> None:
        self._game = Game.resume(json.loads(state), options=self._options)

    async def close(self) -> None:
        self._game = None

    def _started(self) -> Game:
        if self._game is None:
            raise RuntimeError("FrozenLake has no episode: call reset or restore first")
        return self._game


def make_frozenlake(options: Mapping[str, Any]) -> EnvironmentKit:
    """The kit for `environment.name = "frozenlake"`."""
    from envs.frozenlake_play import demonstration  # here, because it plays this module's games

    read = read_options(FrozenLakeOptions, options, owner="frozenlake")

    async def demonstrate(task: Task, rng: np.random.Generator, mistake_rate: float) -> Demonstration:
        return demonstration(task, rng, mistake_rate, options=read)

    return EnvironmentKit(
        make_environment=lambda: FrozenLake(read),
        tasks=FrozenLakeTasks(read),
        opening=lambda task: Game(task, options=read, seed=0).opening(),
        demonstrate=demonstrate,
    )


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ConfigError(f"unknown split {split!r}: frozenlake has {', '.join(SPLITS)}")
