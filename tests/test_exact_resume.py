"""A run in lockstep that is killed anywhere and resumed is the run that was not: same batches, same rows."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.learner_world import ROADS, FakeActor, LearnerWorld, pure
from tests.virtual_time import run
from trace_async.config import LearnerConfig
from trace_async.errors import UserError
from trace_async.learning.checkpoint import newest_checkpoint, read_state
from trace_async.ledger import Ledger
from trace_async.predictors.protocol import Predictor
from trace_async.predictors.registry import make_predictor

STEPS = 7

UP_TO_TIMING = ("timing_s/", "publication/", "wire/", "engine/idle_share", "training/epoch")
"""Keys, or beginnings of keys, that tell of time or of one start."""


def exact(row: dict[str, float]) -> dict[str, float | None]:
    """What a row says that timing has no part in; None for NaN, which equals nothing."""
    known = {key: None if math.isnan(value) else value for key, value in row.items()}
    return {
        key: value
        for key, value in known.items()
        if not key.startswith(UP_TO_TIMING) and not key.endswith("_per_s") and not key.endswith("_s_total")
    }


def lockstep_world(
    root: Path, *actors: FakeActor, max_age_steps: int, make: Callable[[], Predictor] | None = None
) -> LearnerWorld:
    root.mkdir(parents=True, exist_ok=True)
    world = LearnerWorld(
        root=root,
        actors=actors or (FakeActor("a"), FakeActor("b", capacity=4)),
        learner=LearnerConfig(max_steps=STEPS, checkpoint_every_steps=2),
        road=replace(
            ROADS,
            lockstep=True,
            max_attempts=1000,
            max_age_steps=max_age_steps,
            soft_age_steps=min(1, max_age_steps),
        ),
    )
    if make is not None:
        world.make_predictor = make
    return world


def rows_by_step(world: LearnerWorld) -> dict[float, dict[str, float | None]]:
    """The last row of every step."""
    return {row["training/global_step"]: exact(row) for row in world.rows.rows}


def run_with_kills(world: LearnerWorld, *, seed: int) -> None:
    draw = pure("kills", seed)
    for _ in range(6):
        effects = draw.choice([None, draw.randint(0, 40)])
        run(world.train_and_kill(draw.uniform(0.5, 12.0), after_effects=effects))
        for actor in world.actors:
            if draw.random() < 0.3:  # it dies too and comes back with nothing
                actor.leases.clear()
                actor.unacked.clear()
    run(world.train())


@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_whatever_the_learner_is_killed_at_the_rows_and_the_order_of_training_are_those_of_the_whole_run(
    tmp_path: Path, max_age_steps: int
) -> None:
    check_kills(tmp_path, range(5), max_age_steps=max_age_steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_the_same_at_hundreds_of_points(tmp_path: Path, max_age_steps: int) -> None:
    check_kills(tmp_path, range(5, 120), max_age_steps=max_age_steps)


def check_kills(tmp_path: Path, seeds: range, *, max_age_steps: int) -> None:
    whole = lockstep_world(tmp_path / "whole", max_age_steps=max_age_steps)
    run(whole.train())
    expected = rows_by_step(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    ages = [min(step - 1, max_age_steps) for step in range(1, STEPS + 1)]
    assert [expected[step]["staleness/age_max"] for step in sorted(expected)] == ages
    assert [expected[step]["staleness/age_mean"] for step in sorted(expected)] == ages
    for seed in seeds:
        killed = lockstep_world(tmp_path / str(seed), max_age_steps=max_age_steps)
        run_with_kills(killed, seed=seed)
        assert rows_by_step(killed) == expected, f"seed {seed}"
        assert killed.trainer.weights == whole.trainer.weights, f"seed {seed}"


def test_a_predictor_that_learns_goes_on_where_it_stood(tmp_path: Path) -> None:
    def make() -> Predictor:
        return make_predictor("hashed", {}, seed=5, text_of=str)

    whole = lockstep_world(tmp_path / "whole", max_age_steps=1, make=make)
    killed = lockstep_world(tmp_path / "killed", max_age_steps=1, make=make)
    run(whole.train())

    run_with_kills(killed, seed=1)

    assert rows_by_step(killed) == rows_by_step(whole)


def test_actors_that_fail_every_tree_of_a_run_leave_empty_steps_and_no_stall(tmp_path: Path) -> None:
    world = lockstep_world(tmp_path, FakeActor("a", mute=True), max_age_steps=1)
    world.road = replace(world.road, max_attempts=1)

    run(world.train())

    rows = [row for row in world.rows.rows if row["training/global_step"] == STEPS]
    assert world.trainer.version == STEPS
    assert world.trainer.weights == []
    assert rows[0]["groups/rejected_total"] > 0


# ---- what a checkpoint has -----------------------------------------------------------------------------------------


def test_a_damaged_newest_checkpoint_costs_its_steps_and_nothing_else(tmp_path: Path) -> None:
    whole = lockstep_world(tmp_path / "whole", max_age_steps=1)
    killed = lockstep_world(tmp_path / "killed", max_age_steps=1)
    run(whole.train())
    killed.learner = replace(killed.learner, max_steps=5)
    run(killed.train())
    newest = newest_checkpoint(killed.folder.checkpoints)
    assert newest is not None
    (newest / "predictor.json").write_text("{}")
    killed.learner = whole.learner

    run(killed.train())

    assert newest.name == "step_000005"
    assert newest.with_name("step_000005.damaged").exists()
    assert killed.trainer.weights == whole.trainer.weights
    assert rows_by_step(killed)[STEPS] == rows_by_step(whole)[STEPS]


def test_a_checkpoint_knows_the_success_since_the_one_before_and_the_best_is_kept(tmp_path: Path) -> None:
    world = lockstep_world(tmp_path, max_age_steps=1)

    run(world.train())

    names = sorted(path.name for path in world.folder.checkpoints.iterdir())
    listed = read_state(world.folder.checkpoints / "step_000006", "files.json")
    assert listed["success"] == pytest.approx(1 / 3)
    assert names == ["step_000006", "step_000007"], "equally good, so the newest is the best"


def test_a_configuration_that_contradicts_the_checkpoint_is_refused_by_the_learner_too(tmp_path: Path) -> None:
    world = lockstep_world(tmp_path, max_age_steps=1)
    run(world.train())
    world.told = {**world.told, "run": {"seed": 6}, "learner": {"lora_rank": 8, "learning_rate": 3e-3}}

    with pytest.raises(UserError) as refused:
        run(world.train())

    assert "run.seed is 6, but the run in" in str(refused.value)
    assert "learner.lora_rank is 8, but" in str(refused.value)
    assert "learning_rate" not in str(refused.value)


def test_a_ledger_that_is_older_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    world = lockstep_world(tmp_path, max_age_steps=1)
    run(world.train())
    for path in tmp_path.glob("ledger.sqlite*"):
        path.unlink()

    with pytest.raises(UserError, match=r"the ledger knows 0 leases, the checkpoint of step 7 was made with \d+"):
        run(world.train())


# ---- a crash of the machine ----------------------------------------------------------------------------------------


class SlowDisk(Ledger):
    """A ledger of which the machine keeps nothing that was committed after the last `sync`."""

    def sync(self) -> None:
        super().sync()
        survives = self._path.parent / "survives"
        shutil.rmtree(survives, ignore_errors=True)
        survives.mkdir()
        for path in self._path.parent.glob("ledger.sqlite*"):
            if not path.name.endswith("-shm"):
                shutil.copy(path, survives)


def lose_power(root: Path) -> None:
    """The ledger's files become what they were at the last `sync`; checkpoints were synced all along."""
    for path in root.glob("ledger.sqlite*"):
        path.unlink()
    for path in (root / "survives").glob("*"):
        shutil.copy(path, root)


@pytest.mark.parametrize("max_age_steps", [0, 2])
def test_a_machine_that_loses_the_ledgers_last_commits_loses_their_sampling_and_nothing_else(
    tmp_path: Path, max_age_steps: int
) -> None:
    whole = lockstep_world(tmp_path / "whole", max_age_steps=max_age_steps)
    run(whole.train())
    for seed in range(3):
        draw = pure("power", seed)
        world = lockstep_world(tmp_path / str(seed), max_age_steps=max_age_steps)
        for _ in range(3):
            run(world.train_and_kill(draw.uniform(6.0, 20.0), after_effects=draw.choice([None, 30]), ledger=SlowDisk))
            if newest_checkpoint(world.folder.checkpoints) is not None:
                lose_power(world.root)
            for actor in world.actors:
                actor.leases.clear()
                actor.unacked.clear()
        run(world.train())
        assert rows_by_step(world) == rows_by_step(whole), f"seed {seed}"
        assert world.trainer.weights == whole.trainer.weights, f"seed {seed}"


def test_a_ledger_in_memory_has_nothing_to_bring_to_a_disk() -> None:
    Ledger(Path(":memory:")).sync()
