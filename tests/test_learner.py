"""The learner among fakes: order of effects, judgement at consumption, exactly-once over crashes, stops and stalls."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import make_lease
from tests.learner_world import (
    ROADS,
    TREES,
    FakeActor,
    FakeChannel,
    LearnerWorld,
    grow_broken,
    grow_flat,
    grow_mixed,
    loop_clock,
    number_of,
    pure,
)
from tests.virtual_time import run
from trace_async.config import LearnerConfig
from trace_async.core.types import ActorStatus, Group, GroupVerdict, Lease
from trace_async.learning.checkpoint import list_steps, newest_checkpoint, read_state
from trace_async.ledger import Ledger
from trace_async.transport import wire


def world_of(root: Path, *actors: FakeActor, max_steps: int = 4, max_age_steps: int = 2) -> LearnerWorld:
    """A run folder with these actors; `max_age_steps` 0 makes every step wait for its own round."""
    return LearnerWorld(
        root=root,
        actors=actors or (FakeActor("a"), FakeActor("b")),
        learner=LearnerConfig(max_steps=max_steps, checkpoint_every_steps=2, keep_checkpoints=2),
        road=replace(ROADS, max_age_steps=max_age_steps, soft_age_steps=min(1, max_age_steps)),
    )


# ---- a run from start to end ---------------------------------------------------------------------------------------


def test_a_run_makes_its_steps_and_ends_in_order(tmp_path: Path) -> None:
    world = world_of(tmp_path, FakeActor("a"), max_steps=3)

    run(world.train())

    assert world.events == [
        *("publish 0", "step 1", "publish 1", "step 2", "publish 2", "save", "step 3", "publish 3"),
        *("stop", "bye a", "export", "save"),
    ]
    assert list_steps(world.folder.checkpoints) == [2, 3]
    assert world.folder.address.read_text() == "memory\n"


def test_every_step_leaves_a_row_whose_totals_reconcile(tmp_path: Path) -> None:
    world = world_of(tmp_path)

    run(world.train())

    assert [row["training/global_step"] for row in world.rows.rows] == [1, 2, 3, 4]
    for row in world.rows.rows:
        ends = sum(row[f"groups/{end}_total"] for end in ("trained", "flat", "stale", "broken", "rejected"))
        assert row["groups/issued_total"] == ends + row["groups/live"]
        assert row["permits/in_use"] <= row["permits/max"] == 18
        assert row["critic/score/mean"] == pytest.approx(1 / 3)
        assert row["rollout/effective_ratio"] == 1.0
        assert row["actor/grad_norm"] == 1.0
    last = world.rows.rows[-1]
    assert last["rollout/sampled_tokens_total"] == 4 * 6 * 2  # steps, rollouts of one turn, tokens
    assert last["engine/idle_share"] == pytest.approx(0.25)


def test_a_run_stops_when_enough_tokens_were_trained_on(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=99)
    world.learner = replace(world.learner, max_sampled_tokens=25)

    run(world.train())

    assert world.trainer.version == 3  # 12 sampled tokens a step


def test_a_stop_request_ends_after_the_step_under_way_and_the_run_can_go_on(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=6)

    async def stop_in_step_two() -> None:
        with Ledger(world.folder.ledger) as ledger:
            learner = world.make_learner(ledger)
            world.trainer.on_step = lambda: learner.request_stop("a signal") if world.trainer.version == 1 else None
            await learner.run()

    run(stop_in_step_two())
    assert world.trainer.version == 2
    run(world.train())

    assert world.trainer.version == 6
    assert max(Counter(world.trainer.weights).values()) == 1
    assert world.former_addresses == ["", "memory"]


def test_an_actor_that_does_not_leave_delays_the_end_only_by_the_deadline(tmp_path: Path) -> None:
    world = world_of(tmp_path, FakeActor("a", stays=True), max_steps=1)

    run(world.train())

    assert world.events[-3:] == ["not all left", "export", "save"]


def test_leases_that_nobody_will_train_on_are_released_at_the_end(tmp_path: Path) -> None:
    actor = FakeActor("a", capacity=99)
    world = world_of(tmp_path, actor, max_steps=1, max_age_steps=2)

    run(world.train())

    assert actor.leases == {}


# ---- versions ------------------------------------------------------------------------------------------------------


def test_each_version_goes_out_with_what_its_own_weights_say_of_the_canary_prompts(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=3)

    run(world.train())

    assert [canary.prompts[0].tolist() for canary in world.store.canaries] == [[5, 6, 7]] * 4
    assert [canary.logprobs[0].tolist() for canary in world.store.canaries] == [[-v, -v] for v in range(4)]


def test_older_versions_are_retired_when_every_live_actor_has_a_newer_one_and_the_times_are_told(
    tmp_path: Path,
) -> None:
    world = world_of(tmp_path, FakeActor("quick"), FakeActor("slow", confirm_after_s=0.7), max_steps=6)

    run(world.train())

    assert world.store.retired[0] == (0, -1)  # nobody is here yet
    assert all(needed_since <= newest for newest, needed_since in world.store.retired)
    assert world.store.retired == sorted(world.store.retired)
    assert max(needed_since for _, needed_since in world.store.retired) >= 4
    first = [row["publication/first_confirm_s"] for row in world.rows.rows]
    everybody = [row["publication/all_confirm_s"] for row in world.rows.rows]
    assert {value for value in first if not math.isnan(value)} == {0.0}
    assert 0.7 in {round(value, 6) for value in everybody}
    assert [row["publication/bytes"] for row in world.rows.rows] == [101, 102, 103, 104, 105, 106]


def test_an_actor_that_is_late_gets_no_leases_until_it_has_caught_up_and_then_it_does(tmp_path: Path) -> None:
    late = FakeActor("late", confirm_after_s=40.0, capacity=99)
    world = world_of(tmp_path, late, max_steps=3)
    leased_s: list[float] = []
    late.on_lease = lambda: leased_s.append(loop_clock())

    run(world.train())

    assert min(leased_s) == 40.0
    assert world.trainer.version == 3


def test_an_actor_whose_load_fails_gets_no_leases_but_others_do_and_with_the_next_version_it_works_again(
    tmp_path: Path,
) -> None:
    fenced, other = FakeActor("fenced", refuses=frozenset({1, 2})), FakeActor("other")
    world = world_of(tmp_path, fenced, other, max_steps=8, max_age_steps=0)
    leased_at: list[int] = []
    fenced.on_lease = lambda: leased_at.append(world.trainer.version)

    run(world.train())

    assert set(leased_at).isdisjoint({1, 2})
    assert set(leased_at) & {3, 4, 5, 6, 7}
    assert world.trainer.version == 8


class BreakingServer:
    """A weight server whose thread ends with an error after a while."""

    async def watch(self) -> None:
        await asyncio.sleep(3.0)
        raise OSError("too many open files")

    def counters(self) -> Mapping[str, float]:
        return {"stream_bytes": 7.0}


def test_a_weight_server_that_breaks_ends_the_run_with_its_error(tmp_path: Path) -> None:
    world = world_of(tmp_path, FakeActor("a", mute=True))
    world.server = BreakingServer()

    with pytest.raises(ExceptionGroup) as caught:
        run(world.train())

    assert caught.group_contains(OSError, match="too many open files")


def test_what_the_weight_server_sent_is_in_the_row(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=1)
    world.server = BreakingServer()

    run(world.train())

    assert world.rows.rows[0]["publication/streamed_bytes_total"] == 7


# ---- judgement -----------------------------------------------------------------------------------------------------


def test_age_is_judged_when_a_group_is_consumed_and_over_age_groups_are_counted_stale(tmp_path: Path) -> None:
    actor = FakeActor("a", capacity=99, frozen_version=0)
    world = world_of(tmp_path, actor, max_steps=4, max_age_steps=2)

    run(world.train())

    ages = [row["staleness/age_max"] for row in world.rows.rows]
    assert ages[:3] == [0, 1, 2]
    tables = [[part.turns for part in step] for step in world.trainer.minibatches]
    verdicts = [[int(v) for table in step for v in table.verdict[table.trained]] for step in tables]
    assert [set(of_step) for of_step in verdicts] == [{0}, {0}, {1}, set()]
    assert [row["groups/stale_total"] for row in world.rows.rows] == [0, 0, 0, 2]
    assert world.rows.rows[3]["staleness/over_age_share"] == 1.0


@pytest.mark.parametrize(("grow", "end"), [(grow_flat, "flat"), (grow_broken, "broken")])
def test_groups_without_signal_are_consumed_and_counted(tmp_path: Path, grow: object, end: str) -> None:
    actor = FakeActor("a", grow=grow)  # type: ignore[arg-type]
    world = world_of(tmp_path, actor, max_steps=2)

    run(world.train())

    assert world.trainer.weights == []
    assert [row[f"groups/{end}_total"] for row in world.rows.rows] == [2, 4]
    assert [row["groups/trained_total"] for row in world.rows.rows] == [0, 0]


def test_a_signal_free_group_beside_others_changes_no_mask_but_stays_in_the_denominator(tmp_path: Path) -> None:
    def grow(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
        one = grow_flat if lease.lease_id.endswith("-000.0") else grow_mixed
        return one(lease, version=version, epoch=epoch, number=number)

    world = world_of(tmp_path, FakeActor("a", grow=grow), max_steps=1, max_age_steps=0)

    run(world.train())

    (row,) = world.rows.rows
    assert (row["groups/trained"], row["groups/flat"]) == (1, 1)
    assert row["rollout/effective_ratio"] == 0.5
    assert row["rollout/success"] == pytest.approx(4 / 6)


# ---- arrivals ------------------------------------------------------------------------------------------------------


def test_groups_whose_acks_are_lost_are_sent_again_and_trained_once(tmp_path: Path) -> None:
    actor = FakeActor("a", ack_lost=lambda group_id: pure("ack", group_id).random() < 0.5)
    world = world_of(tmp_path, actor, max_steps=5)

    run(world.train())

    sent = Counter(ack.group_id for ack in actor.acks)
    assert max(sent.values()) == 2
    assert max(Counter(world.trainer.weights).values()) == 1


def test_a_group_that_is_not_what_was_leased_is_refused(tmp_path: Path) -> None:
    def grow(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
        group = grow_mixed(lease, version=version, epoch=epoch, number=number)
        return replace(group, prompt_id="another") if lease.attempt == 0 else group

    actor = FakeActor("a", grow=grow)
    world = world_of(tmp_path, actor, max_steps=1, max_age_steps=0)

    run(world.train())

    refused = [ack for ack in actor.acks if not ack.accepted]
    assert len(refused) == 2
    assert "it is of prompt another with" in refused[0].reason
    assert sorted(world.trainer.weights) == [1000, 1001], "the second attempts were right"


def poisoned(group: Group, poison: str) -> Group:
    """Well-formed, and nothing that this run could train."""
    ahead = np.full_like(group.version_min, 10**6)
    match poison:
        case "epoch":
            return replace(group, epoch=10**6)
        case "version":
            return replace(group, version_min=ahead, version_max=ahead, kv_version_min=ahead)
        case "token":
            return replace(group, token_ids=np.full_like(group.token_ids, 10_000))
        case "prompt token":
            return replace(group, prompt_ids=np.full_like(group.prompt_ids, 10_000))
        case "length":
            return replace(group, prompt_ids=np.full(TREES.max_context_tokens - 1, 1, np.int32))
        case "budget":
            return replace(group, budget=replace(group.budget, continuations=1))
        case _:
            return replace(group, prompt_id="another")


@pytest.mark.parametrize(
    ("poison", "reason"),
    [
        ("epoch", "it is of epoch 1000000, this is epoch 1"),
        ("version", "a turn was sampled by version 1000000, the newest is 0"),
        ("token", "it holds token id 10000, the policy knows 10000"),
        ("prompt token", "it holds token id 10000, the policy knows 10000"),
        ("length", "a path has 257 tokens, tree.max_context_tokens is 256"),
        ("budget", "continuations=1"),
        ("prompt", "it is of prompt another"),
    ],
)
def test_a_group_that_could_not_be_trained_is_refused_and_poisons_neither_this_start_nor_the_next(
    tmp_path: Path, poison: str, reason: str
) -> None:
    def grow(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
        group = grow_mixed(lease, version=version, epoch=epoch, number=number)
        return poisoned(group, poison) if lease.attempt == 0 and epoch == 1 else group

    actor = FakeActor("a", grow=grow)
    world = world_of(tmp_path, actor, max_steps=1, max_age_steps=0)

    run(world.train())
    refused = [ack for ack in actor.acks if not ack.accepted]
    assert len(refused) == 2
    assert reason in refused[0].reason
    assert sorted(world.trainer.weights) == [1000, 1001], "the second attempts were right"
    world.learner = replace(world.learner, max_steps=3)
    run(world.train())

    assert world.trainer.version == 3
    assert max(Counter(world.trainer.weights).values()) == 1


def test_poison_that_never_ends_is_rejected_when_the_attempts_are_used_up_and_the_run_goes_on(tmp_path: Path) -> None:
    def grow(lease: Lease, *, version: int, epoch: int, number: int) -> Group:
        group = grow_mixed(lease, version=version, epoch=epoch, number=number)
        return poisoned(group, "token") if lease.lease_id.startswith("1-00000-000.") else group

    world = world_of(tmp_path, FakeActor("a", grow=grow), max_steps=2)

    run(world.train())

    assert world.trainer.version == 2
    assert world.rows.rows[-1]["groups/rejected_total"] == 1


def test_a_group_of_a_lease_that_was_never_issued_is_refused(tmp_path: Path) -> None:
    class Stranger(FakeActor):
        async def live(self, channel: FakeChannel) -> None:
            lease = next(iter(self.leases.values()))
            self.leases = {}
            group = grow_mixed(lease, version=0, epoch=1, number=1)
            self.acks.append(channel.handler.on_group(self.name, group))
            await super().live(channel)

    foreign = make_lease(lease_id="7-00000-000.0")
    actor = Stranger("a", leases={foreign.lease_id: foreign})
    world = world_of(tmp_path, actor, max_steps=1)

    run(world.train())

    assert actor.acks[0] == wire.Ack(
        group_id=foreign.lease_id, accepted=False, reason="this run never issued that lease"
    )


# ---- crashes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_age_steps", [0, 2])
def test_whatever_the_learner_is_killed_at_nothing_trains_twice_and_nothing_is_lost(
    tmp_path: Path, max_age_steps: int
) -> None:
    for seed in range(8):
        draw = pure("kills", max_age_steps, seed)
        actors = [FakeActor("a", ack_lost=lambda i: pure("ack", i).random() < 0.3), FakeActor("b")]
        world = world_of(tmp_path / str(seed), *actors, max_steps=7, max_age_steps=max_age_steps)
        world.root.mkdir()
        for _ in range(5):
            effects = draw.choice([None, draw.randint(0, 25)])
            run(world.train_and_kill(draw.uniform(0.5, 9.0), after_effects=effects))
            draw.choice(actors).leases.clear()  # one actor dies too and comes back empty
        run(world.train())
        check_conservation(world)


def check_conservation(world: LearnerWorld) -> None:
    """Every group that was ever acknowledged is in the final weights, was too old for them, or waits; each once."""
    with Ledger(world.folder.ledger) as ledger:
        shelved = {number_of(group_id) for group_id, _ in ledger.shelved()}
        verdicts = {number_of(group_id): verdict for group_id, verdict in ledger.verdicts().items()}
        assert len(verdicts) == ledger.counts().consumed
    accepted = {number_of(ack.group_id) for actor in world.actors for ack in actor.acks if ack.accepted}
    trained = [number for number, verdict in verdicts.items() if verdict is GroupVerdict.TRAINED]
    assert sorted(world.trainer.weights) == sorted(trained)
    assert set(verdicts.values()) <= {GroupVerdict.TRAINED, GroupVerdict.STALE}
    assert accepted == {*verdicts, *shelved}
    assert not shelved.intersection(verdicts)
    assert world.trainer.version == 7


def test_the_same_seed_gives_the_same_batches_after_kills_when_every_step_waits_for_its_round(tmp_path: Path) -> None:
    whole = world_of(tmp_path / "whole", FakeActor("a", capacity=99), max_steps=6, max_age_steps=0)
    killed = world_of(tmp_path / "killed", FakeActor("a", capacity=99), max_steps=6, max_age_steps=0)
    for world in (whole, killed):
        world.root.mkdir()

    run(whole.train())
    for after_s in (3.3, 1.7, 4.1):
        run(killed.train_and_kill(after_s))
    run(killed.train())

    assert killed.trainer.weights == whole.trainer.weights
    assert figures(killed) == figures(whole)


def figures(world: LearnerWorld) -> dict[str, float]:
    """What the last row says about predictions and costs; all but seconds, which a kill may add to."""
    stages = ("predictor/", "allocation/", "cost/", "rollout/sampled_tokens_total")
    last = world.rows.rows[-1]
    known = {key: value for key, value in last.items() if not math.isnan(value)}
    return {key: value for key, value in known.items() if key.startswith(stages) and key != "cost/wall_s_total"}


def test_a_resumed_run_counts_on_from_the_checkpoint(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=4)
    run(world.train())
    state = read_state(newest_checkpoint(world.folder.checkpoints) or tmp_path)
    world.learner = replace(world.learner, max_steps=5)

    run(world.train())

    assert state["step"] == 4
    last = world.rows.rows[-1]
    assert last["rollout/sampled_tokens_total"] == state["costs"]["sampled_tokens"] + 12 == 5 * 12
    assert last["cost/environment_steps_total"] == last["cost/nominal_rollouts_total"] == 5 * 6
    assert last["cost/wall_s_total"] > state["costs"]["wall_s"] > 0
    assert last["predictor/prompts/outcomes"] == 6
    assert world.rows.rows[-1]["training/epoch"] == 2
    assert [notice.epoch for notice in world.store.notices][-2:] == [2, 2]


def test_checkpoints_beyond_the_kept_ones_go_and_the_ledger_forgets_their_groups(tmp_path: Path) -> None:
    world = world_of(tmp_path, max_steps=8)

    run(world.train())

    assert list_steps(world.folder.checkpoints) == [6, 8]
    with Ledger(world.folder.ledger) as ledger:
        assert len(ledger.rewind(6)) == 4  # two steps of two groups; what came before is gone for good


# ---- stalls and status ---------------------------------------------------------------------------------------------


def first_stall_s(world: LearnerWorld) -> float:
    """Runs until a stall is named; the virtual time of that."""

    class Named(logging.Handler):
        def __init__(self) -> None:
            super().__init__()
            self.at_s: list[float] = []

        def emit(self, record: logging.LogRecord) -> None:
            if "nothing moved" in record.getMessage():
                self.at_s.append(asyncio.get_running_loop().time())

    named = Named()
    logging.getLogger("trace_async.learning.learner").addHandler(named)
    try:
        run(world.train_and_kill(100.0))
    finally:
        logging.getLogger("trace_async.learning.learner").removeHandler(named)
    return named.at_s[0]


def test_a_run_without_actors_says_so_within_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    world = LearnerWorld(root=tmp_path, actors=())

    assert first_stall_s(world) <= 60.0
    assert "no actor is connected" in caplog.text


def test_a_stuck_tree_is_named_with_lease_actor_node_and_phase_within_a_minute(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = world_of(tmp_path, FakeActor("a", mute=True))

    assert first_stall_s(world) <= 60.0
    assert "lease 1-00000-000." in caplog.text
    assert "with a: node 1 in phase generate" in caplog.text


def test_an_actor_that_was_given_up_while_its_road_stood_says_hello_again_and_goes_on(tmp_path: Path) -> None:
    actor = FakeActor("a", breathless=(1.5, 13.5), mute=True)
    world = world_of(tmp_path, actor, max_steps=2)

    async def story() -> None:
        async with asyncio.TaskGroup() as group:
            training = group.create_task(world.train())
            await asyncio.sleep(13.0)
            assert not training.done()
            actor.mute = False
            actor.leases.clear()

    run(story())

    assert actor.hellos_s == [0.0, 14.0]
    assert world.trainer.version == 2


def test_the_status_file_lists_live_leases_with_their_trees(tmp_path: Path) -> None:
    world = world_of(tmp_path, FakeActor("a", mute=True))

    run(world.train_and_kill(5.5))

    status = json.loads(world.folder.status.read_text())
    assert status["phase"] == "wait"
    assert status["permits"] == {"in_use": 12, "max": 18}
    assert status["actors"][0]["actor_id"] == "a"
    first = status["leases"][0]
    assert (first["lease_id"], first["actor_id"], first["state"]) == ("1-00000-000.0", "a", "live")
    assert first["tree"]["phase"] == "generate"
    assert first["tree"]["waiting_s"] is None, "unknown is null"


# ---- the loop stays free -------------------------------------------------------------------------------------------


def test_actors_are_heard_while_the_trainer_computes(tmp_path: Path) -> None:
    heard = threading.Event()

    class Speaker(FakeActor):
        def status(self) -> ActorStatus:
            heard.set()
            return super().status()

    world = world_of(tmp_path, Speaker("a"), max_steps=1, max_age_steps=0)
    heard_in_step: list[bool] = []

    def compute() -> None:
        heard.clear()
        heard_in_step.append(heard.wait(20.0))

    async def main() -> None:
        with Ledger(world.folder.ledger) as ledger, ThreadPoolExecutor(max_workers=1) as worker:
            world.worker = worker
            learner = world.make_learner(ledger)
            world.trainer.on_step = compute
            async with asyncio.timeout(30.0):
                await learner.run()

    asyncio.run(main())
    assert heard_in_step == [True]
