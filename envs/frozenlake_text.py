"""What the policy reads and writes in FrozenLake: two phrasings of one game.

`compact` costs a tiny policy few tokens: the map once, as one word a cell, then one word a turn. `full` is for language
models: instructions, a grid, ReAct tags, and what is left. Never: rules, randomness, state.
"""

from __future__ import annotations

import re
from typing import Protocol

from envs.frozenlake_map import MOVES, Lake
from trace_async.core.types import Message

_ACTION = re.compile(r"<action>(.*?)</action>", re.IGNORECASE | re.DOTALL)
_COMPACT_KINDS = {"S": "S", "F": ".", "H": "O", "G": "G"}
_FULL_KINDS = {"S": "_", "F": "_", "H": "O", "G": "G"}

_INSTRUCTIONS = """You walk over a frozen lake, seen from above as a square grid:
P  you
_  ice, safe
O  hole: whoever falls in has lost
G  goal: reach it to win

Each turn you make one move: Left, Down, Right or Up. A move off the grid leaves you where you are. {ice}
You have {max_turns} turns; a turn whose answer cannot be read is used up as well.
First think, then give exactly one move, like this:
<think>your reasoning</think><action>Right</action>
Only the last action counts."""


class Phrasing(Protocol):
    """How a game is told and how an answer is read."""

    def opening(self, lake: Lake, *, max_turns: int, slip: float) -> tuple[Message, ...]:
        """The messages before the first turn; `slip` is the probability that a move goes astray."""
        ...

    def reply(self, lake: Lake, before: int, after: int, *, turns_left: int, readable: bool) -> str:
        """What the policy is told after a turn that does not end the game."""
        ...

    def read(self, answer: str) -> int | None:
        """The move (index into MOVES) of an answer; None when it cannot be read."""
        ...

    def write(self, move: int) -> str:
        """An answer that `read` turns back into `move`."""
        ...


def cell_word(lake: Lake, cell: int) -> str:
    """The word of a cell: row letter, column digit from 1, kind; e.g. `b2.`."""
    row, column = divmod(cell, lake.size)
    return f"{chr(ord('a') + row)}{column + 1}{_COMPACT_KINDS[lake.text[cell]]}"


class Compact:
    """Words only, separated by spaces; the agent stands on the `S` cell at first."""

    def opening(self, lake: Lake, *, max_turns: int, slip: float) -> tuple[Message, ...]:
        return (Message("user", " ".join(cell_word(lake, cell) for cell in range(len(lake.text)))),)

    def reply(self, lake: Lake, before: int, after: int, *, turns_left: int, readable: bool) -> str:
        word = cell_word(lake, after)
        return word if readable else f"? {word}"

    def read(self, answer: str) -> int | None:
        word = answer.strip().lower()
        return MOVES.index(word) if word in MOVES else None

    def write(self, move: int) -> str:
        return MOVES[move]


class Full:
    """A grid redrawn each turn, with `<think>` and `<action>` tags."""

    def opening(self, lake: Lake, *, max_turns: int, slip: float) -> tuple[Message, ...]:
        ice = f"The ice is slippery: with probability {slip:.2f} you slide to one side instead." if slip else ""
        instructions = _INSTRUCTIONS.format(ice=ice, max_turns=max_turns).replace(" \n", "\n")
        return (
            Message("system", instructions),
            Message("user", f"{_grid(lake, lake.start)}\nTurns left: {max_turns}"),
        )

    def reply(self, lake: Lake, before: int, after: int, *, turns_left: int, readable: bool) -> str:
        if not readable:
            happened = (
                "No move could be read. End your answer with one of "
                "<action>Left</action>, <action>Down</action>, <action>Right</action>, <action>Up</action>."
            )
        elif before == after:
            happened = "You did not leave your cell."
        else:
            happened = "You moved."
        return f"{happened}\n{_grid(lake, after)}\nTurns left: {turns_left}"

    def read(self, answer: str) -> int | None:
        # A move that is only weighed inside the thoughts is not an answer.
        found = _ACTION.findall(answer.rpartition("</think>")[2])
        word = found[-1].strip().lower() if found else ""
        return MOVES.index(word) if word in MOVES else None

    def write(self, move: int) -> str:
        return f"<think>Go {MOVES[move]}.</think><action>{MOVES[move].capitalize()}</action>"


def _grid(lake: Lake, standing_on: int) -> str:
    cells = ["P" if cell == standing_on else _FULL_KINDS[kind] for cell, kind in enumerate(lake.text)]
    return "\n".join(" ".join(cells[i : i + lake.size]) for i in range(0, len(cells), lake.size))


PHRASINGS: dict[str, Phrasing] = {"compact": Compact(), "full": Full()}


def compact_words() -> list[str]:
    """Every word of the compact phrasing, in a fixed order: the vocabulary of a tiny policy."""
    cells = [f"{chr(ord('a') + row)}{column + 1}{kind}" for row in range(9) for column in range(9) for kind in ".OSG"]
    return ["?", *MOVES, *cells]
