from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.retrieval.local import CorpusDigest, LocalRetriever, best_rows, query_words, split_words
from envs.retrieval.protocol import Hit, Passage
from trace_async.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", []),
        ("  \t\n", []),
        ("Lord of the Rings: Part-2!", ["lord", "of", "the", "rings", "part", "2"]),
        ("snake_case", ["snake", "case"]),
        ("Beyoncé Knowles", ["beyonce", "knowles"]),
        ("Beyonce\u0301", ["beyonce"]),
        ("ﬁnal", ["final"]),
        ("東京 2020", ["東京", "2020"]),
        ("a\0b", ["a", "b"]),
        ("\ud800 lone", ["lone"]),
        ("😀🎉", []),
    ],
)
def test_words_are_runs_of_letters_and_digits_without_case_and_diacritics(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("Who directed the film It?", ["directed", "film"]),
        ("The Who", ["the", "who"]),
        ("paris Paris PARIS france", ["paris", "france"]),
        ("?!", []),
    ],
)
def test_a_query_is_its_distinct_words_without_little_ones_unless_it_has_no_others(
    query: str, words: list[str]
) -> None:
    assert query_words(query) == words


passages = st.lists(st.tuples(st.text(), st.text()), min_size=1, max_size=6).map(
    lambda pairs: [Passage(str(number), *pair) for number, pair in enumerate(pairs)]
)


def digest(of: Sequence[Passage]) -> str:
    found = CorpusDigest()
    for passage in of:
        found.add(passage)
    return found.hexdigest()


@given(passages, st.randoms(use_true_random=False))
def test_the_digest_does_not_depend_on_the_order(corpus: list[Passage], random: object) -> None:
    shuffled = list(corpus)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert digest(shuffled) == digest(corpus)


@given(passages, passages)
def test_the_digest_tells_corpora_apart(one: list[Passage], other: list[Passage]) -> None:
    assert (digest(one) == digest(other)) == (one == other)


def test_the_digest_sees_where_one_field_ends() -> None:
    assert digest([Passage("1", "ab", "c")]) != digest([Passage("1", "a", "bc")])


def test_a_document_id_seen_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="two documents 'x'"):
        digest([Passage("x", "", "one"), Passage("x", "", "two")])


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), min_size=1, max_size=30),
    st.integers(1, 40),
)
def test_best_rows_are_those_of_a_full_sort(scores: list[float], k: int) -> None:
    expected = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:k]
    assert best_rows(np.array(scores, np.float32), k) == expected


class Where(LocalRetriever):
    """Remembers the thread of each search."""

    def __init__(self, size: int) -> None:
        super().__init__(index_id="where", size=size, inline_limit=10)
        self.threads: list[int] = []

    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.threads.append(threading.get_ident())
        return [[] for _ in queries]


@pytest.mark.parametrize(("size", "queries", "inline"), [(10, 1, True), (5, 2, True), (11, 1, False), (5, 3, False)])
def test_a_big_search_leaves_the_event_loop_free(size: int, queries: int, inline: bool) -> None:
    retriever = Where(size)
    asyncio.run(retriever.search(["x"] * queries, 1))
    assert (retriever.threads == [threading.get_ident()]) is inline
