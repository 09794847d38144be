"""Starts and ends vLLM inside an actor: its front end in this process, its engine and workers in child processes.

Owns the engine arguments, the environment that the children are started with, and the children themselves.
Invariants
    - os.environ is as before once vLLM has started or failed to.
    - However a start or a stop ends, also when cancelled, none of the children is left behind.
    - `ended` is set the moment the engine's process is gone, whoever ended it.

Imports vllm only while it starts one. Never: requests, weights, or a decision to start again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_async.config import EngineConfig
from trace_async.engines.vllm_common import GREEDY_PROCESSOR, KV_BLOCK_TOKENS, OWN_SETTINGS
from trace_async.errors import PolicyError

_LOG = logging.getLogger(__name__)

_MIN_CACHE_BYTES = 1 << 30
"""Key/values that a CPU keeps at least: requests in flight need room beside the prefixes."""

_CANARY_TOKENS = 64
"""Of a canary's prompt at most."""

_STOP_S = 15.0
"""For the engine to end by itself when its workers have; it is killed then."""

_WORKERS_S = 3.0
"""For the workers to end by themselves when their engine was told to; then they are killed. They keep nothing."""

_LOOK_S = 0.2
"""Between two looks at children that must end, while a thread waits for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What vLLM is started with."""

    folder: Path  # of the start policy
    config: EngineConfig
    max_tokens: int  # of the longest context, prompt and answer together


class VllmProcess:
    """A running vLLM. Made by `start`."""

    def __init__(self, llm: Any, children: list[Any]) -> None:
        """`children`: multiprocessing's handles of the processes that were started for `llm`."""
        self.llm = llm  # vllm's AsyncLLM
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._limits: set[asyncio.Timeout] = set()
        self._watched = [child.sentinel for child in children]
        self._children = children
        self._family = _family(children)
        self._workers = [process for process in self._family if _is_worker(process, children)]
        for sentinel in self._watched:
            self._loop.add_reader(sentinel, self.end)

    @classmethod
    async def start(cls, launch: Launch) -> VllmProcess:
        """Takes 15 to 40 s, in a thread. Raises PolicyError when vLLM does not start with this folder and options."""
        before = set(multiprocessing.active_children())
        starting = asyncio.get_running_loop().run_in_executor(None, _build, launch)
        try:
            llm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _give_up(starting, before)
            raise
        except Exception as error:  # whatever vLLM's own code raises
            _kill(_family(set(multiprocessing.active_children()) - before))
            raise PolicyError(
                f"vLLM could not be started with {launch.folder} and engine.options = {launch.config.options}: "
                f"{type(error).__name__}: {error}; what its processes say stands in the log above"
            ) from error
        return cls(llm, list(set(multiprocessing.active_children()) - before))

    async def stop(self) -> None:
        """Ends the engine and its workers, at the latest after `_STOP_S` and a kill."""
        self.end()
        await asyncio.get_running_loop().run_in_executor(None, self._shut_down)

    @asynccontextmanager
    async def lifetime(self) -> AsyncIterator[None]:
        """Cuts short whatever is awaited inside when the engine's process ends, of which vLLM does not tell everybody.

        Raises TimeoutError then.
        """
        async with asyncio.timeout(0.0 if self.ended.is_set() else None) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def end(self) -> None:
        """The engine's process is gone, or cannot be used any more."""
        for sentinel in self._watched:
            self._loop.remove_reader(sentinel)
        self._watched = []
        if not self.ended.is_set():
            self.ended.set()
            for limit in self._limits:
                limit.reschedule(self._loop.time())

    def _shut_down(self) -> None:
        """In a thread. An engine waits for its workers, on a CPU for ten seconds unless they are killed."""
        for child in self._children:
            child.terminate()
        _kill(self._workers, patience_s=_WORKERS_S)
        deadline_s = time.monotonic() + _STOP_S
        for child in self._children:
            child.join(max(0.0, deadline_s - time.monotonic()))
        try:
            self.llm.shutdown(timeout=_WORKERS_S)
        finally:
            _kill(self._family, patience_s=_WORKERS_S)


def engine_arguments(launch: Launch, *, on_cpu: bool) -> dict[str, Any]:
    """Arguments of vLLM's AsyncEngineArgs; `engine.options` come on top of the defaults and never over our own."""
    config = launch.config
    max_tokens = min(max(launch.max_tokens, _CANARY_TOKENS) + 1, _positions(launch.folder))  # 1: scoring samples one
    places = config.max_batch + 1  # one for the canary
    defaults: dict[str, Any] = {}
    if on_cpu:
        defaults = {
            "block_size": KV_BLOCK_TOKENS,
            "enforce_eager": True,  # compiling takes a minute and gains little there
            "enable_chunked_prefill": False,  # vLLM's seeded requests end the engine when a prompt is split on a CPU
            "max_num_batched_tokens": max(max_tokens, min(2048, places * max_tokens)),  # any prompt fits into one pass
            "kv_cache_memory_bytes": max(config.prefix_cache_bytes, _MIN_CACHE_BYTES),
        }
    own = {
        **OWN_SETTINGS,
        "model": str(launch.folder),
        "skip_tokenizer_init": True,
        "dtype": config.dtype,
        "max_model_len": max_tokens,
        "max_num_seqs": places,
        "disable_log_stats": True,
    }
    if config.temperature != 1.0:
        own["logits_processors"] = [GREEDY_PROCESSOR]
    if config.device.startswith("cuda:"):
        own["device_ids"] = [int(config.device.removeprefix("cuda:"))]
    return {**defaults, **config.options, **own}


def _positions(folder: Path) -> int:
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return found if isinstance(found, int) else sys.maxsize


def _build(launch: Launch) -> Any:
    """Runs in a thread: vLLM waits for its processes where it is constructed."""
    with _environment(launch.config.threads):
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        class Front(AsyncLLM):  # type: ignore[misc]
            """Is shut down by `stop`, and not once more when Python itself is ending, which fails with a complaint."""

            def __del__(self) -> None:
                return

        arguments = engine_arguments(launch, on_cpu=current_platform.is_cpu())
        return Front.from_engine_args(AsyncEngineArgs(**arguments))


def child_environment(threads: int) -> dict[str, str]:
    """What vLLM's processes find in their environment, unless it is set already; `threads`: of torch, on a CPU."""
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of an actor would copy locks that its threads hold
        "VLLM_LOGGING_LEVEL": "ERROR",  # its warnings are about settings made here on purpose, at every load
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": _binding(threads),
    }


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """The variables that vLLM and its children find while they start; those that are set already stay."""
    before, wanted = dict(os.environ), child_environment(threads)
    os.environ.update({name: value for name, value in wanted.items() if name not in before})
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)


def _binding(threads: int) -> str:
    """CPU numbers for vLLM's threads when it has the machine for itself, else none: other actors would get the same."""
    allowed = sorted(os.sched_getaffinity(0))
    return ",".join(map(str, allowed)) if threads >= len(allowed) else "nobind"


async def _give_up(starting: asyncio.Future[Any], before: set[Any]) -> None:
    """Ends a start that nobody waits for any more; returns when its thread has ended and no child is left."""
    while not starting.done():
        _kill(_family(set(multiprocessing.active_children()) - before))
        await asyncio.wait([starting], timeout=_LOOK_S)
    if starting.exception() is None:
        await asyncio.get_running_loop().run_in_executor(None, starting.result().shutdown)
    _kill(_family(set(multiprocessing.active_children()) - before))


def _is_worker(process: Any, children: list[Any]) -> bool:
    """Neither an engine itself nor the process that frees an engine's shared memory behind it."""
    return process.pid not in {child.pid for child in children} and "resource_tracker" not in " ".join(
        process.cmdline()
    )


def _family(children: Any) -> list[Any]:
    """The processes of multiprocessing's handles and all their descendants, as psutil knows them."""
    import psutil

    found: list[Any] = []
    for child in children:
        try:
            process = psutil.Process(child.pid)
            found += [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _kill(family: list[Any], *, patience_s: float = 0.0) -> None:
    """End what is left of a family, after `patience_s` seconds in which it may do so itself. Blocks that long."""
    import psutil

    _, alive = psutil.wait_procs(family, timeout=patience_s)
    for process in alive:
        try:
            process.kill()
            _LOG.info("process %d of vLLM did not end by itself and was killed", process.pid)
        except psutil.NoSuchProcess:
            continue
