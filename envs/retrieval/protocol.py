"""What a retriever is: a Protocol and its records. Never: an index, a socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Passage(NamedTuple):
    """One document of a corpus."""

    doc_id: str  # unique in the corpus
    title: str
    text: str  # without the title


class Hit(NamedTuple):
    """A passage that was found."""

    passage: Passage
    score: float  # higher is better; comparable within one query only


class Retriever(Protocol):
    """Finds passages for queries.

    Equal queries to one index get equal answers: ties are broken by document id, and there is no randomness.
    """

    @property
    def index_id(self) -> str:
        """What is searched and how (digest of the corpus, kind and parameters): the key of caches."""
        ...

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """For each query the `k` best passages, best first; fewer when fewer match, none for a query without words.

        Raises EnvironmentFailure (infrastructure) when no answer can be had; never for a strange query.
        """
        ...

    async def close(self) -> None:
        """Give back connections and files; may be called twice."""
        ...
