"""Client of a retrieval server that speaks Search-R1's `POST /retrieve`.

Owns: one connection pool per event loop, closed by `close` or when that loop shuts down. Invariants: searches that wait
at the same time share a request; requests under way, queries in each, attempts and seconds are bounded; whatever goes
wrong is an EnvironmentFailure that names the address and what was said. Never: a task of its own, an index.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
from yarl import URL

from envs.retrieval.batching import Batcher, Refused
from envs.retrieval.local import check_k, query_words
from envs.retrieval.protocol import Hit
from envs.retrieval.wire import read_answer, write_request
from trace_async.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout

MAX_REQUESTS = 8
MAX_QUERIES = 64
ATTEMPTS = 5
FIRST_WAIT_S = (
    0.1  # before the second attempt; doubles, and shrinks by up to a half at random so that clients part ways
)

_BUSY = (429, 502, 503, 504)
_SAID = 200  # characters of an answer that an error repeats


@dataclass(slots=True)
class _Lane:
    """What one event loop has: its batches and its connections."""

    batcher: Batcher
    session: aiohttp.ClientSession
    keeper: AsyncGenerator[None, None]  # closes the session when it ends, at the latest with its loop


class HttpRetriever:
    """A Retriever at `url`, the whole address. Event loops may share it, each with connections of its own.

    `index_id` is the address: the client cannot know what the server searches, so the server must keep its corpus.
    """

    def __init__(self, url: str, *, deadline_s: float = 30.0, first_wait_s: float = 0.1) -> None:
        """`deadline_s`: for one request, its further attempts included. `first_wait_s`: before the second attempt; it
        doubles each time, and shrinks by up to a half at random so that clients part ways.

        ConfigError when `url` is no address.
        """
        try:
            parsed = URL(url)
        except ValueError as error:
            raise ConfigError(f"retriever url {url!r}: {error}") from error
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"retriever url {url!r}: need an address such as http://127.0.0.1:8000/retrieve")
        self._url = parsed
        self._deadline_s = deadline_s
        self._first_wait_s = first_wait_s
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}

    @property
    def index_id(self) -> str:
        return f"http:{self._url}"

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """EnvironmentTimeout when a request misses its deadline, EnvironmentFailure when the server cannot be had."""
        check_k(k)
        asked = [query for query in queries if query_words(query)]
        found: list[list[Hit]] = []
        for start in range(0, len(asked), MAX_QUERIES):
            lane = await self._lane()
            found += await lane.batcher.ask(asked[start : start + MAX_QUERIES], k)
        rest = iter(found)
        return [next(rest) if query_words(query) else [] for query in queries]

    async def close(self) -> None:
        """Close the connections of the running event loop; those of others are closed when these loops shut down."""
        lane = self._lanes.pop(asyncio.get_running_loop(), None)
        if lane is not None:
            await lane.keeper.aclose()

    async def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        if loop not in self._lanes:
            for other in [other for other in self._lanes if other.is_closed()]:
                del self._lanes[other]
            session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_REQUESTS), timeout=aiohttp.ClientTimeout(total=None)
            )
            lane = _Lane(Batcher(self._send, max_calls=MAX_REQUESTS, max_queries=MAX_QUERIES), session, _keep(session))
            self._lanes[loop] = lane
            await anext(lane.keeper)  # a generator that has begun is closed by loop.shutdown_asyncgens
        return self._lanes[loop]

    async def _send(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        """One batch, with further attempts as long as the server is away or busy."""
        session = (await self._lane()).session
        said = "no answer"
        try:
            async with asyncio.timeout(self._deadline_s):
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        async with session.post(self._url, json=write_request(queries, k)) as response:
                            body = await response.read()
                    except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
                        said, wait_s = f"{type(error).__name__} {error}".strip(), 0.0
                    except aiohttp.ClientError as error:
                        raise EnvironmentFailure(f"{self._url}: {type(error).__name__} {error}") from error
                    else:
                        if response.status not in _BUSY:
                            return self._read(response.status, body, num_queries=len(queries), k=k)
                        said, wait_s = f"{response.status} {_excerpt(body)}", _retry_after_s(response)
                    if attempt < ATTEMPTS:
                        backoff_s = self._first_wait_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
                        await asyncio.sleep(max(wait_s, backoff_s))
        except TimeoutError:
            message = f"{self._url}: not answered in {self._deadline_s:g} s ({len(queries)} queries, last said: {said})"
            raise EnvironmentTimeout(message) from None
        raise EnvironmentFailure(f"{self._url}: {ATTEMPTS} attempts failed, the last by {said}")

    def _read(self, status: int, body: bytes, *, num_queries: int, k: int) -> list[list[Hit]]:
        if status != 200:
            raise Refused(f"{self._url}: status {status} for {num_queries} queries: {_excerpt(body)}")
        try:
            answer: Any = json.loads(body)
            return read_answer(answer, num_queries=num_queries, k=k)
        except (ValueError, RecursionError) as error:
            message = f"{self._url}: not an answer of /retrieve ({error}): {_excerpt(body)}"
            raise EnvironmentFailure(message) from error


async def _keep(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    async with session:
        yield


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * _SAID].decode("utf-8", "replace").split())
    return text[:_SAID] or "(nothing)"


def _retry_after_s(response: aiohttp.ClientResponse) -> float:
    """Seconds that the server asks to wait, said as a number or as a date; 0 when it does not say."""
    said = response.headers.get("Retry-After", "")
    try:
        return max(0.0, float(said))
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(said)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
