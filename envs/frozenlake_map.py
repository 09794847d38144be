"""FrozenLake as pure arithmetic: maps, where moves lead, shortest paths, and the split of maps into train and held-out.

Owns the rules. Cells are numbered row by row from 0, as gymnasium's FrozenLake-v1 numbers its states, and a map is
its rows of `S` start, `F` frozen, `H` hole, `G` goal. Invariants: every map found here has one start, one goal and a
path between them that fits the turn limit; which split a map belongs to depends on the map alone, so no two seeds can
put one map on both sides. Never: text for the policy, rewards, asyncio.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from trace_async.errors import ConfigError

MOVES = ("left", "down", "right", "up")
"""Move words in the order of gymnasium's action numbers."""

SPLITS = ("train", "heldout")
HELDOUT_ONE_IN = 8
"""One map in this many is held out."""

_STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # (row, column) of each of MOVES


@dataclass(frozen=True, slots=True)
class Lake:
    """One map. `text` is its size*size cells, row by row; build with `Lake.parse` unless it is known to be sound."""

    size: int
    text: str

    @classmethod
    def parse(cls, rows: Sequence[str]) -> Lake:
        """Checked construction from rows such as ("SF", "FG"); ValueError says what is wrong."""
        size = len(rows)
        text = "".join(rows)
        if size < 2 or any(len(row) != size for row in rows):
            raise ValueError(f"a FrozenLake map must be square with at least 2 rows, got {list(rows)}")
        if unknown := set(text) - set("SFHG"):
            raise ValueError(f"a FrozenLake map is made of S, F, H and G, got {sorted(unknown)} in {list(rows)}")
        if text.count("S") != 1 or text.count("G") != 1:
            raise ValueError(f"a FrozenLake map needs exactly one S and one G, got {list(rows)}")
        return cls(size, text)

    @property
    def rows(self) -> tuple[str, ...]:
        return tuple(self.text[i : i + self.size] for i in range(0, len(self.text), self.size))

    @property
    def start(self) -> int:
        return self.text.index("S")

    @property
    def goal(self) -> int:
        return self.text.index("G")


@lru_cache(maxsize=16)
def _neighbours(size: int) -> tuple[tuple[int, ...], ...]:
    """[size*size][4] cell reached by each move; a move off the map stays."""

    def reached(cell: int, row_step: int, column_step: int) -> int:
        row, column = divmod(cell, size)
        row = min(max(row + row_step, 0), size - 1)
        column = min(max(column + column_step, 0), size - 1)
        return row * size + column

    return tuple(tuple(reached(cell, *step) for step in _STEPS) for cell in range(size * size))


def neighbour(lake: Lake, cell: int, move: int) -> int:
    """The cell that `move` (index into MOVES) leads to when the foot does not slip."""
    return _neighbours(lake.size)[cell][move]


def transitions(
    lake: Lake, cell: int, move: int, *, slippery: bool, success_rate: float
) -> tuple[tuple[float, int], ...]:
    """(probability, cell reached) of one move, in the order of gymnasium 1.4.0 FrozenLake-v1.

    On slippery ice the intended move happens with `success_rate`; each of the two perpendicular moves with half of
    the rest. Holes and the goal are never left.
    """
    if lake.text[cell] in "HG":
        return ((1.0, cell),)
    if not slippery:
        return ((1.0, neighbour(lake, cell, move)),)
    slip = (1.0 - success_rate) / 2.0
    return tuple(
        (success_rate if turn == 0 else slip, neighbour(lake, cell, (move + turn) % len(MOVES))) for turn in (-1, 0, 1)
    )


def draw_transition(possible: Sequence[tuple[float, int]], rng: np.random.Generator) -> int:
    """One cell drawn from `transitions`; a certain move takes nothing from `rng`, any other one uniform number.

    The first cell whose cumulative probability exceeds the uniform number, as gymnasium's categorical_sample draws.
    """
    if len(possible) == 1:
        return possible[0][1]
    uniform = rng.random()
    cumulative = 0.0
    for probability, cell in possible:
        cumulative += probability
        if cumulative > uniform:
            return cell
    return possible[0][1]  # rounding left the sum below the uniform number; gymnasium's argmax answers 0 as well


@lru_cache(maxsize=4096)
def distances(lake: Lake) -> tuple[int, ...]:
    """[size*size] moves from each cell to the goal without slipping; -1 from holes and from where no path leads."""
    near = _neighbours(lake.size)
    found = [-1] * len(lake.text)
    found[lake.goal] = 0
    queue = deque([lake.goal])
    while queue:
        cell = queue.popleft()
        for other in near[cell]:  # moves are symmetric, so a search from the goal measures the way to it
            if found[other] < 0 and lake.text[other] != "H":
                found[other] = found[cell] + 1
                queue.append(other)
    return tuple(found)


def shortest_moves(lake: Lake, cell: int) -> tuple[int, ...]:
    """Moves (indices into MOVES) that begin a shortest path from `cell`; none where no path leads or at the goal."""
    ways = distances(lake)
    if ways[cell] <= 0:
        return ()
    nearer = ways[cell] - 1
    return tuple(move for move, other in enumerate(_neighbours(lake.size)[cell]) if ways[other] == nearer)


def split_of(lake: Lake) -> str:
    """The split that owns this map, by a hash of the map itself. Rotated maps count as different maps."""
    digest = hashlib.sha256("/".join(lake.rows).encode()).digest()
    return "heldout" if int.from_bytes(digest[:8], "big") % HELDOUT_ONE_IN == 0 else "train"


def draw_lake(rng: np.random.Generator, *, size: int, frozen: float) -> Lake:
    """A candidate map: each cell frozen with probability `frozen`, start and goal on two different random cells.

    May have no path; callers reject.
    """
    cells = np.where(rng.random(size * size) < frozen, ord("F"), ord("H")).astype(np.uint8)
    start = int(rng.integers(size * size))
    goal = int(rng.integers(size * size - 1))
    goal += goal >= start
    cells[start] = ord("S")
    cells[goal] = ord("G")
    return Lake(size, cells.tobytes().decode("ascii"))


def find_lake(
    rng: np.random.Generator,
    *,
    split: str,
    size: int,
    frozen: float,
    max_moves: int,
    min_moves: int = 1,
    max_candidates: int = 10_000,
) -> Lake:
    """The first candidate from `rng` that `split` owns and whose goal is `min_moves` to `max_moves` away.

    Both splits own maps of every size whatever the frozen share when `min_moves` is 1, because a goal beside the start
    needs no ice; with far goals and little ice there may be none. ConfigError after `max_candidates`: wrong
    arguments, not bad luck.
    """
    for _ in range(max_candidates):
        lake = draw_lake(rng, size=size, frozen=frozen)
        # The hash is far cheaper than the search and refuses most candidates of the small split.
        if split_of(lake) == split and min_moves <= distances(lake)[lake.start] <= max_moves:
            return lake
    raise ConfigError(
        f"no {split} map of size {size}, frozen share {frozen:.2f} and {min_moves} to {max_moves} moves "
        f"among {max_candidates} candidates; far goals need ice to walk on: raise min_frozen or lower "
        "min_moves_per_size"
    )
