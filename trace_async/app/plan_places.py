"""Which process of a run takes which GPUs of one node, by the rules of this code. Pure.

    learner     one process: learner.device; several: process k takes GPU k (learner_ranks.py)
    local       every actor that `train` starts gets engine.device, so all of them the same GPU
    vllm        likewise; device_ids in engine.options names several, for tensor_parallel_size
    vllm_server the server's GPUs are chosen where it is started; one actor for each server
    by hand     with actor.count = 0, actors are started one by one, each with CUDA_VISIBLE_DEVICES of its own

Never: memory, whether a GPU exists.
"""

from __future__ import annotations

from dataclasses import dataclass

from trace_async.config import Config
from trace_async.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process, or several that share one place."""

    name: str
    role: str  # "learner", "engine" (an actor with its engine, or a server) or "actor"
    gpus: tuple[int, ...]  # (): the CPU
    command: str = ""  # how it is started, where `train` does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Who is where."""

    processes: tuple[Process, ...]
    shards: int  # GPUs of one engine
    actors: int
    free: tuple[int, ...]  # GPUs that nobody takes
    missing: tuple[int, ...]  # GPUs that somebody wants and the node has not

    @property
    def ranks(self) -> int:
        """Processes of the learner."""
        return sum(process.role == "learner" for process in self.processes)

    def on(self, gpu: int) -> list[Process]:
        """Who takes this GPU."""
        return [process for process in self.processes if gpu in process.gpus]


def find_places(config: Config, *, gpus: int, config_path: str) -> Places:
    """The places on one node with `gpus` GPUs. Raises ConfigError for engine options that name no places."""
    learner = _learner(config, gpus)
    taken = {gpu for process in learner for gpu in process.gpus}
    shards = engine_shards(config)
    others = [gpu for gpu in range(gpus) if gpu not in taken]
    if config.engine.kind == "vllm_server":
        engines = _servers(config, others, shards, config_path)
    elif config.actor.count == 0:
        engines = _by_hand(others, shards, on_cpu=config.engine.device == "cpu" or not gpus)
    else:
        own = _engine_gpus(config, gpus, shards)
        engines = [Process(name=f"actor-{n}", role="engine", gpus=own) for n in range(config.actor.count)]
    processes = (*learner, *engines)
    used = {gpu for process in processes for gpu in process.gpus}
    return Places(
        processes=processes,
        shards=shards,
        actors=sum(process.name.startswith("actor") for process in processes),
        free=tuple(gpu for gpu in range(gpus) if gpu not in used),
        missing=tuple(sorted(gpu for gpu in used if gpu >= gpus)),
    )


def engine_shards(config: Config) -> int:
    """GPUs that one engine is spread over. Raises ConfigError for one that is no number of GPUs."""
    if config.engine.kind == "local":
        return 1
    shards = 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        value = config.engine.options.get(name, 1)
        if type(value) is not int or value < 1:
            raise ConfigError(f"engine.options.{name} must be a positive integer, got {value!r}")
        shards *= value
    return shards


def _learner(config: Config, gpus: int) -> list[Process]:
    ranks, device = config.learner.processes, config.learner.device
    if ranks == 1:
        return [Process(name="learner", role="learner", gpus=_device(device, gpus))]
    if device == "cpu" or not gpus:
        return [Process(name=f"learner-{rank}", role="learner", gpus=()) for rank in range(ranks)]
    return [Process(name=f"learner-{rank}", role="learner", gpus=(rank,)) for rank in range(ranks)]


def _device(name: str, gpus: int) -> tuple[int, ...]:
    if name in ("auto", "cuda"):
        return (0,) if gpus else ()
    number = name.removeprefix("cuda:")
    return (int(number),) if number != name and number.isdigit() else ()


def _engine_gpus(config: Config, gpus: int, shards: int) -> tuple[int, ...]:
    """Of an engine that an actor of `train` has in its own process."""
    named = _named_gpus(config)
    if named:
        if len(named) < shards:
            raise ConfigError(
                f"one engine needs {shards} GPUs (tensor_parallel_size x pipeline_parallel_size in engine.options), "
                f"but {list(named)} is named for it; set engine.device = 'auto' and engine.options.device_ids to "
                f"{shards} numbers"
            )
        return named[:shards]
    start = _device(config.engine.device, gpus)
    return tuple(range(shards)) if start and config.engine.kind == "vllm" else start


def _named_gpus(config: Config) -> tuple[int, ...]:
    """GPUs that vLLM is told to take; engine.device wins over device_ids, as in vllm_process.py."""
    if config.engine.kind == "local":
        return ()
    if config.engine.device.startswith("cuda:"):
        return _device(config.engine.device, 1)
    ids = config.engine.options.get("device_ids") or []
    if not isinstance(ids, list) or any(type(number) is not int or number < 0 for number in ids):
        raise ConfigError(f"engine.options.device_ids must be a list of GPU numbers, got {ids!r}")
    return tuple(ids)


def _servers(config: Config, others: list[int], shards: int, config_path: str) -> list[Process]:
    """Servers with an actor each: one for `train`'s actor, or as many as the free GPUs take."""
    named = _named_gpus(config) if config.actor.count else ()
    number = max(1, config.actor.count or len(others) // shards)
    on_cpu = config.engine.device == "cpu"
    processes = []
    for index in range(number):
        gpus = () if on_cpu else named[:shards] or tuple(others[index * shards : (index + 1) * shards])
        visible = "" if on_cpu or named else f"CUDA_VISIBLE_DEVICES={_list(gpus)} "
        port = f" --port {8000 + index}" if number > 1 else ""
        server = f"{visible}trace-async vllm-server {config_path}{port}"
        processes.append(Process(name=f"server-{index}", role="engine", gpus=gpus, command=server))
        command = "" if config.actor.count else f"trace-async actor RUN --server http://127.0.0.1:{8000 + index}"
        processes.append(Process(name=f"actor-{index}", role="actor", gpus=(), command=command))
    return processes


def _by_hand(others: list[int], shards: int, *, on_cpu: bool) -> list[Process]:
    """One actor on each free GPU, or on each `shards` of them."""
    if on_cpu:
        return [Process(name="actor-0", role="engine", gpus=(), command="trace-async actor RUN")]
    found = []
    for index in range(len(others) // shards):
        gpus = tuple(others[index * shards : (index + 1) * shards])
        command = f"CUDA_VISIBLE_DEVICES={_list(gpus)} trace-async actor RUN --id actor-{index}"
        found.append(Process(name=f"actor-{index}", role="engine", gpus=gpus, command=command))
    return found


def _list(gpus: tuple[int, ...]) -> str:
    return ",".join(map(str, gpus))
