"""What the searches of an episode have brought to light: signals of one turn, and measures of the episode so far.

Pages are told apart by title, in lower case, or by identity where they have none; texts are compared in the normal
form of the answer metrics, whole words. What a question says nothing about is absent or NaN, never 0. Pure. Never:
answers given, rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from envs.multihop_qa.answers import normalise
from envs.multihop_qa.records import Question
from envs.multihop_qa.support import title_scores
from envs.retrieval.protocol import Passage

PROCESS_SIGNALS = ("gold_page", "new_page", "sub_answer")
_CLOSED = frozenset({"", "yes", "no", "noanswer"})  # answers whose appearance in a text says nothing


class Signals(NamedTuple):
    """What one search found: 1.0 or 0.0, NaN where the question does not tell."""

    gold_page: float  # a gold page
    new_page: float  # a page not shown before in this episode
    sub_answer: float  # the answer of a step, or a gold answer


class Found(NamedTuple):
    """What all searches of an episode have shown so far; grows by copies."""

    titles: tuple[str, ...] = ()  # distinct, in the order of appearance
    pages: tuple[str, ...] = ()  # the same pages, those without a title by identity
    num_searches: int = 0
    sums: tuple[float, ...] = (0.0,) * len(PROCESS_SIGNALS)  # of the searches' signals
    has_seen_answer: bool = False  # a gold answer stood in a passage

    def plus(self, passages: Sequence[Passage], question: Question) -> tuple[Found, Signals]:
        """After one more search that showed `passages`, texts as they were shown; and that search's signals."""
        gold = {title.lower() for title in question.gold_titles}
        shown = list(dict.fromkeys(passage.title for passage in passages))
        pages = list(dict.fromkeys(passage.title.lower() or passage.doc_id for passage in passages))
        text = " | ".join(normalise(part) for passage in passages for part in (passage.title, passage.text))
        wanted = _worth_finding(question)
        shows_gold = _holds(text, wanted.intersection(map(normalise, question.answers)))
        signals = Signals(
            gold_page=float(any(title.lower() in gold for title in shown)) if gold else math.nan,
            new_page=float(any(page not in self.pages for page in pages)),
            sub_answer=float(_holds(text, wanted)) if wanted else math.nan,
        )
        after = Found(
            titles=(*self.titles, *(title for title in shown if title not in self.titles)),
            pages=(*self.pages, *(page for page in pages if page not in self.pages)),
            num_searches=self.num_searches + 1,
            sums=tuple(a + (b == 1.0) for a, b in zip(self.sums, signals, strict=True)),
            has_seen_answer=self.has_seen_answer or shows_gold,
        )
        return after, signals

    def metrics(self, question: Question) -> dict[str, float]:
        """`support_*` of all pages shown, and the share of the searches that had each signal (0 without searches)."""
        known = (bool(question.gold_titles), True, bool(_worth_finding(question)))
        measures = {
            name: total / max(self.num_searches, 1)
            for name, total, is_known in zip(PROCESS_SIGNALS, self.sums, known, strict=True)
            if is_known
        }
        if question.gold_titles:
            scores = title_scores(self.titles, question.gold_titles)
            measures |= {f"support_{name}": value for name, value in scores._asdict().items()}
        return measures


def _worth_finding(question: Question) -> set[str]:
    """Normal forms of the answers whose appearance in a text tells something."""
    return {normalise(answer) for answer in (*question.answers, *(step.answer for step in question.steps))} - _CLOSED


def _holds(normal_text: str, normal_answers: Iterable[str]) -> bool:
    """Whether one of the answers stands in the text as whole words."""
    padded = f" {normal_text} "
    return any(f" {answer} " in padded for answer in normal_answers)
