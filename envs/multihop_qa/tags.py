"""The tags of several published protocols as one value, each tag replaceable. Never: reading or writing turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trace_async.errors import ConfigError

WORD_STYLE = "words"

_WHERE = "environment.options.tags"
_PAIRS = ("think", "search", "information", "answer")


class Pair(NamedTuple):
    """An opening and a closing tag; both empty: there are none."""

    open: str
    close: str

    def around(self, text: str) -> str:
        return f"{self.open}{text}{self.close}"


class Tags(NamedTuple):
    """The tags of one style and what stands inside them."""

    think: Pair
    search: Pair
    information: Pair
    answer: Pair
    is_json: bool = False  # a query is a call {"name": "search", "arguments": {"query": ...}}
    is_boxed: bool = False  # the answer proper stands in \boxed{} inside the answer tags


_THINK, _ANSWER = Pair("<think>", "</think>"), Pair("<answer>", "</answer>")
_SEARCH = Pair("<search>", "</search>")

PRESETS: dict[str, Tags] = {
    # PeterGriffinJin/Search-R1
    "search_r1": Tags(_THINK, _SEARCH, Pair("<information>", "</information>"), _ANSWER),
    # Search-R1 as verl ships it: the search is a function call
    "tool_call": Tags(
        _THINK,
        Pair("<tool_call>", "</tool_call>"),
        Pair("<tool_response>", "</tool_response>"),
        _ANSWER,
        is_json=True,
    ),
    # RUCAIBox/R1-Searcher
    "r1_searcher": Tags(
        _THINK,
        Pair("<|begin_of_query|>", "<|end_of_query|>"),
        Pair("<|begin_of_documents|>", "<|end_of_documents|>"),
        _ANSWER,
    ),
    # ReSearch
    "research": Tags(_THINK, _SEARCH, Pair("<result>", "</result>"), _ANSWER, is_boxed=True),
    # No tags: the first word is the action. For policies whose every token counts.
    WORD_STYLE: Tags(Pair("", ""), Pair("search", ""), Pair("", ""), Pair("answer", "")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TagOptions:
    """`[environment.options.tags]`: a style, and pairs [opening, closing] that replace its own; empty: the style's."""

    style: str = "search_r1"
    think: tuple[str, ...] = ()  # ["", ""]: thoughts stand bare before the action
    search: tuple[str, ...] = ()  # style "words": [the first word, ""]
    information: tuple[str, ...] = ()
    answer: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.style not in PRESETS:
            raise ConfigError(f"{_WHERE}.style: need one of {', '.join(PRESETS)}, got {self.style!r}")
        for name in _PAIRS:
            pair = getattr(self, name)
            if pair and len(pair) != 2:
                raise ConfigError(f"{_WHERE}.{name}: need [opening, closing], got {list(pair)}")
        tags = self.resolved()
        if self.style == WORD_STYLE:
            _check_words(tags)
        else:
            _check_pairs(tags)

    def resolved(self) -> Tags:
        """The style's tags with the replacements put in."""
        preset = PRESETS[self.style]
        think, search, information, answer = (
            Pair(*getattr(self, name)) if getattr(self, name) else getattr(preset, name) for name in _PAIRS
        )
        return preset._replace(think=think, search=search, information=information, answer=answer)


def _check_words(tags: Tags) -> None:
    if any(tags.think) or any(tags.information):
        raise ConfigError(f"{_WHERE}: style {WORD_STYLE!r} has no think or information tags")
    for name, pair in (("search", tags.search), ("answer", tags.answer)):
        if len(pair.open.split()) != 1 or pair.close:
            raise ConfigError(f'{_WHERE}.{name}: style {WORD_STYLE!r} needs [word, ""], got {list(pair)}')
    if tags.search.open.lower() == tags.answer.open.lower():
        raise ConfigError(f"{_WHERE}: search and answer need different words, got {tags.search.open!r} twice")


def _check_pairs(tags: Tags) -> None:
    pairs = {name: getattr(tags, name) for name in _PAIRS}
    for name, pair in pairs.items():
        is_needed = name in ("search", "answer")
        if bool(pair.open.strip()) != bool(pair.close.strip()) or (is_needed and not pair.open.strip()):
            cure = "an opening and a closing tag" if is_needed else "two tags or two empty strings"
            raise ConfigError(f"{_WHERE}.{name}: need {cure}, got {list(pair)}")
    spelled = [tag for pair in pairs.values() for tag in pair if tag]
    for tag in spelled:
        if sum(tag in other for other in spelled) > 1:
            raise ConfigError(f"{_WHERE}: no tag may stand in another, but {tag!r} does in one of {spelled}")
