"""The index of the generator against SQLite itself, on texts of any kind."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.multihop_qa.world.index import OneSearch
from envs.retrieval.protocol import Passage

WORDS = ["founder", "founded", "founding", "town", "towns", "running", "ran", "kado", "kadi", "bral", "mayor", "mayors"]
TEXT = st.lists(st.sampled_from(WORDS), min_size=1, max_size=8).map(" ".join)
NOISE = [("zeta", f"eta{place} iota") for place in range(12)]  # or most words would be in more than half of the texts


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=10), TEXT)
def test_places_and_order_are_those_of_fts5(bodies: list[tuple[str, str]], query: str) -> None:
    passages = [Passage(f"{place:02d}", title, text) for place, (title, text) in enumerate(bodies + NOISE)]
    words = " OR ".join(f'"{word}"' for word in dict.fromkeys(query.split()))
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute("CREATE VIRTUAL TABLE pages USING fts5(title, text, tokenize='porter ascii')")
        rows = [(place, title, text) for place, (_, title, text) in enumerate(passages)]
        database.executemany("INSERT INTO pages(rowid, title, text) VALUES (?, ?, ?)", rows)
        ranked = "SELECT rowid FROM pages WHERE pages MATCH ? ORDER BY round(bm25(pages, 2.0, 1.0), 6), rowid LIMIT 5"
        found = [place for (place,) in database.execute(ranked, (words,))]
    assert OneSearch(passages).top(query, 5) == found


def test_ties_go_to_the_smaller_document_id() -> None:
    passages = [Passage(name, "kado", "a town") for name in ("c", "a", "b")] + [Passage("d", "bral", "x")] * 7
    assert OneSearch(passages).top("kado", 2) == [1, 2]


def test_words_that_nobody_wrote_find_nothing() -> None:
    assert OneSearch([Passage("a", "kado", "a town")]).top("zebra", 3) == []


@pytest.mark.parametrize("k", [1, 2, 9])
def test_never_more_than_k_or_than_there_are(k: int) -> None:
    passages = [Passage(str(place), f"kado{place}", "town hall") for place in range(5)]
    assert len(OneSearch(passages).top("kado1 kado2 kado3", k)) == min(k, 3)
