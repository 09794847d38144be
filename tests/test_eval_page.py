"""report.html: hostile words stay words, everything is in one file, its size is bounded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.eval_kit import make_episode
from trace_async.app import eval_page
from trace_async.app.eval_folder import EvalFolder, open_log
from trace_async.app.eval_page import write_page
from trace_async.app.eval_page_episode import MAX_TEXT_CHARS, highlights, last_words, say
from trace_async.app.eval_recorder import Episode
from trace_async.app.eval_summary import summarize_mode
from trace_async.core.types import Json, Task

SETTINGS: Json = {
    "policy": "runs/<img src=x>/policy",
    "policy_sha256": "ab" * 32,
    "environment": {"name": "quiz", "options": {}},
    "success_above": 0.5,
    "split": "dev",
    "num": 3,
    "seed": 0,
    "engine": {"kind": "local", "temperature": 1.0},
}
HOSTILE = [
    "<script>alert(1)</script>",
    "</pre></details></body><script src=//evil.example/x.js></script>",
    '"><img src=x onerror=alert(1)>',
    "' autofocus onfocus='alert(1)",
    "</style><style>*{display:none}",
    "<!-- <![CDATA[ ]]> -->",
    "&lt;b&gt; &amp; &#60;script&#62;",
    "\0\x1b[31m\u202emoc\ud800",
]
DANGEROUS = {"img", "iframe", "object", "embed", "form", "base", "a", "svg", "link"}


class Page(HTMLParser):
    """Every element of a page, its attributes and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in {"meta", "input", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def page_of(out: Path, episodes: list[Episode], *, labels: dict[str, str] | None = None) -> str:
    folder = EvalFolder(out)
    with open_log(folder, SETTINGS, fixed=()) as log:
        for episode in episodes:
            log.add(episode, mode="sampled", labels=labels or {}, seed=0)
        rows = [log.rows[key] for key in sorted(log.rows)]
    keys = [(row.mode, row.task_index) for row in rows]
    write_page(folder, {"sampled": summarize_mode(rows)}, keys=keys, settings=SETTINGS)
    return folder.report.read_text(encoding="utf-8")


def safe(text: str) -> Page:
    """The page, after checking that it holds no element, attribute or address but its own."""
    page = Page(text)
    assert not page.open
    assert page.tags["script"] == 1
    assert page.tags["style"] == 1
    assert not DANGEROUS & set(page.tags)
    assert not [name for _, name, _ in page.attributes if name.startswith("on") or name in {"src", "href", "action"}]
    return page


def test_a_page_says_question_gold_prediction_and_every_turn(tmp_path: Path) -> None:
    episodes = [
        make_episode(0, metrics={"em": 1.0, "f1": 1.0}),
        make_episode(1, said="<answer>Rome</answer>", outcome=0),
    ]
    text = page_of(tmp_path / "out", episodes, labels={"hops": "2"})
    page = safe(text)
    told = "".join(page.texts)
    for words in ("Where?", "Paris", "Rome", "<search>", "capital", "a page", "hops: all", "policy version 4–5"):
        assert words in told
    assert '<dd class="right">Paris</dd>' in text
    assert '<dd class="wrong">Rome</dd>' in text
    states = [value for tag, name, value in page.attributes if tag == "details" and name == "data-state"]
    assert states == ["right", "wrong"]
    assert "<mark>Paris</mark>" in text


@pytest.mark.parametrize("words", HOSTILE)
def test_whatever_anybody_says_stays_words(words: str, tmp_path: Path) -> None:
    episode = make_episode(
        said=words, reply=words, question=words, answers=(words, "fine"), metrics={words.strip() or "m": 0.5}
    )
    failed = Episode(task=episode.task, index=1, wall_s=1.0, failure=words)
    page = safe(page_of(tmp_path / "out", [episode, failed], labels={words: words}))
    shown = words.replace("\0", "␀").replace("\x1b", "␛").replace("\ud800", "?")
    assert "".join(page.texts).count(shown) >= 5


@given(st.text(alphabet="<>/\"'=&;! \nabscript-[]\0", max_size=60), st.text(alphabet='<>&"ab/', max_size=8))
@settings(max_examples=150, deadline=None)
def test_marked_texts_parse_to_the_same_words(text: str, answer: str) -> None:
    page = Page(say(text, highlights([answer])))
    assert not page.open
    assert set(page.tags) <= {"pre", "span", "mark"}
    assert "".join(page.texts) == text.replace("\0", "␀")


def test_the_page_needs_nothing_and_lets_nothing_run_but_its_own_script(tmp_path: Path) -> None:
    text = page_of(tmp_path / "out", [make_episode()])
    assert not re.search(r"https?://|//[a-z]+\.|url\(|@import", text)
    [policy] = [value for tag, name, value in safe(text).attributes if tag == "meta" and name == "content"][:1]
    assert policy is not None
    assert policy.startswith("default-src 'none'; ")
    assert "script-src 'sha256-" in policy


def test_long_texts_are_cut_and_it_is_said(tmp_path: Path) -> None:
    text = page_of(tmp_path / "out", [make_episode(reply="x" * (MAX_TEXT_CHARS + 1234))])
    assert "1,234 more characters in episodes.jsonl" in text
    assert "x" * (MAX_TEXT_CHARS + 1) not in text


def test_the_number_of_episodes_that_can_be_opened_is_bounded_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_page, "MAX_TRANSCRIPTS", 10)
    monkeypatch.setattr(eval_page, "MAX_ROWS", 50)
    text = page_of(tmp_path / "out", [make_episode(index) for index in range(100)])
    assert "Of 100 episodes, 50 are listed and 10 can be opened" in text
    page = safe(text)
    names = [name for name, attribute, value in page.attributes if attribute == "class" and value == "episode right"]
    assert Counter(names) == {"div": 40, "details": 10}
    assert names.index("details") < 5  # spread, not the first ten
    assert "details" in names[-5:]


def test_the_size_of_a_page_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_page, "MAX_TRANSCRIPT_BYTES", 40_000)
    episodes = [make_episode(index, reply="page " * (2000 if index % 2 else 10)) for index in range(40)]
    text = page_of(tmp_path / "out", episodes)
    assert 0 < text.count("<details class=") < 20
    assert len(text) < 40_000 + 40_000


def test_an_episode_that_was_tried_again_is_shown_as_it_ended(tmp_path: Path) -> None:
    episode = make_episode()
    failed = Episode(task=episode.task, index=0, wall_s=1.0, failure="EngineError: boom")
    text = page_of(tmp_path / "out", [failed, episode])
    assert "boom" not in text
    assert text.count('data-state="right"') == 1


def test_a_task_without_question_or_answers_is_called_by_its_name(tmp_path: Path) -> None:
    task = Task("lake/7", {"map": ["SG"], "answers": 3})
    text = page_of(tmp_path / "out", [replace(make_episode(), task=task, opening=())])
    assert '<span class="title">lake/7</span>' in text
    assert "<dt>prediction</dt>" not in text
    safe(text)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("<think>Rome? <answer>no</answer></think> <answer> Paris </answer>", "Paris"),
        ("<search>x</search> <answer>a</answer> <answer>b</answer> done", "b"),
        ("Paris", "Paris"),
        ("<answer>open", "<answer>open"),
        ("", ""),
    ],
)
def test_the_prediction_is_what_stands_in_the_last_tags(said: str, words: str) -> None:
    assert last_words(said) == words


def test_a_page_that_cannot_be_written_leaves_no_draft(tmp_path: Path) -> None:
    folder = EvalFolder(tmp_path / "out")
    page_of(folder.root, [make_episode()])
    before = folder.report.read_bytes()
    with pytest.raises(KeyError):
        write_page(folder, {}, keys=[("sampled", 99)], settings=SETTINGS)
    assert folder.report.read_bytes() == before
    assert not list(folder.root.glob(".report*"))
