"""Episodes turn by turn, without an index: replies, limits, budgets, measures, state."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multihop_qa.game import NO_SCORE, Game, Rules, Wanted, cut_words
from envs.multihop_qa.prompts import PromptOptions, make_script, prepared
from envs.multihop_qa.records import Question, SubQuestion
from envs.multihop_qa.rewards import RewardOptions
from envs.multihop_qa.tags import PRESETS, TagOptions
from envs.options import read_options
from envs.retrieval.protocol import Hit, Passage
from trace_async.core.types import Message
from trace_async.environment import StepResult
from trace_async.errors import ConfigError

QUESTION = Question(
    question_id="q1",
    question=" Where was the mayor of Brenal born",
    answers=("Ulm", "Old Ulm"),
    dataset="world",
    gold_titles=("Brenal", "Ann Tor"),
    steps=(SubQuestion("Who is mayor of Brenal?", "Ann Tor", "Brenal"), SubQuestion("Where?", "Ulm", "Ann Tor")),
)
PAGES = [Passage("1", "Brenal", "Its mayor is Ann Tor ."), Passage("2", "Ann Tor", "She was born in Ulm .")]


def rules(style: str = "words", *, max_turns: int = 3, prompt: PromptOptions | None = None, **changes: Any) -> Rules:
    script = make_script(TagOptions(style=style), prompt or PromptOptions(), max_turns=max_turns)
    plain = Rules(
        script=script,
        max_turns=max_turns,
        passage_tokens=0,
        observation_tokens=100,
        unreadable_ends=False,
        reward="em",
        reward_options=RewardOptions(),
        process_score=NO_SCORE,
        cut=cut_words,
    )
    return replace(plain, **changes)


def play(game: Game, turns: Sequence[str], pages: Sequence[Passage] = PAGES) -> list[StepResult]:
    """Every search finds the pages whose title it names, else nothing."""
    results = []
    for turn in turns:
        result = game.act(turn)
        if isinstance(result, Wanted):
            result = game.show([Hit(page, 1.0) for page in pages if page.title.lower() == result.query.lower()])
        results.append(result)
    return results


def replies(results: Sequence[StepResult]) -> list[str]:
    return [result.messages[0].content if result.messages else "" for result in results]


def game_of(rules: Rules, question: Question = QUESTION) -> Game:
    return Game(question.to_task("train"), rules)


def test_an_episode_in_words_reads_as_written_here() -> None:
    game = game_of(rules())
    assert game.opening() == (Message("user", " Where was the mayor of Brenal born"),)
    results = play(game, ["search brenal", "look", "search Ann Tor", "answer ulm"])
    assert replies(results) == ["Brenal : Its mayor is Ann Tor .", "?", "Ann Tor : She was born in Ulm .\nlast", ""]
    assert [result.valid for result in results] == [True, False, True, True]
    assert [result.reward for result in results] == [0.0, 0.0, 0.0, 1.0]
    assert [(result.terminated, result.truncated) for result in results] == [(False, False)] * 3 + [(True, False)]
    with pytest.raises(RuntimeError, match="'q1' is over after 4 turns"):
        game.act("answer ulm")


def test_an_episode_with_tags_tells_what_went_wrong_and_when_the_last_turn_comes() -> None:
    game = game_of(rules("search_r1", max_turns=2))
    found, unread = play(game, ["<think>t</think><search>Brenal</search>", "Ann Tor"])
    assert replies([found]) == ["<information>\nDoc 1(Title: Brenal) Its mayor is Ann Tor .\n</information>"]
    first, *_, last = replies([unread])[0].splitlines()
    assert first == "That turn could not be read, so nothing was done. Either search, written exactly as"
    assert "<search>your query</search>" in replies([unread])[0]
    assert last == "This is your last turn. Searching is over: write <answer>your answer</answer>"
    (end,) = play(game, ["<think>t</think><answer>Old Ulm</answer>"])
    assert (end.reward, end.terminated) == (1.0, True)


def test_in_the_last_turn_only_an_answer_counts() -> None:
    for last, valid in {"search Ann Tor": True, "look": False}.items():
        game = game_of(rules(max_turns=1))
        shown, end = play(game, ["search Brenal", last])
        assert replies([shown])[0].endswith("\nlast")
        assert (end.reward, end.terminated, end.truncated, end.valid) == (0.0, False, True, valid)
        assert end.metrics["searches"] == 1.0
        assert game.over


def test_a_search_that_finds_nothing_says_so() -> None:
    assert replies(play(game_of(rules()), ["search x"])) == ["nothing"]
    (reply,) = replies(play(game_of(rules("research")), ["<think>t</think><search>x</search>"]))
    assert reply == "<result>\nNo passage matches this query.\n</result>"


def test_an_unreadable_turn_ends_the_episode_where_the_options_say_so() -> None:
    (end,) = play(game_of(rules(unreadable_ends=True, reward="r1_searcher_2")), ["look"])
    assert (end.valid, end.terminated, end.truncated, end.reward, end.messages) == (False, True, False, -2.0, ())


def test_metrics_are_those_of_the_episode_so_far_as_counted_here() -> None:
    results = play(game_of(rules()), ["search x", "look", "search Brenal", "answer Old Ulm Town"])
    assert results[0].metrics == {
        **{"em": 0.0, "f1": 0.0, "cover_em": 0.0, "searches": 1.0, "invalid": 0.0},
        **{"gold_page": 0.0, "new_page": 0.0, "sub_answer": 0.0},
        **{"support_precision": 0.0, "support_recall": 0.0, "support_f1": 0.0, "support_em": 0.0},
    }
    assert results[1].metrics["invalid"] == 1.0
    assert results[3].metrics == {
        **{"em": 0.0, "f1": pytest.approx(0.8), "cover_em": 1.0, "searches": 2.0, "invalid": 1.0},
        **{"gold_page": 0.5, "new_page": 0.5, "sub_answer": 0.5},
        **{"support_precision": 1.0, "support_recall": 0.5, "support_f1": pytest.approx(2 / 3), "support_em": 0.0},
    }


@pytest.mark.parametrize(
    ("signal", "scores"),
    [
        ("gold_page", [0.0, 1.0, math.nan, 1.0, math.nan]),
        ("new_page", [0.0, 1.0, math.nan, 0.0, math.nan]),
        ("sub_answer", [0.0, 1.0, math.nan, 1.0, math.nan]),
        (NO_SCORE, [math.nan] * 5),
    ],
)
def test_the_process_score_judges_searches_and_nothing_else(signal: str, scores: list[float]) -> None:
    turns = ["search x", "search Brenal", "look", "search Brenal", "answer Ulm"]
    results = play(game_of(rules(max_turns=5, process_score=signal)), turns)
    assert [result.process_score for result in results] == pytest.approx(scores, nan_ok=True)


WELL, ILL = "<think>t</think>", ""


@pytest.mark.parametrize("search", [WELL, ILL])
@pytest.mark.parametrize("answer", [WELL, ILL])
@pytest.mark.parametrize("unread", [False, True])
@pytest.mark.parametrize(("said", "query"), [("Ulm", "Ann Tor"), ("Bern", "Ann Tor"), ("Bern", "Brenal")])
def test_every_turn_counts_for_the_form_of_the_episode(
    search: str, answer: str, unread: bool, said: str, query: str
) -> None:
    turns = [f"{search}<search>{query}</search>", *["hm"] * unread, f"{answer}<answer>{said}</answer>"]
    *_, end = play(game_of(rules("search_r1", reward="search_r1_format")), turns)
    formed = search == answer == WELL and not unread
    if said == "Ulm":
        expected = 1.0 if formed else 0.8
    elif formed:
        expected = 0.3 if query == "Ann Tor" else 0.2
    else:
        expected = 0.1
    assert end.reward == pytest.approx(expected)


LONG = [Passage("1", "One", "a b c d e f"), Passage("2", "Two", "g h i j"), Passage("3", "Three", "k l")]


def letters(text: str, count: int) -> str:
    """A tokenizer of one letter a token."""
    return text[:count]


@pytest.mark.parametrize(
    ("limits", "shown"),
    [
        ({"observation_tokens": 100}, "One : a b c d e f\nTwo : g h i j\nThree : k l"),
        ({"observation_tokens": 8}, "One : a b c d e f"),
        ({"observation_tokens": 11}, "One : a b c d e f\nTwo : g"),
        ({"observation_tokens": 10}, "One : a b c d e f"),  # a title alone says nothing
        ({"observation_tokens": 3}, "One : a"),
        ({"observation_tokens": 1}, "One"),
        ({"passage_tokens": 2}, "One : a b\nTwo : g h\nThree : k l"),
        ({"passage_tokens": 2, "observation_tokens": 7}, "One : a b\nTwo : g"),
        ({"cut": letters, "observation_tokens": 10}, "One : a b "),
        ({"cut": letters, "passage_tokens": 3}, "One : a b\nTwo : g h\nThree : k l"),
        ({"cut": letters, "observation_tokens": 17}, "One : a b c d e f"),
        ({"cut": letters, "observation_tokens": 25}, "One : a b c d e f\nTwo : g"),
    ],
)
def test_replies_keep_to_their_budgets(limits: dict[str, Any], shown: str) -> None:
    game = game_of(rules(**limits))
    assert isinstance(game.act("search x"), Wanted)
    (reply,) = replies([game.show([Hit(page, 1.0) for page in LONG])])
    assert reply == shown
    titles = [page.title for page in LONG if f"{page.title} : " in f"\n{shown}"]
    assert list(game.found.titles) == titles


def test_tags_close_however_little_fits_between_them() -> None:
    game = game_of(rules("search_r1", observation_tokens=4))
    assert isinstance(game.act("<think>t</think><search>x</search>"), Wanted)
    assert replies([game.show([Hit(LONG[0], 1.0)])]) == ["<information>\nDoc 1(Title: One) a\n</information>"]


def test_only_what_was_shown_counts_as_seen() -> None:
    game = game_of(rules(observation_tokens=5, process_score="sub_answer"))
    assert isinstance(game.act("search x"), Wanted)
    result = game.show([Hit(Passage("2", "Ann", "She was born in Ulm ."), 1.0)])
    assert result.process_score == 0.0
    assert not game.found.has_seen_answer


@given(st.text("ab \n", max_size=30), st.integers(1, 8))
def test_cut_words_keeps_a_beginning_of_so_many_words(text: str, count: int) -> None:
    kept = cut_words(text, count)
    assert text.startswith(kept)
    assert kept.split() == text.split()[:count]


TURNS = st.lists(
    st.sampled_from(["search Brenal", "search Ann Tor", "search x", "look", "answer Ulm", "answer x"]), max_size=5
)


def until_over(game: Game, turns: Sequence[str]) -> list[StepResult]:
    results: list[StepResult] = []
    for turn in turns:
        if not game.over:
            results += play(game, [turn])
    return results


@given(before=TURNS, after=TURNS)
def test_forks_and_restored_games_go_on_alike_and_leave_their_parent_alone(before: list[str], after: list[str]) -> None:
    shared = rules(process_score="new_page", reward="search_r1_format")
    parent = game_of(shared)
    until_over(parent, before)
    state = json.dumps(parent.state())
    copies = [parent.fork(), parent.fork(), Game.resume(json.loads(state), shared)]
    first, second, third = [until_over(game, after) for game in copies]
    assert str(first) == str(second) == str(third)  # NaN is not equal to itself
    assert [json.dumps(game.state()) for game in copies[1:]] == [json.dumps(copies[0].state())] * 2
    assert json.dumps(parent.state()) == state


def test_a_state_of_another_kind_is_refused() -> None:
    game = game_of(rules())
    play(game, ["look"])
    state = game.state()
    for wrong in ({"num_turns": 9}, {"num_invalid": 2}):
        with pytest.raises(ValueError, match="with max_turns 3"):
            Game.resume({**state, **wrong}, rules())
    with pytest.raises(KeyError):
        Game.resume({**state, "data": {}}, rules())
    with pytest.raises(KeyError):
        Game.resume({}, rules())


@pytest.mark.parametrize("style", [style for style in PRESETS if style != "words"])
@pytest.mark.parametrize("role", ["user", "system"])
def test_the_rules_name_the_tags_the_turns_and_an_example(style: str, role: str) -> None:
    script = make_script(TagOptions(style=style), PromptOptions(role=role), max_turns=5)
    opening = script.opening(" Who is Ann ")
    told, tags = opening[0].content, PRESETS[style]
    assert [message.role for message in opening] == (["user"] if role == "user" else ["system", "user"])
    assert opening[-1].content.endswith("Who is Ann?" if role == "system" else "\n\nQuestion: Who is Ann?")
    for tag in (*tags.think, *tags.search, *tags.information, *tags.answer):
        assert tag in told
    assert "up to 5 turns; a turn that cannot be read counts too." in told
    assert script.style.write("answer", "Lake Titicaca") in told
    assert "{question}" not in told


def test_prompts_can_be_replaced_and_questions_left_as_they_are() -> None:
    def opening(style: str, **options: Any) -> list[tuple[str, str]]:
        script = make_script(TagOptions(style=style), PromptOptions(**options), max_turns=2)
        return [tuple(message) for message in script.opening(" Who? {max_turns} ")]  # type: ignore[misc]

    own = "{max_turns} turns {x}: {question}"
    assert opening("search_r1", template=own) == [("user", "2 turns {x}: Who? {max_turns}?")]
    assert opening("search_r1", template=own, prepare=False) == [("user", "2 turns {x}:  Who? {max_turns} ")]
    ends = make_script(TagOptions(), PromptOptions(), max_turns=1, unreadable_ends=True).rules
    assert "up to 1 turn; a turn that cannot be read ends the task." in ends
    assert [prepared(text) for text in (" Who", "Who? ", "Name it.")] == ["Who?", "Who?", "Name it."]
    told = [("system", "Rules for 2"), ("user", " Who? {max_turns} ")]
    assert opening("words", role="system", template="Rules for {max_turns}") == told
    assert opening("words", role="system") == [("user", " Who? {max_turns} ")]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"role": "tool"}, "prompt.role: need user or system, got 'tool'"),
        ({"template": "Answer!"}, r"prompt.template: with role 'user' it must hold \{question\}"),
        ({"template": "{question}", "role": "system"}, r"must leave \{question\} to the user's message"),
    ],
)
def test_a_prompt_without_a_place_for_the_question_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(PromptOptions, options, owner="multihop_qa")
