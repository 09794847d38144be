"""Tokens per second of this project's engines against transformers, on the requests that growing trees make.

    python -m benchmarks.engine [--quick] [--policy FOLDER]... [--repeats 3] [--threads 1]
                                [--dtype float32] [--prefixes shared] [--concurrency 32] [--sides generate local]
                                [--vllm-python .venv-vllm/bin/python] [--out docs/results/engine.json] [--json]

Every engine runs in a process of its own and answers the same trees (engine_workload.py): prompts of 80 to 240 tokens,
root rollouts of up to three turns with 4 to 36 sampled tokens each, then continuations from places along them. Engines
take turns, and every repetition brings new trees, so nobody finds an earlier repetition's prefixes. Rates are medians;
ratios are medians over repetitions of the ratio within one. Sides are told in engine_sides.py.

Only requested tokens count: a call of `generate` goes on until its longest request is done. `generate_sorted` is the
friendlier baseline, whose calls hold requests that want about as many tokens. Besides wall seconds there are CPU
seconds of all of an engine's processes, which a busy machine's other work disturbs less.

Gaps: log-probabilities that an engine reported against a float32 forward pass over the same tokens. Update: seconds
until an engine samples with the weights of a file (for `generate`: reading and copying the tensors, nothing checked).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.engine_report import markdown
from benchmarks.engine_workload import Spec
from trace_async.app.wiring import policy_path

SIDES = ("generate", "generate_sorted", "continuous", "local")
HEADLINE = (32, True, "float32")
GAP_REQUESTS = 24
CANARY_PROMPTS, CANARY_TOKENS = 4, 48


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of the table."""

    concurrency: int
    shared: bool
    dtype: str

    @property
    def shape(self) -> dict[str, Any]:
        """Trees large enough that as many requests are ready as may run at a time, most of the time."""
        return {
            1: {"trees": 1, "roots": 2, "continuations": 2},
            8: {"trees": 1, "roots": 8, "continuations": 6},
            32: {"trees": 10, "roots": 8, "continuations": 6},
        }[self.concurrency]


class Worker:
    """One engine's process."""

    def __init__(self, side: str, process: subprocess.Popen[str]) -> None:
        self.side = side
        self.ready_s = 0.0
        self._process = process

    def wait_ready(self) -> None:
        """Until the engine can be asked."""
        self.ready_s = float(self._answer()["ready_s"])

    def ask(self, **command: Any) -> dict[str, Any]:
        """One command and its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.side} ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def working(side: str, folder: Path, *, dtype: str, threads: int, python: str) -> Iterator[Worker]:
    """A process with the engine, which ends with the block."""
    setting = {"side": side, "folder": str(folder.resolve()), "dtype": dtype, "threads": threads, "max_batch": 32}
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": str(threads)}
    process = subprocess.Popen(
        [python, "-m", "benchmarks.engine_worker", json.dumps(setting)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield Worker(side, process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Everything about one policy."""
    vocabulary = int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    scorer = Scorer(folder)
    canary = scorer.canary(vocabulary)
    result: dict[str, Any] = {"cells": [], "engines": {}}
    for dtype in dict.fromkeys(cell.dtype for cell in _cells(args)):
        cells = [cell for cell in _cells(args) if cell.dtype == dtype]
        warm_up = asdict(Spec(trees=1, roots=2, continuations=1, shared=True, vocabulary=vocabulary, seed=1))
        with ExitStack() as stack:
            workers = _start(stack, folder, dtype=dtype, args=args)
            for worker in workers:  # kernels, allocators, thread pools
                worker.ask(do="play", spec=warm_up, concurrency=8, answers=False)
            for cell in cells:
                row = _measure_cell(cell, workers, vocabulary=vocabulary, repeats=args.repeats)
                result["cells"].append(row)
                _say(_line(folder, row))
            weights = Path(stack.enter_context(TemporaryDirectory())) / "published.safetensors"
            scorer.publish(weights)
            for worker in workers:
                told = _finish(worker, weights, canary, scorer, vocabulary=vocabulary)
                result["engines"].setdefault(worker.side, {})[dtype] = told
                _say(f"{folder.name} {dtype} {worker.side}: {json.dumps(told)}")
    return result


def _start(stack: ExitStack, folder: Path, *, dtype: str, args: argparse.Namespace) -> list[Worker]:
    workers = []
    for side in args.sides:
        python = args.vllm_python if side == "vllm" else sys.executable
        _say(f"{folder.name} {dtype}: starting {side}")
        workers.append(stack.enter_context(working(side, folder, dtype=dtype, threads=args.threads, python=python)))
    for worker in workers:  # they start side by side
        worker.wait_ready()
    return workers


def _measure_cell(cell: Cell, workers: Sequence[Worker], *, vocabulary: int, repeats: int) -> dict[str, Any]:
    rates: dict[str, list[float]] = {worker.side: [] for worker in workers}
    cpu_rates: dict[str, list[float]] = {worker.side: [] for worker in workers}
    for repeat in range(repeats):
        spec = _spec(cell, vocabulary, seed=1000 * (repeat + 1) + cell.concurrency)
        first = repeat % len(workers)
        for worker in (*workers[first:], *workers[:first]):
            told = worker.ask(do="play", spec=spec, concurrency=cell.concurrency, answers=False)
            rates[worker.side].append(told["tokens"] / told["wall_s"])
            cpu_rates[worker.side].append(told["tokens"] / told["cpu_s"])
    return {
        **asdict(cell),
        "tokens_per_s": {side: median(found) for side, found in rates.items()},
        "tokens_per_cpu_s": {side: median(found) for side, found in cpu_rates.items()},
        "vs_generate": _ratios(rates, "generate"),
        "vs_generate_sorted": _ratios(rates, "generate_sorted"),
        "vs_generate_cpu": _ratios(cpu_rates, "generate"),
        "all_tokens_per_s": rates,
        "all_tokens_per_cpu_s": cpu_rates,
    }


def _ratios(rates: dict[str, list[float]], baseline: str) -> dict[str, float]:
    if baseline not in rates:
        return {}
    return {side: median(a / b for a, b in zip(found, rates[baseline], strict=True)) for side, found in rates.items()}


def _finish(
    worker: Worker, weights: Path, canary: dict[str, Any], scorer: Scorer, *, vocabulary: int
) -> dict[str, Any]:
    """What is not speed: gaps, updates, memory."""
    spec = _spec(Cell(concurrency=8, shared=True, dtype=""), vocabulary, seed=7)
    played = worker.ask(do="play", spec=spec, concurrency=8, answers=True)
    loads = [worker.ask(do="load", weights=str(weights), version=version, **canary) for version in (1, 2, 3)]
    told: dict[str, Any] = {
        "start_s": worker.ready_s,
        "peak_bytes": played["rss_bytes"],
        "update_s": None if "error" in loads[0] else median(load["wall_s"] for load in loads),
    }
    return {**told, **scorer.gaps(played["answers"][:GAP_REQUESTS])}


class Scorer:
    """A plain float32 forward pass, which judges everybody's log-probabilities."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)

    def publish(self, path: Path) -> None:
        """The weights as a learner publishes them."""
        from trace_async.weights import find_aliases, write_weights

        state = self._model.state_dict()
        aliases = find_aliases(state)
        write_weights(path, {name: state[name] for name in state if name not in aliases}, aliases=aliases)

    def logprobs(self, ids: Sequence[int]) -> Any:
        """float32 [L - 1]: of ids[1:]."""
        import torch

        with torch.inference_mode():
            tokens = torch.tensor([list(ids)])
            values = torch.log_softmax(self._model(input_ids=tokens).logits[0, :-1], dim=-1)
            return values.gather(-1, tokens[0, 1:, None])[:, 0].numpy()

    def canary(self, vocabulary: int) -> dict[str, Any]:
        """Prompts and what these weights say of them, as plain lists."""
        prompts = np.random.default_rng(0).integers(0, vocabulary, (CANARY_PROMPTS, CANARY_TOKENS)).tolist()
        return {"prompts": prompts, "logprobs": [self.logprobs(ids).tolist() for ids in prompts]}

    def gaps(self, answers: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Largest and mean difference over all sampled tokens, nats."""
        found = [
            np.abs(self.logprobs(a["prefix"] + a["tokens"])[len(a["prefix"]) - 1 :] - np.asarray(a["logprobs"]))
            for a in answers
        ]
        gaps = np.concatenate(found)
        return {"gap_max": float(gaps.max()), "gap_mean": float(gaps.mean()), "gap_tokens": len(gaps)}


def _cells(args: argparse.Namespace) -> list[Cell]:
    if args.quick:
        return [Cell(concurrency=32, shared=True, dtype="float32")]
    return [
        Cell(concurrency=concurrency, shared=prefixes == "shared", dtype=dtype)
        for dtype in args.dtype
        for prefixes in args.prefixes
        for concurrency in args.concurrency
    ]


def _spec(cell: Cell, vocabulary: int, *, seed: int) -> dict[str, Any]:
    return asdict(Spec(**cell.shape, shared=cell.shared, vocabulary=vocabulary, seed=seed))


def _line(folder: Path, row: dict[str, Any]) -> str:
    rates = ", ".join(f"{side} {rate:.0f}" for side, rate in row["tokens_per_s"].items())
    kind = "shared" if row["shared"] else "unshared"
    ratio = row["vs_generate"].get("local", float("nan"))
    cpu = row["vs_generate_cpu"].get("local", float("nan"))
    where = f"{folder.name} {row['dtype']} x{row['concurrency']} {kind}"
    return f"{where}: tokens/s {rates}; local/generate {ratio:.2f}, in CPU time {cpu:.2f}"


def _say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stderr.flush()


def _headline(result: dict[str, Any], key: str) -> float | None:
    for row in result["cells"]:
        if (row["concurrency"], row["shared"], row["dtype"]) == HEADLINE:
            ratio: float | None = row[key].get("local")
            return ratio
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append", default=[], metavar="FOLDER", help="one more; repeatable")
    parser.add_argument("--only", action="store_true", help="leave the shipped policy out")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of every engine")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32, 8, 1], choices=(32, 8, 1))
    parser.add_argument("--prefixes", nargs="+", default=["shared", "unshared"], choices=("shared", "unshared"))
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--sides", nargs="+", default=None, choices=(*SIDES, "vllm"), help="default: all there are")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python")
    parser.add_argument("--quick", action="store_true", help="one cell, float32")
    parser.add_argument("--out", type=Path, help="write everything there as JSON")
    parser.add_argument("--json", action="store_true", help="everything as the last line")
    args = parser.parse_args()
    if args.sides is None:
        args.sides = list(SIDES)
        if args.quick or not Path(args.vllm_python).exists():
            _say(f"vLLM is left out: {'--quick' if args.quick else args.vllm_python + ' does not exist'}")
        else:
            args.sides.append("vllm")
    names = [*([] if args.only else ["builtin:frozenlake-tiny"]), *args.policy]
    results = {Path(name.removeprefix("builtin:")).name: measure(policy_path(name), args) for name in names}
    told = {
        "threads": args.threads,
        "repeats": args.repeats,
        "speedup_vs_generate": {name: _headline(result, "vs_generate") for name, result in results.items()},
        "speedup_vs_generate_cpu": {name: _headline(result, "vs_generate_cpu") for name, result in results.items()},
        "policies": results,
    }
    sys.stdout.write(markdown(told))
    if args.out:
        args.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if args.json:
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
