"""Lockstep: who samples what with which version, and what a step consumes, whatever happens when."""

from __future__ import annotations

import random

import pytest

from tests.fleet_world import FAR, World, make_road_config, make_tree_config
from tests.test_coordinator import heal_and_run, random_event, ship_all
from trace_async.coordination.slots import Arrival, SlotState, place_of
from trace_async.core.types import GroupVerdict

MANY = 10_000
"""Attempts that no test uses up."""


def lockstep_world(
    *, max_age_steps: int = 1, max_attempts: int = MANY, actors: str = "a", capacity: int = 999
) -> World:
    world = World(road=make_road_config(max_age_steps=max_age_steps, max_attempts=max_attempts, lockstep=True))
    for actor_id in actors:
        world.join(actor_id, capacity=capacity)
        world.confirm(actor_id)
    return world


def round_of(lease_id: str) -> int:
    return int(place_of(lease_id).split("-")[0])


def trained_prompts(world: World) -> list[list[tuple[str, str, int]]]:
    """Of every step: place in the plan, prompt and roots of what it consumed, in order."""
    return [
        [(place_of(i).split(".")[0], world.leases[i].prompt_id, world.leases[i].budget.roots) for i in batch]
        for _, batch in world.trained
    ]


def whole_run(*, max_age_steps: int, steps: int) -> list[list[tuple[str, str, int]]]:
    """What a run consumes to which nothing happens."""
    world = lockstep_world(max_age_steps=max_age_steps)
    while world.step < steps:
        ship_all(world, "a")
        assert world.consume()
        world.confirm("a")
    return trained_prompts(world)


# ---- pace ----------------------------------------------------------------------------------------------------------


def test_a_step_waits_until_everything_that_is_out_is_back() -> None:
    world = lockstep_world(max_age_steps=2)
    *most, last = world.actors["a"].leases
    assert {round_of(lease_id) for lease_id in most} == {0, 1, 2}
    for lease_id in most:
        world.finish("a", lease_id)
        world.ship("a", lease_id)
    assert not world.consume()

    world.finish("a", last)
    world.ship("a", last)

    assert world.consume()


def test_a_step_takes_its_own_round_in_the_order_of_the_plan_whatever_order_the_groups_came_in() -> None:
    world = lockstep_world(max_age_steps=2)
    for lease_id in reversed(list(world.actors["a"].leases)):
        world.finish("a", lease_id)
        world.ship("a", lease_id)

    world.consume()

    assert trained_prompts(world) == whole_run(max_age_steps=2, steps=1)


def test_no_lease_goes_out_before_its_actor_has_confirmed_the_newest_version() -> None:
    world = lockstep_world(max_age_steps=1, actors="ab", capacity=4)
    while world.step == 0:
        for actor_id in "ab":
            ship_all(world, actor_id)
        world.consume()
    assert not world.actors["a"].leases

    world.confirm("b")

    assert {round_of(lease_id) for lease_id in world.actors["b"].leases} == {2}
    assert not world.actors["a"].leases


def test_a_lease_of_a_lost_actor_goes_out_again_at_the_version_of_its_round() -> None:
    world = lockstep_world(max_age_steps=0, actors="ab")
    ship_all(world, "a")
    ship_all(world, "b")
    world.consume()
    world.confirm("a")
    world.confirm("b")
    world.kill("a", noticed=True)

    ship_all(world, "b")
    world.consume()

    assert trained_prompts(world) == whole_run(max_age_steps=0, steps=2)
    assert world.oldest_age == 0


def test_a_rejected_tree_is_missing_from_its_round_and_holds_nothing_up() -> None:
    world = lockstep_world(max_age_steps=0, max_attempts=1)
    lost, *others = list(world.actors["a"].leases)
    world.give_back("a", [lost])
    for lease_id in others:
        world.finish("a", lease_id)
        world.ship("a", lease_id)

    assert world.coordinator.next_batch(version=0, wanted_roots=FAR) == others


def test_a_round_of_which_every_tree_was_rejected_is_an_empty_step() -> None:
    world = lockstep_world(max_age_steps=0, max_attempts=1)
    world.give_back("a", list(world.actors["a"].leases))
    assert world.coordinator.next_batch(version=0, wanted_roots=FAR) == []

    world.consume()
    world.confirm("a")
    ship_all(world, "a")
    world.consume()

    assert trained_prompts(world) == [[], whole_run(max_age_steps=0, steps=2)[1]]


def test_nothing_is_planned_that_the_run_will_not_come_to() -> None:
    world = lockstep_world(max_age_steps=3, actors="")
    world.coordinator.join("a", capacity_roots=999, live_leases=[], now_s=0.0)
    world.coordinator.confirm("a", version=0, epoch=1)

    issued = world.coordinator.next_leases(0.0, version=0, wanted_roots=2 * world.tree.roots_per_step)

    assert {round_of(lease.lease_id) for _, lease in issued} == {0, 1}


# ---- restarts ------------------------------------------------------------------------------------------------------


def killed_two_steps_after_its_checkpoint(*, capacity: int) -> World:
    """Checkpoint at step 0, killed at step 2, while part of round 3 is out (age 1)."""
    world = lockstep_world(max_age_steps=1, capacity=capacity)
    world.save()
    while world.step < 2:
        ship_all(world, "a")
        world.consume()
        world.confirm("a")
    world.restart()
    return world


def test_leases_of_later_rounds_wait_after_a_restart_until_their_version_is_made_again() -> None:
    world = killed_two_steps_after_its_checkpoint(capacity=999)
    held = [lease_id for lease_id in world.actors["a"].leases if round_of(lease_id) == 3]
    assert set(held) == set(world.coordinator.early.live)

    world.join("a", capacity=999)
    world.confirm("a")

    assert not world.actors["a"].leases, "what was sampled by weights that are gone is not gone on with"
    for version in (0, 1):
        assert world.consume(), f"rounds {version} and {version + 1} are in the ledger"
        world.confirm("a")
    world.pass_time(1.0)
    assert {round_of(lease_id) for lease_id in world.actors["a"].leases} == {3}
    ship_all(world, "a")
    world.consume()
    assert trained_prompts(world) == whole_run(max_age_steps=1, steps=3)


def test_a_round_of_which_only_a_part_was_leased_is_whole_after_a_restart() -> None:
    world = killed_two_steps_after_its_checkpoint(capacity=1)  # one tree at a time
    leased = {place_of(lease_id).split(".")[0] for lease_id in world.leases if round_of(lease_id) == 3}
    assert len(leased) == 1
    world.join("a", capacity=999)

    for _ in range(4):
        world.confirm("a")
        world.pass_time(1.0)
        ship_all(world, "a")
        world.consume()

    assert trained_prompts(world) == whole_run(max_age_steps=1, steps=4)


def test_a_group_of_a_later_round_that_comes_after_a_restart_is_kept_for_its_round() -> None:
    world = lockstep_world(max_age_steps=1)
    world.save()
    while world.step < 2:
        ship_all(world, "a")
        world.consume()
        world.confirm("a")
    late, *_ = world.actors["a"].leases
    world.finish("a", late)
    world.restart()

    assert world.ship("a", late, ack_lost=True) is Arrival.ACCEPT
    assert world.ship("a", late) is Arrival.DUPLICATE

    world.join("a", capacity=999)
    for _ in range(4):
        world.confirm("a")
        world.pass_time(1.0)
        ship_all(world, "a")
        world.consume()
    assert late in world.trained[3][1]
    assert trained_prompts(world) == whole_run(max_age_steps=1, steps=4)


def test_groups_that_do_not_fit_the_plan_that_is_made_again_are_given_up_and_hold_nothing_up() -> None:
    world = killed_two_steps_after_its_checkpoint(capacity=999)
    world.join("a", capacity=999)
    ids = {lease_id for lease_id in world.leases if round_of(lease_id) == 2}
    world.coordinator._planner._prompts.take(5)  # as if the weights had come out otherwise

    for _ in range(4):
        world.confirm("a")
        world.pass_time(1.0)
        ship_all(world, "a")
        world.consume()

    assert world.step == 4
    assert ids.isdisjoint(world.trained[2][1])


# ---- random runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_whatever_happens_every_round_is_of_its_version_and_the_run_consumes_what_an_undisturbed_one_does(
    max_age_steps: int,
) -> None:
    for seed in range(6):
        run_randomly(seed, max_age_steps=max_age_steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_the_same_in_hundreds_of_runs(max_age_steps: int) -> None:
    for seed in range(6, 300):
        run_randomly(seed, max_age_steps=max_age_steps)


def run_randomly(seed: int, *, max_age_steps: int) -> None:
    draw = random.Random(f"{max_age_steps}/{seed}")
    road = make_road_config(max_age_steps=max_age_steps, max_attempts=MANY, lockstep=True)
    world = World(road=road, tree=make_tree_config())
    for _ in range(80):
        random_event(world, draw)
        if draw.random() < 0.3:
            bring_on(world, draw)
    heal_and_run(world, steps=3)
    for step, batch in world.trained:
        of_round = {world.sampled_at[lease_id] for lease_id in batch}
        assert of_round == {max(0, step - 1 - max_age_steps)}, f"seed {seed}, step {step}"
    whole = whole_run(max_age_steps=max_age_steps, steps=world.step)
    assert trained_prompts(world) == whole[-len(world.trained) :]


def bring_on(world: World, draw: random.Random) -> None:
    """Most of what is out comes back, so that random runs get anywhere."""
    for actor_id in sorted(world.actors):
        if world.coordinator.fleet.get(actor_id) is None:
            world.join(actor_id)
        world.confirm(actor_id)
        for lease_id in sorted(world.actors[actor_id].leases):
            if lease_id in world.actors[actor_id].leases and draw.random() < 0.9:
                world.finish(actor_id, lease_id)
                world.ship(actor_id, lease_id)
    world.consume(draw.choice(list(GroupVerdict)))


@pytest.mark.parametrize("max_attempts", [1, 2])
def test_trees_that_are_given_up_do_not_stop_a_run(max_attempts: int) -> None:
    for seed in range(10):
        draw = random.Random(f"few attempts/{max_attempts}/{seed}")
        world = World(road=make_road_config(max_age_steps=1, max_attempts=max_attempts, lockstep=True))
        for _ in range(60):
            random_event(world, draw)
        heal_and_run(world, steps=2)
        assert all(
            slot.state is not SlotState.SHELVED or slot.round_number >= world.step for slot in world.coordinator.slots
        )
