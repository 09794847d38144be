"""`trace-async make-policy`: the small policies that ship with the package, remade from nothing.

Deterministic for a seed on one kind of machine with one number of threads. The warm start imitates scripted play that
is imperfect on purpose, so reinforcement learning has something to learn. What is played, and in which words, is the
recipe's own: `make_policy_frozenlake`, `make_policy_multihop`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerFast

from trace_async.app.make_policy_frozenlake import FrozenLakeRecipe
from trace_async.app.make_policy_multihop import MultihopRecipe
from trace_async.policies.tiny import save_policy, tiny_model
from trace_async.policies.warm_start import Conversation, WarmStartConfig, encode, warm_start
from trace_async.policies.warm_start_packing import Encoded
from trace_async.publication.manifest import file_digest
from trace_async.rendering import Renderer

_SORTED_STEPS = 32
"""So many steps' conversations are sorted by length before they are made into batches, so that little is padding."""


class Recipe(Protocol):
    """Everything a policy depends on, besides the machine: a frozen dataclass."""

    @property
    def seed(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def by_length(self) -> bool:
        """Batches are of conversations of like length."""
        ...

    @property
    def num_steps(self) -> int:
        """Of all phases."""
        ...

    def shortened(self, steps: int) -> Recipe:
        """The same with so many steps a phase, or as many as it has."""
        ...

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """All words of the play."""
        ...

    def phases(self) -> Iterator[tuple[WarmStartConfig, Iterator[Conversation]]]:
        """Schedules, one after the other, each with scripted play without end."""
        ...


RECIPES: Mapping[str, Callable[..., Recipe]] = {"frozenlake-tiny": FrozenLakeRecipe, "multihop-tiny": MultihopRecipe}
"""By the name under which the policy ships."""


def make_policy(directory: Path, recipe: Recipe, *, on_step: Callable[[int, float], None]) -> str:
    """Build, warm-start and save the policy; returns the sha256 of its weights. Writes the recipe beside them."""
    torch.set_num_threads(recipe.threads)
    tokenizer = recipe.tokenizer()
    renderer = Renderer(tokenizer)
    renderer.probe()
    model = tiny_model(tokenizer, seed=recipe.seed, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers)

    def answer_ids(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    for config, conversations in recipe.phases():
        encoded: Iterator[Encoded] = (encode(one, renderer=renderer, answer_ids=answer_ids) for one in conversations)
        if recipe.by_length:
            encoded = sorted_by_length(encoded, batch=config.conversations_per_step, seed=recipe.seed)
        warm_start(model, encoded, pad_id=renderer.pad_id, config=config, on_step=on_step)
    save_policy(model, tokenizer, directory)
    digest = file_digest(directory / "model.safetensors")
    told = {**asdict(recipe), "sha256": digest}  # type: ignore[call-overload]
    (directory / "recipe.json").write_text(json.dumps(told, indent=2) + "\n")
    return digest


def sorted_by_length(conversations: Iterator[Encoded], *, batch: int, seed: int) -> Iterator[Encoded]:
    """The same conversations in an order in which every `batch` of them are of like length; batches in random order."""
    generator = torch.Generator().manual_seed(seed)
    while some := sorted(islice(conversations, _SORTED_STEPS * batch), key=lambda one: len(one.ids)):
        for place in torch.randperm(math.ceil(len(some) / batch), generator=generator).tolist():
            yield from some[place * batch : (place + 1) * batch]
