from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.retrieval.fts5 import Fts5Retriever, match_expression
from envs.retrieval.protocol import Hit, Passage
from tests.envs.retrieval.kit import WORDS, corpora, texts
from trace_async.errors import ConfigError, EnvironmentFailure

PAGES = [
    Passage("3", "Navarre", "a community in northern Spain; its capital city is Pamplona"),
    Passage("1", "It (film)", "a horror film directed by Andy Muschietti"),
    Passage("2", "Málaga", "cities of Spain on the coast"),
    Passage("0", "Operators", "near or not and title col"),
]
INDEX = Fts5Retriever(PAGES)


def names(hits: Sequence[Hit]) -> list[str]:
    return [found.passage.doc_id for found in hits]


def search(query: str, k: int = 4) -> list[str]:
    return names(INDEX.search_now([query], k)[0])


HOSTILE = (
    '"',
    '""""',
    "'; DROP TABLE words; --",
    "Pamplona OR",
    "NEAR(",
    "title : Spain",
    "{title text} : Spain",
    "^Spain",
    "Spain*",
    "-Spain",
    "+Spain +",
    "(((Spain",
    "Spain AND NOT Pamplona",
    'Spain "Pamplona',
    "Pamplona\0Spain",
    "Pamplona 😀 Spain",
    "\ud800Spain",
    "%s %d ? ?1 :name $name",
    "\\",
)


@pytest.mark.parametrize("query", HOSTILE, ids=repr)
def test_a_query_is_words_and_never_syntax(query: str) -> None:
    expected = {doc_id for doc_id in ("2", "3") if "spain" in query.lower() or (doc_id == "3" and "Pamplona" in query)}
    assert expected <= set(search(query)) <= {*expected, "0"}  # "0" holds the operators as words


@settings(max_examples=200)
@given(st.text(max_size=40))
def test_no_text_is_an_error(query: str) -> None:
    (hits,) = INDEX.search_now([query], 3)
    assert len({hit.passage.doc_id for hit in hits}) == len(hits) <= 3


def test_a_query_of_ten_thousand_words_is_answered() -> None:
    assert search("Pamplona " + " ".join(f"w{number}" for number in range(10_000))) == ["3"]


def test_unknown_and_empty_queries_find_less() -> None:
    found = INDEX.search_now(["", " ?! ", "zebra", "zebra Pamplona", "😀"], 5)
    assert list(map(names, found)) == [[], [], [], ["3"], []]


def test_stems_and_diacritics_do_not_matter() -> None:
    assert search("CITY") == search("cities") == ["2", "3"]
    assert search("malaga") == ["2"] == search("MÁLAGA")


def test_hits_carry_the_passage_and_a_score() -> None:
    ((found,),) = INDEX.search_now(["Pamplona"], 3)
    assert found.passage == PAGES[0]
    assert found.score > 0.0


def test_words_are_quoted_once_each() -> None:
    assert match_expression('Spain "OR" spain\'s') == '"spain" OR "s"'


@settings(max_examples=60)
@given(corpora(), texts, st.integers(1, 8))
def test_it_finds_what_holds_a_word_best_first_then_by_document_id(corpus: list[Passage], query: str, k: int) -> None:
    twins = [*corpus, *(Passage(f"c{passage.doc_id}", passage.title, passage.text) for passage in corpus)]
    (hits,) = Fts5Retriever(twins).search_now([query], k)
    (everything,) = Fts5Retriever(twins[::-1]).search_now([query], len(twins))
    wanted = set(query.split())
    assert set(names(everything)) == {
        passage.doc_id for passage in twins if wanted & {*passage.title.split(), *passage.text.split()}
    }
    assert everything == sorted(everything, key=lambda found: (-found.score, found.passage.doc_id))
    assert everything[:k] == hits


def test_the_title_weighs_more() -> None:
    filler = [Passage(f"z{number}", "cedar", "dune") for number in range(8)]
    retriever = Fts5Retriever([Passage("b", "amber", "birch"), Passage("a", "birch", "amber"), *filler])
    assert names(retriever.search_now(["amber"], 2)[0]) == ["b", "a"]


def test_half_a_surrogate_pair_in_a_passage_is_stored_as_the_replacement_character() -> None:
    ((found,),) = Fts5Retriever([Passage("1", "x\ud800", "amber")]).search_now(["amber"], 1)
    assert found.passage.title == "x\ufffd"


def test_a_file_answers_as_memory_does(tmp_path: Path) -> None:
    path = tmp_path / "index"
    written = Fts5Retriever(PAGES, path=path)
    opened = Fts5Retriever.open(path)
    queries = ["Spain", "film", "city of Pamplona", ""]
    assert written.search_now(queries, 3) == opened.search_now(queries, 3) == INDEX.search_now(queries, 3)
    assert written.index_id == opened.index_id == INDEX.index_id
    assert written.size == opened.size == len(PAGES)
    assert [file.name for file in tmp_path.iterdir()] == ["index"]


def test_a_corpus_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Fts5Retriever(PAGES, path=path)
    before = path.read_bytes()
    for corpus in ([], [PAGES[0], PAGES[0]]):
        with pytest.raises(ConfigError):
            Fts5Retriever(corpus, path=path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["index"]


def test_an_index_is_replaced_under_its_readers(tmp_path: Path) -> None:
    path = tmp_path / "index"
    old = Fts5Retriever(PAGES, path=path)
    new = Fts5Retriever(PAGES[:1], path=path)
    assert names(old.search_now(["film"], 1)[0]) == ["1"]
    assert new.search_now(["film"], 1) == [[]]


@pytest.mark.parametrize("content", [b"", b"not a database at all, but some text that is long enough" * 100])
def test_a_file_that_is_no_index_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "index"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="not an index of passages"):
        Fts5Retriever.open(path)


def test_an_index_of_another_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Fts5Retriever(PAGES, path=path)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET format = 'porter-0'")
    with pytest.raises(ConfigError, match="index format 'porter-0'"):
        Fts5Retriever.open(path)


def test_files_that_cannot_be_had_are_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such index file"):
        Fts5Retriever.open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be written"):
        Fts5Retriever(PAGES, path=tmp_path / "no folder" / "index")


def test_a_damaged_file_is_a_failure_and_no_empty_answer(tmp_path: Path) -> None:
    path = tmp_path / "index"
    Fts5Retriever([Passage(str(number), f"page {number}", "amber " * 50) for number in range(200)], path=path)
    data = bytearray(path.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    path.write_bytes(data)
    with pytest.raises((EnvironmentFailure, ConfigError)):
        Fts5Retriever.open(path).search_now(["amber"], 3)


@pytest.mark.parametrize("in_file", [False, True])
def test_threads_get_the_answers_of_one(tmp_path: Path, in_file: bool) -> None:
    corpus = [Passage(f"{n:03}", WORDS[n % 7], f"{WORDS[n % 5]} {WORDS[n % 3]} page{n}") for n in range(200)]
    retriever = Fts5Retriever(corpus, path=tmp_path / "index" if in_file else None)
    queries = [f"{WORDS[n % 7]} {WORDS[n % 4]} page{n}" for n in range(100)]
    expected = retriever.search_now(queries, 4)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search_now([query], 4)[0], queries))
    assert found == expected
    asyncio.run(retriever.close())


@pytest.mark.parametrize("in_file", [False, True])
def test_after_closing_a_search_is_a_failure(tmp_path: Path, in_file: bool) -> None:
    retriever = Fts5Retriever(PAGES, path=tmp_path / "index" if in_file else None)

    async def story() -> None:
        assert await retriever.search(["film"], 1)
        await retriever.close()
        await retriever.close()
        with pytest.raises(EnvironmentFailure, match="was closed"):
            await retriever.search(["film"], 1)

    asyncio.run(story())


def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        INDEX.search_now(["Spain"], 0)
