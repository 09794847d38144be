"""The queue between the retrieval server's requests and its one searching thread.

Invariants: the queries that wait or are being searched are bounded, and what does not fit is refused at once; requests
are searched in the order of their coming, together with those right behind them that want as many passages; a search
that fails, fails its requests only. `run` is woken by `search`, which waits for `run`. Never: HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from envs.retrieval.local import LocalRetriever
from envs.retrieval.protocol import Hit
from tools.retriever_metrics import ServerMetrics

_LOG = logging.getLogger(__name__)
_MEMORY = 0.9  # of the running mean of seconds per query, per batch


class QueueFull(Exception):
    """The queries do not fit now."""

    def __init__(self, queued: int, retry_after_s: int) -> None:
        super().__init__(f"{queued} queries are waiting already; try again in {retry_after_s} s")
        self.retry_after_s = retry_after_s


class SearchFailed(Exception):
    """The index could not be searched."""


@dataclass(slots=True, eq=False)
class _Request:
    queries: Sequence[str]
    k: int
    answer: asyncio.Future[list[list[Hit]] | SearchFailed]


class SearchQueue:
    """Searches of one index, one batch at a time."""

    def __init__(self, index: LocalRetriever, metrics: ServerMetrics, *, max_queued: int, max_batch: int) -> None:
        """`max_queued`: queries that wait or are being searched; `max_batch`: queries of several requests together."""
        self._index = index
        self._metrics = metrics
        self._max_queued = max_queued
        self._max_batch = max_batch
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._query_s = 0.0  # running mean
        self.queued = 0

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """The hits of each query. Raises QueueFull at once, or SearchFailed."""
        if self.queued + len(queries) > self._max_queued:
            self._metrics.rejected += len(queries)
            raise QueueFull(self.queued, max(1, math.ceil(self.queued * self._query_s)))
        request = _Request(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(request)
        self.queued += len(queries)
        self._arrived.set()
        answer = await request.answer
        if isinstance(answer, SearchFailed):
            raise answer
        return answer

    async def run(self) -> None:
        """Search what comes, for ever."""
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if batch:
                await self._search(batch)
            if not self._waiting:
                self._arrived.clear()

    def _next_batch(self) -> list[_Request]:
        """The first request and those behind it with the same k, as many as fit; whose client went away is dropped."""
        batch: list[_Request] = []
        size = 0
        while self._waiting:
            first = self._waiting[0]
            if first.answer.done():
                self._waiting.popleft()
                self.queued -= len(first.queries)
                continue
            if batch and (first.k != batch[0].k or size + len(first.queries) > self._max_batch):
                break
            batch.append(self._waiting.popleft())
            size += len(first.queries)
        return batch

    async def _search(self, batch: list[_Request]) -> None:
        queries = [query for request in batch for query in request.queries]
        start = time.perf_counter()
        try:
            found = await asyncio.to_thread(self._index.search_now, queries, batch[0].k)
        except Exception as error:  # noqa: BLE001 - the boundary of the index: its failures are answered, not fatal
            _LOG.exception("a search of %d queries failed", len(queries))
            self._settle(batch, SearchFailed(f"{type(error).__name__}: {error}"))
            return
        seconds = (time.perf_counter() - start) / len(queries)
        self._query_s = _MEMORY * self._query_s + (1.0 - _MEMORY) * seconds if self._query_s else seconds
        self._metrics.batch_queries.observe(len(queries))
        self._metrics.queries += len(queries)
        self._settle(batch, found)

    def _settle(self, batch: list[_Request], outcome: list[list[Hit]] | SearchFailed) -> None:
        start = 0
        for request in batch:
            end = start + len(request.queries)
            self.queued -= len(request.queries)
            if not request.answer.done():
                request.answer.set_result(outcome if isinstance(outcome, SearchFailed) else outcome[start:end])
            start = end
