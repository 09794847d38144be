"""Rewards of every kind of ending, computed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from envs.multihop_qa.records import Question
from envs.multihop_qa.rewards import Ending, RewardOptions, end, reward
from envs.options import read_options
from trace_async.errors import ConfigError

NUMBERS = RewardOptions(structure=0.25, final=0.125, retrieval=0.0625)


def ending(*, right: bool, formed: bool, answered: bool = True, seen: bool = False, searches: int = 1) -> Ending:
    hit = float(right)
    return Ending(hit, hit or 0.5, hit, answered, formed, searches, seen)


@pytest.mark.parametrize(
    ("right", "formed", "seen", "expected"),
    [
        # Search-R1's table with structure 0.25, final 0.125, retrieval 0.0625
        (True, True, True, 1.0),
        (True, True, False, 1.0),
        (True, False, True, 0.75),
        (True, False, False, 0.75),
        (False, True, True, 0.3125),
        (False, True, False, 0.25),
        (False, False, True, 0.125),
        (False, False, False, 0.125),
    ],
)
def test_search_r1_format_pays_by_answer_form_and_retrieval(
    right: bool, formed: bool, seen: bool, expected: float
) -> None:
    assert reward(ending(right=right, formed=formed, seen=seen), "search_r1_format", NUMBERS) == expected


def test_search_r1_format_has_the_published_numbers_by_default() -> None:
    options = RewardOptions()
    assert reward(ending(right=True, formed=False), "search_r1_format", options) == 0.8
    assert reward(ending(right=False, formed=True), "search_r1_format", options) == 0.2
    assert reward(ending(right=False, formed=True, seen=True), "search_r1_format", options) == pytest.approx(0.3)
    assert reward(ending(right=False, formed=False), "search_r1_format", options) == 0.1


@pytest.mark.parametrize("kind", ["em", "f1", "cover_em", "search_r1_format"])
def test_without_an_answer_there_is_nothing(kind: str) -> None:
    nothing = Ending(0.0, 0.0, 0.0, False, False, 3, True)
    assert reward(nothing, kind, NUMBERS) == 0.0


@pytest.mark.parametrize(
    ("formed", "searches", "first", "second"),
    [(True, 1, 1.0, 0.5), (True, 0, 0.5, 0.5), (False, 2, 0.5, -1.5), (False, 0, 0.0, -1.5)],
)
def test_the_stages_of_r1_searcher_pay_for_search_and_form_then_for_f1(
    formed: bool, searches: int, first: float, second: float
) -> None:
    end = ending(right=False, formed=formed, searches=searches)  # F1 0.5
    assert reward(end, "r1_searcher_1", NUMBERS) == first
    assert reward(end, "r1_searcher_2", NUMBERS) == second


def test_a_staged_reward_is_the_one_of_its_stage() -> None:
    half = ending(right=False, formed=True)
    assert reward(half, "staged", RewardOptions()) == reward(half, "r1_searcher_1", RewardOptions()) == 1.0
    assert reward(half, "staged", RewardOptions(stage=2)) == 0.5
    assert reward(half, "staged", RewardOptions(stages=("em", "f1", "cover_em"), stage=3)) == 0.0


def question(dataset: str, *answers: str) -> Question:
    return Question(question_id="q", question="Who?", answers=answers, dataset=dataset)


def test_an_ending_measures_the_answer_by_the_rule_of_its_data_set() -> None:
    def measured(question: Question, answer: str | None) -> tuple[float, float, float]:
        end_ = end(question, answer, is_well_formed=True, num_searches=2, has_seen_answer=True)
        assert end_.has_answer == end_.is_well_formed == (answer is not None)
        assert (end_.num_searches, end_.has_seen_answer) == (2, True)
        return end_.em, end_.f1, end_.cover_em

    two = question("musique", "Ann of Ulm", "Ann")
    assert measured(two, "the Ann!") == (1.0, 1.0, 1.0)
    assert measured(two, "Ann Bob") == pytest.approx((0.0, 2 / 3, 1.0))
    assert measured(two, "Bob") == (0.0, 0.0, 0.0)
    assert measured(two, None) == (0.0, 0.0, 0.0)
    assert measured(question("hotpotqa", "yes"), "yes indeed") == (0.0, 0.0, 1.0)  # yes matches yes alone
    assert measured(question("musique", "yes"), "yes indeed") == pytest.approx((0.0, 2 / 3, 1.0))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"structure": 1.5}, r"reward_options.structure: need a number within 0..1, got 1.5"),
        ({"retrieval": -0.1}, r"reward_options.retrieval: need a number"),
        ({"stages": ["em", "staged"]}, r"reward_options.stages: need names out of em, f1, .*, got 'staged'"),
        ({"stage": 3}, r"reward_options.stage: need 1..2, got 3"),
        ({"stages": []}, r"reward_options.stage: need 1..0, got 1"),
    ],
)
def test_numbers_and_stages_out_of_range_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(RewardOptions, options, owner="multihop_qa")
