from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.protocol import Hit, Passage
from tests.envs.retrieval.kit import corpora, slow_bm25, texts
from trace_async.errors import ConfigError

PAGES = [
    Passage("3", "Navarre", "a community in northern Spain; its capital city is Pamplona"),
    Passage("1", "It (film)", "a horror film directed by Andy Muschietti"),
    Passage("2", "Málaga", "cities of Spain on the coast"),
    Passage("4", "", "the the the"),
]


def names(hits: Sequence[Hit]) -> list[str]:
    return [found.passage.doc_id for found in hits]


def search(retriever: Bm25Retriever, query: str, k: int = 3) -> list[str]:
    return names(retriever.search_now([query], k)[0])


@settings(max_examples=60)
@given(corpora(), texts, st.floats(0.0, 3.0), st.floats(0.0, 1.0))
def test_scores_are_those_of_the_formula(corpus: list[Passage], query: str, k1: float, b: float) -> None:
    (hits,) = Bm25Retriever(corpus, k1=k1, b=b).search_now([query], len(corpus))
    expected = slow_bm25(corpus, query, k1=k1, b=b)
    assert {found.passage.doc_id: found.score for found in hits} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [found.score for found in hits] == sorted((found.score for found in hits), reverse=True)


@settings(max_examples=30)
@given(corpora(), texts, st.integers(1, 8))
def test_equal_scores_are_in_order_of_document_id_whatever_the_order_of_the_corpus(
    corpus: list[Passage], query: str, k: int
) -> None:
    twins = [*corpus, *(Passage(f"c{passage.doc_id}", passage.title, passage.text) for passage in corpus)]
    (hits,) = Bm25Retriever(twins).search_now([query], k)
    assert hits == sorted(hits, key=lambda found: (-found.score, found.passage.doc_id))
    assert Bm25Retriever(twins[::-1]).search_now([query], k) == [hits]
    (everything,) = Bm25Retriever(twins).search_now([query], len(twins))
    assert everything[:k] == hits


def test_the_title_counts_twice() -> None:
    in_title, in_text = Passage("b", "amber", "birch"), Passage("a", "birch", "amber")
    assert search(Bm25Retriever([in_title, in_text], b=0.0), "amber") == ["b", "a"]


def test_stems_and_diacritics_do_not_matter() -> None:
    retriever = Bm25Retriever(PAGES)
    assert search(retriever, "CITIES") == ["2", "3"] == search(retriever, "city")
    assert search(retriever, "malaga") == ["2"] == search(retriever, "MÁLAGA")


def test_unknown_and_empty_queries_find_less() -> None:
    retriever = Bm25Retriever(PAGES)
    found = retriever.search_now(["", " ?! ", "zebra", "zebra Pamplona", "😀"], 5)
    assert list(map(names, found)) == [[], [], [], ["3"], []]


def test_a_query_of_little_words_is_searched_as_it_is() -> None:
    assert search(Bm25Retriever(PAGES), "It") == ["1", "3"]  # and its


def test_answers_do_not_depend_on_earlier_queries_or_on_their_batch() -> None:
    retriever = Bm25Retriever(PAGES)
    queries = ["unheard words first", "Spain", "unheard", "film in Spain"]
    batch = retriever.search_now(queries, 3)
    assert [retriever.search_now([query], 3)[0] for query in reversed(queries)] == batch[::-1]
    assert Bm25Retriever(PAGES).search_now(["Spain"], 3) == [batch[1]]


def test_threads_get_the_answers_of_one() -> None:
    corpus = [
        Passage(f"{number:03}", f"page {number}", f"walking{number % 7}s runs{number % 5}") for number in range(200)
    ]
    retriever = Bm25Retriever(corpus)
    queries = [f"walking{number % 9} pages runs{number % 4} unseen{number}" for number in range(300)]
    expected = retriever.search_now(queries, 4)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda query: retriever.search_now([query], 4)[0], queries))
    assert found == expected


def test_the_index_is_known_by_corpus_and_parameters() -> None:
    one = Bm25Retriever(PAGES).index_id
    assert one == Bm25Retriever(PAGES[::-1]).index_id
    others = {
        Bm25Retriever(PAGES[1:]).index_id,
        Bm25Retriever(PAGES, k1=1.2).index_id,
        Bm25Retriever(PAGES, b=0.5).index_id,
    }
    assert len(others | {one}) == 4


def test_the_asyncio_face_says_the_same() -> None:
    retriever = Bm25Retriever(PAGES)

    async def ask() -> list[list[Hit]]:
        found = await retriever.search(["Spain", ""], 2)
        await retriever.close()
        await retriever.close()
        return found

    assert asyncio.run(ask()) == retriever.search_now(["Spain", ""], 2)


@pytest.mark.parametrize(
    ("corpus", "said"),
    [
        ([], "the corpus is empty"),
        ([Passage("1", "?", "..."), Passage("2", "", "")], "none of the 2 documents has a word"),
        ([Passage("1", "a", "b"), Passage("1", "c", "d")], "two documents '1'"),
    ],
)
def test_a_corpus_that_cannot_be_searched_is_refused(corpus: list[Passage], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Bm25Retriever(corpus)


@pytest.mark.parametrize(("k1", "b"), [(-0.1, 0.4), (0.9, -0.1), (0.9, 1.1), (float("nan"), 0.4)])
def test_parameters_out_of_range_are_refused(k1: float, b: float) -> None:
    with pytest.raises(ConfigError, match="k1 >= 0"):
        Bm25Retriever(PAGES, k1=k1, b=b)


def test_k_must_be_positive() -> None:
    with pytest.raises(ValueError, match="k >= 1"):
        Bm25Retriever(PAGES).search_now(["Spain"], 0)


def test_missing_packages_are_said_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(ConfigError, match=r"pip install 'trace-async\[qa\]', or take kind 'fts5'"):
        Bm25Retriever(PAGES)
