"""Builds whatever of a configuration can be built in a moment, before any process starts. Never starts anything."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np

from trace_async.app.wiring import (
    build_kit,
    build_predictor,
    build_prompts,
    build_root_allocator,
    heldout_tasks,
    policy_path,
)
from trace_async.config import Config
from trace_async.core.types import IntArray
from trace_async.devices import pick_device
from trace_async.engines.vllm_common import check_options
from trace_async.errors import ConfigError
from trace_async.methods.allocators import make_allocator
from trace_async.methods.credit import credit_rule
from trace_async.methods.objective_check import check_objective
from trace_async.methods.registry import read_options
from trace_async.predictors.embedding import EmbeddingOptions
from trace_async.predictors.protocol import Belief


def check_parts(config: Config) -> None:
    """Builds whatever can be built in a moment, so that a wrong name or option shows before any process starts.

    Raises ConfigError or PolicyError.
    """
    kit = build_kit(config)
    make_allocator(config.tree.allocator, config.tree.options, np.random.default_rng(0))
    _check_round(config)
    credit_rule(config.learner.credit)
    check_objective(config)
    build_predictor(config, text_of=_no_text)
    check_cache(config)
    build_prompts(config, kit)
    heldout_tasks(config, kit)
    _check_positions(config, policy_path(config.policy.path))
    _check_engine(config)
    for key, device in (("engine.device", config.engine.device), ("learner.device", config.learner.device)):
        if device not in ("auto", "cpu"):
            pick_device(device, key=key)


def _check_round(config: Config) -> None:
    """Divides a round's roots once, among prompts of which nothing is known."""
    tree, allocator = config.tree, build_root_allocator(config)
    size = allocator.pool_size(
        config.prompts.candidates_per_round, budget=tree.roots_per_step, max_roots=tree.max_roots_per_prompt
    )
    beliefs = [Belief(1.0, 1.0)] * size
    rng = np.random.default_rng(0)
    allocator.allocate(beliefs, budget=tree.roots_per_step, max_roots=tree.max_roots_per_prompt, rng=rng)


def check_cache(config: Config) -> None:
    """The prompts of all rounds that may be out must stay encoded, or the learner encodes them while actors wait."""
    if config.predictor.kind != "embedding":
        return
    cache = read_options(EmbeddingOptions, config.predictor.options, where="predictor.options").cache
    needed = config.prompts.candidates_per_round * (config.coordinator.max_age_steps + 2)
    if cache < needed:
        raise ConfigError(
            f"predictor.options.cache is {cache}, less than the {needed} prompts that may be looked at at a time, "
            "prompts.candidates_per_round x (coordinator.max_age_steps + 2); raise it to at least that"
        )


def _check_positions(config: Config, folder: Path) -> None:
    positions = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    if isinstance(positions, int) and config.tree.max_context_tokens > positions:
        raise ConfigError(
            f"tree.max_context_tokens is {config.tree.max_context_tokens}, more than the {positions} positions of the "
            f"model in {folder}; lower it"
        )


def _check_engine(config: Config) -> None:
    if config.engine.kind == "vllm":
        check_options(config.engine.options)
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(
                "engine.kind is 'vllm', but vllm is not installed here; install it (docs/vllm.md says how), "
                "or set engine.kind = 'local'"
            )


def _no_text(token_ids: IntArray) -> str:
    raise AssertionError("a predictor that is only checked reads nothing")
