"""One engine in a process of its own: reads commands from standard input, one JSON object a line, and answers each.

Started by benchmarks/engine.py with the interpreter that has the engine. Processes that engines start count to it: in
seconds of CPU time, and in memory (the sum of every process's own peak, pages that they share counted each time).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine_sides import Answers, Setting, Side, opened
from benchmarks.engine_workload import Growth, Spec
from trace_async.core.types import Canary

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

_FIRST = Spec(trees=1, roots=1, continuations=0, shared=True, vocabulary=50, seed=0)
"""An engine is ready when it has answered these."""


async def serve(setting: Setting) -> None:
    """Until standard input ends."""
    loop = asyncio.get_running_loop()
    started = time.perf_counter()
    async with opened(setting) as side:
        await side.play(Growth(_FIRST), concurrency=1, logprobs=False)
        _tell({"ready_s": time.perf_counter() - started})
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            _tell(await _load(side, command) if command["do"] == "load" else await _play(side, command))


async def _play(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    told_spec: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in command["spec"].items()}
    spec = Spec(**told_spec)
    growth = Growth(spec)
    cpu, started = _cpu_s(), time.perf_counter()
    answers = await side.play(growth, concurrency=command["concurrency"], logprobs=command["answers"])
    wall_s, cpu_s = time.perf_counter() - started, _cpu_s() - cpu
    told: dict[str, Any] = {"wall_s": wall_s, "cpu_s": cpu_s, "tokens": growth.num_tokens, "rss_bytes": _peak_bytes()}
    if command["answers"]:
        told["answers"] = list(_plain(answers))
    return told


async def _load(side: Side, command: dict[str, Any]) -> dict[str, Any]:
    canary = Canary(
        prompts=tuple(np.asarray(ids, np.int32) for ids in command["prompts"]),
        logprobs=tuple(np.asarray(values, np.float32) for values in command["logprobs"]),
    )
    started = time.perf_counter()
    try:
        await side.load(Path(command["weights"]), canary, version=command["version"])
    except NotImplementedError as error:
        return {"error": str(error)}
    return {"wall_s": time.perf_counter() - started}


def _plain(answers: Answers) -> Iterator[dict[str, Any]]:
    for job, tokens, logprobs in answers.values():
        values = None if logprobs is None else logprobs.tolist()
        yield {"prefix": job.prefix.tolist(), "tokens": tokens.tolist(), "logprobs": values}


def _family() -> list[Path]:
    """This process and everything below it, as folders of /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
    family = [os.getpid()]
    for pid in family:
        family.extend(child for child, parent in parents.items() if parent == pid)
    return [Path("/proc") / str(pid) for pid in family]


def _cpu_s() -> float:
    fields = [(folder / "stat").read_text().rpartition(")")[2].split() for folder in _family()]
    return sum(int(field[11]) + int(field[12]) for field in fields) / _TICKS_PER_S


def _peak_bytes() -> int:
    lines = [line for folder in _family() for line in (folder / "status").read_text().splitlines()]
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _tell(told: dict[str, Any]) -> None:
    _OUT.write(json.dumps(told) + "\n")
    _OUT.flush()


if __name__ == "__main__":
    # Libraries write to standard output as they like; answers go out by another descriptor of the same pipe.
    _OUT = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    told = json.loads(sys.argv[1])
    asyncio.run(serve(Setting(**{**told, "folder": Path(told["folder"])})))
