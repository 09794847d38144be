"""The collections that an environment's tasks search: one index each, made at the first search.

Owns: the retrievers and their closing. Invariants: processes that only need tasks or openings never build an index;
an index is built once, off the event loop, whoever asks first. Never: what is in a collection, what is shown of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from threading import Lock

from envs.retrieval.protocol import Hit, Passage, Retriever
from envs.retrieval.registry import RetrieverOptions, make_retriever


class Library:
    """Searches collections by name."""

    def __init__(self, options: RetrieverOptions, collections: Mapping[str, Callable[[], Iterable[Passage]]]) -> None:
        self._options = options
        self._collections = collections
        self._retrievers: dict[str, Retriever] = {}
        self._lock = Lock()  # of building; held in worker threads only

    async def search(self, collection: str, query: str, k: int) -> list[Hit]:
        """The `k` best passages, best first. ValueError for a collection that is not there.

        Raises as Retriever.search.
        """
        await self.prepare(collection)
        (hits,) = await self._retrievers[collection].search([query], k)
        return hits

    async def prepare(self, collection: str) -> None:
        """Make the index of a collection now. ValueError as `search`."""
        if collection not in self._retrievers:
            await asyncio.to_thread(self._build, collection)

    async def close(self) -> None:
        """Close every retriever; may be called twice."""
        while self._retrievers:
            _, retriever = self._retrievers.popitem()
            await retriever.close()

    def _build(self, collection: str) -> Retriever:
        if collection not in self._collections:
            raise ValueError(f"no collection {collection!r}; there are {', '.join(self._collections)}")
        with self._lock:
            if collection not in self._retrievers:
                options = self._options
                if options.path and collection != next(iter(self._collections)):  # a file of its own for each
                    options = replace(options, path=f"{options.path}.{collection}")
                self._retrievers[collection] = make_retriever(options, self._collections[collection])
            return self._retrievers[collection]
