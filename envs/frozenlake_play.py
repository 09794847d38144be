"""Scripted play of FrozenLake: deliberately imperfect demonstrations from which a small policy is warm-started.

Pure: the random generator is handed in. A demonstration is a real episode of the environment, ended by its rules.
"""

from __future__ import annotations

import numpy as np

from envs.frozenlake import FrozenLakeOptions, Game
from envs.frozenlake_map import MOVES, shortest_moves
from trace_async.core.types import Task
from trace_async.environment import Demonstration


def demonstration(
    task: Task, rng: np.random.Generator, random_move_rate: float, *, options: FrozenLakeOptions | None = None
) -> Demonstration:
    """Play `task`: with probability `random_move_rate` a uniformly random move, otherwise a random one of the moves
    that begin a shortest path. On slippery ice the shortest path is walked as if there were no slipping.
    """
    ice_seed = int(rng.integers(1 << 63)) if task.data["slippery"] else 0  # firm ice draws nothing
    game = Game(task, options=options or FrozenLakeOptions(), seed=ice_seed)
    opening = game.opening()
    turns: list[tuple[str, str]] = []
    reward = 0.0
    while not game.over:
        choices = shortest_moves(game.lake, game.cell)
        if not choices or rng.random() < random_move_rate:
            choices = tuple(range(len(MOVES)))
        action = game.write(choices[int(rng.integers(len(choices)))])
        result = game.act(action)
        reward += result.reward
        turns.append((action, result.messages[0].content if result.messages else ""))
    return Demonstration(opening, turns, reward)
