"""No question of several hops is answered by less than its hops, and every hop can be made: seen with real searches."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from envs.multihop_qa.records import Question
from envs.multihop_qa.world import World
from envs.multihop_qa.world.index import OneSearch
from envs.retrieval.local import query_words
from envs.retrieval.protocol import Passage
from tests.envs.multihop_qa.worlds import all_questions, holds, names_an_entity, small, tiny

TOP_K = 3
WORLDS: dict[str, Callable[[], World]] = {
    "small": small,
    "tiny": tiny,
    "short forms": lambda: small(alias_rate=0.5, near_names=0.4),
    "card": lambda: tiny(style="card"),
}


@pytest.fixture(params=WORLDS, scope="module")
def world(request: pytest.FixtureRequest) -> World:
    return WORLDS[str(request.param)]()


@pytest.fixture(scope="module")
def fts5(world: World) -> Iterator[Fts5]:
    with closing(sqlite3.connect(":memory:")) as database:
        yield Fts5(database, world.pages)


class Fts5:
    """SQLite's own full-text search: porter stems, title weight 2, any of the words."""

    def __init__(self, database: sqlite3.Connection, pages: tuple[Passage, ...]) -> None:
        self._database = database
        self._pages = sorted(pages)
        database.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text, tokenize='porter ascii')")
        rows = [(place, page.title, page.text) for place, page in enumerate(self._pages)]
        database.executemany("INSERT INTO pages(rowid, title, text) VALUES (?, ?, ?)", rows)

    def search(self, query: str, k: int = TOP_K) -> list[Passage]:
        words = " OR ".join(f'"{word}"' for word in query_words(query))
        ranked = "SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY round(bm25(pages, 2.0, 1.0), 6), rowid LIMIT ?"
        return [self._pages[place] for (place,) in self._database.execute(ranked, (words, k))]


def several_hops(world: World) -> list[Question]:
    return [question for question in all_questions(world) if question.hops > 1]


def test_one_search_with_the_question_never_brings_a_name_or_year_that_answers_it(world: World, fts5: Fts5) -> None:
    for question in several_hops(world):
        if names_an_entity(question) or len(question.answers[0]) > 2:
            found = fts5.search(question.question)
            told = [
                page for page in found for answer in question.answers if holds(f"{page.title}\n{page.text}", answer)
            ]
            assert not told, (question.question, question.answers)


def test_one_search_with_the_question_never_brings_all_pages_of_the_path(world: World, fts5: Fts5) -> None:
    for question in several_hops(world):
        assert not set(question.gold_ids) <= {page.doc_id for page in fts5.search(question.question)}


def test_one_search_with_a_question_of_one_hop_brings_its_page(world: World, fts5: Fts5) -> None:
    questions = [question for question in all_questions(world) if question.hops == 1]
    assert questions
    for question in questions:
        assert question.gold_ids[0] in {page.doc_id for page in fts5.search(question.question)}


def test_searching_the_title_of_each_step_finds_its_page_first(world: World, fts5: Fts5) -> None:
    for title in sorted({step.title for question in all_questions(world) for step in question.steps}):
        assert fts5.search(title)[0].title == title


def test_the_questions_of_the_steps_find_their_pages(world: World, fts5: Fts5) -> None:
    steps = [step for question in all_questions(world)[:200] for step in question.steps]
    found = [step.doc_id in {page.doc_id for page in fts5.search(step.question)} for step in steps]
    assert sum(found) / len(found) > 0.97


def test_no_page_names_something_of_the_question_and_its_answer(world: World) -> None:
    titles = {page.title for page in world.pages if not page.title.startswith("Statistics of ")}
    texts = [f"{page.title}\n{page.text}" for page in world.pages]
    words = [set(re.findall(r"\w+", text)) for text in texts]
    naming = {title: {at for at, known in enumerate(words) if known.issuperset(title.split())} for title in titles}
    for question in several_hops(world):
        if not names_an_entity(question):
            continue
        anchors = [title for title in capitalised(question.question) if title in titles]
        assert anchors
        told = {at for at, known in enumerate(words) if any(known.issuperset(a.split()) for a in question.answers)}
        for both in told.intersection(*[set().union(*(naming[anchor] for anchor in anchors))]):
            named = [anchor for anchor in anchors if holds(texts[both], anchor)]
            assert not named or not any(holds(texts[both], one) for one in question.answers), (question, texts[both])


def capitalised(question: str) -> list[str]:
    """Runs of words in capitals: the names, and the question's own first word."""
    return re.findall(r"[A-Z]\w+(?: [A-Z]\w+)?", question)


def test_no_answer_stands_in_its_question(world: World) -> None:
    for question in all_questions(world):
        if question.kind != "yes_no":
            assert not any(holds(question.question, answer) for answer in question.answers)


def test_guessing_without_reading_does_not_pay(world: World) -> None:
    for questions in world.questions.values():
        named = [question for question in questions if names_an_entity(question)]
        (_, most), *_ = Counter(question.answers[0] for question in named).most_common(1)
        assert most <= max(3, 0.02 * len(questions))
    known = Counter(one.answers[0] for one in world.questions["train"]).most_common(5)
    heldout = [one for one in world.questions["heldout"] if names_an_entity(one)]
    assert not {one.answers[0] for one in heldout} & {answer for answer, _ in known}


def test_our_index_ranks_as_fts5_does(world: World, fts5: Fts5) -> None:
    index = OneSearch(world.pages)
    for question in all_questions(world)[:150]:
        assert [world.pages[place] for place in index.top(question.question, 5)] == fts5.search(question.question, 5)
