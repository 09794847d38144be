"""Answers kept in front of any retriever, so that sibling branches that ask the same see the same.

Owns: the most recently used answers, by (index_id, query, k), and the searches under way. Invariants: of equal queries
asked at the same time on one event loop, one is searched; whoever asks and is cancelled disturbs nobody else; failures
are not kept. Every wait ends when the one who searches ends, cancelled or not. Never: a task of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

from envs.retrieval.protocol import Hit, Retriever
from trace_async.errors import ConfigError, EnvironmentFailure

_Key: TypeAlias = tuple[str, str, int]
_Answer: TypeAlias = tuple[Hit, ...]


class CacheCounts(NamedTuple):
    """Queries so far, by where their answers came from."""

    hits: int  # kept
    shared: int  # from a search that somebody else had under way
    misses: int  # searched


@dataclass(slots=True, eq=False)
class _Flight:
    """One search under way; `answer` and `error` stay None when it was given up."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: _Answer | None = None
    error: EnvironmentFailure | None = None


class CachedRetriever:
    """A Retriever that asks another one only for what it does not know yet; several event loops may share it."""

    def __init__(self, inner: Retriever, *, max_entries: int) -> None:
        if max_entries < 1:
            raise ConfigError(f"a cache needs room for at least one answer, got max_entries={max_entries}")
        self.inner = inner
        self._max_entries = max_entries
        self._kept: OrderedDict[_Key, _Answer] = OrderedDict()  # the one not used for longest first
        self._lock = threading.Lock()  # guards everything here: loops may run in different threads
        self._flights: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[_Key, _Flight]] = WeakKeyDictionary()
        self._hits = self._shared = self._misses = 0

    @property
    def index_id(self) -> str:
        return self.inner.index_id

    def __len__(self) -> int:
        return len(self._kept)

    def counts(self) -> CacheCounts:
        with self._lock:
            return CacheCounts(hits=self._hits, shared=self._shared, misses=self._misses)

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """As the inner retriever; its failure fails everybody who waits for that search."""
        answers: dict[str, _Answer] = {}
        while missing := [query for query in dict.fromkeys(queries) if query not in answers]:
            own, others = self._sort_out(missing, k, answers)
            if own:
                answers.update(await self._search_for_all(own, k))
            for query, flight in others.items():
                await flight.done.wait()
                if flight.error is not None:
                    raise type(flight.error)(*flight.error.args) from flight.error
                if flight.answer is not None:  # else it was given up: the next round asks again
                    answers[query] = flight.answer
                    self._count(shared=1)
        return [list(answers[query]) for query in queries]

    async def close(self) -> None:
        await self.inner.close()

    def _sort_out(
        self, missing: Sequence[str], k: int, answers: dict[str, _Answer]
    ) -> tuple[dict[str, _Flight], dict[str, _Flight]]:
        """Kept answers go into `answers`; returns the flights that the caller must fly, and those to wait for."""
        with self._lock:
            flights = self._flights.setdefault(asyncio.get_running_loop(), {})
        own: dict[str, _Flight] = {}
        others: dict[str, _Flight] = {}
        for query in missing:
            key = (self.index_id, query, k)
            kept = self._find(key)
            if kept is not None:
                answers[query] = kept
            elif key in flights:
                others[query] = flights[key]
            else:
                own[query] = flights[key] = _Flight()
        return own, others

    async def _search_for_all(self, own: dict[str, _Flight], k: int) -> dict[str, _Answer]:
        """Search what the caller's flights stand for and land them, whatever happens."""
        with self._lock:
            flights = self._flights[asyncio.get_running_loop()]
        try:
            found = await self.inner.search(list(own), k)
            for (query, flight), hits in zip(own.items(), found, strict=True):
                flight.answer = tuple(hits)
                self._keep((self.index_id, query, k), flight.answer)
        except EnvironmentFailure as error:
            for flight in own.values():
                flight.error = error
            raise
        finally:
            for query, flight in own.items():
                del flights[self.index_id, query, k]
                flight.done.set()
        self._count(misses=len(own))
        return {query: flight.answer for query, flight in own.items() if flight.answer is not None}

    def _find(self, key: _Key) -> _Answer | None:
        with self._lock:
            answer = self._kept.get(key)
            if answer is not None:
                self._kept.move_to_end(key)
                self._hits += 1
            return answer

    def _keep(self, key: _Key, answer: _Answer) -> None:
        with self._lock:
            self._kept[key] = answer
            self._kept.move_to_end(key)
            while len(self._kept) > self._max_entries:
                self._kept.popitem(last=False)

    def _count(self, *, shared: int = 0, misses: int = 0) -> None:
        with self._lock:
            self._shared += shared
            self._misses += misses
