"""Held-out success of every checkpoint of a run, on the same maps with the same draws.

    python -m benchmarks.checkpoint_curve RUN [--maps 1024] [--maps-between 256]

Writes RUN/curve.json: {"points": [{"step", "sampled_tokens", "success", "success_low", "success_high"}, ...]}, the
start policy first. The first and the last point are measured on all maps, those between on fewer. The start policy's
point is kept beside the run, since all runs of one folder start from it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from trace_async.app import wiring
from trace_async.app.commands import EVALUATION_SEED
from trace_async.app.evaluate import Evaluation, Evaluator
from trace_async.config import Config
from trace_async.config_load import load_saved_config
from trace_async.core.types import Canary
from trace_async.run_folder import RunFolder

EPISODES_AT_ONCE = 128
_NO_CANARY = Canary(prompts=(), logprobs=())  # no learner here to ask


async def measure(config: Config, folder: RunFolder, *, maps: int, between: int) -> list[dict[str, Any]]:
    """One point for the start policy and one for each checkpoint, in order of steps."""
    kit = wiring.build_kit(config)
    tasks = [kit.tasks.task("heldout", index) for index in range(maps)]
    start = folder.root.parent / "start.json"
    engine, renderer = wiring.build_engine(config, wiring.policy_path(config.policy.path), version=0)
    evaluator = Evaluator(
        player=wiring.build_player(config, engine=engine, renderer=renderer),
        make_environment=kit.make_environment,
        seed=EVALUATION_SEED,
        max_parallel=EPISODES_AT_ONCE,
    )
    checkpoints = sorted(folder.checkpoints.glob("step_*"))
    points = [json.loads(start.read_text(encoding="utf-8"))] if start.exists() else []
    async with asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        if not points:
            points.append(_point(0, 0, await evaluator.run(tasks)))
            start.write_text(json.dumps(points[0]), encoding="utf-8")
        for checkpoint in checkpoints:
            state = json.loads((checkpoint / "learner.json").read_text(encoding="utf-8"))
            weights = checkpoint / "trainer" / "model.safetensors"
            await engine.load(version=state["version"], epoch=0, weights=weights, canary=_NO_CANARY, adapter=None)
            played = tasks if checkpoint == checkpoints[-1] else tasks[:between]
            found = await evaluator.run(played)
            points.append(_point(state["step"], state["costs"]["sampled_tokens"], found))
        running.cancel()
    return points


def _point(step: int, sampled_tokens: int, found: Evaluation) -> dict[str, Any]:
    return {
        "step": step,
        "sampled_tokens": sampled_tokens,
        "success": found.success,
        "success_low": found.success_low,
        "success_high": found.success_high,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--maps", type=int, default=1024)
    parser.add_argument("--maps-between", type=int, default=256)
    args = parser.parse_args()
    folder = RunFolder(args.run)
    points = asyncio.run(measure(load_saved_config(folder.config), folder, maps=args.maps, between=args.maps_between))
    (folder.root / "curve.json").write_text(json.dumps({"points": points}) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
