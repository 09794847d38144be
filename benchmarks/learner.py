"""Forward and backward pass of the same trees, packed against path rows: how much of what is shared becomes time saved.

    python -m benchmarks.learner [--model 16m] [--shapes single roots ...] [--tokens 3000] [--rounds 3] [--json]
                                 [--out docs/results/learner.json]

Random weights and random trees (`learner_workload.py`), one torch thread. Both layouts hold the same turns, are given
the same bound on tokens of one pass, and are timed in turns within one run, the first round thrown away. Speed-up is
the median over rounds of rows' seconds / trees' seconds, by the processor's clock (others may use the machine) and by
the wall's; efficiency is the speed-up over the sharing, which is tokens of path rows over tokens of packed trees, no
padding counted. Kept bytes are those of distinct tensors that a forward pass keeps for its backward pass, at most over
the passes. `full head` is packed trees with logits of every token, as a model gives them by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learner_workload import SHAPES, Shape, make_items, sizes
from trace_async.core.packing import PackItem, RowBatch, first_tokens, pack
from trace_async.core.tree_packing import pack_trees
from trace_async.trainer_scoring import Scorer

MODELS: dict[str, dict[str, Any]] = {
    "1m": {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "heads": 4},
    "16m": {"vocab_size": 4096, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "heads": 6},
    "16m_32k": {"vocab_size": 32768, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "heads": 4},
}
"""The first is of the shipped policy's size; the last has a large vocabulary on a small body."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One shape of tree."""

    shape: str
    sharing: float  # tokens of path rows per token of packed trees
    unique_tokens: int
    rows_s: float  # medians, processor time of one pass over everything
    trees_s: float
    full_head_s: float
    speed_up: float  # by processor time
    speed_up_wall: float
    rows_kept_mb: float
    trees_kept_mb: float
    full_head_kept_mb: float
    worst_gradient_gap: float  # between the layouts, as a share of the largest entry

    @property
    def efficiency(self) -> float:
        """Share of the sharing that became speed."""
        return self.speed_up / self.sharing


def build(name: str) -> torch.nn.Module:
    """A Llama with random weights."""
    torch.manual_seed(0)
    settings = dict(MODELS[name])
    heads = settings.pop("heads")
    config = LlamaConfig(
        **settings, num_attention_heads=heads, num_key_value_heads=max(1, heads // 3), max_position_embeddings=4096
    )
    model: torch.nn.Module = LlamaForCausalLM(config)
    return model.train(mode=False)


def run_pass(model: torch.nn.Module, scorer: Scorer, batches: Sequence[RowBatch]) -> None:
    """The gradient of the sum of all log-probabilities."""
    model.zero_grad()
    for batch in batches:
        scorer.logprobs(batch).sum().backward()  # type: ignore[no-untyped-call]


def kept_bytes(model: torch.nn.Module, scorer: Scorer, batches: Sequence[RowBatch]) -> int:
    """What one forward pass keeps, at most."""
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    most = 0
    for batch in batches:
        storages: dict[int, int] = {}

        def note(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                storages[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scorer.logprobs(batch)
        most = max(most, sum(storages.values()))
    return most


def gradient(model: torch.nn.Module) -> torch.Tensor:
    """All of it, flat."""
    return torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


def measure(shape: Shape, model: torch.nn.Module, args: argparse.Namespace) -> Result:
    """Both layouts of some trees, in turns."""
    items = make_items(shape, tokens=args.tokens, vocabulary=MODELS[args.model]["vocab_size"], seed=1)
    sides = make_sides(model, items, args.micro_batch_tokens)
    cpu: dict[str, list[float]] = {name: [] for name in sides}
    wall: dict[str, list[float]] = {name: [] for name in sides}
    gradients: dict[str, torch.Tensor] = {}
    for number in range(args.rounds + 1):
        for name in list(sides)[:: 1 if number % 2 else -1]:
            started = (time.process_time(), time.perf_counter())
            sides[name].run()
            cpu[name].append(time.process_time() - started[0])
            wall[name].append(time.perf_counter() - started[1])
            gradients[name] = gradient(model)
    size = sizes(items)
    gap = (gradients["rows"] - gradients["trees"]).abs().max() / gradients["rows"].abs().max()
    seconds = {name: statistics.median(times[1:]) for name, times in cpu.items()}
    kept = {name: side.kept() / 1e6 for name, side in sides.items()}
    return Result(
        shape=shape.name,
        sharing=size.sharing,
        unique_tokens=size.unique,
        rows_s=seconds["rows"],
        trees_s=seconds["trees"],
        full_head_s=seconds["full head"],
        speed_up=_ratio(cpu["rows"], cpu["trees"]),
        speed_up_wall=_ratio(wall["rows"], wall["trees"]),
        rows_kept_mb=kept["rows"],
        trees_kept_mb=kept["trees"],
        full_head_kept_mb=kept["full head"],
        worst_gradient_gap=float(gap),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to compute the same gradient."""

    run: Callable[[], None]
    kept: Callable[[], int]


def make_sides(model: torch.nn.Module, items: Sequence[PackItem], bound: int) -> dict[str, Side]:
    """Rows, trees, and trees whose head is not chunked."""
    chunked, full = (Scorer(model, temperature=1.0, chunks_head=chunks) for chunks in (True, False))
    for scorer in (chunked, full):
        if not scorer.probe_trees(2048):
            raise SystemExit("this model takes no packed trees")
    first = first_tokens(items)
    rows = pack(items, first_tokens=first, micro_batch_tokens=bound)
    trees = pack_trees(items, first_tokens=first, micro_batch_tokens=bound)
    plan = {"rows": (chunked, rows), "trees": (chunked, trees), "full head": (full, trees)}
    return {
        name: Side(run=partial(run_pass, model, scorer, batches), kept=partial(kept_bytes, model, scorer, batches))
        for name, (scorer, batches) in plan.items()
    }


def _ratio(rows: Sequence[float], trees: Sequence[float]) -> float:
    return statistics.median([a / b for a, b in zip(rows[1:], trees[1:], strict=True)])


def line_of(result: Result) -> str:
    """For people."""
    seconds = f"rows {result.rows_s:.2f} s, trees {result.trees_s:.2f} s, full head {result.full_head_s:.2f} s"
    kept = f"{result.rows_kept_mb:.0f} / {result.trees_kept_mb:.0f} / {result.full_head_kept_mb:.0f} MB kept"
    gains = f"speed-up {result.speed_up:.2f} (wall {result.speed_up_wall:.2f}), efficiency {result.efficiency:.2f}"
    return f"{result.shape:10} sharing {result.sharing:5.2f}: {seconds}; {gains}; {kept}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--model", choices=MODELS, default="16m")
    parser.add_argument("--shapes", nargs="+", choices=names, default=names)
    parser.add_argument("--tokens", type=int, default=3000, help="unique tokens of each shape, at least")
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="adds the results under the model's name to this file")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, console = build(args.model), Console(width=140)
    load_before = os.getloadavg()[0]
    results = []
    for shape in track([shape for shape in SHAPES if shape.name in args.shapes], console=Console(stderr=True)):
        result = measure(shape, model, args)
        results.append(result)
        console.print(line_of(result))
    figures = {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "micro_batch_tokens": args.micro_batch_tokens,
        "rounds": args.rounds,
        "load": [load_before, os.getloadavg()[0]],
        "efficiency": {f"{result.sharing:.2f}": round(result.efficiency, 3) for result in results},
        "shapes": [asdict(result) for result in results],
    }
    if args.out is not None:
        known = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
        args.out.write_text(json.dumps({**known, args.model: figures}, indent=1) + "\n", encoding="utf-8")
    if args.json:
        print(json.dumps({"model": args.model, **figures}))  # noqa: T201


if __name__ == "__main__":
    main()
