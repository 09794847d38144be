"""Answer metrics against hand-made cases, and against a slow oracle written from the published rules."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multihop_qa.answers import (
    Rule,
    answer_scores,
    cover_exact_match,
    cover_tokens,
    exact_match,
    f1,
    normalise,
    normalise_r1_searcher,
    rule_of,
)

WORDS = st.sampled_from(
    ["a", "an", "the", "yes", "no", "noanswer", "Paris", "Rome's", "U.S.", "été", "-", "_", "“x”", ""]
)
TEXTS = st.lists(WORDS, max_size=5).map(" ".join) | st.text(max_size=12)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles", "beatles"),
        ("a An THE", ""),
        ("Anthem of the Ants", "anthem of ants"),
        ("U.S.A.", "usa"),
        ("rock-and-roll", "rockandroll"),  # no space is put in
        ("a-ha", "aha"),  # punctuation goes before articles, so this a is none
        ("snake_case", "snakecase"),
        ("O'Neill's", "oneills"),
        ("O’Neill’s", "o’neill’s"),  # curly quotes are no ASCII punctuation
        ("“The Wall”", "“ wall”"),  # ... but bound a word
        ("São Paulo", "são paulo"),
        ("“The”", "“ ”"),  # an article leaves a space
        ("ÉTÉ", "été"),
        ("1,234.5", "12345"),
        ("3–4", "3–4"),
        ("\u00a0tab\tand\nline\u2003", "tab and line"),
        ("", ""),
        ("!?", ""),
    ],
)
def test_the_common_normal_form(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("True", "yes"),
        ("False", "no"),
        ("true", "true"),  # exactly these words
        ("True.", "true"),
        ("rock-and-roll", "rock and roll"),
        ("a-ha", "ha"),  # the hyphen is a space now, so this a is an article
        ("snake_case", "snake case"),
        ("O’Neill’s", "o neill s"),
        ("‘x´`", "x"),
        ("“x”", "“x”"),  # only the single ones
        ("1,234.5", "1 234 5"),
        ("The", ""),
    ],
)
def test_the_normal_form_of_r1_searcher(text: str, normal: str) -> None:
    assert normalise_r1_searcher(text) == normal


@pytest.mark.parametrize(
    ("prediction", "answers", "expected"),
    [
        ("the Eiffel Tower!", ["Eiffel Tower"], 1.0),
        ("Eiffel", ["Eiffel Tower"], 0.0),
        ("NYC", ["New York City", "nyc"], 1.0),
        ("yes", ["Yes."], 1.0),
        ("", ["x"], 0.0),
        ("", ["The"], 1.0),  # both have the empty normal form
        ("the", ["a"], 1.0),
        ("café", ["cafe"], 0.0),
        ("e\u0301t", ["ét"], 0.0),  # no Unicode normalisation is done
    ],
)
def test_exact_match_compares_normal_forms(prediction: str, answers: list[str], expected: float) -> None:
    assert exact_match(prediction, answers) == expected


@pytest.mark.parametrize(
    ("prediction", "answers", "hotpotqa", "squad"),
    [
        ("red green blue", ["green blue white black"], 4 / 7, 4 / 7),  # 2 of 3, 2 of 4
        ("x x y", ["x z"], 2 / 5, 2 / 5),  # a multiset: one x is shared, 1 of 3, 1 of 2
        ("x x y", ["x x z"], 2 / 3, 2 / 3),
        ("yes it is", ["yes"], 0.0, 1 / 2),  # a closed answer and something else
        ("yes", ["yes it is"], 0.0, 1 / 2),
        ("no", ["yes"], 0.0, 0.0),
        ("Yes!", ["yes"], 1.0, 1.0),
        ("noanswer given", ["noanswer"], 0.0, 2 / 3),
        ("", [""], 0.0, 1.0),
        ("the", ["a"], 0.0, 1.0),
        ("", ["word"], 0.0, 0.0),
        ("word", ["an"], 0.0, 0.0),
        ("", ["yes"], 0.0, 0.0),
        ("other", ["word"], 0.0, 0.0),
        ("red", ["blue", "red car", "red"], 1.0, 1.0),
        ("yes", ["yes it is", "no", "yes"], 1.0, 1.0),
        ("the U.S.A.", ["usa"], 1.0, 1.0),
        ("O’Neill", ["O'Neill"], 0.0, 0.0),
    ],
)
def test_f1_by_the_rule_of_the_data_set(prediction: str, answers: list[str], hotpotqa: float, squad: float) -> None:
    assert f1(prediction, answers, rule="hotpotqa") == pytest.approx(hotpotqa)
    assert f1(prediction, answers, rule="squad") == pytest.approx(squad)


def test_precision_and_recall_are_maxima_of_their_own() -> None:
    scores = answer_scores("one two three four", ["one", "one two five six seven eight nine ten one"])
    assert scores.precision == pytest.approx(2 / 4)  # of the second answer
    assert scores.recall == pytest.approx(1.0)  # of the first
    assert scores.f1 == pytest.approx(2 * 0.25 * 1.0 / 1.25)
    assert scores.em == 0.0


@pytest.mark.parametrize(
    ("prediction", "answers", "substring", "tokens"),
    [
        ("It was born in Paris, France.", ["Paris"], 1.0, 1.0),
        ("Parisian", ["Paris"], 1.0, 0.0),  # a part of a word
        ("Tower of Eiffel", ["Eiffel Tower"], 0.0, 1.0),  # any order
        ("Paris", ["Paris France"], 0.0, 0.0),
        ("nothing", ["x", "thing"], 1.0, 0.0),
        ("True", ["yes"], 0.0, 1.0),
        ("rock and roll", ["rock-and-roll"], 0.0, 1.0),
        ("whatever", ["The"], 0.0, 0.0),  # an answer without a normal form is not covered by everything
        ("an", ["The"], 1.0, 1.0),
        ("", ["Paris"], 0.0, 0.0),
        ("x", ["x x"], 0.0, 1.0),  # tokens, not counts
    ],
)
def test_the_two_kinds_of_cover(prediction: str, answers: list[str], substring: float, tokens: float) -> None:
    assert cover_exact_match(prediction, answers) == substring
    assert cover_tokens(prediction, answers) == tokens


@pytest.mark.parametrize(
    ("dataset", "rule"),
    [
        ("hotpotqa", "hotpotqa"),
        ("searchR1_hotpotqa", "hotpotqa"),
        ("HotpotQA", "hotpotqa"),
        ("2wiki", "hotpotqa"),
        ("2wikimultihopqa", "hotpotqa"),
        ("2WikiMultiHopQA", "hotpotqa"),
        ("musique", "squad"),
        ("nq", "squad"),
        ("world", "squad"),
        ("", "squad"),
    ],
)
def test_the_rule_of_a_data_set(dataset: str, rule: Rule) -> None:
    assert rule_of(dataset) == rule


@pytest.mark.parametrize("metric", [exact_match, f1, cover_exact_match, cover_tokens])
@pytest.mark.parametrize("answers", [[], (), "Paris"])
def test_gold_answers_that_are_none_or_one_text_are_refused(metric, answers) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="gold answers must be a sequence"):
        metric("Paris", answers)


def slow_normal(text: str) -> str:
    """Character by character and word by word; word characters are those that Python's identifiers know."""
    kept = "".join(char for char in text.lower() if char not in string.punctuation)
    out, word = "", ""
    for char in kept + " ":
        if char.isalnum() or char == "_":
            word += char
        else:
            out += (" " if word in ("a", "an", "the") else word) + char
            word = ""
    return " ".join(out.split())


def slow_f1(prediction: str, answer: str, rule: str) -> float:
    left, right = slow_normal(prediction), slow_normal(answer)
    if (
        rule == "hotpotqa"
        and left != right
        and (left in ("yes", "no", "noanswer") or right in ("yes", "no", "noanswer"))
    ):
        return 0.0
    if rule == "squad" and (left == "" or right == ""):
        return float(left == right)
    rest, shared = right.split(), 0
    for token in left.split():
        if token in rest:
            rest.remove(token)
            shared += 1
    return 2 * shared / (len(left.split()) + len(right.split())) if shared else 0.0


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_metrics_agree_with_the_slow_oracle(prediction: str, answers: list[str]) -> None:
    assert exact_match(prediction, answers) == max(float(slow_normal(prediction) == slow_normal(a)) for a in answers)
    assert f1(prediction, answers, "hotpotqa") == pytest.approx(
        max(slow_f1(prediction, a, "hotpotqa") for a in answers)
    )
    assert f1(prediction, answers, "squad") == pytest.approx(max(slow_f1(prediction, a, "squad") for a in answers))


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_metrics_are_ordered_and_do_not_depend_on_the_order_of_answers(prediction: str, answers: list[str]) -> None:
    em = exact_match(prediction, answers)
    assert em <= f1(prediction, answers, "squad") <= 1.0
    assert em <= cover_exact_match(prediction, answers)
    assert answer_scores(prediction, answers).em == em
    for metric in (exact_match, f1, cover_exact_match, cover_tokens):
        assert metric(prediction, answers) == metric(prediction, answers[::-1])
        assert metric(answers[0], [*answers, prediction]) == 1.0


@given(TEXTS)
def test_normal_forms_have_single_spaces_and_no_punctuation(text: str) -> None:
    for normal in (normalise(text), normalise_r1_searcher(text)):
        assert normal == " ".join(normal.split())
        assert not set(normal) & set(string.punctuation)
