"""What `trace-async eval` was asked, and what that means: configuration, policy, tasks, modes.

Everything that can be wrong with a request is found here, before a model is loaded. Never plays, never writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trace_async import config_load
from trace_async.app import wiring
from trace_async.config import Config
from trace_async.core.types import Task
from trace_async.environment import EnvironmentKit
from trace_async.errors import UserError
from trace_async.publication.manifest import file_digest
from trace_async.run_folder import RunFolder

HELDOUT = "heldout"
MODES = ("sampled", "greedy")

_POLICY_FILES = (".json", ".safetensors", ".bin", ".model", ".txt", ".jinja")
"""What makes a policy: configuration, weights, tokenizer, template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line of one evaluation."""

    source: Path  # a run folder or a TOML file
    overrides: tuple[str, ...] = ()
    policy: str | None = None  # None: the run's trained one, or the configuration's
    split: str = HELDOUT
    num: int | None = None  # tasks; None: as the configuration says
    modes: tuple[str, ...] = ()  # (): as the configuration says
    out: Path | None = None
    label: str | None = None  # "before" or "after": save as the run's own
    supervised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be played."""

    config: Config
    policy: Path
    kit: EnvironmentKit
    split: str
    modes: tuple[str, ...]
    tasks: tuple[Task, ...]
    labels: tuple[Mapping[str, str], ...]  # of each task
    seed: int


def make_plan(request: Request, *, seed: int) -> Plan:
    """Reads and checks what is asked. UserError when it cannot be had."""
    _check_label(request)
    config = _load(request)
    policy = wiring.policy_path(request.policy or _default_policy(request, config))
    kit = wiring.build_kit(config)
    tasks = wiring.split_tasks(config, kit, split=request.split, num=request.num)
    if not tasks:
        raise UserError("evaluation.num_prompts is 0, so there is nothing to play; say how many with --num")
    labels: list[Mapping[str, str]] = [{} for _ in tasks]
    if kit.labels is not None:
        labels = [{str(name): str(value) for name, value in kit.labels(task).items()} for task in tasks]
    wanted = {"sampled": config.evaluation.sampled, "greedy": config.evaluation.greedy}
    return Plan(
        config=config,
        policy=policy,
        kit=kit,
        split=request.split,
        modes=tuple(mode for mode in MODES if (mode in request.modes if request.modes else wanted[mode])),
        tasks=tuple(tasks),
        labels=tuple(labels),
        seed=seed,
    )


def settings_of(request: Request, plan: Plan) -> dict[str, object]:
    """All that the episodes and what is said of them depend on, as JSON. Reads the whole policy once."""
    engine, tree = plan.config.engine, plan.config.tree
    return {
        "source": str(request.source),
        "policy": str(plan.policy),
        "policy_sha256": policy_digest(plan.policy),
        "environment": {"name": plan.config.environment.name, "options": plan.config.environment.options},
        "success_above": plan.config.environment.success_above,
        "split": plan.split,
        "num": len(plan.tasks),
        "modes": list(plan.modes),
        "seed": plan.seed,
        "engine": {
            "kind": engine.kind,
            "dtype": engine.dtype,
            "options": engine.options,
            "temperature": engine.temperature,
            "max_turn_tokens": engine.max_turn_tokens,
        },
        "limits": {"max_turns": tree.max_turns, "max_context_tokens": tree.max_context_tokens},
        "config": config_load.to_json(plan.config),
    }


def policy_digest(folder: Path) -> str:
    """Hex sha256 over names and contents of a policy's files: weights, configuration, tokenizer, template."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in _POLICY_FILES and path.is_file():
            digest.update(f"{path.name}\n{file_digest(path)}\n".encode())
    return digest.hexdigest()


def _check_label(request: Request) -> None:
    """A run's own evaluation is what `train` asks for and its summary reads, and nothing else."""
    if request.label is None:
        return
    own = Request(source=request.source, policy=request.policy, label=request.label, supervised=request.supervised)
    if request != own or not request.source.is_dir():
        raise UserError(
            f"--label {request.label} saves the evaluation of a run folder as it was configured: it goes with RUN and "
            "--policy alone; for anything else give --out FOLDER"
        )


def _load(request: Request) -> Config:
    if request.source.is_file():
        return config_load.load_config(request.source, request.overrides)
    if not request.source.is_dir():
        raise UserError(f"{request.source}: there is no such run folder and no such TOML file")
    return config_load.load_saved_config(RunFolder(request.source).config, request.overrides)


def _default_policy(request: Request, config: Config) -> str:
    if request.source.is_file() or request.label == "before":
        return config.policy.path
    return str(RunFolder(request.source).policy)
