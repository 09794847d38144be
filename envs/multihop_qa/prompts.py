"""What the policy is told: the rules and the question at the start, and the environment's own sentences later.

Pure text. The `words` style says nothing that is not needed: the bare question, then single words.
Never: passages, state, judging.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

from envs.multihop_qa.styles import TOOL_ARGUMENT, TOOL_NAME, Style, make_style
from envs.multihop_qa.tags import WORD_STYLE, TagOptions
from trace_async.core.types import Message
from trace_async.errors import ConfigError

_EXAMPLE_ANSWER = "Lake Titicaca"
_TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Finds the passages of the collection that match a query best.",
        "parameters": {
            "type": "object",
            "properties": {TOOL_ARGUMENT: {"type": "string", "description": "what to look for"}},
            "required": [TOOL_ARGUMENT],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """`[environment.options.prompt]`."""

    role: str = "user"  # who states the rules: "user", in one message with the question, or "system"
    template: str = ""  # own rules; {question} (role "user" only) and {max_turns} are filled in; "": those of the style
    prepare: bool = True  # `prepared` questions; style "words" leaves them as they are

    def __post_init__(self) -> None:
        where = "environment.options.prompt"
        if self.role not in ("user", "system"):
            raise ConfigError(f"{where}.role: need user or system, got {self.role!r}")
        if self.template and ("{question}" in self.template) != (self.role == "user"):
            told = "must hold {question}" if self.role == "user" else "must leave {question} to the user's message"
            raise ConfigError(f"{where}.template: with role {self.role!r} it {told}")


class Script(NamedTuple):
    """Everything an episode says besides passages; texts are fixed once for all episodes."""

    style: Style
    rules: str  # with {question} where the question goes, if the role is "user"
    role: str  # who states the rules: "user" or "system"
    is_prepared: bool
    invalid: str  # reply to a turn that says nothing readable
    nothing: str  # in place of passages
    last: str  # behind the reply before the last turn

    def opening(self, question: str) -> tuple[Message, ...]:
        """The messages before the first turn."""
        asked = prepared(question) if self.is_prepared else question
        if self.role == "system":
            return (Message("system", self.rules), Message("user", asked))
        return (Message("user", self.rules.replace("{question}", asked)),)


def prepared(question: str) -> str:
    """The question without surrounding white space, with a question mark at its end, as Search-R1 has it; but a whole
    sentence ("Name the ... .") keeps its own mark."""
    question = question.strip()
    return question if question.endswith(("?", ".", "!")) else f"{question}?"


def make_script(tags: TagOptions, prompt: PromptOptions, *, max_turns: int, unreadable_ends: bool = False) -> Script:
    """The texts of one style; `max_turns` turns may search before the last, and a turn that cannot be read counts, or
    ends the episode."""
    style = make_style(tags)
    rules = prompt.template.replace("{max_turns}", str(max_turns))
    if tags.style == WORD_STYLE:
        return Script(
            style,
            rules=rules or "{question}",
            role=prompt.role if rules else "user",
            is_prepared=False,
            invalid="?",
            nothing="nothing",
            last="last",
        )
    search, answer = style.write("search", "your query"), style.write("answer", "your answer")
    return Script(
        style,
        rules=rules or _rules(style, max_turns=max_turns, unreadable_ends=unreadable_ends, role=prompt.role),
        role=prompt.role,
        is_prepared=prompt.prepare,
        invalid=(
            "That turn could not be read, so nothing was done. Either search, written exactly as\n"
            f"{search}\nor answer, written exactly as\n{answer}"
        ),
        nothing="No passage matches this query.",
        last=f"This is your last turn. Searching is over: write {answer}",
    )


def _rules(style: Style, *, max_turns: int, unreadable_ends: bool, role: str) -> str:
    tags = style.tags
    search, answer = style.write("search", "your query"), style.write("answer", "your answer")
    think = (
        f"In each turn, first reason between {tags.think.open} and {tags.think.close}, then"
        if tags.think.open
        else "In each turn, first reason, then"
    )
    shown = f" between {tags.information.open} and {tags.information.close}" if tags.information.open else ""
    tool = f"\nThe tool that you may call:\n{json.dumps(_TOOL)}\n" if tags.is_json else ""
    rules = (
        "Answer the question with the help of a search engine over a collection of passages.\n"
        f"{tool}{think} do exactly one of these:\n"
        f"1. Search. Write {search} and the passages that match best are shown to you{shown}. Ask for one fact at a "
        "time: what one search finds tells you what to search for next.\n"
        f"2. Answer. Write {answer} with the bare answer and no explanation, for example "
        f"{style.write('answer', _EXAMPLE_ANSWER)}. This ends the task.\n"
        f"You may search in up to {max_turns} turn{'s' if max_turns > 1 else ''}; a turn that cannot be read "
        f"{'ends the task' if unreadable_ends else 'counts too'}. After that, one last turn is left for the answer."
    )
    return rules if role == "system" else f"{rules}\n\nQuestion: {{question}}"
