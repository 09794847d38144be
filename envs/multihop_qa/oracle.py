"""Scripted play that knows the way: the gold pages one after the other, then the answer, with mistakes on demand.

Every episode is really played against the real index. The script answers right only with what it has been shown: it
gives the gold answer when every gold page turned up, and otherwise the best it saw. Invariants: all randomness comes
from the generator handed in; at mistake rate 0 no search is in vain but those that try other words for a page that
did not turn up. Never: rules, rewards.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from envs.multihop_qa.answers import normalise
from envs.multihop_qa.episode import MultihopQA
from envs.multihop_qa.records import Question
from envs.multihop_qa.styles import Style
from trace_async.core.types import Task
from trace_async.environment import Demonstration

_NAME = re.compile(r"\b[A-Z][\w'’-]*(?: (?:of|the|de|la|von|van|and) [A-Z][\w'’-]*| [A-Z][\w'’-]*)*")
_HEAD = re.compile(r"Doc \d+\(Title: ")
_CLOSED = ("yes", "no")


class Goal(NamedTuple):
    """One thing to find."""

    title: str  # the page that has it; "" unknown
    question: str  # "" unknown
    answer: str  # "" unknown

    @property
    def queries(self) -> list[str]:
        """The searches to try, in this order."""
        both = f"{self.title} {self.question}" if self.title and self.question else ""
        return [query for query in (self.title, self.question, both) if query]


def goals_of(question: Question) -> list[Goal]:
    """The steps of the decomposition; without one the gold pages, with what the evidence says that they are for;
    without any the question itself."""
    steps = [Goal(step.title, step.question, step.answer) for step in question.steps if step.title or step.question]
    if steps:
        return steps
    asked = {subject.lower(): f"the {relation} of {subject}" for subject, relation, _ in question.evidences}
    pages = [Goal(title, asked.get(title.lower(), ""), "") for title in question.gold_titles]
    return pages or [Goal("", question.question, question.answers[0])]


def names_in(text: str) -> list[str]:
    """Runs of capitalised words, but single ones that only begin a sentence, and the heads of documents."""
    text = _HEAD.sub("", text)
    names = []
    for match in _NAME.finditer(text):
        before = text[: match.start()].rstrip()
        if " " in match[0] or (before and before[-1] not in ".?!:)>"):
            names.append(match[0].rstrip("'’-"))
    return names


class Move(NamedTuple):
    """One turn of the script."""

    kind: str  # "search" or "answer"
    content: str
    thought: str


@dataclass
class Plan:
    """What the script has in mind during one episode."""

    question: Question
    rng: np.random.Generator
    ask_rate: float
    seen: list[str] = field(default_factory=list)  # replies so far
    titles: tuple[str, ...] = ()  # of the pages shown so far
    queries: list[str] = field(default_factory=list)  # searches so far
    tried: int = 0  # searches for the present goal
    done: int = 0  # goals behind

    def __post_init__(self) -> None:
        self.goals = goals_of(self.question)

    def move(self, *, turns_left: int, mistake_rate: float) -> Move:
        """The next turn, when `turns_left` more may search."""
        self._advance(turns_left)
        if self.rng.random() < mistake_rate:
            return self._mistake(turns_left)
        if self.done == len(self.goals) or not turns_left:
            return self._answer()
        goal = self.goals[self.done]
        queries = goal.queries
        if len(queries) > 1 and self.rng.random() < self.ask_rate:
            queries = [*queries[1:], queries[0]]
        query = queries[self.tried % len(queries)]
        self.tried += 1
        return Move("search", query, self._thought(goal))

    def observe(self, reply: str, titles: tuple[str, ...]) -> None:
        """Take in what a turn showed."""
        self.seen.append(reply)
        self.titles = titles

    def _advance(self, turns_left: int) -> None:
        """Leave goals behind that were found, or were tried in every way that the turns left allow."""
        while self.done < len(self.goals):
            goal = self.goals[self.done]
            spare = turns_left - (len(self.goals) - self.done)
            is_over = self.tried and (spare < 0 or self.tried >= len(goal.queries))
            if not (self._has_found(goal) or is_over):
                return
            self.done, self.tried = self.done + 1, 0

    def _has_found(self, goal: Goal) -> bool:
        """Its page came when asked for, in whatever words it says the answer; or came by itself, and the answer was
        read."""
        if goal.title:
            if goal.title.lower() not in {title.lower() for title in self.titles}:
                return False
            if self.tried or not goal.answer:
                return True
        return bool(goal.answer) and self._has_read(goal.answer)

    def _has_read(self, answer: str) -> bool:
        return f" {normalise(answer)} " in f" {normalise(' '.join(self.seen))} "

    def _knows_answer(self) -> bool:
        wanted = {goal.title.lower() for goal in self.goals if goal.title}
        if wanted:
            return wanted <= {title.lower() for title in self.titles}
        if normalise(self.question.answers[0]) in _CLOSED:
            return bool(self.titles)
        return any(map(self._has_read, self.question.answers))

    def _answer(self) -> Move:
        if self._knows_answer():
            return Move("answer", self.question.answers[0], self._conclusion())
        return Move("answer", self._guess(), self._pick("I cannot look further, so I give my best guess."))

    def _mistake(self, turns_left: int) -> Move:
        """One of the mistakes that can be made here; where none can, the best guess."""
        kinds = ["stray", "repeat"] if self.queries and turns_left else ["stray"] if turns_left else []
        kind = self._pick(*kinds, *(["early"] if self.seen or not turns_left else []))
        if kind == "repeat":
            return Move("search", self.queries[-1], self._pick("Let me search for that again.", "I look once more."))
        if kind == "stray":
            name = self._pick(*self._names() or [self.question.question])
            return Move("search", name, self._pick(f"Perhaps {name} leads further.", f"Let me look up {name} first."))
        return Move("answer", self._guess(), self._pick("I think I can answer now.", "That should be the answer."))

    def _guess(self) -> str:
        """Something seen that is not the answer."""
        gold = set(map(normalise, self.question.answers))
        return self._pick(*[name for name in self._names() if normalise(name) not in gold] or ["unknown"])

    def _names(self) -> list[str]:
        """Pages shown and names in the question and the last reply, but the page that is looked for and the last
        search."""
        names = [*self.titles, *names_in(self.question.question), *(names_in(self.seen[-1]) if self.seen else ())]
        wanted = self.goals[self.done].title if self.done < len(self.goals) else ""
        return [name for name in dict.fromkeys(names) if name not in (wanted, *self.queries[-1:])]

    def _thought(self, goal: Goal) -> str:
        if self.tried > 1:
            return self._pick("That did not bring what I need. I try other words.", "Not found yet; I ask differently.")
        need = goal.question or f"what the page about {goal.title} says"
        known = self.goals[self.done - 1].answer if self.done else ""
        if known and self._has_read(known):
            return self._pick(f"So that is {known}. Next I need to know: {need}", f"It is {known}. Now I ask: {need}")
        return self._pick(f"I need to know: {need}", f"Let me find out first: {need}")

    def _conclusion(self) -> str:
        answer = self.question.answers[0]
        return self._pick(
            f"Now I know enough. The answer is {answer}.", f"With this the question is settled: {answer}."
        )

    def _pick(self, *choices: str) -> str:
        return choices[int(self.rng.integers(len(choices)))]


class Oracle(NamedTuple):
    """Plays tasks by script; `demonstrate` is a kit's."""

    make_environment: Callable[[], MultihopQA]
    style: Style
    max_turns: int
    ask_rate: float

    async def demonstrate(self, task: Task, rng: np.random.Generator, mistake_rate: float) -> Demonstration:
        """Play `task`; at each turn, with probability `mistake_rate`, search something else, search the same again,
        or answer with something seen."""
        environment = self.make_environment()
        opening = await environment.reset(task, seed=0)
        plan = Plan(environment.game.question, rng, self.ask_rate)
        turns: list[tuple[str, str]] = []
        reward = 0.0
        while not environment.game.over:
            turns_left = self.max_turns - environment.game.num_turns
            move = plan.move(turns_left=turns_left, mistake_rate=mistake_rate)
            action = self.style.write(move.kind, move.content, move.thought)
            result = await environment.step(action)
            reward += result.reward
            reply = "\n".join(message.content for message in result.messages)
            turns.append((action, reply))
            if move.kind == "search":
                plan.queries.append(move.content)
                plan.observe(reply, environment.game.found.titles)
        await environment.close()
        return Demonstration(opening, turns, reward)
