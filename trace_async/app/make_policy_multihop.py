"""How the small policy for generated worlds that ships with the package is made.

It is warmed on worlds of name families that configs/multihop_tiny.toml does not use, so that it has never met a name
of the worlds it is trained and judged on. Worlds change with the code that makes them, and the policy with the worlds:
the one that ships was made before the last changes to them. Half an hour on one core.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from transformers import PreTrainedTokenizerFast

from envs.multihop_qa.world import PUNCTUATION, SYLLABLES, vocabulary
from envs.registry import load_environment
from trace_async.core.types import Message
from trace_async.environment import EnvironmentKit
from trace_async.policies.tiny import subword_tokenizer
from trace_async.policies.warm_start import Conversation, WarmStartConfig

_ACTIONS = ("search", "answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What is said again or played during one schedule of the warm start."""

    drills_first: int = 0  # drills before anything else
    drill_share: float = 0.0  # of all that comes then; the rest is play
    mistakes: float  # of the play, rate per turn
    warm_start: WarmStartConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MultihopRecipe:
    """Play on generated worlds, with mistakes, and drills: made-up names, to be said again.

    Drills teach to copy, which play alone does not do in reasonable time. Worlds take turns, question by question.
    """

    by_length: ClassVar[bool] = True

    seed: int = 0
    families: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)  # of names
    worlds_per_family: int = 4  # so many that none can be learned by heart instead of learning to read
    pages: int = 600  # of a world
    questions: int = 1200
    hops: tuple[int, ...] = (1, 2, 3, 4)
    max_turns: int = 6
    drill_names: int = 5  # words of a drill, to twice as many
    hidden_size: int = 128
    num_layers: int = 4
    threads: int = 1
    plan: tuple[Phase, ...] = (
        Phase(
            drills_first=12_800,
            mistakes=0.45,
            warm_start=WarmStartConfig(steps=2400, conversations_per_step=32, learning_rate=3e-3, warmup_steps=100),
        ),
        Phase(
            drill_share=0.5,
            mistakes=0.2,
            warm_start=WarmStartConfig(steps=2000, conversations_per_step=32, learning_rate=2e-3, warmup_steps=50),
        ),
    )

    @property
    def num_steps(self) -> int:
        return sum(phase.warm_start.steps for phase in self.plan)

    def shortened(self, steps: int) -> MultihopRecipe:
        plan = [
            replace(phase, warm_start=replace(phase.warm_start, steps=min(steps, phase.warm_start.steps)))
            for phase in self.plan
        ]
        return replace(self, plan=tuple(plan))

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Every word of pages and questions; names are spelled in syllables."""
        return subword_tokenizer((*vocabulary(), *_ACTIONS), SYLLABLES, punctuation="".join(PUNCTUATION))

    def phases(self) -> Iterator[tuple[WarmStartConfig, Iterator[Conversation]]]:
        """Each phase with drills and play without end."""
        kits = [
            load_environment("multihop_qa", self.options(family, seed=1 + number))
            for number in range(self.worlds_per_family)
            for family in self.families
        ]
        for number, phase in enumerate(self.plan):
            rng = np.random.default_rng(self.seed if number == 0 else (self.seed, number))
            yield phase.warm_start, self._conversations(phase, kits, rng)

    def _conversations(
        self, phase: Phase, kits: Sequence[EnvironmentKit], rng: np.random.Generator
    ) -> Iterator[Conversation]:
        for _ in range(phase.drills_first):
            yield self._drill(rng)
        with asyncio.Runner() as runner:
            index = 0
            while True:
                for kit in kits:
                    while phase.drill_share and rng.random() < phase.drill_share:
                        yield self._drill(rng)
                    yield runner.run(self._play(kit, index, rng, phase.mistakes))
                index += 1

    def options(self, family: int, *, seed: int) -> dict[str, Any]:
        """Of the environment: as in configs/multihop_tiny.toml, with another world."""
        world = {
            "seed": seed,
            "name_family": family,
            "pages": self.pages,
            "questions": self.questions,
            "kinds": ["chain"],
            "hops": list(self.hops),
            "facts_per_page": 2,
            "filler_sentences": 0,
            "paraphrase": 0.0,
            "style": "card",
        }
        return {
            "world": world,
            "tags": {"style": "words"},
            "top_k": 1,
            "max_turns": self.max_turns,
            "unreadable_ends": True,
        }

    def _drill(self, rng: np.random.Generator) -> Conversation:
        lengths = rng.integers(2, 4, size=2 * self.drill_names)  # of words, in syllables
        words = ["".join(rng.choice(SYLLABLES, size=length)) for length in lengths]
        names = " ".join(words[: int(rng.integers(self.drill_names, 2 * self.drill_names + 1))])
        return Conversation((Message("user", names),), [(names, "")])

    async def _play(self, kit: EnvironmentKit, index: int, rng: np.random.Generator, mistakes: float) -> Conversation:
        assert kit.demonstrate is not None
        number = kit.tasks.size("train")
        assert number is not None
        played = await kit.demonstrate(kit.tasks.task("train", index % number), rng, mistakes)
        return Conversation(played.opening, played.turns)
