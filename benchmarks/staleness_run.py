"""One run of the staleness study: the quickstart task trained at one fixed age with one objective and one seed.

An in-process loop with the real trainer, objectives, credit and packing. A shelf of `age` rounds stands in front of the
learner: round r is sampled by version max(0, r - age) and trained by the step that starts from version r, as
`coordinator.lockstep` does with `max_age_steps = age`. So the first rounds all come from the start policy, a step's age
is min(r, age), and every run samples and trains the same number of rounds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.staleness_rollouts import Rollouts
from trace_async.app import wiring
from trace_async.config import Config
from trace_async.config_load import load_config
from trace_async.coordination.rounds import Draft, RoundPlanner
from trace_async.core.outcomes import is_success
from trace_async.core.types import Group, GrownBy, Lease, NodeState, Score, TreeBudget
from trace_async.learning.batching import BatchRule, make_batch
from trace_async.methods.credit import credit_rule
from trace_async.methods.objective_kinds import Scope, kind_of
from trace_async.rendering import load_renderer
from trace_async.trainer import Trainer

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.toml"
EPOCH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a run does."""

    steps: int = 48
    roots: int = 16
    learning_rate: float = 3e-4
    sampled_tasks: int = 512  # held-out tasks played with sampled tokens after the last step
    greedy_tasks: int = 256  # with the most likely ones
    between_tasks: int = 128  # with sampled ones, after the steps of `between`
    between: tuple[int, ...] = (24,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One objective as the study sets it."""

    label: str
    objective: Mapping[str, object] = field(default_factory=dict)  # keys of `[objective]` beside the quickstart's
    soft: bool = False  # keeps the soft bound on ages, beyond which caps are 1


NO_BRAKE: dict[str, object] = {"m2_budget": 0.0}
NO_VETO: dict[str, object] = {"veto_low": 0.0, "veto_high": 1e9, "veto_token": 0.0}

METHODS: dict[str, Method] = {
    "none": Method(label="no correction", objective={"kind": "reinforce", **NO_VETO}),
    "tis": Method(label="TIS", objective={"kind": "reinforce", "options.cap": 2.0, **NO_VETO}),
    "unbraked": Method(label="default without its brake", objective=NO_BRAKE, soft=True),
    "default": Method(label="default", soft=True),
    "decoupled": Method(
        label="decoupled PPO",
        objective={"kind": "ppo", "proximal": "interpolated", "cap_decay": 1.0, **NO_VETO},
    ),
    "m2po": Method(label="M2PO", objective={"kind": "m2po", "cap_decay": 1.0, **NO_VETO}),
    "lpo": Method(label="LPO", objective={"kind": "lpo", **NO_VETO}),
    "no_veto": Method(label="no brake, no veto", objective={**NO_BRAKE, **NO_VETO}, soft=True),
    "no_soft": Method(label="no brake, no soft bound", objective=NO_BRAKE),
    "ppo": Method(label="PPO", objective={"kind": "ppo", "cap_decay": 1.0, **NO_VETO}),
    "no_mask": Method(label="M2PO, no mask", objective={"cap_decay": 1.0, **NO_BRAKE, **NO_VETO}),
}
MAIN = ("none", "tis", "unbraked", "default", "decoupled", "m2po", "ppo", "lpo")
"""The study; the others say which part of a method does what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run."""

    method: str
    age: int
    seed: int


def config_of(cell: Cell, sizes: Sizes) -> Config:
    """The quickstart's configuration with what the cell changes."""
    settings: dict[str, object] = {
        "run.seed": cell.seed,
        "tree.roots_per_step": sizes.roots,
        "prompts.candidates_per_round": 2 * sizes.roots,
        "learner.learning_rate": sizes.learning_rate,
        "learner.max_steps": sizes.steps,
        "learner.device": "cpu",
        "engine.device": "cpu",
        "coordinator.max_age_steps": cell.age,
    }
    method = METHODS[cell.method]
    settings["coordinator.soft_age_steps"] = min(2, cell.age) if method.soft else cell.age
    settings |= {f"objective.{key}": value for key, value in method.objective.items()}
    if cell.age <= 1:  # one step behind the trained policy is the one that sampled
        settings["objective.proximal"] = "behaviour"
    overrides = [f'{key}="{value}"' if isinstance(value, str) else f"{key}={value}" for key, value in settings.items()]
    return load_config(QUICKSTART, overrides)


class Run:
    """One run's parts; `play` once."""

    def __init__(self, cell: Cell, sizes: Sizes, *, start_rounds: dict[tuple[int, int], list[Group]]) -> None:
        """`start_rounds`: what the start policy sampled, by seed and round: equal for every cell of a seed."""
        self._cell, self._sizes = cell, sizes
        self._config = config = config_of(cell, sizes)
        self._start_rounds = start_rounds
        renderer = load_renderer(wiring.policy_path(config.policy.path))
        self._predictor = wiring.build_predictor(config, text_of=renderer.text)
        self._beliefs = wiring.build_predictor(config, text_of=renderer.text)
        self._rollouts = Rollouts(config, predictor=self._beliefs)
        self._planner: RoundPlanner = wiring.build_planner(config, beliefs=self._beliefs, renderer=renderer)
        self._trainer = Trainer(
            wiring.policy_path(config.policy.path),
            learner=config.learner,
            objective=config.objective,
            temperature=config.engine.temperature,
            seed=cell.seed,
        )
        kind = kind_of(config.objective)
        self._rule = BatchRule(
            credit=credit_rule(config.learner.credit),
            soft_age_steps=config.coordinator.soft_age_steps,
            max_age_steps=cell.age,
            pad_id=renderer.pad_id,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            packs_trees=self._trainer.packs_trees,
            signal=kind.signal,
            whole_trees=kind.scope is Scope.TREE,
            updates_per_step=config.learner.updates_per_step,
        )
        self._tasks = [self._rollouts.kit.tasks.task("heldout", index) for index in range(sizes.sampled_tasks)]

    def play(self) -> dict[str, Any]:
        """The run's result."""
        started_s = time.process_time()
        shelf: deque[list[Group]] = deque(self._sample(number) for number in range(self._cell.age))
        rows, points = [], []
        for step in range(self._sizes.steps):
            shelf.append(self._sample(step + self._cell.age))
            rows.append(self._train(shelf.popleft()))
            if step + 1 in self._sizes.between:
                tasks = self._tasks[: self._sizes.between_tasks]
                points.append([step + 1, round(self._rollouts.success(tasks, greedy=False), 4)])
        success = self._rollouts.success(self._tasks, greedy=False)
        greedy = self._rollouts.success(self._tasks[: self._sizes.greedy_tasks], greedy=True)
        return {
            **asdict(self._cell),
            "success": round(success, 4),
            "greedy": round(greedy, 4),
            "points": [*points, [self._sizes.steps, round(success, 4)]],
            **summary(rows),
            "cpu_s": round(time.process_time() - started_s, 1),
        }

    def _sample(self, number: int) -> list[Group]:
        """Round `number`, with the weights of now."""
        key = (self._cell.seed, number)
        if self._rollouts.version == 0 and key in self._start_rounds:
            self._planner.skip()
            return self._start_rounds[key]
        leases = [self._lease(draft, number) for draft in self._planner.plan(number)]
        groups = self._rollouts.grow(leases)
        if self._rollouts.version == 0:
            self._start_rounds[key] = groups
        return groups

    def _train(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step on these groups, after which their successors are sampled with what it made."""
        trainer = self._trainer
        version = trainer.version
        batch = make_batch(groups, rule=self._rule, version=version, epoch=EPOCH)
        stats = trainer.step(batch.minibatches)
        self._predictor.observe(groups)
        self._beliefs.load(self._predictor.parameters(), version=trainer.version)
        self._rollouts.take_over(trainer.model.state_dict(), version=trainer.version)
        played = np.concatenate([item.ages[item.ages >= 0] for item in batch.items])
        return {
            **stats,
            "sampled_tokens": float(sum(group.num_sampled_tokens for group in groups)),
            "success": fmean(success for group in groups for success in root_successes(group)),
            "age_min": float(played.min()),
            "age_max": float(played.max()),
            "trained_tokens": stats.get("objective/tokens", 0.0),
        }

    def _lease(self, draft: Draft, number: int) -> Lease:
        version = self._rollouts.version
        return Lease(
            lease_id=f"{number}-{draft.task.task_id}",
            prompt_id=draft.task.task_id,
            task=draft.task,
            budget=TreeBudget(roots=draft.roots, continuations=draft.roots * self._config.tree.continuations_per_root),
            seed=self._cell.seed,
            round_index=draft.visit,
            attempt=0,
            issued_version=version,
            deadline_s=3600.0,
            root_score=Score(success=draft.success, predictor_version=version, strength=draft.strength),
        )


def root_successes(group: Group) -> list[bool]:
    """Of each root rollout, whether it succeeded."""
    chain = {int(group.parent[k]): k for k in range(group.num_turns) if group.grown_by[k] == GrownBy.CHAIN}
    found = []
    for turn in range(group.num_turns):
        if group.grown_by[turn] == GrownBy.ROOT:
            while turn in chain:
                turn = chain[turn]
            if group.state[turn] == NodeState.LEAF:
                found.append(bool(is_success(group.outcome[turn], group.success_above)))
    return found


MEANS = {
    "ess_ratio": "objective/ess_ratio",
    "kl_k3": "objective/kl_k3",
    "vetoed_share": "objective/vetoed_share",
    "capped_share": "objective/capped_share",
    "log_ratio_sq": "objective/log_ratio_sq_mean",
    "harmful_sq": "objective/harmful_sq_mean",
    "max_abs_log_ratio": "objective/max_abs_log_ratio",
    "grad_norm": "actor/grad_norm",
}
"""Of a run's steps at full age, by their keys in a step's metrics."""


def summary(rows: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """What a run's steps say: means over the steps at full age, totals, and the training curve by tenths."""
    oldest = max(row["age_max"] for row in rows)
    full = [row for row in rows if row["age_min"] == oldest]
    last = rows[-max(1, len(rows) // 4) :]
    width = max(1, len(rows) // 10)
    return {
        "train_success_last_quarter": round(fmean(row["success"] for row in last), 4),
        "curve": [
            round(fmean(row["success"] for row in rows[start : start + width]), 4)
            for start in range(0, len(rows), width)
        ],
        **{name: _mean([row[key] for row in full if key in row]) for name, key in MEANS.items()},
        "steps_at_full_age": len(full),
        "age_reached": int(oldest),
        "skipped_steps": int(rows[-1]["actor/skipped_steps"]),
        "steps_without_loss": sum("objective/tokens" not in row for row in rows),
        "sampled_tokens": int(sum(row["sampled_tokens"] for row in rows)),
        "trained_tokens": int(sum(row["trained_tokens"] for row in rows)),
    }


def _mean(values: Sequence[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return float(f"{fmean(known):.5g}") if known else None
