"""Two processes train as one does: the same numbers, the same files, and an end that says who was lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.ranks_kit import CASES, STEPPING, make_trainer, play_all, play_first, processes
from trace_async.app.learner_ranks import Place, environments, own_place
from trace_async.errors import ConfigError
from trace_async.policies.tiny import save_policy, tiny_model, tiny_tokenizer
from trace_async.trainer_ranks import ALONE, share_out

pytestmark = pytest.mark.timeout(180)

START_S = 120.0


@dataclass(frozen=True, slots=True)
class World:
    root: Path
    ranks: list[subprocess.Popen[str]]  # under way

    def report(self, who: str, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.root / who / name / "report.json").read_text())
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("ranks")
    tokenizer = tiny_tokenizer([f"w{index}" for index in range(200)])
    save_policy(tiny_model(tokenizer, seed=3, hidden_size=32, num_layers=2), tokenizer, root / "policy")
    for name, case in CASES.items():
        if case.resumes:
            trainer = make_trainer(case, root / "policy")
            play_first(case, trainer)
            (root / "before" / name / "saved").mkdir(parents=True)
            trainer.save(root / "before" / name / "saved")
    arguments = ["-m", "tests.ranks_kit", str(root / "two"), str(root / "policy"), str(root / "before")]
    with processes(arguments, size=2) as ranks:
        until_s = time.monotonic() + START_S
        while not (root / "two" / STEPPING).exists():
            assert all(rank.poll() is None for rank in ranks), "\n".join(rank.communicate()[0] for rank in ranks)
            assert time.monotonic() < until_s
            time.sleep(0.05)  # a file that another process writes wakes nobody
        play_all(root / "one", root / "policy", ALONE, others=root / "two")
        yield World(root, ranks)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_all_that_is_measured_are_those_of_one_process(world: World, name: str) -> None:
    one, two = world.report("one", name), world.report("two", name)
    assert len(one["steps"]) == len(two["steps"]) == (4 if CASES[name].resumes else 3)
    for alone, together in zip(one["steps"], two["steps"], strict=True):
        assert together == pytest.approx(alone, rel=1e-5, abs=1e-7, nan_ok=True)
    assert all(step["actor/grad_norm"] > 1e-3 for step in one["steps"])


@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(world: World, name: str) -> None:
    one, two = (load_file(world.root / who / name / "weights.safetensors") for who in ("one", "two"))
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=0.0, atol=1e-5)
    start = load_file(world.root / "policy" / "model.safetensors")
    assert any((one[key] - start.get(key, torch.zeros(()))).abs().max() > 1e-3 for key in one)


def test_batches_were_shared_evenly_unevenly_and_not_at_all(world: World) -> None:
    rows = {name: world.report("one", name)["rows"] for name in CASES}
    assert any(count % 2 for count in rows["all weights"])
    assert all(count >= 2 for count in rows["all weights"])
    assert rows["brakes on one batch"] == [1, 1, 1]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumes])
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_the_other_way_round(world: World, name: str) -> None:
    """Each went on from where the other stood after two steps."""
    whole = load_file(world.root / "one" / name / "weights.safetensors")
    for who in ("one", "two"):
        resumed = load_file(world.root / who / name / "resumed.safetensors")
        for key, expected in whole.items():
            torch.testing.assert_close(resumed[key], expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.resumes])
def test_files_for_others_are_those_of_one_process(world: World, name: str) -> None:
    for file in ("saved/model.safetensors", "saved/optimizer.safetensors", "policy/model.safetensors"):
        one, two = (load_file(world.root / who / name / file) for who in ("one", "two"))
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(two[key], one[key], rtol=0.0, atol=1e-5)
    said = (world.report(who, name)["canary"] for who in ("one", "two"))
    for alone, together in zip(*said, strict=True):
        np.testing.assert_allclose(together, alone, atol=1e-5)


def test_master_weights_stay_float32_whatever_layers_compute_in(world: World) -> None:
    for name in CASES:
        assert world.report("two", name)["dtypes"] == ["torch.float32"]


def test_the_brakes_acted_in_their_case_and_nowhere_else(world: World) -> None:
    for name in CASES:
        for step in world.report("two", name)["steps"]:
            assert (step["actor/ess_factor"] < 1.0) == (name == "brakes on one batch")
            assert (step["objective/held_back_share"] > 0.0) == (name == "brakes on one batch")


def test_a_rank_that_is_killed_ends_the_other_soon_with_its_name(world: World) -> None:
    leader, other = world.ranks
    other.send_signal(signal.SIGKILL)
    killed_s = time.monotonic()
    said, _ = leader.communicate(timeout=30.0)
    assert time.monotonic() - killed_s < 20.0
    assert leader.returncode == 1
    assert f"rank 1 (pid {other.pid} on " in said
    assert "ended without a word" in said
    assert "step, version " in said
    assert "goes on from its last checkpoint" in said


# ---- places ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_shares_hold_every_piece_once_and_none_is_much_heavier_than_the_best_can_be(
    costs: list[int], size: int
) -> None:
    shares = share_out(costs, size)
    assert sorted(piece for share in shares for piece in share) == list(range(len(costs)))
    heaviest = max(sum(costs[piece] for piece in share) for share in shares)
    bound = max(sum(costs) / size, max(costs, default=0))
    assert heaviest <= bound * (4 / 3) + max(costs, default=0) / 3


def test_a_share_of_three_pieces_for_two_by_hand() -> None:
    assert share_out([3, 5, 4], 2) == [[1], [2, 0]]
    assert share_out([7], 3) == [[0], [], []]


def test_without_torchrun_a_learner_is_alone() -> None:
    assert own_place({}, processes=1) == Place()
    assert own_place({"WORLD_SIZE": "1", "RANK": "0"}, processes=1) == Place()


def test_several_configured_processes_are_not_quietly_one() -> None:
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 4"):
        own_place({}, processes=4)


def test_half_of_torchruns_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="MASTER_PORT is not set"):
        own_place({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}, processes=1)


def test_what_torchrun_says_counts_more_than_the_configuration() -> None:
    (_, second, _) = environments({"PATH": "/bin", "RANK": "7"}, processes=3)
    assert second["PATH"] == "/bin"
    assert own_place(second, processes=2) == Place(rank=1, local_rank=1, size=3, master="127.0.0.1")


def test_nothing_of_an_outer_torchrun_reaches_a_learner_of_one_process() -> None:
    assert environments({"PATH": "/bin", "RANK": "7", "WORLD_SIZE": "9"}, processes=1) == [{"PATH": "/bin"}]
