"""What one search finds, fast enough to ask at every question: BM25 as SQLite's FTS5 ranks.

SQLite makes the porter stems; scores follow its formula with the title counted twice (k1 1.2, b 0.75, a word's share
never below 1e-6), rounded, so that equal passages tie on every platform. Ties go to the smaller document id, and the
words of a query are those that the retrievers look for.
"""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

import numpy as np
from numpy.typing import NDArray

from envs.retrieval.local import query_words, split_words
from envs.retrieval.protocol import Passage
from trace_async.errors import ConfigError

_K1, _B = 1.2, 0.75
_TITLE_WEIGHT = 2
_LEAST_IDF = 1e-6
_DECIMALS = 6


class OneSearch:
    """An index over passages that answers with their places."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        self._order = sorted(range(len(passages)), key=lambda place: passages[place].doc_id)
        bodies = [(split_words(passages[place].title), split_words(passages[place].text)) for place in self._order]
        self._stems = _stems({word for title, text in bodies for word in title + text})
        lengths = np.array([len(title) + len(text) for title, text in bodies], dtype=np.float64)
        norms = _K1 * (1 - _B + _B * lengths / (float(lengths.sum()) / len(passages)))
        stemmed = [tuple([self._stems[word] for word in part] for part in pair) for pair in bodies]
        self._postings = {stem: _scored(rows, counts, norms) for stem, (rows, counts) in _postings(stemmed).items()}

    def top(self, query: str, k: int) -> list[int]:
        """Places of the `k` best passages, best first; fewer when fewer have a word of the query."""
        scores = np.zeros(len(self._order))
        for stem in self._query_stems(query):  # words with one stem count twice, as they do there
            if stem in self._postings:
                rows, shares = self._postings[stem]
                scores[rows] += shares
        scores = scores.round(_DECIMALS)
        best = []
        for _ in range(min(k, len(self._order))):
            row = int(scores.argmax())  # the first of equals
            if scores[row] <= 0.0:
                break
            best.append(self._order[row])
            scores[row] = 0.0
        return best

    def _query_stems(self, query: str) -> Iterable[str]:
        found = query_words(query)
        if new := set(found) - self._stems.keys():
            self._stems.update(_stems(new))
        return (self._stems[word] for word in found)


def _postings(bodies: Sequence[tuple[list[str], ...]]) -> Mapping[str, tuple[list[int], list[int]]]:
    """Rows that hold a stem, and how often."""
    postings: dict[str, tuple[list[int], list[int]]] = {}
    for row, (title, text) in enumerate(bodies):
        for stem, count in Counter(_TITLE_WEIGHT * title + text).items():
            rows, counts = postings.setdefault(stem, ([], []))
            rows.append(row)
            counts.append(count)
    return postings


def _scored(
    rows: list[int], counts: list[int], norms: NDArray[np.float64]
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """A stem's rows and its share of their scores."""
    idf = max(math.log((len(norms) - len(rows) + 0.5) / (len(rows) + 0.5)), _LEAST_IDF)
    places = np.array(rows, dtype=np.intp)
    frequencies = np.array(counts, dtype=np.float64)
    return places, idf * frequencies * (_K1 + 1) / (frequencies + norms[places])


def _stems(distinct: Iterable[str]) -> dict[str, str]:
    """Porter stems as FTS5 makes them."""
    order = sorted(distinct)
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.execute("CREATE VIRTUAL TABLE words USING fts5(word, tokenize='porter ascii')")
        except sqlite3.OperationalError as error:
            raise ConfigError(
                f"a world is checked with SQLite's full-text search, which this Python lacks: {error}; "
                "use a Python whose sqlite3 has FTS5"
            ) from error
        database.executemany("INSERT INTO words(rowid, word) VALUES (?, ?)", enumerate(order))
        database.execute("CREATE VIRTUAL TABLE stems USING fts5vocab(words, 'instance')")
        return {order[place]: stem for stem, place in database.execute("SELECT term, doc FROM stems")}
