"""What searches brought to light, counted by hand."""

from __future__ import annotations

import math

import pytest

from envs.multihop_qa.records import Question, SubQuestion
from envs.multihop_qa.signals import Found
from envs.retrieval.protocol import Passage

CHAIN = Question(
    question_id="q",
    question="Where was the mayor of Brenal born?",
    answers=("Old Ulm",),
    gold_titles=("Brenal", "Ann Tor"),
    steps=(SubQuestion("Who is mayor?", "Ann Tor"), SubQuestion("Where was Ann Tor born?", "Old Ulm")),
)
BRENAL = Passage("1", "BRENAL", "Its mayor is Ann Tor.")
ANN = Passage("2", "Ann Tor", "Born in old Ulm, she moved.")
OTHER = Passage("3", "Brenal River", "A river with nobody.")


def test_signals_and_measures_of_a_chain_are_as_counted_here() -> None:
    found = Found()
    assert found.metrics(CHAIN) == {
        **{"gold_page": 0.0, "new_page": 0.0, "sub_answer": 0.0},
        **{"support_precision": 0.0, "support_recall": 0.0, "support_f1": 0.0, "support_em": 0.0},
    }
    found, signals = found.plus([OTHER], CHAIN)
    assert tuple(signals) == (0.0, 1.0, 0.0)
    found, signals = found.plus([OTHER, BRENAL], CHAIN)  # a title in other case is the same page
    assert tuple(signals) == (1.0, 1.0, 1.0)
    assert not found.has_seen_answer  # an answer of a step is not the gold answer
    found, signals = found.plus([BRENAL], CHAIN)
    assert tuple(signals) == (1.0, 0.0, 1.0)
    found, signals = found.plus([], CHAIN)
    assert tuple(signals) == (0.0, 0.0, 0.0)
    found, signals = found.plus([ANN], CHAIN)
    assert tuple(signals) == (1.0, 1.0, 1.0)
    assert found.has_seen_answer
    assert found.titles == ("Brenal River", "BRENAL", "Ann Tor")
    assert found.metrics(CHAIN) == {
        "gold_page": 3 / 5,
        "new_page": 3 / 5,
        "sub_answer": 3 / 5,
        "support_precision": pytest.approx(2 / 3),
        "support_recall": 1.0,
        "support_f1": pytest.approx(0.8),
        "support_em": 0.0,
    }


def test_answers_are_found_as_whole_words_in_normal_form_in_titles_too() -> None:
    def sees(answer: str, title: str, text: str) -> float:
        asked = Question(question_id="q", question="?", answers=(answer,))
        return Found().plus([Passage("1", title, text)], asked)[1].sub_answer

    assert sees("The U.S.", "x", "made in the US, today") == 1.0
    assert sees("Ulm", "x", "the Ulmer") == 0.0
    assert sees("Ulm", "Ulm", "a town") == 1.0
    assert sees("Ann Tor", "Ann", "Tor") == 0.0  # a title does not run on into its text
    assert math.isnan(sees("yes", "x", "yes"))
    assert math.isnan(sees("The", "x", "the"))


def test_what_a_question_says_nothing_about_is_absent_not_zero() -> None:
    bare = Question(question_id="q", question="Is it?", answers=("no",))
    found, signals = Found().plus([BRENAL], bare)
    assert math.isnan(signals.gold_page)
    assert math.isnan(signals.sub_answer)
    assert found.metrics(bare) == {"new_page": 1.0}
    assert Found().metrics(bare) == {"new_page": 0.0}
    assert not found.has_seen_answer


def test_pages_without_a_title_are_told_apart_by_identity() -> None:
    found, _ = Found().plus([Passage("1", "", "One.")], CHAIN)
    found, signals = found.plus([Passage("2", "", "Two.")], CHAIN)
    assert signals.new_page == 1.0
    assert found.plus([Passage("1", "", "One.")], CHAIN)[1].new_page == 0.0
