"""`trace-async plan CONFIG`: what a run would need and do, before anything is booked, started or downloaded.

Reads the configuration, checks it as `train` does, and computes the rest in `plan_*.py`. What only another machine has
(policy, data, vLLM, GPUs) may be missing here: it is told, and the plan goes on with what is known. Invariants: starts
nothing, writes nothing, asks no hub. Importable without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trace_async.app import plan_text
from trace_async.app.plan_files import FileSizes, file_sizes
from trace_async.app.plan_inputs import (
    Request,
    average_rollout,
    check_request,
    check_settings,
    find_shape,
    look_around,
)
from trace_async.app.plan_memory import (
    GIB,
    RESERVE_BYTES,
    EngineMemory,
    LearnerMemory,
    learner_memory,
    local_memory,
    vllm_memory,
)
from trace_async.app.plan_places import Places, find_places
from trace_async.app.plan_problems import Facts, GpuUse, find_problems, find_remarks, gpu_uses
from trace_async.app.plan_sizes import ModelShape
from trace_async.app.plan_steps import Ages, Rollout, StepLoad, Totals, ages, step_load, totals
from trace_async.config import Config
from trace_async.config_load import load_config
from trace_async.errors import ConfigError

DOES_NOT_FIT = 1
"""Exit code of a plan with problems."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that was found."""

    name: str
    model: str
    model_source: str
    parameters: int
    trained_parameters: int
    num_gpus: int
    gpu_bytes: int
    places: Places
    gpus: tuple[GpuUse, ...]
    pass_tokens: int  # of the learner's largest pass
    learner: LearnerMemory
    engine: EngineMemory
    contexts: int  # of full length that an engine's key/values take
    files: FileSizes
    host_bytes: int  # at least, of the node
    rollout: Rollout
    given: dict[str, str]  # how each figure of the rollout is known
    step: StepLoad
    ages: Ages
    totals: Totals
    problems: list[str]
    remarks: list[str]
    missing: list[str]  # why `train` would not start on this machine


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `trace-async plan` takes beside a configuration and overrides; `request_of` reads it back."""
    default = Request()
    parser.add_argument("--gpus", type=int, default=default.gpus, metavar="N", help="of the node; default: 8")
    parser.add_argument(
        "--gpu-memory-gib", type=float, default=default.gpu_memory_gib, metavar="G", help="of each; default: 80"
    )
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="config.json of a policy that is not here")
    for name, what in (
        ("mean-turns", "of a root rollout"),
        ("mean-turn-tokens", "sampled in a turn"),
        ("mean-observation-tokens", "between two turns"),
        ("mean-prompt-tokens", "of a task's opening"),
        ("sampled-tokens-per-s", "measured, of all engines together"),
        ("trained-tokens-per-s", "measured: a step's sampled tokens by the seconds of its training"),
    ):
        parser.add_argument(f"--{name}", type=float, metavar="X", help=what)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def request_of(arguments: argparse.Namespace) -> Request:
    """The request in parsed arguments."""
    return Request(
        gpus=arguments.gpus,
        gpu_memory_gib=arguments.gpu_memory_gib,
        model_config=arguments.model_config,
        mean_turns=arguments.mean_turns,
        mean_turn_tokens=arguments.mean_turn_tokens,
        mean_observation_tokens=arguments.mean_observation_tokens,
        mean_prompt_tokens=arguments.mean_prompt_tokens,
        sampled_tokens_per_s=arguments.sampled_tokens_per_s,
        trained_tokens_per_s=arguments.trained_tokens_per_s,
        as_json=arguments.json,
    )


def plan(config_path: Path, overrides: Sequence[str], request: Request) -> int:
    """Prints the plan; 0, or `DOES_NOT_FIT`. Raises UserError for what no machine could run."""
    config = load_config(config_path, overrides)
    found = make_plan(config, request, config_path=str(config_path))
    plan_text.show(found)
    if request.as_json:
        sys.stdout.write(json.dumps(asdict(found), allow_nan=False) + "\n")
    return DOES_NOT_FIT if found.problems else 0


def make_plan(config: Config, request: Request, *, config_path: str = "CONFIG") -> Plan:
    """The plan of a configuration. Raises ConfigError for settings that no machine could run."""
    check_request(request)
    prompts, looked_at = check_settings(config)
    model, source, shape = find_shape(config, request.model_config)
    if config.tree.max_context_tokens > shape.positions:
        raise ConfigError(
            f"tree.max_context_tokens is {config.tree.max_context_tokens}, more than the {shape.positions} positions "
            f"of {model}; lower it"
        )
    kit, missing = look_around(config)
    rollout, given = average_rollout(config, request, kit, missing)
    places = find_places(config, gpus=request.gpus, config_path=config_path)
    step = step_load(config, shape, rollout, prompts=prompts, prompts_looked_at=looked_at)
    facts = _facts(config, request, shape=shape, places=places, step=step)
    files = file_sizes(config, shape)
    return Plan(
        name=config.run.name,
        model=model,
        model_source=source,
        parameters=shape.parameters,
        trained_parameters=_trained(config, shape),
        num_gpus=request.gpus,
        gpu_bytes=request.gpu_bytes,
        places=places,
        gpus=facts.gpus,
        pass_tokens=facts.pass_tokens,
        learner=facts.learner,
        engine=facts.engine,
        contexts=facts.engine.contexts(config.tree.max_context_tokens),
        files=files,
        host_bytes=_host_bytes(config, shape, places, files),
        rollout=rollout,
        given=given,
        step=step,
        ages=facts.ages,
        totals=totals(config, step, step_s=facts.ages.step_s),
        problems=find_problems(facts),
        remarks=find_remarks(facts, sampled_per_s=request.sampled_tokens_per_s),
        missing=missing,
    )


def _facts(config: Config, request: Request, *, shape: ModelShape, places: Places, step: StepLoad) -> Facts:
    """Memory and ages."""
    learner, longest = config.learner, max(config.tree.max_context_tokens, round(step.packed_tokens))
    pass_tokens = min(learner.micro_batch_tokens, longest)
    memory = learner_memory(shape, learner, ranks=places.ranks, tokens=pass_tokens)
    engine = _engine(config, shape, places, request.gpu_bytes)
    needs = (("learner", memory.needed), ("engine", _taken(engine)), ("actor", 0))
    return Facts(
        config=config,
        shape=shape,
        places=places,
        learner=memory,
        engine=engine,
        gpus=gpu_uses(places, needs, gpus=request.gpus),
        gpu_bytes=request.gpu_bytes,
        num_gpus=request.gpus,
        pass_tokens=pass_tokens,
        step=step,
        ages=ages(
            config,
            capacity=places.actors * config.actor.max_live_roots,
            step=step,
            sampled_per_s=request.sampled_tokens_per_s,
            trained_per_s=request.trained_tokens_per_s,
        ),
    )


# ---- bytes -------------------------------------------------------------------------------------------------------


def _engine(config: Config, shape: ModelShape, places: Places, gpu_bytes: int) -> EngineMemory:
    on_gpu = any(process.role == "engine" and process.gpus for process in places.processes)
    if config.engine.kind != "local" and on_gpu:
        return vllm_memory(shape, config.engine, shards=places.shards, gpu_bytes=gpu_bytes)
    found = local_memory(shape, config.engine, max_context_tokens=config.tree.max_context_tokens)
    if config.engine.kind == "local":
        return found
    kv_bytes = max(config.engine.prefix_cache_bytes, GIB)  # vLLM on a CPU (vllm_process.py)
    return replace(found, kv_bytes=kv_bytes, taken=found.weights + kv_bytes)


def _taken(engine: EngineMemory) -> int:
    return engine.taken + (RESERVE_BYTES if engine.kind == "local" else 0)


def _trained(config: Config, shape: ModelShape) -> int:
    rank = config.learner.lora_rank
    return sum(tensor.numel for tensor in shape.pairs(rank)) if rank else shape.parameters


def _host_bytes(config: Config, shape: ModelShape, places: Places, files: FileSizes) -> int:
    """The largest of: every rank reads the whole policy in float32; the leader gathers a checkpoint; it exports.

    Beside it versions, where they are published in memory.
    """
    whole, trained = 4 * shape.parameters, 4 * _trained(config, shape)
    return max(places.ranks * whole, 3 * trained, 2 * whole) + (files.versions if files.in_memory else 0)
