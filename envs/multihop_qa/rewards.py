"""What an episode is worth at its end: exact match, F1, cover-EM, and the published mixtures with format.

Pure functions of an `Ending`, which holds facts of the policy's own turns only: nothing is decoded from the prompt. So
Search-R1's rule that two answer pairs must exist, the first being the prompt's example, has no counterpart here, and
an episode has one answer at most, because answering ends it. Every turn but the last has reward 0. Never: parsing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from envs.multihop_qa.answers import cover_exact_match, exact_match, f1, rule_of
from envs.multihop_qa.records import Question
from trace_async.errors import ConfigError

STAGED = "staged"


class Ending(NamedTuple):
    """What an episode comes to if it ends now."""

    em: float  # agreement of the answer with the gold answers; 0 without an answer
    f1: float
    cover_em: float
    has_answer: bool
    is_well_formed: bool  # every turn is, and the last one answers
    num_searches: int
    has_seen_answer: bool  # a gold answer stood in a passage that was shown


def end(
    question: Question, answer: str | None, *, is_well_formed: bool, num_searches: int, has_seen_answer: bool
) -> Ending:
    """The ending with this answer (None: none was given), F1 by the rule of the question's data set."""
    if answer is None:
        return Ending(0.0, 0.0, 0.0, False, False, num_searches, has_seen_answer)
    return Ending(
        em=exact_match(answer, question.answers),
        f1=f1(answer, question.answers, rule_of(question.dataset)),
        cover_em=cover_exact_match(answer, question.answers),
        has_answer=True,
        is_well_formed=is_well_formed,
        num_searches=num_searches,
        has_seen_answer=has_seen_answer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOptions:
    """`[environment.options.reward_options]`: the numbers of the mixtures, and the stages of reward "staged".

    A run has one reward, since a begun run keeps its environment's options. The next stage is a new run: its
    policy is the exported checkpoint of the one before, its `stage` one higher.
    """

    structure: float = 0.2  # search_r1_format: worth of the form of the whole episode
    final: float = 0.1  # search_r1_format: worth of any answer in an ill-formed episode
    retrieval: float = 0.1  # search_r1_format: added when a gold answer was shown but not given
    stages: tuple[str, ...] = ("r1_searcher_1", "r1_searcher_2")
    stage: int = 1  # which of `stages`, from 1

    def __post_init__(self) -> None:
        where = "environment.options.reward_options"
        for name in ("structure", "final", "retrieval"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ConfigError(f"{where}.{name}: need a number within 0..1, got {getattr(self, name)}")
        for kind in self.stages:
            if kind not in REWARDS:
                raise ConfigError(f"{where}.stages: need names out of {', '.join(REWARDS)}, got {kind!r}")
        if not 1 <= self.stage <= len(self.stages):
            raise ConfigError(f"{where}.stage: need 1..{len(self.stages)}, got {self.stage}")


def reward(ending: Ending, kind: str, options: RewardOptions) -> float:
    """What the episode earns when it ends like this; `kind` is one of REWARDS or "staged"."""
    return REWARDS[options.stages[options.stage - 1] if kind == STAGED else kind](ending, options)


def _search_r1_format(ending: Ending, options: RewardOptions) -> float:
    """Search-R1 v0.3 `qa_em_format` (also Tree-GRPO's): a right answer earns 1, less `structure` if ill-formed."""
    if not ending.has_answer:
        return 0.0
    if ending.em:
        return 1.0 if ending.is_well_formed else 1.0 - options.structure
    if ending.is_well_formed:
        return options.structure + options.retrieval * ending.has_seen_answer
    return options.final


def _r1_searcher_1(ending: Ending, options: RewardOptions) -> float:
    """R1-Searcher stage 1: 0.5 for having searched and 0.5 for the form; the answer does not matter."""
    return 0.5 * (ending.num_searches > 0) + 0.5 * ending.is_well_formed


def _r1_searcher_2(ending: Ending, options: RewardOptions) -> float:
    """R1-Searcher stage 2: token F1, less 2 for a breach of the form."""
    return ending.f1 - 2.0 * (not ending.is_well_formed)


REWARDS: Mapping[str, Callable[[Ending, RewardOptions], float]] = {
    "em": lambda ending, options: ending.em,
    "f1": lambda ending, options: ending.f1,
    "cover_em": lambda ending, options: ending.cover_em,
    "search_r1_format": _search_r1_format,
    "r1_searcher_1": _r1_searcher_1,
    "r1_searcher_2": _r1_searcher_2,
}
