"""The plan of a run: tokens of a step, ages, places, what does not work and its cure, and what is printed."""

from __future__ import annotations

import argparse
import heapq
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tests.trainer_kit  # noqa: F401 - imports transformers, which takes longer than a test may on a busy machine
from trace_async.app.plan import DOES_NOT_FIT, add_options, make_plan, plan, request_of
from trace_async.app.plan_inputs import Request
from trace_async.app.plan_places import find_places
from trace_async.app.plan_sizes import published_shape
from trace_async.app.plan_steps import Rollout, ages, step_load, totals
from trace_async.config import Config, CoordinatorConfig, LearnerConfig, TreeConfig
from trace_async.config_load import load_config
from trace_async.errors import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"
GPU = CONFIGS / "multihop_qwen3_gpu.toml"
ROLLOUT = Rollout(turns=3.0, turn_tokens=100.0, observation_tokens=50.0, prompt_tokens=30.0, turn_limit=5)
SHAPE = published_shape("Qwen3-0.6B")


def small(**changes: Any) -> Config:
    return Config(
        tree=TreeConfig(roots_per_step=10, continuations_per_root=2, max_context_tokens=2000, max_turns=5),
        learner=LearnerConfig(micro_batch_tokens=2000, max_steps=7),
        coordinator=CoordinatorConfig(**changes),
    )


# ---- one step ------------------------------------------------------------------------------------------------------


def test_a_step_is_counted_by_hand() -> None:
    """Lengths 1..5 about a mean of 3 have variance 2: a continuation has 3/2 + 2/(2 x 2) = 2 turns."""
    step = step_load(small(), SHAPE, ROLLOUT, prompts=4, prompts_looked_at=128)
    assert (step.roots, step.continuations, step.leaves) == (10, 20, 30)
    assert step.turns == 10 * 3 + 20 * 2
    assert step.sampled_tokens == 70 * 100
    assert step.observation_tokens == (10 * 2 + 20 * 1) * 50
    assert step.packed_tokens == 7000 + 2000 + 4 * 30
    assert step.micro_batches == 5
    assert step.passes_forward == 2  # the default objective's brake looks at all of an update first
    assert (step.sampled_tokens_least, step.sampled_tokens_most) == (10, 10 * 5 * 4 + 20 * 4 * 4)


def test_operations_are_two_for_each_weight_and_token_and_pass() -> None:
    """One micro-batch: a forward and a backward pass over layers and head, the head once more; then recomputed."""
    config = replace(small(), learner=LearnerConfig(micro_batch_tokens=100_000))
    step = step_load(config, SHAPE, ROLLOUT, prompts=4, prompts_looked_at=4)
    head = 151_936 * 1024
    layers = SHAPE.parameters - head - 1024
    assert step.operations == pytest.approx(2 * 9120 * layers * 3 + 2 * 7000 * head * 4)
    again = replace(config, learner=replace(config.learner, activation_checkpointing=True))
    more = step_load(again, SHAPE, ROLLOUT, prompts=4, prompts_looked_at=4)
    assert more.operations - step.operations == pytest.approx(2 * 9120 * layers)


@pytest.mark.parametrize(("limit", "mean"), [(5, 3.0), (9, 3.0), (6, 5.0), (40, 12.0), (4, 1.0)])
def test_a_continuation_is_as_long_as_what_lies_behind_a_random_turn(limit: int, mean: float) -> None:
    reach = min(mean - 1, limit - mean)
    lengths = np.random.default_rng(0).integers(round(mean - reach), round(mean + reach) + 1, 40_000)
    behind = [length - depth for length in lengths.tolist() for depth in range(1, length)] or [1]
    rollout = replace(ROLLOUT, turns=mean, turn_limit=limit)
    assert rollout.suffix_turns == pytest.approx(np.mean(behind), rel=0.02)


def test_a_run_ends_by_its_steps_or_by_its_tokens() -> None:
    step = step_load(small(), SHAPE, ROLLOUT, prompts=4, prompts_looked_at=128)
    run = totals(small(), step, step_s=60.0)
    assert (run.steps, run.roots, run.sampled_tokens, run.trees) == (7, 70, 49_000, 28)
    assert run.epochs == 7 * 128 / 1024
    assert run.hours == pytest.approx(7 / 60)
    limited = replace(small(), learner=replace(small().learner, max_sampled_tokens=20_000))
    assert totals(limited, step, step_s=None).steps == 3


# ---- ages ----------------------------------------------------------------------------------------------------------


def simulated_age(*, roots: int, bound: int, capacity: int, sampling_s: float, training_s: float) -> float:
    """Mean age of turns: roots of random lengths, `capacity` at a time, consumed in their order; versions as they come.

    `sampling_s`: of a step's roots when all places are busy; `training_s`: of a step, with its publication.
    """
    rng = np.random.default_rng(1)
    together = min(capacity, bound * roots) if training_s < sampling_s else roots  # else one round at a time
    mean_s = sampling_s * together / roots
    now, version, planned, shelf = 0.0, 0, 0, 0
    live: list[tuple[float, float]] = []  # when a root ends, and when a turn of it was sampled
    found: list[int] = []
    published: list[float] = []
    batch: list[float] = []
    waiting: list[float] = []  # when the turns in the middle of shelved roots were sampled, as versions
    training_until = np.inf
    while version < 60:
        out = len(live) + shelf + len(batch)
        while planned or out + roots <= (bound + 1) * roots:
            if not planned:
                planned, out = roots, out + roots
            if len(live) >= capacity:
                break
            length = mean_s * rng.uniform(0.5, 1.5)
            heapq.heappush(live, (now + length, now + length * rng.uniform(0, 1)))
            planned -= 1
            out = len(live) + shelf + len(batch) + planned
        if shelf >= roots and training_until == np.inf:
            batch, waiting, shelf = waiting[:roots], waiting[roots:], shelf - roots
            training_until = now + training_s
            found += [version - sum(1 for at in published if at <= when) for when in batch]
        now = min(training_until, live[0][0] if live else np.inf)
        if now == training_until:
            version, batch, training_until = version + 1, [], np.inf
            published.append(now)
        else:
            waiting.append(heapq.heappop(live)[1])
            shelf += 1
    return float(np.mean(found[10 * roots :]))


@pytest.mark.parametrize(
    ("capacity", "training_s"), [(1000, 2.0), (1000, 6.0), (40, 2.0), (40, 6.0), (160, 8.0), (1000, 20.0)]
)
def test_expected_ages_are_those_of_a_simulated_road(capacity: int, training_s: float) -> None:
    """A step's roots take 10 s to sample; four steps of age are allowed."""
    found = simulated_age(roots=40, bound=4, capacity=capacity, sampling_s=10.0, training_s=training_s)
    config = replace(small(max_age_steps=4), tree=TreeConfig(roots_per_step=40))
    step = step_load(config, SHAPE, ROLLOUT, prompts=4, prompts_looked_at=4)
    rate = step.sampled_tokens
    planned = ages(config, capacity=capacity, step=step, sampled_per_s=rate / 10.0, trained_per_s=rate / training_s)
    assert planned.expected == pytest.approx(found, abs=0.35)
    assert planned.learner_busy == pytest.approx(min(1.0, training_s / 10.0))
    assert planned.step_s == pytest.approx(max(10.0, training_s))


@pytest.mark.parametrize("changes", [{"lockstep": True, "max_age_steps": 3}, {"max_age_steps": 0, "soft_age_steps": 0}])
def test_without_overlap_sampling_and_training_take_turns(changes: dict[str, Any]) -> None:
    config = small(**changes)
    step = step_load(config, SHAPE, ROLLOUT, prompts=4, prompts_looked_at=4)
    found = ages(config, capacity=100, step=step, sampled_per_s=700.0, trained_per_s=1400.0)
    assert (found.expected, found.step_s) == (changes["max_age_steps"], 15.0)
    assert found.if_actors_are_slower == (changes["max_age_steps"],) * 2


def test_the_documented_ages_of_the_study_are_met() -> None:
    """docs/methods.md: means of 1.9 to 2.5 for max_age_steps = 4 and actors that hold all that permits allow."""
    config = replace(small(max_age_steps=4), tree=TreeConfig(roots_per_step=24))
    step = step_load(config, SHAPE, ROLLOUT, prompts=4, prompts_looked_at=4)
    low, high = ages(config, capacity=128, step=step, sampled_per_s=None, trained_per_s=None).if_actors_are_slower
    assert low <= 2.1
    assert high == pytest.approx(2.5)


# ---- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        ((), {"learner-0": (0,), "learner-3": (3,), "actor-0": (4, 5, 6, 7)}),
        (("engine.options={}", "engine.device=cuda:5"), {"actor-0": (5,)}),
        (("engine.options={}", "actor.count=0"), {"actor-0": (4,), "actor-3": (7,)}),
        (("engine.options={}", "actor.count=2"), {"actor-0": (0,), "actor-1": (0,)}),
        (("engine.kind=local", "engine.options={}", "learner.processes=1"), {"learner": (0,), "actor-0": (0,)}),
        (("learner.device=cpu", "engine.options={}", "actor.count=0"), {"learner-3": (), "actor-7": (7,)}),
    ],
)
def test_processes_take_the_gpus_that_the_code_gives_them(
    overrides: tuple[str, ...], where: dict[str, tuple[int, ...]]
) -> None:
    places = find_places(load_config(GPU, overrides), gpus=8, config_path="c.toml")
    found = {process.name: process.gpus for process in places.processes}
    assert {name: found[name] for name in where} == where
    assert not places.missing


def test_servers_get_the_gpus_that_the_learner_leaves_and_their_commands() -> None:
    server = ("engine.kind=vllm_server", "engine.server_url=http://127.0.0.1:8001", "actor.count=0")
    two = (*server, "engine.options={tensor_parallel_size=2}")
    places = find_places(load_config(GPU, two), gpus=8, config_path="c.toml")
    commands = {process.name: process.command for process in places.processes if process.command}
    assert commands == {
        "server-0": "CUDA_VISIBLE_DEVICES=4,5 trace-async vllm-server c.toml --port 8000",
        "server-1": "CUDA_VISIBLE_DEVICES=6,7 trace-async vllm-server c.toml --port 8001",
        "actor-0": "trace-async actor RUN --server http://127.0.0.1:8000",
        "actor-1": "trace-async actor RUN --server http://127.0.0.1:8001",
    }


# ---- what does not work --------------------------------------------------------------------------------------------


def problems(*overrides: str, **request: Any) -> list[str]:
    config = load_config(GPU, ["prompts.candidates_per_round=160", *overrides])  # dividing roots takes most of the time
    return make_plan(config, Request(**request)).problems


def test_the_shipped_configuration_of_the_paper_fits_its_node() -> None:
    found = make_plan(load_config(GPU), Request())
    assert found.problems == []
    assert (found.parameters, found.step.roots, found.step.continuations) == (8_190_735_360, 1024, 2048)
    assert found.places.free == ()
    assert all(use.num_bytes < 80 << 30 for use in found.gpus)
    assert found.contexts > load_config(GPU).engine.max_batch
    assert (
        problems(
            "policy.path=Qwen/Qwen3-14B",
            "learner.processes=6",
            "engine.options={device_ids=[6,7],tensor_parallel_size=2}",
        )
        == []
    )  # as the file says


@pytest.mark.parametrize(
    ("overrides", "said", "cured"),
    [
        (("learner.activation_checkpointing=false",), "GPU 0, 1, 2, 3: a process of the learner needs", ()),
        (("learner.processes=1",), "GPU 0: learner needs", ("learner.processes=4",)),
        (
            ("engine.options={}",),
            "a process of the learner and actor-0 need",
            ("engine.options={}", "engine.device=cuda:4"),
        ),
        (("actor.count=2",), "gives all its actors the same GPU", ("actor.count=1",)),
        (("engine.options={device_ids=[4,5,6],tensor_parallel_size=3}",), "does not divide the model's 32", ()),
        (("engine.options={device_ids=[8],tensor_parallel_size=1}",), "GPU 8 is wanted, but the node has 8", ()),
        (("learner.processes=8", "engine.options={}", "actor.count=0", "engine.device=auto"), "no engine has a", ()),
        (
            ("engine.options={device_ids=[4],tensor_parallel_size=1,gpu_memory_utilization=0.2}",),
            "set engine.options.tensor_parallel_size = 2",
            ("engine.options={device_ids=[4,5],tensor_parallel_size=2,gpu_memory_utilization=0.2}",),
        ),
    ],
)
def test_what_does_not_work_is_said_with_a_cure_that_works(
    overrides: tuple[str, ...], said: str, cured: tuple[str, ...]
) -> None:
    assert any(said in line for line in problems(*overrides)), problems(*overrides)
    assert problems(*cured) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ("learner.compute_dtype=float32", "learner.activation_checkpointing=false"),
        ("learner.processes=2", "learner.micro_batch_tokens=32768"),
        ("learner.processes=1", "learner.compute_dtype=float32", "learner.activation_checkpointing=false"),
        ("policy.path=Qwen/Qwen3-32B",),
    ],
)
def test_offered_cures_of_a_learner_are_enough(overrides: tuple[str, ...]) -> None:
    (said,) = problems(*overrides)
    cure = said.partition(" GiB; ")[2]
    together = cure.startswith("these together are enough: ")
    named = cure.partition("enough: ")[2] or cure.removesuffix(" is enough")
    sets = [named.split("; ")] if together else [[one] for one in named.split("; ")]
    assert sets
    for cures in sets:
        changed = [one.replace(" = ", "=").replace("'", "") for one in cures]
        assert problems(*overrides, *changed) == [], cures


def test_rates_show_leases_that_would_expire() -> None:
    config = load_config(GPU, ["coordinator.lease_deadline_s=700"])
    slow = make_plan(config, Request(sampled_tokens_per_s=1000.0, trained_tokens_per_s=9000.0))
    assert any("coordinator.lease_deadline_s = 700" in line for line in slow.remarks)
    fast = make_plan(config, Request(sampled_tokens_per_s=20_000.0, trained_tokens_per_s=9000.0))
    assert not any("lease_deadline_s" in line for line in fast.remarks)


@pytest.mark.parametrize(
    ("overrides", "request_", "said"),
    [
        (["tree.max_context_tokens=50000", "learner.micro_batch_tokens=50000"], {}, "more than the 40960 positions"),
        (["policy.path=someone/unheard-of"], {}, "--model-config FILE"),
        (["tree.allocator=nothing"], {}, "tree.allocator"),
        (["engine.device=cuda:4"], {}, "one engine needs 4 GPUs"),
        (["engine.options={quantization='fp8'}"], {}, "engine.options.quantization is refused"),
        ([], {"sampled_tokens_per_s": 5.0}, "give both"),
        ([], {"sampled_tokens_per_s": 5.0, "trained_tokens_per_s": 0.0}, "--trained-tokens-per-s must be"),
        ([], {"mean_turns": 0.5}, "--mean-turns must be at least 1"),
    ],
)
def test_what_no_machine_could_run_is_refused(overrides: list[str], request_: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan(load_config(GPU, overrides), Request(**request_))


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_plan_prints_everything_and_ends_with_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = [f"run.dir={tmp_path / 'run'}"]
    code = plan(CONFIGS / "quickstart.toml", run, Request(gpus=0, as_json=True, mean_turns=3.0))
    text, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    found = json.loads(last)
    assert code == 0
    assert not (tmp_path / "run").exists()
    assert found["parameters"] == 938_368
    assert found["given"]["prompt_tokens"] == "mean of 32 training prompts"
    assert found["learner"]["standing"][0] == {"what": "weights, float32", "num_bytes": 4 * 938_368}
    for part in ("what runs where", "one optimizer step", "ages, in optimizer steps", "the whole run"):
        assert part in text


def test_every_option_reaches_the_plan() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    assert request_of(parser.parse_args([])) == Request()
    words = "--gpus 2 --gpu-memory-gib 24 --model-config c.json --mean-turns 2 --mean-turn-tokens 3 --json"
    more = "--mean-observation-tokens 4 --mean-prompt-tokens 5 --sampled-tokens-per-s 6 --trained-tokens-per-s 7"
    found = request_of(parser.parse_args(f"{words} {more}".split()))
    assert found == Request(
        gpus=2,
        gpu_memory_gib=24.0,
        model_config=Path("c.json"),
        mean_turns=2.0,
        mean_turn_tokens=3.0,
        mean_observation_tokens=4.0,
        mean_prompt_tokens=5.0,
        sampled_tokens_per_s=6.0,
        trained_tokens_per_s=7.0,
        as_json=True,
    )


def test_versions_in_memory_count_for_the_host_and_not_for_the_disk() -> None:
    config = load_config(GPU)
    memory = make_plan(config, Request())
    disk = make_plan(replace(config, publication=replace(config.publication, directory="")), Request())
    versions = 3 * memory.files.version
    assert disk.files.disk - memory.files.disk == memory.host_bytes - disk.host_bytes == versions
    assert disk.host_bytes == 4 * 4 * 8_190_735_360


def test_a_plan_that_does_not_fit_ends_with_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(GPU, [], Request(gpus=8, gpu_memory_gib=24)) == DOES_NOT_FIT
    out = capsys.readouterr().out
    assert "DOES NOT WORK: GPU 0, 1, 2, 3" in out
    assert "not on this machine: policy: Qwen/Qwen3-8B is no folder here" in out


def test_sizes_come_from_a_given_config_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text((CONFIGS.parent / "trace_async/policies/frozenlake-tiny/config.json").read_text())
    overrides = ["policy.path=someone/unheard-of", "tree.max_context_tokens=512", "engine.max_turn_tokens=64"]
    found = make_plan(load_config(GPU, overrides), Request(model_config=file))
    assert (found.parameters, found.model_source) == (938_368, str(file))
    file.write_text("[]")
    with pytest.raises(ConfigError, match="no table of sizes"):
        make_plan(load_config(GPU, overrides), Request(model_config=file))
