"""Demonstrations as tokens to imitate: plays them, encodes them, leaves out what rollouts could not have sampled.

Invariants: what is played depends on the environment, the seed and the place in the order of play, not on timing.
Importable without torch. Never: a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from trace_async.app import wiring
from trace_async.config import Config
from trace_async.environment import Demonstrate, Demonstration, EnvironmentKit
from trace_async.errors import ConfigError
from trace_async.prompts import PromptStream
from trace_async.rendering import Renderer, load_renderer

if TYPE_CHECKING:
    from trace_async.policies.warm_start_packing import Encoded

_MAX_SKIPPED = 200
"""In a row: then the limits leave nothing to learn from."""

_DOMAIN = 0x7761726D
"""Keeps these generators apart from others that start from the same seed."""


@dataclass(slots=True)
class Played:
    """What was played for the training so far."""

    demonstrations: int = 0  # trained on
    tokens: int = 0  # in those
    said_tokens: int = 0  # of these the assistant's, with loss
    reward: float = 0.0  # summed over those
    over_context: int = 0  # left out: longer than tree.max_context_tokens
    over_turn: int = 0  # left out: a turn longer than engine.max_turn_tokens
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)  # of all tokens trained on, in order

    def add(self, encoded: Encoded, reward: float) -> None:
        """One more to train on."""
        self.demonstrations += 1
        self.tokens += len(encoded.ids)
        self.said_tokens += sum(encoded.said)
        self.reward += reward
        self.digest.update(np.array([len(encoded.ids), *encoded.ids, *encoded.said], np.int64).tobytes())

    def told(self) -> dict[str, object]:
        """As JSON."""
        return {
            "demonstrations": self.demonstrations,
            "tokens": self.tokens,
            "said_tokens": self.said_tokens,
            "mean_reward": self.reward / max(1, self.demonstrations),
            "skipped_over_max_context_tokens": self.over_context,
            "skipped_over_max_turn_tokens": self.over_turn,
            "sha256": self.digest.hexdigest(),
        }


class Encoder(NamedTuple):
    """Conversations to tokens as rollouts make them."""

    renderer: Renderer
    answer_ids: Callable[[str], list[int]]

    def encode(self, demonstration: Demonstration) -> Encoded:
        """Its tokens, and which of them the assistant said."""
        from trace_async.policies.warm_start import Conversation, encode  # here, because it imports torch

        conversation = Conversation(demonstration.opening, demonstration.turns)
        return encode(conversation, renderer=self.renderer, answer_ids=self.answer_ids)


class Script:
    """Endless batches of demonstrations that the limits allow."""

    def __init__(
        self,
        kit: EnvironmentKit,
        encoder: Encoder,
        config: Config,
        *,
        batch: int,
        mistakes: float,
        seed: int,
    ) -> None:
        """`batch` demonstrations a batch. Raises ConfigError for an environment without a script."""
        self._demonstrate = _script_of(kit, config.environment.name)
        self.played = Played()
        self._encoder = encoder
        self._config = config
        self._batch, self._mistakes, self._seed = batch, mistakes, seed
        self._prompts = PromptStream(kit.tasks, num_train=config.prompts.num_train, seed=seed)
        self._place = 0  # of the next demonstration among all, skipped ones included: its randomness

    async def batch(self) -> list[Encoded]:
        """The next batch. Raises ConfigError when the limits leave out one demonstration after the other."""
        batch: list[Encoded] = []
        skipped = 0
        while len(batch) < self._batch:
            encoded = self._encoder.encode(demonstration := await self._play_next())
            if self._fits(encoded):
                self.played.add(encoded, demonstration.reward)
                batch.append(encoded)
                skipped = 0
            elif (skipped := skipped + 1) >= _MAX_SKIPPED:
                raise ConfigError(
                    f"{_MAX_SKIPPED} demonstrations one after the other are longer than tree.max_context_tokens = "
                    f"{self._config.tree.max_context_tokens} or have a turn longer than engine.max_turn_tokens = "
                    f"{self._config.engine.max_turn_tokens} (the last has {len(encoded.ids)} tokens, its longest turn "
                    f"{encoded.longest_said}); raise them, or let the environment show less"
                )
        return batch

    async def _play_next(self) -> Demonstration:
        rng = np.random.default_rng((_DOMAIN, self._seed, self._place))
        self._place += 1
        (candidate,) = self._prompts.take(1)
        return await self._demonstrate(candidate.task, rng, self._mistakes)

    def _fits(self, encoded: Encoded) -> bool:
        if encoded.longest_said > self._config.engine.max_turn_tokens:
            self.played.over_turn += 1
        elif len(encoded.ids) > self._config.tree.max_context_tokens:
            self.played.over_context += 1
        else:
            return True
        return False


def _script_of(kit: EnvironmentKit, name: str) -> Demonstrate:
    if kit.demonstrate is None:
        raise ConfigError(
            f"environment.name: {name!r} has no script to imitate (its kit has no `demonstrate`): warm-start on "
            "another environment, or give its kit a function that plays a task"
        )
    return kit.demonstrate


def load_encoder(path: Path) -> Encoder:
    """By the tokenizer and template of a policy. Raises PolicyError and TemplateError as `load_renderer`."""
    from transformers import AutoTokenizer

    wiring.hide_progress_bars()
    renderer, tokenizer = load_renderer(path), AutoTokenizer.from_pretrained(str(path), local_files_only=True)

    def answer_ids(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return Encoder(renderer, answer_ids)
