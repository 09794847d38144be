"""Answer normalisation and answer metrics of the multi-hop data sets: EM, F1, and the two kinds of cover-EM.

Formulas follow the evaluation scripts of HotpotQA v1, 2WikiMultihopQA v1.1, MuSiQue v1.0 (the SQuAD rules), Search-R1
and R1-Searcher. Every metric takes one prediction and all gold answers and is the maximum over the gold answers.
Pure. Never: finding the answer in a response, supporting evidence, rewards.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, assert_never

Rule = Literal["hotpotqa", "squad"]
"""How F1 treats what has no tokens to share: HotpotQA and 2Wiki, or SQuAD and MuSiQue (`answer_scores`)."""

_DELETE_PUNCTUATION = str.maketrans("", "", string.punctuation)
_SPACE_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation + "‘’´`", " "))
_ARTICLE = re.compile(r"\b(a|an|the)\b")
_CLOSED_ANSWERS = frozenset({"yes", "no", "noanswer"})
_BOOLEANS = {"True": "yes", "False": "no"}


class Scores(NamedTuple):
    """Agreement of something predicted with something gold, each in [0, 1]."""

    precision: float
    recall: float
    f1: float
    em: float


def without_punctuation(text: str) -> str:
    """Lower case, ASCII punctuation deleted (no space put in), white space collapsed."""
    return " ".join(text.lower().translate(_DELETE_PUNCTUATION).split())


def normalise(text: str) -> str:
    """The normal form of SQuAD, HotpotQA, 2Wiki, MuSiQue and Search-R1.

    In this order: lower case; delete ASCII punctuation, with no space put in; delete the words a, an, the; collapse
    white space. Curly quotes, dashes beyond ASCII and accents stay.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_DELETE_PUNCTUATION)).split())


def normalise_r1_searcher(text: str) -> str:
    """The normal form of R1-Searcher: a text that is exactly True or False becomes yes or no; lower case; ASCII
    punctuation, underscores and the quotes ‘ ’ ´ become a space each; a, an, the go; white space collapses."""
    return " ".join(_ARTICLE.sub(" ", _BOOLEANS.get(text, text).lower().translate(_SPACE_PUNCTUATION)).split())


def rule_of(dataset: str) -> Rule:
    """The F1 rule of a data set by its name, as file names and `data_source` columns spell it, in any case."""
    name = dataset.lower()
    return "hotpotqa" if any(part in name for part in ("hotpot", "2wiki", "wikimultihop")) else "squad"


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 when the prediction and a gold answer have the same normal form, else 0.0."""
    predicted = normalise(prediction)
    return _best(lambda answer: float(predicted == normalise(answer)), answers)


def f1(prediction: str, answers: Sequence[str], rule: Rule = "squad") -> float:
    """Harmonic mean of token precision and recall, the best over the gold answers; `answer_scores` tells the rules."""
    return answer_scores(prediction, answers, rule).f1


def answer_scores(prediction: str, answers: Sequence[str], rule: Rule = "squad") -> Scores:
    """Token precision, recall, F1 and EM, each the maximum over the gold answers on its own (2Wiki v1.1).

    Tokens are compared as multisets of the normal forms. "hotpotqa": when either side is yes, no or noanswer and the
    two differ, all is 0; two empty sides share no token, so F1 is 0. "squad": when either side is empty, all is 1 if
    both are and 0 otherwise.
    """
    _check(answers)
    predicted = normalise(prediction)
    each = [_scores(predicted, normalise(answer), rule) for answer in answers]
    return Scores(*(max(values) for values in zip(*each, strict=True)))


def cover_exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 when the normal form of a gold answer is a substring of the prediction's (Search-R1's sub-EM), else 0.0.

    Unlike there, a gold answer without a normal form ("The", "!!!") is covered by an empty one only, not by every text.
    """
    predicted = normalise(prediction)
    return _best(lambda answer: float(_covers_text(predicted, normalise(answer))), answers)


def cover_tokens(prediction: str, answers: Sequence[str]) -> float:
    """1.0 when every token of a gold answer is one of the prediction's, in any order (R1-Searcher), else 0.0."""
    predicted = set(normalise_r1_searcher(prediction).split(" "))  # of an empty text: {""}, which covers only its like
    return _best(lambda answer: float(predicted.issuperset(normalise_r1_searcher(answer).split(" "))), answers)


def _covers_text(predicted: str, gold: str) -> bool:
    return gold in predicted if gold else not predicted


def _scores(predicted: str, gold: str, rule: Rule) -> Scores:
    """Scores of two normal forms."""
    em = float(predicted == gold)
    if rule == "hotpotqa":
        if predicted != gold and not _CLOSED_ANSWERS.isdisjoint((predicted, gold)):
            return Scores(0.0, 0.0, 0.0, em)
    elif rule == "squad":
        if not predicted or not gold:
            return Scores(em, em, em, em)
    else:
        assert_never(rule)
    predicted_tokens, gold_tokens = predicted.split(), gold.split()
    num_same = (Counter(predicted_tokens) & Counter(gold_tokens)).total()
    if not num_same:
        return Scores(0.0, 0.0, 0.0, em)
    precision, recall = num_same / len(predicted_tokens), num_same / len(gold_tokens)
    return Scores(precision, recall, 2 * precision * recall / (precision + recall), em)


def _best(metric: Callable[[str], float], answers: Sequence[str]) -> float:
    _check(answers)
    return max(map(metric, answers))


def _check(answers: Sequence[str]) -> None:
    if isinstance(answers, str) or not answers:
        raise ValueError(f"gold answers must be a sequence of at least one text, not {answers!r}")
