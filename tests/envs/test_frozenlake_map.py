"""FrozenLake's rules against gymnasium's, and the maps' own promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.frozenlake_map import (
    HELDOUT_ONE_IN,
    MOVES,
    Lake,
    distances,
    draw_lake,
    draw_transition,
    find_lake,
    shortest_moves,
    split_of,
    transitions,
)
from trace_async.errors import ConfigError

lakes = st.builds(
    lambda seed, size, frozen: draw_lake(np.random.default_rng(seed), size=size, frozen=frozen),
    st.integers(0, 2**32),
    st.integers(2, 9),
    st.floats(0.0, 1.0),
)
findable = st.builds(
    lambda seed, size, split: find_lake(np.random.default_rng(seed), split=split, size=size, frozen=0.8, max_moves=99),
    st.integers(0, 2**32),
    st.integers(3, 9),
    st.sampled_from(["train", "heldout"]),
)


@pytest.mark.parametrize(("slippery", "success_rate"), [(False, 1 / 3), (True, 1 / 3), (True, 0.8), (True, 1.0)])
def test_every_transition_of_random_maps_has_the_probability_that_gymnasium_gives_it(
    slippery: bool, success_rate: float
) -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for size in (2, 3, 4, 6, 9):
        lake = draw_lake(rng, size=size, frozen=0.7)
        table = FrozenLakeEnv(desc=list(lake.rows), is_slippery=slippery, success_rate=success_rate).P
        for cell in range(size * size):
            for move in range(len(MOVES)):
                ours = transitions(lake, cell, move, slippery=slippery, success_rate=success_rate)
                theirs = [(probability, reached) for probability, reached, _, _ in table[cell][move]]
                assert list(ours) == theirs
                compared += len(theirs)
    assert compared >= 4 * (4 + 9 + 16 + 36 + 81)


@pytest.mark.parametrize("slippery", [False, True])
def test_thousands_of_random_steps_lead_where_gymnasium_leads_when_both_draw_the_same_numbers(slippery: bool) -> None:
    rng = np.random.default_rng(1)
    steps = 0
    while steps < 4000:
        lake = draw_lake(rng, size=int(rng.integers(3, 10)), frozen=0.85)
        oracle: Any = FrozenLakeEnv(desc=list(lake.rows), is_slippery=slippery)
        cell, _ = oracle.reset(seed=0)
        assert cell == lake.start
        oracle.np_random = np.random.default_rng(steps)
        ice = np.random.default_rng(steps)
        terminated = False
        for _ in range(40):
            if terminated:
                break
            move = int(rng.integers(4))
            cell = draw_transition(transitions(lake, cell, move, slippery=slippery, success_rate=1 / 3), ice)
            reached, reward, terminated, _, _ = oracle.step(move)
            assert cell == reached
            assert terminated == (lake.text[cell] in "HG")
            assert reward == (lake.text[cell] == "G")
            steps += 1


def test_slippery_frequencies_are_the_stated_probabilities() -> None:
    lake = Lake.parse(["FFF", "FSF", "GFF"])
    possible = transitions(lake, lake.start, MOVES.index("right"), slippery=True, success_rate=0.6)
    rng = np.random.default_rng(2)
    reached = [draw_transition(possible, rng) for _ in range(6000)]
    # Five standard errors of a share near 0.6 in 6000 draws are 0.032.
    assert reached.count(5) / 6000 == pytest.approx(0.6, abs=0.032)
    assert reached.count(7) / 6000 == pytest.approx(0.2, abs=0.032)
    assert reached.count(1) / 6000 == pytest.approx(0.2, abs=0.032)


def test_distances_and_shortest_moves_of_a_small_map_are_those_counted_by_hand() -> None:
    lake = Lake.parse(["SFF", "HHF", "GFF"])
    assert distances(lake) == (6, 5, 4, -1, -1, 3, 0, 1, 2)
    assert [MOVES[move] for move in shortest_moves(lake, lake.start)] == ["right"]
    assert [MOVES[move] for move in shortest_moves(lake, 2)] == ["down"]
    assert shortest_moves(lake, lake.goal) == ()
    assert shortest_moves(lake, 3) == ()
    fork = Lake.parse(["SF", "FG"])
    assert [MOVES[move] for move in shortest_moves(fork, 0)] == ["down", "right"]


@given(findable)
@settings(max_examples=60, deadline=None)
def test_following_any_shortest_move_comes_one_step_nearer_and_never_into_a_hole(lake: Lake) -> None:
    ways = distances(lake)
    for cell in range(len(lake.text)):
        for move in shortest_moves(lake, cell):
            ((_, reached),) = transitions(lake, cell, move, slippery=False, success_rate=1.0)
            assert ways[reached] == ways[cell] - 1
            assert lake.text[reached] != "H"


@given(lakes)
@settings(max_examples=100, deadline=None)
def test_a_drawn_map_is_square_with_one_start_and_one_goal_and_parses_to_itself(lake: Lake) -> None:
    assert Lake.parse(lake.rows) == lake
    assert lake.start != lake.goal


def test_a_map_belongs_to_one_split_whatever_the_seed_and_about_one_in_eight_is_held_out() -> None:
    rng = np.random.default_rng(3)
    drawn = [draw_lake(rng, size=4, frozen=0.7) for _ in range(4000)]
    heldout = sum(split_of(lake) == "heldout" for lake in drawn)
    # Five standard errors of a share near 1/8 in 4000 draws are 0.026.
    assert heldout / 4000 == pytest.approx(1 / HELDOUT_ONE_IN, abs=0.026)
    # Frozen for ever: moving a map to the other split would let old held-out maps into new training runs.
    assert split_of(Lake.parse(["SF", "FG"])) == "train"
    assert split_of(Lake.parse(["SG", "FF"])) == "train"


def test_a_search_for_maps_that_cannot_exist_ends_with_its_numbers() -> None:
    rng = np.random.default_rng(4)
    with pytest.raises(ConfigError, match=r"no train map of size 9.*1 to 0 moves among 50 candidates"):
        find_lake(rng, split="train", size=9, frozen=0.9, max_moves=0, max_candidates=50)


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        (["SG"], "square"),
        (["SG", "F"], "square"),
        (["SG", "FX"], "X"),
        (["SS", "FG"], "one S"),
        (["FF", "FG"], "one S"),
    ],
)
def test_a_malformed_map_is_refused_with_its_rows(rows: list[str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Lake.parse(rows)
