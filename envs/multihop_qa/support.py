"""How well the evidence that was found agrees with the gold evidence: supporting facts, titles, triples, joint.

Counted as the evaluation scripts of HotpotQA v1, 2WikiMultihopQA v1.1 and MuSiQue v1.0 count. Pure.
Never: answers, what an agent has to do to find evidence.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet

from envs.multihop_qa.answers import Scores, without_punctuation

__all__ = ["Fact", "Scores", "Triple", "evidence_scores", "fact_scores", "joint", "set_scores", "title_scores"]

Fact = tuple[str, int]
"""Title of a page and number of the sentence on it, from 0."""
Triple = tuple[str, str, str]
"""Subject, relation, object."""


def set_scores(predicted: AbstractSet[Hashable], gold: AbstractSet[Hashable]) -> Scores:
    """Precision, recall, F1 and equality of two sets; a precision or recall with nothing to divide by is 0.

    HotpotQA on (title, sentence) pairs, MuSiQue on paragraphs. Two empty sets have EM 1 and F1 0, as there.
    """
    num_same = len(predicted & gold)
    return _scores(num_same, len(predicted), len(gold))


def fact_scores(predicted: Iterable[Fact], gold: Iterable[Fact], *, lower_titles: bool = False) -> Scores:
    """Scores of supporting facts. `lower_titles` is 2Wiki's way: titles are compared in lower case, but spellings
    that differ in case only are still counted one by one."""
    predicted, gold = list(set(predicted)), list(set(gold))
    if lower_titles:
        predicted = [(title.lower(), sentence) for title, sentence in predicted]
        gold = [(title.lower(), sentence) for title, sentence in gold]
    predicted_set, gold_set = set(predicted), set(gold)
    num_right = sum(fact in gold_set for fact in predicted)
    num_missed = sum(fact not in predicted_set for fact in gold)
    return _scores(num_right, len(predicted), num_right + num_missed)


def title_scores(found_titles: Iterable[str], gold_titles: Iterable[str]) -> Scores:
    """Scores of the pages found against the gold pages, by title in lower case."""
    return set_scores({title.lower() for title in found_titles}, {title.lower() for title in gold_titles})


def evidence_scores(predicted: Iterable[Triple], gold: Sequence[Collection[Triple]]) -> Scores:
    """2Wiki's scores of evidence triples. Each gold triple comes as the collection of its accepted spellings
    (`[[triple] for triple in question.evidences]` where no aliases are known).

    Compared in lower case without ASCII punctuation. As in the official script a predicted triple counts when any gold
    triple accepts it, so that two spellings of one gold triple both count and recall may exceed 1.
    """
    predicted_set = {_normal_triple(triple) for triple in predicted}
    accepted = {_normal_triple(triple) for spellings in gold for triple in spellings}
    num_right = len(predicted_set & accepted)
    return _scores(num_right, len(predicted_set), len(gold))


def joint(
    answer_precision: float, answer_recall: float, answer_em: float, support: Scores, evidence: Scores | None = None
) -> Scores:
    """Answer and support together: products of the precisions, recalls and EMs, and F1 of the first two.

    HotpotQA multiplies answer and support, 2Wiki also the evidence triples.
    """
    precision, recall, em = answer_precision * support.precision, answer_recall * support.recall, answer_em * support.em
    if evidence is not None:
        precision, recall, em = precision * evidence.precision, recall * evidence.recall, em * evidence.em
    return Scores(precision, recall, _f1(precision, recall), em)


def _normal_triple(triple: Triple) -> Triple:
    subject, relation, obj = triple
    return without_punctuation(subject), without_punctuation(relation), without_punctuation(obj)


def _scores(num_right: int, num_predicted: int, num_gold: int) -> Scores:
    precision = num_right / num_predicted if num_predicted else 0.0
    recall = num_right / num_gold if num_gold else 0.0
    return Scores(precision, recall, _f1(precision, recall), float(num_right == num_predicted == num_gold))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall > 0 else 0.0
