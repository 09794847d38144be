"""One episode without asyncio and without an index: turns in, replies out.

A turn searches, answers, or cannot be read. `max_turns` turns may search; the reply before the one after them says
that it is the last, and in it only an answer counts. Invariants: replies depend on the task, the options and what
was found alone; a search is answered by `show`, everything else by `act`; the reward comes with the end. Forks share
nothing that changes. Never: searching, waiting, tags.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from envs.multihop_qa.prompts import Script
from envs.multihop_qa.records import Question
from envs.multihop_qa.rewards import Ending, RewardOptions, end, reward
from envs.multihop_qa.signals import PROCESS_SIGNALS, Found
from envs.multihop_qa.styles import Action
from envs.retrieval.protocol import Hit, Passage
from trace_async.core.types import Message, Task
from trace_async.environment import CutText, StepResult

NO_SCORE = "none"
"""The process score that is none."""

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What all episodes of one kit share."""

    script: Script
    max_turns: int
    passage_tokens: int  # of one passage's text; 0: no limit of its own
    observation_tokens: int  # of all passages of a reply, titles and numbers included, tags around them not
    unreadable_ends: bool
    reward: str
    reward_options: RewardOptions
    process_score: str  # one of PROCESS_SIGNALS, or NO_SCORE
    cut: CutText


def cut_words(text: str, count: int) -> str:
    """The text up to the end of its `count`-th white-space separated word: where no tokenizer is known."""
    stop = 0
    for number, word in enumerate(_WORD.finditer(text), 1):
        if number > count:
            return text[:stop]
        stop = word.end()
    return text


class Wanted(NamedTuple):
    """A search that the game waits for."""

    query: str


class Game:
    """The state of one episode."""

    __slots__ = ("_rules", "data", "found", "is_well_formed", "num_invalid", "num_turns", "over", "question")

    def __init__(self, task: Task, rules: Rules) -> None:
        """KeyError or ValueError when the task's data is no question."""
        self._rules = rules
        self.data = task.data
        self.question = Question.from_data(task.data)
        self.found = Found()
        self.num_turns = 0
        self.num_invalid = 0
        self.is_well_formed = True  # of all turns so far
        self.over = False

    @property
    def is_last_turn(self) -> bool:
        """The next turn is the one in which only an answer counts."""
        return self.num_turns == self._rules.max_turns

    def opening(self) -> tuple[Message, ...]:
        return self._rules.script.opening(self.question.question)

    def act(self, text: str) -> StepResult | Wanted:
        """One turn; a search must be answered with `show` before the next. RuntimeError when the episode is over."""
        if self.over:
            raise RuntimeError(
                f"episode of question {self.question.question_id!r} is over after {self.num_turns} turns: reset it"
            )
        action = self._rules.script.style.read(text)
        is_last = self.is_last_turn
        self.num_turns += 1
        self.num_invalid += action.kind == "invalid"
        self.is_well_formed = self.is_well_formed and action.well_formed
        if action.kind == "answer":
            return self._end(action, terminated=True)
        if is_last:
            return self._end(action, terminated=False)
        if action.kind == "search":
            return Wanted(action.content)
        if self._rules.unreadable_ends:
            return self._end(action, terminated=True)
        return self._result(self._reply(self._rules.script.invalid), valid=False)

    def show(self, hits: Sequence[Hit]) -> StepResult:
        """The reply to a search."""
        script, rules = self._rules.script, self._rules
        limit = rules.passage_tokens
        passages = [hit.passage for hit in hits]
        if limit:
            passages = [passage._replace(text=rules.cut(passage.text, limit)) for passage in passages]
        documents, passages = self._fit(passages)
        self.found, signals = self.found.plus(passages, self.question)
        score = getattr(signals, rules.process_score) if rules.process_score in PROCESS_SIGNALS else math.nan
        reply = script.style.observation(documents or script.nothing)
        return self._result(self._reply(reply), score=score)

    def fork(self) -> Game:
        """An independent episode in the same state."""
        return copy.copy(self)  # every part is immutable

    def state(self) -> dict[str, Any]:
        """Everything but the rules, as JSON."""
        return {
            "data": dict(self.data),
            "found": self.found._asdict(),
            "num_turns": self.num_turns,
            "num_invalid": self.num_invalid,
            "is_well_formed": self.is_well_formed,
            "over": self.over,
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any], rules: Rules) -> Game:
        """The game that `state` described; ValueError, TypeError or KeyError when it is not such a state."""
        game = cls(Task("resumed", state["data"]), rules)
        found = dict(state["found"])
        game.found = Found(**{**found, **{name: tuple(found[name]) for name in ("titles", "pages", "sums")}})
        game.num_turns, game.num_invalid = int(state["num_turns"]), int(state["num_invalid"])
        game.is_well_formed, game.over = bool(state["is_well_formed"]), bool(state["over"])
        if not 0 <= game.num_invalid <= game.num_turns <= rules.max_turns + 1:
            raise ValueError(
                f"{game.num_turns} turns, {game.num_invalid} of them unreadable, with max_turns {rules.max_turns}"
            )
        return game

    def _fit(self, passages: Sequence[Passage]) -> tuple[str, list[Passage]]:
        """The passages as one text within the budget, and those that are in it, with what is left of their texts."""
        style, rules = self._rules.script.style, self._rules
        text, shown = "", list[Passage]()
        for number, passage in enumerate(passages, 1):
            line = style.document(number, passage.title, passage.text)
            whole = f"{text}\n{line}" if text else line
            kept = rules.cut(whole, rules.observation_tokens)
            head = len(whole) - len(passage.text)
            if kept != whole and len(kept) <= head:  # nothing but a part of its title fits
                return text or kept, shown
            text = kept
            shown.append(passage._replace(text=kept[head:]))
            if kept != whole:
                break
        return text, shown

    def _reply(self, text: str) -> str:
        return f"{text}\n{self._rules.script.last}" if self.is_last_turn else text

    def _ending(self, answer: str | None) -> Ending:
        return end(
            self.question,
            answer,
            is_well_formed=self.is_well_formed,
            num_searches=self.found.num_searches,
            has_seen_answer=self.found.has_seen_answer,
        )

    def _end(self, action: Action, *, terminated: bool) -> StepResult:
        self.over = True
        ending = self._ending(action.content if action.kind == "answer" else None)
        return StepResult(
            messages=(),
            reward=reward(ending, self._rules.reward, self._rules.reward_options),
            terminated=terminated,
            truncated=not terminated,
            valid=action.kind != "invalid",
            metrics=self._metrics(ending),
        )

    def _result(self, reply: str, *, valid: bool = True, score: float = math.nan) -> StepResult:
        return StepResult(
            messages=(Message("user", reply),),
            reward=0.0,
            terminated=False,
            valid=valid,
            process_score=score,
            metrics=self._metrics(self._ending(None)),
        )

    def _metrics(self, ending: Ending) -> dict[str, float]:
        return {
            "em": ending.em,
            "f1": ending.f1,
            "cover_em": ending.cover_em,
            "searches": float(self.found.num_searches),
            "invalid": float(self.num_invalid),
            **self.found.metrics(self.question),
        }
