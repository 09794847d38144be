"""`trace-async make-policy`: the small FrozenLake policy that ships with the package, remade from nothing.

Deterministic for a seed on one kind of machine with one number of threads. The warm start imitates scripted play that
is imperfect on purpose (`random_moves` of the moves are random), so reinforcement learning has something to learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import torch

from envs.frozenlake import FrozenLakeOptions, FrozenLakeTasks
from envs.frozenlake_play import demonstration
from envs.frozenlake_text import compact_words
from trace_async.policies.tiny import save_policy, tiny_model, tiny_tokenizer
from trace_async.policies.warm_start import Conversation, WarmStartConfig, encode, warm_start
from trace_async.publication.manifest import file_digest
from trace_async.rendering import Renderer


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything the result depends on, besides the machine."""

    seed: int = 0
    sizes: tuple[int, ...] = (3, 4, 5)
    random_moves: float = 0.65
    hidden_size: int = 128
    num_layers: int = 4
    threads: int = 2
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)


def make_policy(directory: Path, recipe: Recipe, *, on_step: Callable[[int, float], None]) -> str:
    """Build, warm-start and save the policy; returns the sha256 of its weights. Writes the recipe beside them."""
    torch.set_num_threads(recipe.threads)
    tokenizer = tiny_tokenizer(compact_words())
    renderer = Renderer(tokenizer)
    renderer.probe()
    model = tiny_model(tokenizer, seed=recipe.seed, hidden_size=recipe.hidden_size, num_layers=recipe.num_layers)

    def answer_ids(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    encoded = (encode(c, renderer=renderer, answer_ids=answer_ids) for c in _scripted_play(recipe))
    warm_start(model, encoded, pad_id=renderer.pad_id, config=recipe.warm_start, on_step=on_step)
    save_policy(model, tokenizer, directory)
    digest = file_digest(directory / "model.safetensors")
    (directory / "recipe.json").write_text(json.dumps({**asdict(recipe), "sha256": digest}, indent=2) + "\n")
    return digest


def _scripted_play(recipe: Recipe) -> Iterator[Conversation]:
    options = FrozenLakeOptions(sizes=recipe.sizes)
    tasks = FrozenLakeTasks(options)
    rng = np.random.default_rng(recipe.seed)
    index = 0
    while True:
        played = demonstration(tasks.task("train", index), rng, recipe.random_moves, options=options)
        yield Conversation(played.opening, played.turns)
        index += 1
