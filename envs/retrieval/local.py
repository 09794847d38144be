"""What every index in this process shares: words, the identity of a corpus, and the asyncio face of a search.

Invariants: a query that has no words finds nothing; the digest of a corpus does not depend on the order of its
passages; a search on a big corpus runs in a thread, on a small one (a millisecond or two) at once.
Never: an index, a file, a socket.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from envs.retrieval.protocol import Hit, Passage
from trace_async.errors import ConfigError

_WORD = re.compile(r"[^\W_]+")
_DIGEST_BITS = 256
_LITTLE_WORDS = """
a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was
will with what which who whom whose when where how did do does
"""
_STOP_WORDS = frozenset(_LITTLE_WORDS.split())  # Lucene's English stop words, and those that ask


def split_words(text: str) -> list[str]:
    """Runs of letters and digits in lower case without diacritics ("Łódź, 2nd" -> łodz, 2nd)."""
    if not text.isascii():
        parts = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in parts if not unicodedata.combining(char))
    return _WORD.findall(text.lower())


def query_words(query: str) -> list[str]:
    """The distinct words to look for, in their order: without stop words, unless there is nothing else ("The Who")."""
    words = list(dict.fromkeys(split_words(query)))
    return [word for word in words if word not in _STOP_WORDS] or words


def without_surrogates(text: str) -> str:
    """Halves of surrogate pairs, which JSON may hold and UTF-8 may not, become U+FFFD; two that meet, a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class CorpusDigest:
    """Identity of a set of passages, read one by one: the sum of their SHA-256 numbers, so that order does not matter.

    Raises ConfigError for a document id seen twice.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, passage: Passage) -> None:
        if passage.doc_id in self._ids:
            raise ConfigError(f"the corpus has two documents {passage.doc_id!r}: document ids must be distinct")
        self._ids.add(passage.doc_id)
        data = "".join(f"{len(part)}:{part}" for part in passage).encode("utf-8", "surrogatepass")
        self._sum += int.from_bytes(hashlib.sha256(data).digest(), "big")

    def watch(self, passages: Iterable[Passage]) -> Iterator[Passage]:
        """The same passages, each counted as it goes by."""
        for passage in passages:
            self.add(passage)
            yield passage

    def hexdigest(self) -> str:
        return f"{self._sum % (1 << _DIGEST_BITS):064x}"[:32]


class LocalRetriever(ABC):
    """A Retriever whose index is in this process; `search_now` is the search without asyncio.

    `index_id` is `{kind}:{parameters}:{corpus digest}`; `size` counts passages. Several event loops and threads may
    share one object.
    """

    def __init__(self, *, index_id: str, size: int, inline_limit: int) -> None:
        """`inline_limit`: passages times queries that are searched on the event loop itself rather than in a thread."""
        self._index_id = index_id
        self.size = size
        self._inline_limit = inline_limit

    @property
    def index_id(self) -> str:
        return self._index_id

    @abstractmethod
    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """As `search`, in the calling thread. ValueError when k < 1."""

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        if len(queries) * self.size <= self._inline_limit:
            return self.search_now(queries, k)
        return await asyncio.to_thread(self.search_now, queries, k)

    async def close(self) -> None:
        """Nothing to give back."""
        return


def check_k(k: int) -> None:
    """ValueError unless k >= 1."""
    if k < 1:
        raise ValueError(f"a search needs k >= 1, got {k}")


def best_rows(scores_D: NDArray[np.float32], k: int) -> list[int]:
    """Rows of the `k` highest scores, best first, of equal scores the lower row first."""
    if k < len(scores_D):
        threshold = np.partition(scores_D, len(scores_D) - k)[len(scores_D) - k]
        rows = np.flatnonzero(scores_D >= threshold)
    else:
        rows = np.arange(len(scores_D))
    order = np.argsort(-scores_D[rows], kind="stable")  # stable: rows stay in ascending order among equals
    best: list[int] = rows[order[:k]].tolist()
    return best
