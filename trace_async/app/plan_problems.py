"""What of a plan does not work, or works badly, each with its cure. Pure: looks at numbers that others computed.

A problem stops the run or makes it fail; a remark costs speed or needs care. Cures that change memory are tried before
they are offered. Never: reads files, changes a configuration.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trace_async.app.plan_memory import GIB, EngineMemory, LearnerMemory, learner_memory, vllm_memory
from trace_async.app.plan_places import Places
from trace_async.app.plan_sizes import ModelShape
from trace_async.app.plan_steps import Ages, StepLoad
from trace_async.config import Config, LearnerConfig

_LORA_RANK = 32
_ONE_FILE_BYTES = 50 * 10**9
"""Above it transformers writes a model in several files."""


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU."""

    gpu: int
    names: tuple[str, ...]
    num_bytes: int  # that they need together, reserves included


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that problems are found in."""

    config: Config
    shape: ModelShape
    places: Places
    learner: LearnerMemory
    engine: EngineMemory
    gpus: tuple[GpuUse, ...]
    gpu_bytes: int
    num_gpus: int
    pass_tokens: int
    step: StepLoad
    ages: Ages


def find_problems(facts: Facts) -> list[str]:
    """What stops the run."""
    return [*_missing_gpus(facts), *_overfull(facts), *_shards(facts), *_room(facts), *_files(facts)]


def find_remarks(facts: Facts, *, sampled_per_s: float | None) -> list[str]:
    """What costs speed or needs care."""
    return [*_free(facts), *_batches(facts), *_ranks(facts), *_deadlines(facts, sampled_per_s)]


def gib(num_bytes: float) -> str:
    """For people."""
    return f"{num_bytes / GIB:.1f} GiB"


def _missing_gpus(facts: Facts) -> Iterator[str]:
    if facts.places.missing:
        names = ", ".join(map(str, facts.places.missing))
        yield (
            f"GPU {names} is wanted, but the node has {facts.num_gpus}; lower learner.processes or "
            "tensor_parallel_size, or name others in engine.device or engine.options.device_ids"
        )
    if not any(process.role == "engine" for process in facts.places.processes):
        yield (
            f"no engine has a place: the learner leaves too few GPUs for one that needs {facts.places.shards}; lower "
            "learner.processes"
        )


def _overfull(facts: Facts) -> Iterator[str]:
    """One sentence for GPUs that hold the same; processes of the learner are alike."""
    alike: dict[tuple[str, ...], list[GpuUse]] = {}
    for use in facts.gpus:
        if use.num_bytes > facts.gpu_bytes:
            names = tuple("a process of the learner" if name.startswith("learner-") else name for name in use.names)
            alike.setdefault(names, []).append(use)
    for names, uses in alike.items():
        numbers = ", ".join(str(use.gpu) for use in uses)
        wants = f"GPU {numbers}: {' and '.join(names)} need {gib(uses[0].num_bytes)} of {gib(facts.gpu_bytes)}"
        if len(names) > 1:
            yield f"{wants} together; {_apart(facts)}"
        elif "learner" in names[0]:
            yield f"{wants.replace(' need ', ' needs ')}; {_learner_cures(facts)}"
        else:
            yield f"{wants.replace(' need ', ' needs ')}; {_engine_cures(facts)}"


def _apart(facts: Facts) -> str:
    """How processes that share a GPU get one each."""
    config, shards = facts.config, facts.places.shards
    taken = {gpu for process in facts.places.processes if process.role == "learner" for gpu in process.gpus}
    free = [gpu for gpu in range(facts.num_gpus) if gpu not in taken][:shards]
    if config.actor.count > 1:
        return (
            "`train` gives all its actors the same GPU: set actor.count = 0 and start each by itself with "
            "CUDA_VISIBLE_DEVICES=N trace-async actor RUN"
        )
    if len(free) < shards:
        return "lower learner.processes, so that GPUs are left for the engine"
    if config.engine.kind == "local" or shards == 1:
        return f"set engine.device = 'cuda:{free[0]}'"
    return f"set engine.options.device_ids = {free}"


def _learner_cures(facts: Facts) -> str:
    """Changes that make the learner fit, tried one by one and then together."""
    learner = facts.config.learner
    most = facts.num_gpus - facts.places.shards
    cures: list[tuple[str, LearnerConfig, int, int]] = []
    if learner.compute_dtype == "float32":
        cures.append(("learner.compute_dtype = 'bfloat16'", replace(learner, compute_dtype="bfloat16"), 0, 0))
    if not learner.activation_checkpointing:
        cures.append(("learner.activation_checkpointing = true", replace(learner, activation_checkpointing=True), 0, 0))
    context = facts.config.tree.max_context_tokens
    if context < facts.pass_tokens:
        cures.append((f"learner.micro_batch_tokens = {context}", learner, 0, context))
    ranks = [number for number in (2, 4, 6, 8, most) if max(1, learner.processes) < number <= most]
    cures += [(f"learner.processes = {number}", learner, number, 0) for number in dict.fromkeys(ranks)]
    if not learner.lora_rank:
        cures.append((f"learner.lora_rank = {_LORA_RANK}", replace(learner, lora_rank=_LORA_RANK), 0, 0))
    found = [text for text, changed, number, tokens in cures if _fits(facts, changed, number, tokens)]
    if found:
        return f"any of these is enough: {'; '.join(found)}" if len(found) > 1 else f"{found[0]} is enough"
    whole = replace(learner, compute_dtype="bfloat16", activation_checkpointing=True)
    for number in (0, *ranks):
        if _fits(facts, whole, number, context):
            parts = [text for text, _, _, _ in cures if "processes" not in text and "lora" not in text]
            parts += [f"learner.processes = {number}"] if number else []
            return f"these together are enough: {'; '.join(parts)}"
    if _fits(facts, replace(whole, lora_rank=_LORA_RANK), max([0, *ranks]), context):
        return (
            f"use low-rank additions (learner.lora_rank = {_LORA_RANK}) with checkpointing and all GPUs that are left"
        )
    return "use a smaller model or larger GPUs, or several machines (docs/learner.md)"


def _fits(facts: Facts, learner: LearnerConfig, ranks: int, tokens: int) -> bool:
    found = learner_memory(facts.shape, learner, ranks=ranks or facts.places.ranks, tokens=tokens or facts.pass_tokens)
    return found.needed <= facts.gpu_bytes


def _engine_cures(facts: Facts) -> str:
    if facts.config.engine.kind == "local":
        return (
            "lower engine.max_batch, tree.max_context_tokens or engine.prefix_cache_bytes, or use engine.kind = 'vllm'"
        )
    return "lower engine.options.gpu_memory_utilization"


def _shards(facts: Facts) -> Iterator[str]:
    shards = facts.config.engine.options.get("tensor_parallel_size", 1)
    if facts.config.engine.kind != "local" and facts.shape.heads % shards:
        yield (
            f"engine.options.tensor_parallel_size = {shards} does not divide the model's {facts.shape.heads} attention "
            "heads; use one that does"
        )


def _room(facts: Facts) -> Iterator[str]:
    """Key/values of an engine that has GPUs."""
    engine, context = facts.engine, facts.config.tree.max_context_tokens
    on_gpu = any(process.role == "engine" and process.gpus for process in facts.places.processes)
    if engine.kind == "local" or not on_gpu or engine.contexts(context) >= 1:
        return
    sizes = [size for size in (2, 4, 8) if size > facts.places.shards and not facts.shape.heads % size]
    for size in sizes:
        found = vllm_memory(facts.shape, facts.config.engine, shards=size, gpu_bytes=facts.gpu_bytes)
        if found.contexts(context) >= 1:
            cure = f"set engine.options.tensor_parallel_size = {size}"
            break
    else:
        cure = "lower tree.max_context_tokens, or use a smaller model"
    yield (
        f"an engine has {gib(engine.taken)} of a GPU, of which weights take {gib(engine.weights)}: not one context of "
        f"{context} tokens fits; {cure}"
    )


def _files(facts: Facts) -> Iterator[str]:
    config, whole = facts.config, 4 * facts.shape.parameters
    if config.engine.kind == "vllm_server" and config.evaluation.num_prompts and whole > _ONE_FILE_BYTES:
        yield (
            f"the trained policy is exported in float32, {whole / 1e9:.0f} GB, which transformers writes in several "
            "files; a vLLM server is given one, so the evaluation after training would fail: set "
            "evaluation.num_prompts = 0, or use engine.kind = 'vllm'"
        )


def _free(facts: Facts) -> Iterator[str]:
    if facts.places.free:
        names = ", ".join(map(str, facts.places.free))
        who = f"GPU {names} does" if len(facts.places.free) == 1 else f"GPUs {names} do"
        yield f"{who} nothing: raise learner.processes, start further actors, or book fewer"


def _batches(facts: Facts) -> Iterator[str]:
    """Whether an engine's places, its key/values and what it is asked fit each other."""
    config, engine = facts.config, facts.engine
    contexts, places = engine.contexts(config.tree.max_context_tokens), config.engine.max_batch
    if engine.kind != "local" and 1 <= contexts < places:
        yield (
            f"key/values of {contexts} full contexts fit beside {places} requests (engine.max_batch): when most of "
            f"them are long vLLM computes some again; shared prefixes, which count once, delay that"
        )
    each = facts.ages.live_roots / max(1, facts.places.actors)
    if facts.places.actors and each < places / 2:
        yield (
            f"about {each:.0f} root rollouts are under way for each engine, which "
            f"has {places} places (engine.max_batch): it will not be full; raise actor.max_live_roots, or "
            "coordinator.max_age_steps and tree.roots_per_step, which bound them"
        )


def _ranks(facts: Facts) -> Iterator[str]:
    learner, ranks = facts.config.learner, facts.places.ranks
    share = facts.step.packed_tokens / learner.updates_per_step / ranks
    if ranks > 1 and facts.step.micro_batches / learner.updates_per_step < ranks:
        yield (
            f"an update has about {facts.step.micro_batches // learner.updates_per_step} batches for {ranks} processes "
            f"of the learner: some idle; lower learner.micro_batch_tokens to {max(1, int(share))} or less"
        )


def _deadlines(facts: Facts, sampled_per_s: float | None) -> Iterator[str]:
    """By Little's law a tree is under way for what is under way over what ends per second."""
    if sampled_per_s is None:
        return
    config, step = facts.config, facts.step
    root_tokens = step.sampled_tokens / step.roots
    tree_s = facts.ages.live_roots * root_tokens / sampled_per_s
    if tree_s > config.coordinator.lease_deadline_s:
        yield (
            f"with {facts.ages.live_roots:.0f} root rollouts under way a tree takes about {tree_s:.0f} s, longer than "
            f"coordinator.lease_deadline_s = {config.coordinator.lease_deadline_s:g}: it would be leased again; raise "
            "that, or lower actor.max_live_roots"
        )
    turn_s = tree_s / step.turns_in_a_row
    if turn_s > config.engine.request_deadline_s:
        yield (
            f"a turn takes about {turn_s:.0f} s with its waiting, longer than engine.request_deadline_s = "
            f"{config.engine.request_deadline_s:g}: it would fail; raise that, or lower actor.max_live_roots"
        )


def gpu_uses(places: Places, needs: Sequence[tuple[str, int]], *, gpus: int) -> tuple[GpuUse, ...]:
    """What each GPU holds; `needs`: bytes by role of a process."""
    by_role = dict(needs)
    found = []
    for gpu in range(gpus):
        here = places.on(gpu)
        total = sum(by_role[process.role] for process in here)
        found.append(GpuUse(gpu, tuple(process.name for process in here), total))
    return tuple(found)
