"""What a plan starts from: what the caller said, the policy's sizes, the settings' check, an average rollout.

Checks what `train` checks before it starts anything. What only another machine has is collected as sentences instead
of raised. Importable without torch. Never: asks a hub, starts or writes anything.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trace_async.app import checks
from trace_async.app.plan_sizes import PUBLISHED, ModelShape, published_name, published_shape, read_shape
from trace_async.app.plan_steps import Rollout
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
from trace_async.engines.vllm_common import check_options
from trace_async.environment import EnvironmentKit
from trace_async.errors import ConfigError, UserError
from trace_async.methods.allocators import make_allocator
from trace_async.methods.credit import credit_rule
from trace_async.methods.objective_check import check_objective
from trace_async.predictors.protocol import Belief

_SAMPLED_OPENINGS = 32
_PROMPT_TOKENS, _OBSERVATION_TOKENS = 256.0, 128.0
"""Assumed where nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked beside the configuration; None: not said."""

    gpus: int = 8
    gpu_memory_gib: float = 80.0
    model_config: Path | None = None
    mean_turns: float | None = None
    mean_turn_tokens: float | None = None
    mean_observation_tokens: float | None = None
    mean_prompt_tokens: float | None = None
    sampled_tokens_per_s: float | None = None  # of all engines together
    trained_tokens_per_s: float | None = None  # sampled tokens of a step over the seconds of its training
    as_json: bool = False

    @property
    def gpu_bytes(self) -> int:
        """Of one GPU."""
        return int(self.gpu_memory_gib * (1 << 30))


def find_shape(config: Config, model_config: Path | None) -> tuple[str, str, ModelShape]:
    """Name, source and sizes of the policy: from a given file, its own folder, or the table of published models.

    Raises ConfigError when none of them has it.
    """
    name = config.policy.path
    if model_config is not None:
        return name, str(model_config), _read(model_config)
    if name.startswith("builtin:") or Path(name).exists():
        file = policy_path(name) / "config.json"
        return name, str(file), _read(file)
    published = published_name(name)
    if published is None:
        raise ConfigError(
            f"policy.path = {name!r} is no folder here and no published model whose sizes are known "
            f"({', '.join(PUBLISHED)}); give its config.json: --model-config FILE"
        )
    return name, f"published sizes of {published}", published_shape(published)


def _read(file: Path) -> ModelShape:
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a model's config.json: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: is no table of sizes, as a model's config.json is")
    return read_shape(table, source=str(file))


# ---- checks ------------------------------------------------------------------------------------------------------


def check_request(request: Request) -> None:
    named: tuple[tuple[str, float | None, float], ...] = (
        ("--gpus", request.gpus, 0),
        ("--gpu-memory-gib", request.gpu_memory_gib, 1),
        ("--mean-turns", request.mean_turns, 1),
        ("--mean-turn-tokens", request.mean_turn_tokens, 1),
        ("--mean-observation-tokens", request.mean_observation_tokens, 0),
        ("--mean-prompt-tokens", request.mean_prompt_tokens, 1),
    )
    for option, value, least in named:
        if value is not None and not least <= value < math.inf:
            raise ConfigError(f"{option} must be at least {least:g}, got {value:g}")
    if (request.sampled_tokens_per_s is None) != (request.trained_tokens_per_s is None):
        raise ConfigError("--sampled-tokens-per-s and --trained-tokens-per-s tell ages only together; give both")


def check_settings(config: Config) -> tuple[int, int]:
    """What `train` refuses whatever the machine; trees and candidates of a round of which nothing is known."""
    make_allocator(config.tree.allocator, config.tree.options, np.random.default_rng(0))
    credit_rule(config.learner.credit)
    check_objective(config)
    build_predictor(config, text_of=_no_text)
    checks.check_cache(config)
    if config.engine.kind != "local":
        check_options(config.engine.options)
    tree, allocator = config.tree, build_root_allocator(config)
    size = allocator.pool_size(
        config.prompts.candidates_per_round, budget=tree.roots_per_step, max_roots=tree.max_roots_per_prompt
    )
    counts = allocator.allocate(
        [Belief(1.0, 1.0)] * size,
        budget=tree.roots_per_step,
        max_roots=tree.max_roots_per_prompt,
        rng=np.random.default_rng(0),
    )
    return int((counts > 0).sum()), size


def _no_text(token_ids: IntArray) -> str:
    raise AssertionError("a predictor that is only checked reads nothing")


def look_around(config: Config) -> tuple[EnvironmentKit | None, list[str]]:
    """The environment, where its data are here, and why `train` would refuse this machine."""
    missing = []
    kit = None
    try:
        kit = build_kit(config)
        build_prompts(config, kit)
        heldout_tasks(config, kit)
    except UserError as error:
        missing.append(f"environment: {error}")
    if config.engine.kind == "vllm" and importlib.util.find_spec("vllm") is None:
        missing.append("engine.kind = 'vllm': vllm is not installed here (docs/vllm.md)")
    return kit, missing


# ---- an average rollout ------------------------------------------------------------------------------------------


def average_rollout(
    config: Config, request: Request, kit: EnvironmentKit | None, missing: list[str]
) -> tuple[Rollout, dict[str, str]]:
    """Figures of a rollout and how they are known; adds to `missing` what the policy's folder lacks."""
    tree = config.tree
    limit, shown = _own_limits(config)
    prompt, how = _prompt_tokens(config, kit, missing)
    known = {
        "prompt_tokens": (request.mean_prompt_tokens, prompt, how),
        "turn_tokens": (
            request.mean_turn_tokens,
            max(1.0, config.engine.max_turn_tokens / 2),
            "assumed: half of engine.max_turn_tokens",
        ),
        "observation_tokens": (
            request.mean_observation_tokens,
            float(shown or _OBSERVATION_TOKENS),
            "assumed: all that environment.options.observation_tokens lets through" if shown else "assumed",
        ),
        "turns": (request.mean_turns, (limit + 1) / 2, f"assumed: middle of 1 and the limit, {limit}"),
    }
    figures = {name: otherwise if said is None else said for name, (said, otherwise, _) in known.items()}
    given = {name: why if said is None else "given" for name, (said, _, why) in known.items()}
    room = tree.max_context_tokens - figures["prompt_tokens"] + figures["observation_tokens"]
    fitting = max(1.0, room / (figures["turn_tokens"] + figures["observation_tokens"]))
    if figures["turns"] > fitting:
        figures["turns"] = fitting
        given["turns"] += ", cut to what fits the context"
    return Rollout(turn_limit=limit, **figures), given


def _own_limits(config: Config) -> tuple[int, int]:
    """Turns of an episode and tokens of an observation at most, as far as the environment is known; 0: unknown."""
    if config.environment.name != "multihop_qa":
        return config.tree.max_turns, 0
    options = config.environment.options
    searches, shown = options.get("max_turns", 4), options.get("observation_tokens", 500)
    turns = searches + 1 if type(searches) is int and searches > 0 else config.tree.max_turns  # one more answers
    return min(config.tree.max_turns, turns), shown if type(shown) is int and shown > 0 else 0


def _prompt_tokens(config: Config, kit: EnvironmentKit | None, missing: list[str]) -> tuple[float, str]:
    """Mean tokens of the first training prompts, by the policy's tokenizer where both are here."""
    name = config.policy.path
    if not (name.startswith("builtin:") or Path(name).exists()):
        missing.append(f"policy: {name} is no folder here, so its tokenizer and chat template were not looked at")
        if "Qwen3" in name:
            missing.append(
                "policy: the chat template that Qwen3 comes with drops thoughts of earlier turns, which `train` "
                "refuses; docs/plan.md has one that keeps them"
            )
        return _PROMPT_TOKENS, "assumed"
    from trace_async.rendering import load_renderer

    try:
        renderer = load_renderer(policy_path(name))
    except UserError as error:
        missing.append(f"policy: {error}")
        return _PROMPT_TOKENS, "assumed"
    if kit is None or kit.opening is None:
        return _PROMPT_TOKENS, "assumed"
    size = kit.tasks.size("train") or _SAMPLED_OPENINGS
    tasks = [kit.tasks.task("train", index) for index in range(min(size, _SAMPLED_OPENINGS))]
    lengths = [len(renderer.opening_ids(kit.opening(task))) for task in tasks]
    return float(np.mean(lengths)), f"mean of {len(lengths)} training prompts"
