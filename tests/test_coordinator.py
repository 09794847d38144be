"""The coordinator: conservation, permits, exactly-once, age bound and re-leases, in chosen scenes and random runs."""

from __future__ import annotations

import random

import pytest

from tests.fleet_world import FAR, World, make_coordinator, make_road_config, make_tree_config
from trace_async.coordination.leases import REJECTED
from trace_async.coordination.slots import Arrival, SlotState
from trace_async.core.types import GroupVerdict
from trace_async.errors import InvariantError
from trace_async.methods.root_allocators import ROOT_ALLOCATORS


def one_actor(*, max_age_steps: int = 2, max_attempts: int = 3, capacity: int = 8) -> World:
    """A world with actor `a`, which holds the leases it was given at version 0."""
    world = World(road=make_road_config(max_age_steps=max_age_steps, max_attempts=max_attempts))
    world.join("a", capacity=capacity)
    world.confirm("a")
    return world


def ship_all(world: World, actor_id: str) -> None:
    for lease_id in list(world.actors[actor_id].leases):
        if lease_id in world.actors[actor_id].leases:  # a group may end a second attempt of the same actor
            world.finish(actor_id, lease_id)
            world.ship(actor_id, lease_id)


# ---- planning and permits ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root_allocator", sorted(ROOT_ALLOCATORS))
def test_each_round_gives_out_exactly_the_roots_of_a_step(root_allocator: str) -> None:
    world = World(tree=make_tree_config(root_allocator=root_allocator, roots_per_step=7, max_roots=3))
    world.join("a", capacity=999)
    world.confirm("a")

    leases = list(world.actors["a"].leases.values())

    assert sum(lease.budget.roots for lease in leases) == 3 * 7
    assert all(1 <= lease.budget.roots <= 3 for lease in leases)
    assert all(lease.budget.continuations == lease.budget.roots for lease in leases)


def test_an_even_allocator_visits_only_as_many_prompts_as_it_needs() -> None:
    world = World(tree=make_tree_config(root_allocator="even", roots_per_step=6, max_roots=3))
    world.join("a", capacity=999)
    world.confirm("a")

    assert [lease.prompt_id for lease in world.actors["a"].leases.values()] == [f"train-{index}" for index in range(6)]


def test_no_more_roots_are_out_than_there_are_permits() -> None:
    world = one_actor(max_age_steps=1, capacity=999)

    assert world.check().committed_roots == 12
    ship_all(world, "a")
    assert world.check().committed_roots == 12, "a group on the shelf still holds its permits"
    world.consume()
    world.confirm("a")
    assert world.check().shelved_roots + sum(x.budget.roots for x in world.actors["a"].leases.values()) <= 12


def test_nothing_is_planned_beyond_what_the_run_will_consume() -> None:
    tree, road = make_tree_config(), make_road_config(max_age_steps=4)
    coordinator = make_coordinator(tree=tree, road=road)
    coordinator.join("a", capacity_roots=999, live_leases=[], now_s=0.0)
    coordinator.confirm("a", version=0, epoch=1)

    issued = coordinator.next_leases(0.0, version=0, wanted_roots=2 * tree.roots_per_step)

    assert sum(lease.budget.roots for _, lease in issued) == 2 * tree.roots_per_step


def test_an_actor_gets_nothing_before_it_holds_a_version() -> None:
    world = World()

    world.join("a")
    assert world.actors["a"].leases == {}
    world.confirm("a")
    assert world.actors["a"].leases != {}


def test_a_confirmation_of_an_earlier_epoch_does_not_count() -> None:
    world = World()
    world.join("a")

    world.coordinator.confirm("a", version=0, epoch=0)

    assert world.coordinator.next_leases(0.0, version=0, wanted_roots=FAR) == []


def test_a_heartbeat_of_an_earlier_epoch_is_a_sign_of_life_and_says_nothing_about_the_version() -> None:
    world = World()
    world.join("a")

    assert world.coordinator.heartbeat("a", 5.0, version=0, epoch=0)
    assert world.coordinator.next_leases(5.0, version=0, wanted_roots=FAR) == []

    assert world.coordinator.heartbeat("a", 6.0, version=0, epoch=1)
    assert world.coordinator.next_leases(6.0, version=0, wanted_roots=FAR) != []


def test_an_actor_is_filled_up_to_its_capacity_and_no_further() -> None:
    world = one_actor(capacity=5)

    assert sum(lease.budget.roots for lease in world.actors["a"].leases.values()) <= 5


def test_a_tree_larger_than_a_whole_actor_goes_to_an_idle_one() -> None:
    world = one_actor(capacity=1)

    assert len(world.actors["a"].leases) == 1


def test_at_age_bound_zero_a_round_waits_until_the_actor_holds_the_newest_version() -> None:
    world = one_actor(max_age_steps=0, capacity=999)
    ship_all(world, "a")
    assert world.consume()

    assert world.actors["a"].leases == {}
    world.confirm("a")
    assert {lease.issued_version for lease in world.actors["a"].leases.values()} == {1}


def test_a_slow_follower_is_given_leases_as_long_as_they_will_be_consumed_soon() -> None:
    world = one_actor(max_age_steps=2, capacity=999)
    ship_all(world, "a")
    world.consume()  # the actor stays at version 0; 12 roots are ahead of a new round, so it would be consumed at age 3

    assert world.actors["a"].leases == {}
    world.consume()
    assert world.actors["a"].leases == {}
    world.consume()
    assert world.actors["a"].leases == {}, "even an empty queue does not excuse a lag of three"
    world.confirm("a", 1)
    assert sum(lease.budget.roots for lease in world.actors["a"].leases.values()) == 6, "one round, not three"


# ---- arrivals ------------------------------------------------------------------------------------------------------


def test_a_group_that_comes_twice_is_accepted_once() -> None:
    world = one_actor()
    lease_id = next(iter(world.actors["a"].leases))
    world.finish("a", lease_id)

    assert world.ship("a", lease_id, ack_lost=True) is Arrival.ACCEPT
    assert world.ship("a", lease_id) is Arrival.DUPLICATE


def test_a_group_that_comes_again_after_it_was_trained_is_a_duplicate() -> None:
    world = one_actor(max_age_steps=0)
    lease_id, *others = list(world.actors["a"].leases)
    for other in [lease_id, *others]:
        world.finish("a", other)
    world.ship("a", lease_id, ack_lost=True)
    for other in others:
        world.ship("a", other)
    assert world.consume()

    assert world.ship("a", lease_id) is Arrival.DUPLICATE


@pytest.mark.parametrize("lease_id", ["", "lease-0", "1-00000-000", "1-00000-000.9", "1-00099-000.0", "9-00000-000.0"])
def test_a_group_of_a_lease_that_was_never_issued_is_unknown(lease_id: str) -> None:
    world = one_actor()

    assert world.coordinator.group_arrived(lease_id, 0.0) is Arrival.UNKNOWN


def test_a_late_group_is_accepted_and_the_second_attempt_released() -> None:
    world = one_actor(capacity=999)
    world.join("b", capacity=999)
    world.confirm("b")
    first = next(iter(world.actors["a"].leases))
    world.pass_time(31.0)
    second = first.replace(".0", ".1")
    assert second in world.actors["b"].leases
    world.finish("a", first)

    assert world.ship("a", first) is Arrival.ACCEPT
    assert second not in world.actors["b"].leases, "b was told to stop"


def test_a_late_group_after_the_second_attempts_is_a_duplicate() -> None:
    world = one_actor(capacity=999)
    world.join("b", capacity=999)
    world.confirm("b")
    first = next(iter(world.actors["a"].leases))
    world.finish("a", first)
    world.pass_time(31.0)
    second = first.replace(".0", ".1")
    world.finish("b", second)

    assert world.ship("b", second) is Arrival.ACCEPT
    assert world.ship("a", first) is Arrival.DUPLICATE


# ---- actors that go ------------------------------------------------------------------------------------------------


def test_the_leases_of_a_dead_actor_go_to_another() -> None:
    world = one_actor(capacity=999)
    lost = set(world.actors["a"].leases)
    world.join("b", capacity=999)
    world.confirm("b")

    world.kill("a", noticed=True)

    assert {lease_id.replace(".0", ".1") for lease_id in lost} <= set(world.actors["b"].leases)


def test_an_actor_that_falls_silent_is_given_up_after_the_deadline() -> None:
    world = one_actor()
    world.pass_time(9.0, silent=["a"])
    assert world.coordinator.fleet.get("a") is not None

    world.pass_time(2.0, silent=["a"])

    assert world.coordinator.fleet.get("a") is None
    assert not world.coordinator.heartbeat("a", world.now_s, version=0, epoch=1), "it must say hello first"


def test_an_actor_that_comes_back_keeps_its_leases() -> None:
    world = one_actor()
    held = set(world.actors["a"].leases)
    world.lose_connection("a")

    world.join("a")

    assert {slot.lease_id for slot in world.coordinator.slots if slot.state is SlotState.LIVE} == held


def test_a_process_that_restarted_under_the_same_id_loses_what_it_does_not_hold() -> None:
    world = one_actor()
    held = set(world.actors["a"].leases)
    del world.actors["a"]

    world.join("a")
    world.confirm("a")

    again = {lease_id.replace(".0", ".1") for lease_id in held}
    assert again == set(world.actors["a"].leases)


def test_a_lease_is_rejected_with_its_reason_when_its_attempts_are_used_up() -> None:
    world = one_actor(max_attempts=2, capacity=2)
    (lease_id,) = world.actors["a"].leases
    world.give_back("a", [lease_id])
    world.give_back("a", [lease_id.replace(".0", ".1")])

    counts = world.check()

    assert counts.finished[REJECTED] == 1
    assert [event.what for event in world.coordinator.story(lease_id)] == [
        "planned",
        "issued",
        "queued again",
        "issued",
        "rejected",
    ]
    assert "attempt 2 of 2: a: returned" in world.coordinator.story(lease_id)[-1].detail


def test_a_rejected_tree_gives_its_permits_back() -> None:
    world = one_actor(max_age_steps=0, max_attempts=1, capacity=999)
    lease_id = next(iter(world.actors["a"].leases))
    roots = world.leases[lease_id].budget.roots

    world.give_back("a", [lease_id])

    assert world.check().committed_roots == 6 - roots


def test_a_step_takes_less_than_a_round_when_no_more_can_come() -> None:
    world = one_actor(max_age_steps=0, max_attempts=1, capacity=999)
    lost, *others = list(world.actors["a"].leases)
    for lease_id in others:
        world.finish("a", lease_id)
        world.ship("a", lease_id)
    assert world.coordinator.next_batch(version=world.step, wanted_roots=FAR) is None

    world.give_back("a", [lost])

    assert world.coordinator.next_batch(version=world.step, wanted_roots=FAR) == others


def test_the_oldest_groups_are_consumed_first_whatever_order_they_came_in() -> None:
    world = one_actor(capacity=999)
    order = list(world.actors["a"].leases)
    for lease_id in reversed(order):
        world.finish("a", lease_id)
        world.ship("a", lease_id)

    batch = world.coordinator.next_batch(version=world.step, wanted_roots=FAR) or []

    assert batch == order[: len(batch)]
    assert sum(world.leases[lease_id].budget.roots for lease_id in batch) == 6


def test_consuming_a_group_that_is_not_on_the_shelf_ends_the_run() -> None:
    world = one_actor()

    with pytest.raises(InvariantError, match=r"step 1 consumed group 1-00000-000\.0, which is not on the shelf"):
        world.coordinator.consumed({"1-00000-000.0": GroupVerdict.TRAINED}, step=1, now_s=0.0)


# ---- restarts ------------------------------------------------------------------------------------------------------


def test_a_restart_consumes_again_what_the_lost_weights_had_learned_from() -> None:
    world = one_actor(capacity=999)
    world.save()
    ship_all(world, "a")
    world.consume()
    (_, batch), *_ = world.trained

    world.restart()

    assert world.trained == []
    assert world.coordinator.next_batch(version=world.step, wanted_roots=FAR) == batch


def test_a_restart_that_brings_back_less_than_a_batch_does_not_wait_for_leases_that_may_not_start() -> None:
    """A step consumed less than a round, the next round was issued, and the learner lost the step; age bound zero."""
    world = one_actor(max_age_steps=0, max_attempts=2, capacity=999)
    lost, *others = list(world.actors["a"].leases)
    world.give_back("a", [lost])
    world.give_back("a", [lost.replace(".0", ".1")])
    for lease_id in others:
        world.finish("a", lease_id)
        world.ship("a", lease_id)
    assert world.consume()
    world.confirm("a")

    world.restart()
    world.kill("a", noticed=False)
    heal_and_run(world, steps=2)


def test_after_a_restart_an_actor_goes_on_with_leases_that_the_checkpoint_does_not_know() -> None:
    world = one_actor(capacity=999)  # the checkpoint is from before the first lease
    held = set(world.actors["a"].leases)

    world.restart()
    world.join("a", capacity=999)

    assert set(world.actors["a"].leases) == held
    assert {slot.lease_id for slot in world.coordinator.slots if slot.state is SlotState.LIVE} == held


def test_prompts_of_rounds_that_were_planned_after_the_checkpoint_are_not_drawn_again() -> None:
    world = one_actor(max_age_steps=0, capacity=999)
    before = {lease.prompt_id for lease in world.leases.values()}
    world.restart()
    world.join("a", capacity=999)
    world.confirm("a")
    ship_all(world, "a")
    world.consume()
    world.confirm("a")

    after = {lease.prompt_id for lease in world.actors["a"].leases.values()}

    assert after
    assert not after & before


def test_a_ledger_that_lost_its_last_commits_does_not_make_a_group_train_twice() -> None:
    world = one_actor(max_age_steps=0, capacity=999)
    leases = list(world.actors["a"].leases.values())
    ship_all(world, "a")
    world.consume()
    state = world.coordinator.state()
    fresh = make_coordinator(tree=world.tree, road=world.road, epoch=2)

    stale = fresh.load(state, live=[], shelved=leases, now_s=0.0)

    assert [ended.lease_id for ended in stale] == [lease.lease_id for lease in leases]
    assert fresh.slots == []


def test_a_checkpoint_with_a_group_that_the_ledger_does_not_have_is_refused() -> None:
    world = one_actor(capacity=999)
    ship_all(world, "a")
    fresh = make_coordinator(tree=world.tree, road=world.road, epoch=2)

    with pytest.raises(InvariantError, match="waits to be consumed in the checkpoint and the ledger does not have it"):
        fresh.load(world.coordinator.state(), live=[], shelved=[], now_s=0.0)


def test_a_crash_between_the_issue_of_a_second_attempt_and_the_end_of_the_first_leaves_one_of_them_live() -> None:
    world = one_actor()
    held = sorted(world.actors["a"].leases)
    world.join("b", capacity=999)
    world.confirm("b")
    before = world.ledger.counts()
    world.dies_at_next_issue = True

    world.lose_connection("a")

    live = {lease.lease_id for lease in world.ledger.live()}
    again = {lease_id.replace(".0", ".1") for lease_id in held}
    assert again & live, "at least one was issued again"
    assert not {lease_id.replace(".1", ".0") for lease_id in again & live} & live
    assert world.ledger.counts().rejected == before.rejected + len(again & live)


def test_a_crash_between_a_late_group_and_the_end_of_the_second_attempt_leaves_the_group_alone() -> None:
    world = one_actor()
    first = sorted(world.actors["a"].leases)[0]
    world.finish("a", first)
    world.join("b", capacity=999)
    world.confirm("b")
    world.pass_time(31.0)  # leased again, the first holder goes on
    assert first.replace(".0", ".1") in {lease.lease_id for lease in world.ledger.live()}
    world.dies_at_next_issue = True

    assert world.ship("a", first) is Arrival.ACCEPT

    assert first.replace(".0", ".1") not in {lease.lease_id for lease in world.ledger.live()}
    assert [group_id for group_id, _ in world.ledger.shelved()] == [first]


# ---- random runs ---------------------------------------------------------------------------------------------------


def random_event(world: World, draw: random.Random) -> None:
    """One thing that may happen; `World` checks the invariants after it."""
    actor_id = draw.choice(["a", "b", "c"])
    actor = world.actors.get(actor_id)
    event = draw.choice(["join", "confirm", "finish", "finish", "ship", "ship", "ship", "consume", "time", "trouble"])
    if actor is None or event == "join":
        world.join(actor_id, capacity=draw.choice([1, 4, 9]))
    elif event == "confirm":
        world.confirm(actor_id, draw.randint(max(0, world.step - 1), world.step))
    elif event == "finish" and actor.leases:
        world.finish(actor_id, draw.choice(sorted(actor.leases)))
    elif event == "ship" and actor.finished:
        world.ship(actor_id, draw.choice(sorted(actor.finished)), ack_lost=draw.random() < 0.3)
    elif event == "consume":
        world.consume(draw.choice(list(GroupVerdict)))
    elif event == "time":
        world.pass_time(draw.choice([1.0, 4.0, 12.0]), silent=draw.choice([(), (), ("a",), ("a", "b")]))
    elif event == "trouble":
        random_trouble(world, actor_id, draw)


def random_trouble(world: World, actor_id: str, draw: random.Random) -> None:
    match draw.choice(["kill", "vanish", "lose", "return", "save", "restart", "half"]):
        case "kill":
            world.kill(actor_id, noticed=True)
        case "vanish":
            world.kill(actor_id, noticed=False)
        case "lose":
            world.lose_connection(actor_id)
        case "return":
            world.give_back(actor_id, sorted(world.actors[actor_id].leases)[:2])
        case "save":
            world.save()
        case "restart":
            world.restart()
        case "half":
            world.dies_at_next_issue = True


@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_nothing_is_lost_doubled_or_stuck_whatever_happens(max_age_steps: int) -> None:
    for seed in range(50):
        run_randomly(seed, max_age_steps=max_age_steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("max_age_steps", [0, 1, 3])
def test_nothing_is_lost_doubled_or_stuck_in_thousands_of_runs(max_age_steps: int) -> None:
    for seed in range(50, 1500):
        run_randomly(seed, max_age_steps=max_age_steps)


def run_randomly(seed: int, *, max_age_steps: int) -> None:
    draw = random.Random(f"{max_age_steps}/{seed}")
    tree = make_tree_config(root_allocator=draw.choice(["trace", "even"]), roots_per_step=draw.choice([3, 6, 7]))
    world = World(tree=tree, road=make_road_config(max_age_steps=max_age_steps))
    for _ in range(60):
        random_event(world, draw)
    heal_and_run(world, steps=2)


def heal_and_run(world: World, *, steps: int) -> None:
    """From any state, actors that behave bring the run forward."""
    goal = world.step + steps
    for _ in range(400):
        for actor_id in ("a", "b"):
            if world.coordinator.fleet.get(actor_id) is None or actor_id not in world.actors:
                world.join(actor_id)
            world.confirm(actor_id)
            ship_all(world, actor_id)
            for lease_id in list(world.actors[actor_id].finished):
                world.ship(actor_id, lease_id)
        world.consume()
        world.pass_time(1.0)
        if world.step >= goal:
            world.check_ledger()
            return
    raise AssertionError(f"no {steps} steps after healing: {world.check()}")


@pytest.mark.parametrize("max_age_steps", [0, 1, 2, 4])
def test_no_turn_is_older_than_the_bound_when_groups_come_in_order(max_age_steps: int) -> None:
    oldest = 0
    for seed in range(30):
        draw = random.Random(seed)
        world = World(road=make_road_config(max_age_steps=max_age_steps))
        for actor_id in ("a", "b"):
            world.join(actor_id, capacity=draw.choice([4, 99]))
        for _ in range(80):
            in_order_event(world, draw)
            assert world.oldest_age <= max_age_steps
        oldest = max(oldest, world.oldest_age)

    assert oldest == max_age_steps, "the bound is never reached, so permits hold back more than they must"


def in_order_event(world: World, draw: random.Random) -> None:
    """Actors follow versions at their own pace; the oldest tree of all is always the next to arrive."""
    actor_id = draw.choice(["a", "b"])
    match draw.choice(["confirm", "ship", "ship", "ship", "consume"]):
        case "confirm":
            world.confirm(actor_id, draw.randint(max(0, world.actors[actor_id].version), world.step))
        case "ship":
            live = [slot for slot in world.coordinator.slots if slot.state is SlotState.LIVE]
            if live:
                holder = live[0].holders[live[0].attempt]
                world.finish(holder, live[0].lease_id)
                world.ship(holder, live[0].lease_id)
        case "consume":
            world.consume()
