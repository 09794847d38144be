"""Short trainings that one process or several do alike, and what starts the several.

`play_all` is the same for any number of ranks: it trains each case, checkpoints in between, and the leader writes what
it found. `python -m tests.ranks_kit FOLDER POLICY OTHERS` is one rank, placed by torchrun's environment; when it has
played, it goes on with steps that rank 0 drives, until the test ends it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.trainer_kit import OPEN_OBJECTIVE, Layout, items, minibatch
from trace_async.app.learner_ranks import environments
from trace_async.config import LearnerConfig, ObjectiveConfig
from trace_async.core.packing import Minibatch, pack
from trace_async.core.tree_packing import pack_trees
from trace_async.errors import RankError
from trace_async.trainer import Trainer
from trace_async.trainer_lifeline import Member, open_follower, open_leader, this_member
from trace_async.trainer_ranks import ALONE, Ranks, joined
from trace_async.trainer_remote import LeadingTrainer, follow

PROMPTS = [np.arange(3, 20, dtype=np.int32), np.array([5, 4], np.int32)]
STEPPING = "stepping"
"""File that says: all is played, and rank 0 drives steps now."""

# Adam divides by the root of the gradient's square: far above the rounding of gradients that are almost zero, which it
# would blow up to whole steps. Gradients are long enough to be clipped.
LEARNER = LearnerConfig(learning_rate=1e-2, adam_eps=1e-4, max_grad_norm=0.01, device="cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training of three steps."""

    learner: LearnerConfig = LEARNER
    objective: ObjectiveConfig = OPEN_OBJECTIVE
    layout: Layout = pack_trees
    micro_batch_tokens: int = 64
    groups: int = 4  # per update
    changes: dict[str, Any] = field(default_factory=dict)  # of the items
    resumes: bool = False  # also from where others stood after two steps


CASES = {
    "all weights": Case(resumes=True),
    "pairs": Case(learner=replace(LEARNER, lora_rank=4, lora_alpha=8.0), resumes=True),
    "trees in parts": Case(objective=replace(OPEN_OBJECTIVE, kind="vtrace"), layout=pack, changes={"whole_tree": True}),
    "brakes on one batch": Case(
        learner=replace(LEARNER, ess_scaled=True, schedule="cosine", decay_to=0.1, max_steps=4, warmup_steps=2),
        objective=replace(OPEN_OBJECTIVE, m2_budget=0.04),
        micro_batch_tokens=4096,
    ),
    "recomputed pairs in bfloat16": Case(
        learner=replace(LEARNER, lora_rank=4, compute_dtype="bfloat16", activation_checkpointing=True)
    ),
}


def make_trainer(case: Case, policy: Path, ranks: Ranks = ALONE) -> Trainer:
    return Trainer(policy, learner=case.learner, objective=case.objective, temperature=0.9, seed=1, ranks=ranks)


def update(case: Case, seed: int) -> Minibatch:
    made = [replace(item, **case.changes) for item in items(seed, case.groups)]
    return minibatch(made, layout=case.layout, micro_batch_tokens=case.micro_batch_tokens)


def play_first(case: Case, trainer: Trainer) -> list[dict[str, float]]:
    return [dict(trainer.step([update(case, seed)])) for seed in (0, 1)]


def play_last(case: Case, trainer: Trainer) -> list[dict[str, float]]:
    return [dict(trainer.step([update(case, 2)]))]


def play_all(folder: Path, policy: Path, ranks: Ranks, *, others: Path) -> None:
    """Every case into folder/NAME; `others`/NAME/saved are checkpoints of another number of ranks."""
    for name, case in CASES.items():
        place = folder / name
        if ranks.leads:
            (place / "saved").mkdir(parents=True)
        trainer = make_trainer(case, policy, ranks)
        found = play_first(case, trainer)
        trainer.save(place / "saved")
        found += play_last(case, trainer)
        said = [logprobs.tolist() for logprobs in trainer.canary(PROMPTS).logprobs]
        trainer.save_weights(place / "weights.safetensors")
        if case.resumes:
            trainer.export(place / "policy")
            trainer.load(others / name / "saved")
            found += play_last(case, trainer)
            trainer.save_weights(place / "resumed.safetensors")
        if ranks.leads:
            rows = [len(update(case, seed).rows) for seed in range(3)]
            dtypes = sorted({str(parameter.dtype) for parameter in trainer.model.parameters()})
            report = {"steps": found, "canary": said, "rows": rows, "dtypes": dtypes}
            (place / "report.json").write_text(json.dumps(report))


@contextmanager
def processes(arguments: Sequence[str], *, size: int) -> Iterator[list[subprocess.Popen[str]]]:
    """`python ARGUMENTS` as each of `size` ranks; none is left afterwards."""
    started = [
        subprocess.Popen(
            [sys.executable, *arguments], env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for place in environments({**os.environ, "OMP_NUM_THREADS": "1"}, processes=size)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def main() -> None:
    """One rank."""
    folder, policy, others = (Path(argument) for argument in sys.argv[1:])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with joined(rank=rank, size=size, device=torch.device("cpu"), deadline_s=60.0) as ranks:
        play_all(folder, policy, ranks, others=others)
        _go_on(folder, make_trainer(CASES["all weights"], policy, ranks), ranks)


def _go_on(folder: Path, trainer: Trainer, ranks: Ranks) -> None:
    """Steps until a rank is lost."""
    listener = socket.create_server(("127.0.0.1", 0))
    found = ranks.agree({"port": listener.getsockname()[1], "leader": asdict(this_member(0))})
    if not ranks.leads:
        listener.close()
        address, leader = ("127.0.0.1", found["port"]), Member(**found["leader"])
        with open_follower(address, rank=ranks.rank, leader=leader, deadline_s=10.0, on_loss=_ignore) as lifeline:
            follow(trainer, ranks=ranks, lifeline=lifeline)
        return
    with open_leader(listener, others=ranks.size - 1, deadline_s=10.0, on_loss=_ignore) as lifeline:
        leading = LeadingTrainer(trainer, ranks=ranks, lifeline=lifeline)
        while True:
            leading.step([update(CASES["all weights"], 0)])
            (folder / STEPPING).touch()


def _ignore(error: RankError) -> None:
    """The call under way raises it."""


if __name__ == "__main__":
    main()
