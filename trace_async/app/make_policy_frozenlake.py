"""How the small FrozenLake policy that ships with the package is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from envs.frozenlake import FrozenLakeOptions, FrozenLakeTasks
from envs.frozenlake_play import demonstration
from envs.frozenlake_text import compact_words
from trace_async.policies.tiny import tiny_tokenizer
from trace_async.policies.warm_start import Conversation, WarmStartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenLakeRecipe:
    """Play on small maps; `random_moves` of the moves are random."""

    by_length: ClassVar[bool] = False

    seed: int = 0
    sizes: tuple[int, ...] = (3, 4, 5)
    random_moves: float = 0.65
    hidden_size: int = 128
    num_layers: int = 4
    threads: int = 2
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)

    @property
    def num_steps(self) -> int:
        return self.warm_start.steps

    def shortened(self, steps: int) -> FrozenLakeRecipe:
        return replace(self, warm_start=replace(self.warm_start, steps=min(steps, self.warm_start.steps)))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The words of the compact phrasing."""
        return tiny_tokenizer(compact_words())

    def phases(self) -> Iterator[tuple[WarmStartConfig, Iterator[Conversation]]]:
        """One, with one map after the other."""
        yield self.warm_start, self._conversations()

    def _conversations(self) -> Iterator[Conversation]:
        options = FrozenLakeOptions(sizes=self.sizes)
        tasks = FrozenLakeTasks(options)
        rng = np.random.default_rng(self.seed)
        index = 0
        while True:
            played = demonstration(tasks.task("train", index), rng, self.random_moves, options=options)
            yield Conversation(played.opening, played.turns)
            index += 1
