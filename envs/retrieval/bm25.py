"""BM25 in memory, by bm25s: the default index.

Words without diacritics, Snowball's English stems, the title counted twice. Over the distinct stems w of `query_words`,
score(q, d) = Σ_w ln(1 + (N - n_w + 0.5) / (n_w + 0.5)) · f / (f + k1 (1 - b + b |d| / avg)), Lucene's variant in
Kamphuis et al. (ECIR 2020); f = occurrences of w in d, |d| = words of d, n_w of N documents hold w.
Invariants: an answer depends on the query alone, never on earlier ones; ties are broken by document id; documents
without a word of the query are not found. Never: a file, a socket.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.retrieval.local import CorpusDigest, LocalRetriever, best_rows, check_k, query_words, split_words
from envs.retrieval.protocol import Hit, Passage
from trace_async.errors import ConfigError

TITLE_COUNT = 2

_INLINE_PASSAGES = 60_000  # about 2 ms
_FORMAT = "snowball-1"  # changes whenever the same corpus and parameters would give other answers


class Bm25Retriever(LocalRetriever):
    """The index of some passages, all kept in memory.

    Raises ConfigError for an empty corpus, a document id seen twice, parameters out of range, or packages that are not
    installed.
    """

    def __init__(self, passages: Iterable[Passage], *, k1: float = 0.9, b: float = 0.4) -> None:
        """`k1` >= 0: how much repetition counts; `b` in [0, 1]: how much length counts against a document."""
        if not (k1 >= 0.0 and 0.0 <= b <= 1.0):
            raise ConfigError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, got k1={k1}, b={b}")
        bm25s, stemmer = _packages()
        digest = CorpusDigest()
        self._passages = sorted(digest.watch(passages))  # by document id: of equal scores the first row is the first id
        if not self._passages:
            raise ConfigError("the corpus is empty: there is nothing to search")
        self._stems = _Stems(stemmer)
        documents = [self._stems.learn(f"{title}\n" * TITLE_COUNT + text) for _, title, text in self._passages]
        if not self._stems.vocabulary:
            raise ConfigError(f"none of the {len(self._passages)} documents has a word: there is nothing to search")
        self._scores = bm25s.BM25(k1=k1, b=b, method="lucene")
        self._scores.index((documents, self._stems.vocabulary), show_progress=False)
        index_id = f"bm25:{_FORMAT},{k1:g},{b:g}:{digest.hexdigest()}"
        super().__init__(index_id=index_id, size=len(self._passages), inline_limit=_INLINE_PASSAGES)

    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_k(k)
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Hit]:
        known = self._stems.known(query)
        if not known:
            return []
        scores_D: NDArray[np.float32] = self._scores.get_scores_from_ids(known)
        return [Hit(self._passages[row], float(scores_D[row])) for row in best_rows(scores_D, k) if scores_D[row] > 0.0]


class _Stems:
    """Words to numbers of their stems. Built once from the corpus; queries only read."""

    def __init__(self, stemmer: Any) -> None:
        self._stemmer = stemmer
        self._lock = threading.Lock()  # a stemmer keeps scratch memory: one thread at a time
        self._words: dict[str, int] = {}  # every form that the corpus has
        self.vocabulary: dict[str, int] = {}  # stem: number

    def learn(self, text: str) -> list[int]:
        words = split_words(text)
        for word in words:
            if word not in self._words:
                stem = self._stemmer.stemWord(word)
                self._words[word] = self.vocabulary.setdefault(stem, len(self.vocabulary))
        return [self._words[word] for word in words]

    def known(self, query: str) -> list[int]:
        """Distinct stems of the query; those that the corpus lacks are left out."""
        numbers: dict[int, None] = {}
        for word in query_words(query):
            number = self._words.get(word)
            if number is None:
                with self._lock:
                    stem = self._stemmer.stemWord(word)
                number = self.vocabulary.get(stem)
            if number is not None:
                numbers[number] = None
        return list(numbers)


def _packages() -> tuple[Any, Any]:
    """The module bm25s and a stemmer. ConfigError when they are not installed."""
    try:
        import bm25s
        import Stemmer
    except ImportError as error:
        raise ConfigError(
            f"retriever kind 'bm25' needs bm25s and PyStemmer ({error}): "
            "pip install 'trace-async[qa]', or take kind 'fts5', which needs no package"
        ) from error
    logging.getLogger("bm25s").setLevel(logging.WARNING)  # it asks for DEBUG
    return bm25s, Stemmer.Stemmer("english")
