"""Held-out success of every checkpoint of a run, on the same tasks with the same draws.

    python -m benchmarks.checkpoint_curve RUN [--tasks 1024] [--between 256] [--also SPLIT ...]

Writes RUN/curve.json: {"points": [{"step", "sampled_tokens", "success", "success_low", "success_high", "also"}, ...]},
the start policy first. The first and the last point are measured on all tasks, those between on fewer; "also" has the
success of those two on further splits. The start policy's point is kept beside the run, since all runs of one folder
start from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trace_async.app import wiring
from trace_async.app.commands import EVALUATION_SEED
from trace_async.app.evaluate import Evaluation, Evaluator
from trace_async.config import Config
from trace_async.config_load import load_saved_config
from trace_async.core.types import Canary, Task
from trace_async.environment import TaskSource
from trace_async.run_folder import RunFolder

EPISODES_AT_ONCE = 128
_NO_CANARY = Canary(prompts=(), logprobs=())  # no learner here to ask


async def measure(
    config: Config, folder: RunFolder, *, number: int, between: int, also: Sequence[str]
) -> list[dict[str, Any]]:
    """One point for the start policy and one for each checkpoint, in order of steps."""
    start = folder.root.parent / "start.json"
    engine, renderer = wiring.build_engine(config, wiring.policy_path(config.policy.path), version=0)
    kit = wiring.build_kit(config, renderer)
    tasks = {split: _tasks(kit.tasks, split, number) for split in ("heldout", *also)}
    evaluator = Evaluator(
        player=wiring.build_player(config, engine=engine, renderer=renderer),
        make_environment=kit.make_environment,
        seed=EVALUATION_SEED,
        max_parallel=EPISODES_AT_ONCE,
        success_above=config.environment.success_above,
    )

    async def point(step: int, sampled_tokens: int, *, whole: bool) -> dict[str, Any]:
        found = await evaluator.run(tasks["heldout"] if whole else tasks["heldout"][:between])
        others = {split: (await evaluator.run(tasks[split])).success for split in also if whole}
        return _point(step, sampled_tokens, found, others)

    checkpoints = sorted(folder.checkpoints.glob("step_*"))
    points = [json.loads(start.read_text(encoding="utf-8"))] if start.exists() else []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        if not points:
            points.append(await point(0, 0, whole=True))
            start.write_text(json.dumps(points[0]), encoding="utf-8")
        for checkpoint in checkpoints:
            state = json.loads((checkpoint / "learner.json").read_text(encoding="utf-8"))
            weights = checkpoint / "trainer" / "model.safetensors"
            await engine.load(version=state["version"], epoch=0, weights=weights, canary=_NO_CANARY, adapter=None)
            is_last = checkpoint == checkpoints[-1]
            points.append(await point(state["step"], state["costs"]["sampled_tokens"], whole=is_last))
        running.cancel()
    await wiring.close_kit(kit)
    return points


def _tasks(source: TaskSource, split: str, number: int) -> list[Task]:
    """The first `number` tasks of a split, or all that it has."""
    available = source.size(split)
    return [source.task(split, index) for index in range(number if available is None else min(number, available))]


def _point(step: int, sampled_tokens: int, found: Evaluation, also: Mapping[str, float]) -> dict[str, Any]:
    return {
        "step": step,
        "sampled_tokens": sampled_tokens,
        "success": found.success,
        "success_low": found.success_low,
        "success_high": found.success_high,
        "also": dict(also),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--tasks", type=int, default=1024)
    parser.add_argument("--between", type=int, default=256)
    parser.add_argument("--also", action="append", default=[], metavar="SPLIT")
    args = parser.parse_args()
    folder = RunFolder(args.run)
    config = load_saved_config(folder.config)
    points = asyncio.run(measure(config, folder, number=args.tasks, between=args.between, also=args.also))
    (folder.root / "curve.json").write_text(json.dumps({"points": points}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
