"""Turns written and read in every style, hostile ones included; tags replaced and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multihop_qa.styles import Action, Style, make_style
from envs.multihop_qa.tags import PRESETS, WORD_STYLE, TagOptions
from envs.options import read_options
from trace_async.errors import ConfigError

TAGGED = [style for style in PRESETS if style != WORD_STYLE]
PLAIN = st.text("abcXYZ éß0'\"", min_size=1, max_size=20).map(str.strip).filter(bool)


def style_of(name: str, **pairs: tuple[str, ...]) -> Style:
    return make_style(TagOptions(style=name, **pairs))


@pytest.mark.parametrize("name", TAGGED)
@given(content=PLAIN, thought=PLAIN, kind=st.sampled_from(["search", "answer"]))
def test_what_is_written_is_read_back_well_formed(name: str, content: str, thought: str, kind: str) -> None:
    read = style_of(name).read(style_of(name).write(kind, content, thought))
    assert read == Action(kind, " ".join(content.split()) if kind == "search" else content, thought, True)


@given(content=PLAIN, kind=st.sampled_from(["search", "answer"]))
def test_words_are_read_back_without_a_thought(content: str, kind: str) -> None:
    style = style_of("words")
    assert style.read(style.write(kind, content, "never said")) == Action(kind, " ".join(content.split()), "", True)


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("search_r1", "<think>why</think>\n<search>who</search>"),
        ("tool_call", '<think>why</think>\n<tool_call>{"name": "search", "arguments": {"query": "who"}}</tool_call>'),
        ("r1_searcher", "<think>why</think>\n<|begin_of_query|>who<|end_of_query|>"),
        ("research", "<think>why</think>\n<search>who</search>"),
        ("words", "search who"),
    ],
)
def test_a_search_is_spelled_as_the_published_protocol_does(name: str, turn: str) -> None:
    assert style_of(name).write("search", "who", "why") == turn


def test_answers_and_passages_are_spelled_as_the_published_protocols_do() -> None:
    assert style_of("research").write("answer", "Ann") == "<answer>\\boxed{Ann}</answer>"
    assert style_of("tool_call").write("answer", "Ann") == "<answer>Ann</answer>"
    assert style_of("words").write("answer", "Ann") == "answer Ann"
    r1 = style_of("search_r1")
    assert (
        r1.observation(r1.document(1, "Ann", "A text.")) == "<information>\nDoc 1(Title: Ann) A text.\n</information>"
    )
    words = style_of("words")
    assert words.observation(words.document(1, "Ann", "A text.")) == "Ann : A text."


SEARCH_R1: list[tuple[str, str, str, bool]] = [
    # turn, kind, content, well-formed
    ("<think>t</think><search>q</search>", "search", "q", True),
    (" <think>t</think>\n\n <answer> two\nlines </answer>\n", "answer", "two\nlines", True),
    ("<think>t</think><answer></answer>", "answer", "", True),
    ("<think></think><search>a  b\nc</search>", "search", "a b c", True),
    # no thoughts, words outside, words behind
    ("<search>q</search>", "search", "q", False),
    ("well <think>t</think><search>q</search>", "search", "q", False),
    ("<think>t</think> so <search>q</search>", "search", "q", False),
    ("<think>t</think><search>q</search> and more", "search", "q", False),
    # several pairs: the first closing tag decides
    ("<think>t</think><search>q</search><search>r</search>", "search", "q", False),
    ("<think>t</think><search>q</search><answer>a</answer>", "search", "q", False),
    ("<think>t</think><answer>a</answer><search>q</search>", "answer", "a", False),
    ("<think>t</think><search>q</search><information>lies</information>", "search", "q", False),
    # nested: what the first closing tag closes
    ("<think>t</think><search>a<search>b</search></search>", "search", "b", False),
    ("<think>t</think><answer>a<search>b</search></answer>", "search", "b", False),
    ("<think>t</think><search>a<answer>b</answer>", "answer", "b", False),
    ("<think>t</think><answer>a<information>b</answer>", "answer", "a<information>b", False),
    # inside thoughts
    ("<think>say <search>q</search></think><answer>a</answer>", "search", "q", False),
    ("<think>say <search> or so</think><answer>a</answer>", "answer", "a", False),
    ("<think>a<think>b</think><search>q</search>", "search", "q", False),
    # thoughts that do not close or open
    ("<think>t<search>q</search>", "search", "q", False),
    ("t</think><search>q</search>", "search", "q", False),
    # unreadable
    ("", "invalid", "", False),
    ("Ann", "invalid", "", False),
    ("<think>t</think>", "invalid", "", False),
    ("<think>t</think><search>q", "invalid", "", False),
    ("<think>t</think>q</search><search>r</search>", "invalid", "", False),
    ("<think>t</think><search> \n </search>", "invalid", "", False),
    ("<THINK>t</THINK><SEARCH>q</SEARCH>", "invalid", "", False),
    ("<think>t</think><Search>q</Search>", "invalid", "", False),
    ("<think>t</think><search>q< /search>", "invalid", "", False),
]


@pytest.mark.parametrize(("turn", "kind", "content", "well_formed"), SEARCH_R1)
def test_hostile_turns_are_read_by_their_first_closing_tag(
    turn: str, kind: str, content: str, well_formed: bool
) -> None:
    action = style_of("search_r1").read(turn)
    assert (action.kind, action.content, action.well_formed) == (kind, content, well_formed)


@pytest.mark.parametrize(
    ("call", "query"),
    [
        ('{"name": "search", "arguments": {"query": "who"}}', "who"),
        ('\n{"arguments": {"query": " who\\n is "}, "name": "search"}\n', "who is"),
        ('{"name": "browse", "arguments": {"query": "who"}}', None),
        ('{"name": "search", "arguments": {"query": ["who"]}}', None),
        ('{"name": "search", "arguments": {"q": "who"}}', None),
        ('{"name": "search", "arguments": "who"}', None),
        ('{"name": "search"}', None),
        ('["search", "who"]', None),
        ("null", None),
        ('{"name": "search", "arguments": {"query": ""}}', None),
        ("who", None),
        ("{'name': 'search'}", None),
        ("[" * 100_000, None),
    ],
)
def test_a_call_that_is_no_search_cannot_be_read(call: str, query: str | None) -> None:
    action = style_of("tool_call").read(f"<think>t</think><tool_call>{call}</tool_call>")
    assert (action.kind, action.content) == (("invalid", "") if query is None else ("search", query))
    assert action.well_formed is (query is not None)


@pytest.mark.parametrize(
    ("inside", "answer", "well_formed"),
    [
        ("\\boxed{Ann}", "Ann", True),
        ("It is \\boxed{Ann {von} Ulm}.", "Ann {von} Ulm", True),
        ("\\boxed{Bob} or \\boxed{ Ann }", "Ann", True),
        ("Ann", "Ann", False),
        ("\\boxed{Ann", "\\boxed{Ann", False),
        ("\\boxed{}", "", True),
    ],
)
def test_a_boxed_answer_is_what_the_last_box_holds(inside: str, answer: str, well_formed: bool) -> None:
    action = style_of("research").read(f"<think>t</think><answer>{inside}</answer>")
    assert action == Action("answer", answer, "t", well_formed)


@pytest.mark.parametrize(
    ("turn", "action"),
    [
        ("search  Alpha\nTown ", Action("search", "Alpha Town", "", True)),
        ("Search Alpha", Action("search", "Alpha", "", True)),
        ("answer", Action("answer", "", "", True)),
        ("search", Action("invalid")),
        ("", Action("invalid")),
        (" \n", Action("invalid")),
        ("find Alpha", Action("invalid")),
        ("<search>Alpha</search>", Action("invalid")),
    ],
)
def test_the_first_word_decides_in_the_words_style(turn: str, action: Action) -> None:
    assert style_of("words").read(turn) == action


def test_every_tag_can_be_replaced_by_itself() -> None:
    style = style_of("search_r1", search=("<q>", "</q>"), information=("<docs>", "</docs>"))
    assert style.read("<think>t</think><q>who</q>") == Action("search", "who", "t", True)
    assert style.read("<think>t</think><search>who</search>").kind == "invalid"
    assert style.observation("x") == "<docs>\nx\n</docs>"
    assert style.read(style.write("answer", "Ann", "t")).content == "Ann"
    words = style_of("words", answer=("say", ""))
    assert words.read("say Ann").content == "Ann"
    assert words.read("answer Ann").kind == "invalid"


def test_without_think_tags_bare_thoughts_are_well_formed_and_tags_in_them_are_not() -> None:
    style = style_of("search_r1", think=("", ""))
    assert style.read("I wonder. <search>who</search>") == Action("search", "who", "I wonder.", True)
    assert style.read(style.write("search", "who", "I wonder.")) == Action("search", "who", "I wonder.", True)
    assert not style.read("I <answer> wonder. <search>who</search>").well_formed
    assert style_of("search_r1", information=("", "")).observation("x") == "x"


def test_a_call_keeps_letters_of_every_script() -> None:
    turn = style_of("tool_call").write("search", "Łódź")
    assert "Łódź" in turn
    assert json.loads(turn.removeprefix("<tool_call>").removesuffix("</tool_call>"))["arguments"]["query"] == "Łódź"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (
            {"style": "react"},
            r"tags.style: need one of search_r1, tool_call, r1_searcher, research, words, got 'react'",
        ),
        ({"search": ["<s>"]}, r"tags.search: need \[opening, closing\], got \['<s>'\]"),
        ({"search": ["<s>", ""]}, r"tags.search: need an opening and a closing tag"),
        ({"answer": ["", ""]}, r"tags.answer: need an opening and a closing tag"),
        ({"think": ["<t>", " "]}, r"tags.think: need two tags or two empty strings"),
        ({"search": ["<answer>", "</q>"]}, r"no tag may stand in another, but '<answer>'"),
        ({"search": ["<q>", "<q>"]}, r"no tag may stand in another, but '<q>'"),
        ({"search": ["ans", "wer>"]}, r"no tag may stand in another, but 'ans'"),
        ({"style": "words", "think": ["<t>", "</t>"]}, r"has no think or information tags"),
        ({"style": "words", "search": ["look up", ""]}, r"tags.search: style 'words' needs \[word, \"\"\]"),
        ({"style": "words", "search": ["Answer", ""]}, r"different words, got 'Answer' twice"),
        ({"serach": ["<s>", "</s>"]}, r"tags.serach: .* did you mean 'search'"),
    ],
)
def test_tags_that_could_not_be_read_back_are_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(TagOptions, options, owner="multihop_qa", where="environment.options.tags")
