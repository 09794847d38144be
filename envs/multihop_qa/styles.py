"""How a turn is written and read, and how passages are shown: between tags, or in plain words for tiny policies.

A turn is cut behind its first closing search or answer tag, after the fact: no stop strings are needed. The pair that
this tag closes is the action, wherever it stands, inside thoughts too; what comes later is ignored but makes the turn
ill-formed. Tags are matched exactly, case included. Reading what `write` wrote gives it back, well-formed, unless it
has tags inside. Never: questions, passages, rewards, instructions.
"""

from __future__ import annotations

import json
from typing import NamedTuple, Protocol

from envs.multihop_qa.tags import WORD_STYLE, TagOptions, Tags

TOOL_NAME, TOOL_ARGUMENT = "search", "query"
BOX = "\\boxed{"


class Action(NamedTuple):
    """What a turn says."""

    kind: str  # "search", "answer" or "invalid"
    content: str = ""  # query or answer
    thought: str = ""  # as far as it can be told apart
    well_formed: bool = False  # thoughts, then one action, and nothing else


class Style(Protocol):
    """One way to write and read turns and to show passages."""

    tags: Tags

    def read(self, text: str) -> Action:
        """The action of a turn; never an error."""
        ...

    def write(self, kind: str, content: str, thought: str | None = None) -> str:
        """A turn of kind "search" or "answer"; without a thought the bare action, ill-formed where thoughts belong."""
        ...

    def document(self, number: int, title: str, text: str) -> str:
        """One passage as it is shown; `number` counts from 1."""
        ...

    def observation(self, documents: str) -> str:
        """What a search shows: the passages inside their tags."""
        ...


def make_style(options: TagOptions) -> Style:
    """The style that the options describe."""
    return Words(options.resolved()) if options.style == WORD_STYLE else Tagged(options.resolved())


class Tagged:
    """Actions between tags, thoughts before them."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self._spelled = [tag for pair in tags[:4] for tag in pair if tag]

    def read(self, text: str) -> Action:
        ends = [
            (text.find(pair.close), kind, pair)
            for kind, pair in (("search", self.tags.search), ("answer", self.tags.answer))
            if pair.close in text
        ]
        if not ends:
            return Action("invalid", thought=text.strip())
        end, kind, pair = min(ends)
        before, opened, inside = text[:end].rpartition(pair.open)
        if not opened:
            return Action("invalid", thought=text[:end].strip())
        thought, is_clean = self._thought(before)
        content, is_proper = self._content(kind, inside.strip())
        is_last = not text[end + len(pair.close) :].strip()
        well_formed = is_clean and is_proper and is_last and not self._has_tag(inside)
        if content is None or (kind == "search" and not content):
            return Action("invalid", thought=thought)
        return Action(kind, content, thought, well_formed)

    def write(self, kind: str, content: str, thought: str | None = None) -> str:
        if kind == "answer":
            action = self.tags.answer.around(f"{BOX}{content}}}" if self.tags.is_boxed else content)
        else:
            call = {"name": TOOL_NAME, "arguments": {TOOL_ARGUMENT: content}}
            action = self.tags.search.around(json.dumps(call, ensure_ascii=False) if self.tags.is_json else content)
        return action if thought is None else f"{self.tags.think.around(thought)}\n{action}".lstrip("\n")

    def document(self, number: int, title: str, text: str) -> str:
        return f"Doc {number}(Title: {title}) {text}"

    def observation(self, documents: str) -> str:
        return self.tags.information.around(f"\n{documents}\n").strip()

    def _thought(self, before: str) -> tuple[str, bool]:
        """The thought in what precedes the action, and whether nothing else is there."""
        opening, closing = self.tags.think
        before = before.strip()
        if not opening:
            return before, not self._has_tag(before)
        inside = before.removeprefix(opening).removesuffix(closing)
        is_whole = len(inside) == len(before) - len(opening) - len(closing)
        return inside.strip(), is_whole and not self._has_tag(inside)

    def _content(self, kind: str, inside: str) -> tuple[str | None, bool]:
        """Query or answer, None where none can be read, and whether it is written as the style wants it."""
        if kind == "search":
            query = _call_query(inside) if self.tags.is_json else inside
            return (None if query is None else " ".join(query.split())), True
        if not self.tags.is_boxed:
            return inside, True
        boxed = _boxed(inside)
        return (inside, False) if boxed is None else (boxed, True)

    def _has_tag(self, text: str) -> bool:
        return any(tag in text for tag in self._spelled)


class Words:
    """White-space separated words: the first is the action, in any case; observations are plain."""

    def __init__(self, tags: Tags) -> None:
        self.tags = tags
        self._kinds = {tags.search.open.lower(): "search", tags.answer.open.lower(): "answer"}

    def read(self, text: str) -> Action:
        first, *rest = text.split() or [""]
        kind = self._kinds.get(first.lower(), "invalid")
        if kind == "invalid" or (kind == "search" and not rest):
            return Action("invalid")
        return Action(kind, " ".join(rest), well_formed=True)

    def write(self, kind: str, content: str, thought: str | None = None) -> str:
        word = self.tags.answer.open if kind == "answer" else self.tags.search.open
        return f"{word} {content}"

    def document(self, number: int, title: str, text: str) -> str:
        return f"{title} : {text}"

    def observation(self, documents: str) -> str:
        return documents


def _call_query(text: str) -> str | None:
    """The query of a function call; None when it is not a call of the search tool with a text for a query."""
    try:
        call = json.loads(text)
        query = call["arguments"][TOOL_ARGUMENT] if call["name"] == TOOL_NAME else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return query if isinstance(query, str) else None


def _boxed(text: str) -> str | None:
    r"""What the last \boxed{} holds, braces balanced; None when there is none that closes."""
    start = text.rfind(BOX)
    depth = 1
    for position in range(start + len(BOX), len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if not depth:
            return text[start + len(BOX) : position].strip()
    return None
