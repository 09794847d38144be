"""Scores of supporting facts, titles, triples and their joint, on numbers worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multihop_qa.support import Scores, evidence_scores, fact_scores, joint, set_scores, title_scores

FACTS = st.sets(st.tuples(st.sampled_from(["A", "a", "B", "C"]), st.integers(0, 2)), max_size=6)


@pytest.mark.parametrize(
    ("predicted", "gold", "expected"),
    [
        ({1, 2, 3}, {2, 3, 4, 5}, Scores(2 / 3, 2 / 4, 4 / 7, 0.0)),
        ({1, 2}, {1, 2}, Scores(1.0, 1.0, 1.0, 1.0)),
        ({1, 2, 3}, {1, 2}, Scores(2 / 3, 1.0, 4 / 5, 0.0)),
        ({1}, {2}, Scores(0.0, 0.0, 0.0, 0.0)),
        (set(), {1}, Scores(0.0, 0.0, 0.0, 0.0)),
        ({1}, set(), Scores(0.0, 0.0, 0.0, 0.0)),
        (set(), set(), Scores(0.0, 0.0, 0.0, 1.0)),
    ],
)
def test_scores_of_sets(predicted: set[int], gold: set[int], expected: Scores) -> None:
    assert set_scores(predicted, gold) == pytest.approx(expected)


def test_titles_of_supporting_facts_in_lower_case_are_the_way_of_2wiki() -> None:
    predicted, gold = [("Ed Wood", 0), ("ed wood", 0), ("Rome", 2)], [("ed Wood", 0), ("Rome", 1)]
    assert fact_scores(predicted, gold) == Scores(0.0, 0.0, 0.0, 0.0)
    # both spellings are right and counted: 2 of 3 predicted; 2 right and 1 missed is the recall
    assert fact_scores(predicted, gold, lower_titles=True) == pytest.approx(Scores(2 / 3, 2 / 3, 2 / 3, 0.0))


def test_the_same_fact_twice_counts_once() -> None:
    assert fact_scores([("A", 0), ("A", 0)], [("A", 0)]) == Scores(1.0, 1.0, 1.0, 1.0)


@given(FACTS, FACTS)
def test_supporting_facts_are_counted_as_sets(predicted: set[tuple[str, int]], gold: set[tuple[str, int]]) -> None:
    assert fact_scores(predicted, gold) == set_scores(predicted, gold)
    mirrored = fact_scores(gold, predicted)
    assert fact_scores(predicted, gold) == Scores(mirrored.recall, mirrored.precision, mirrored.f1, mirrored.em)
    lowered = fact_scores(predicted, gold, lower_titles=True)
    assert all(0 <= value <= 1 for value in lowered)
    assert lowered.em >= fact_scores(predicted, gold).em


def test_pages_found_are_compared_by_title_whatever_the_case() -> None:
    scores = title_scores(["Ed Wood", "Ed wood", "Rome", "Oslo"], ("ED WOOD", "Paris"))
    assert scores == pytest.approx(Scores(1 / 3, 1 / 2, 2 / 5, 0.0))
    assert title_scores(["x", "y"], ["Y", "X"]).em == 1.0
    assert title_scores([], ["x"]) == Scores(0.0, 0.0, 0.0, 0.0)


def test_evidence_triples_are_compared_without_case_and_punctuation() -> None:
    gold = [[("Get Low", "performer", "Dillon Francis")], [("Dillon Francis", "date of birth", "October 5, 1987")]]
    assert evidence_scores([("get low!", "Performer", "dillon  francis")], gold) == pytest.approx(
        Scores(1.0, 1 / 2, 2 / 3, 0.0)
    )
    right = [("Get Low", "performer", "Dillon Francis"), ("Dillon Francis", "date of birth", "october 5 1987")]
    assert evidence_scores(right, gold) == Scores(1.0, 1.0, 1.0, 1.0)
    assert evidence_scores([], gold) == Scores(0.0, 0.0, 0.0, 0.0)
    assert evidence_scores([("the x", "r", "y")], [[("x", "r", "y")]]).precision == 0.0  # articles stay


def test_each_spelling_of_a_triple_is_accepted_and_counted() -> None:
    gold = [[("NYC", "in", "US"), ("New York", "in", "US")], [("US", "capital", "DC")]]
    assert evidence_scores([("New York", "in", "US")], gold) == pytest.approx(Scores(1.0, 1 / 2, 2 / 3, 0.0))
    three = [("NYC", "in", "US"), ("New York", "in", "US"), ("US", "capital", "DC")]
    assert evidence_scores(three, gold) == pytest.approx(Scores(1.0, 3 / 2, 6 / 5, 0.0))


def test_joint_scores_are_products() -> None:
    support = Scores(0.5, 1.0, 2 / 3, 0.0)
    assert joint(0.5, 0.4, 1.0, support) == pytest.approx(Scores(0.25, 0.4, 2 * 0.25 * 0.4 / 0.65, 0.0))
    assert joint(0.0, 0.0, 0.0, support) == Scores(0.0, 0.0, 0.0, 0.0)
    perfect = Scores(1.0, 1.0, 1.0, 1.0)
    assert joint(1.0, 1.0, 1.0, perfect, perfect) == perfect
    evidence = Scores(0.5, 0.5, 0.5, 0.0)
    assert joint(1.0, 1.0, 1.0, perfect, evidence) == evidence
