"""Multi-hop question answering behind the Environment protocol: the game, with a library to search.

Never: rules, texts.
"""

from __future__ import annotations

import json
from typing import ClassVar

from envs.multihop_qa.game import Game, Rules, Wanted
from envs.multihop_qa.library import Library
from trace_async.core.types import Message, Task
from trace_async.environment import Branching, StepResult

COLLECTION = "collection"
"""Key of a task's data: the name of the collection that is searched."""


class MultihopQA:
    """One episode. Deterministic: seeds change nothing."""

    name: ClassVar[str] = "multihop_qa"
    branching: ClassVar[Branching] = Branching.STATELESS

    def __init__(self, rules: Rules, library: Library, *, top_k: int) -> None:
        self._rules = rules
        self._library = library
        self._top_k = top_k
        self._game: Game | None = None

    @property
    def game(self) -> Game:
        """RuntimeError before the first reset."""
        if self._game is None:
            raise RuntimeError("multihop_qa has no episode: call reset or restore first")
        return self._game

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        """Start the task; ValueError or KeyError when its data is no question."""
        self._game = Game(task, self._rules)
        return self._game.opening()

    async def step(self, action: str) -> StepResult:
        """Play one turn. A search that fails raises EnvironmentFailure and leaves the episode as it was."""
        after = self.game.fork()
        result = after.act(action)
        if isinstance(result, Wanted):
            result = after.show(await self._library.search(after.data[COLLECTION], result.query, self._top_k))
        self._game = after
        return result

    async def fork(self, *, seed: int) -> MultihopQA:
        child = MultihopQA(self._rules, self._library, top_k=self._top_k)
        child._game = self.game.fork()
        return child

    def snapshot(self) -> bytes:
        return json.dumps(self.game.state()).encode()

    def restore(self, state: bytes) -> None:
        self._game = Game.resume(json.loads(state), self._rules)

    async def close(self) -> None:
        """The library is shared: the kit closes it."""
        self._game = None
