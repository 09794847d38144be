"""How versions spread: times to the first and the last confirmation, and what nobody needs any more."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from trace_async.learning.spread import Spread

FIRST, ALL = "publication/first_confirm_s", "publication/all_confirm_s"


def test_the_first_and_the_last_confirmation_are_timed_from_publication() -> None:
    spread = Spread()
    spread.publish(0, now_s=10.0)
    assert not spread.look([-1, -1], now_s=11.0)
    spread.look([0, -1], now_s=12.0)
    assert spread.look([0, 0], now_s=15.0)
    assert spread.read() == {FIRST: 2.0, ALL: 5.0}
    assert all(math.isnan(value) for value in spread.read().values())


def test_an_actor_that_skips_versions_confirms_those_before_with_the_newer_one() -> None:
    spread = Spread()
    for version in range(4):
        spread.publish(version, now_s=float(version))
    spread.look([3, 1], now_s=10.0)
    assert spread.read() == {FIRST: 7.0, ALL: 9.0}
    spread.look([3, 3], now_s=11.0)
    assert spread.read()[ALL] == 8.0


def test_without_live_actors_nobody_needs_an_older_version_and_nothing_is_timed() -> None:
    spread = Spread()
    spread.publish(5, now_s=0.0)
    assert spread.look([], now_s=1.0)
    assert spread.needed_since == 5
    assert all(math.isnan(value) for value in spread.read().values())
    spread.look([-1], now_s=2.0)  # a newcomer
    assert spread.needed_since == -1


@given(st.lists(st.lists(st.integers(-1, 200), max_size=3), min_size=1, max_size=200))
def test_what_is_needed_is_what_the_slowest_has_and_no_time_is_shorter_than_it_was(looks: list[list[int]]) -> None:
    spread = Spread()
    for version, versions in enumerate(looks):
        spread.publish(version, now_s=float(version))
        known = [min(v, version) for v in versions]
        spread.look(known, now_s=version + 0.5)
        assert spread.needed_since == min(known, default=version)
        assert all(math.isnan(value) or value >= 0.5 for value in spread.read().values())
