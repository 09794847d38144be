"""Seeds depend on where a node stands and on nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trace_async.core.seeds import env_seed, node_seed

RUN_SEEDS = st.integers(min_value=-(2**70), max_value=2**70)
PATHS = st.lists(st.integers(min_value=0, max_value=40), max_size=6).map(tuple)
PLACES = st.tuples(RUN_SEEDS, st.text(max_size=8), st.integers(min_value=0, max_value=9), PATHS)


def test_seeds_are_pinned_so_that_recorded_runs_can_be_played_again() -> None:
    assert node_seed(0, "train/0", 0, ()) == 8_615_253_292_828_327_112
    assert node_seed(0, "train/0", 0, (0, 2)) == 348_851_825_470_274_131
    assert env_seed(0, "train/0", 0, (0, 2)) == 3_985_980_902_609_117_231


@settings(max_examples=40)
@given(st.lists(PLACES, min_size=2, max_size=8, unique=True))
def test_no_two_places_share_a_seed(places: list[tuple[int, str, int, tuple[int, ...]]]) -> None:
    assert len({node_seed(*place) for place in places}) == len(places)
    assert len({env_seed(*place) for place in places}) == len(places)


@settings(max_examples=40)
@given(PLACES)
def test_seeds_are_63_bits_and_sampling_never_shares_one_with_the_environment(
    place: tuple[int, str, int, tuple[int, ...]],
) -> None:
    assert 0 <= node_seed(*place) < 2**63
    assert 0 <= env_seed(*place) < 2**63
    assert node_seed(*place) != env_seed(*place)


def test_a_prompt_id_cannot_imitate_the_fields_around_it() -> None:
    assert node_seed(1, "a|0|1", 0, ()) != node_seed(1, "a", 0, (1,))
    assert node_seed(1, "a", 0, (1, 2)) != node_seed(1, "a", 0, (12,))
    assert node_seed(1, "1:a", 0, ()) != node_seed(11, "a", 0, ())
