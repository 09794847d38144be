"""The client against real servers on real sockets, most of them bad ones."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from aiohttp import web

from envs.retrieval import http
from envs.retrieval.http import HttpRetriever
from envs.retrieval.protocol import Hit
from envs.retrieval.wire import write_answer
from tests.envs.retrieval.kit import hit
from trace_async.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout


def found(queries: Sequence[str], k: int) -> list[list[Hit]]:
    return [[hit(f"{query}-{rank}", 9.0 - rank) for rank in range(k)] for query in queries]


def good(data: dict[str, Any]) -> web.Response:
    return web.json_response(write_answer(found(data["queries"], data["topk"]), scores=data["return_scores"]))


Reply = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]] | web.Response | None


class Server:
    """Answers request number n by the n-th of `replies`, from the last on always by the last; None answers well."""

    def __init__(
        self, *replies: Callable[[dict[str, Any]], Awaitable[web.StreamResponse]] | web.Response | None
    ) -> None:
        self._replies = replies
        self.requests: list[dict[str, Any]] = []
        self.under_way = self.most_under_way = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        data = await request.json()
        self.requests.append(data)
        reply = self._replies[min(len(self.requests), len(self._replies)) - 1] if self._replies else None
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if isinstance(reply, web.Response):
                return web.Response(status=reply.status, body=reply.body, headers=dict(reply.headers))
            return good(data) if reply is None else await reply(data)
        finally:
            self.under_way -= 1


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[Server]:
    app = web.Application()
    app.router.add_post("/retrieve", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}/retrieve"
        yield server
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(server: Server, *, deadline_s: float = 20.0) -> AsyncIterator[HttpRetriever]:
    async with serving(server):
        client = HttpRetriever(server.url, deadline_s=deadline_s, first_wait_s=0.005)
        try:
            yield client
        finally:
            await client.close()


def test_queries_are_answered_in_order() -> None:
    async def story() -> None:
        async with asking(server := Server()) as client:
            assert await client.search(["a", "b"], 2) == found(["a", "b"], 2)
            assert server.requests == [{"queries": ["a", "b"], "topk": 2, "return_scores": True}]

    asyncio.run(story())


def test_queries_without_words_find_nothing_and_are_not_sent() -> None:
    async def story() -> None:
        async with asking(server := Server()) as client:
            assert await client.search(["", "a", "?!"], 1) == [[], found(["a"], 1)[0], []]
            assert await client.search([" "], 1) == [[]]
            assert await client.search([], 1) == []
            assert [request["queries"] for request in server.requests] == [["a"]]

    asyncio.run(story())


def test_searches_at_the_same_time_share_requests_within_bounds() -> None:
    async def slow(data: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.02)
        return good(data)

    async def story() -> None:
        async with asking(server := Server(slow)) as client:
            answers = await asyncio.gather(*(client.search([f"q{number}"], 1 + number % 2) for number in range(1500)))
            assert answers == [found([f"q{number}"], 1 + number % 2) for number in range(1500)]
            sizes = [len(request["queries"]) for request in server.requests]
            assert max(sizes) == http.MAX_QUERIES
            assert len(sizes) < 40
            assert server.most_under_way <= http.MAX_REQUESTS

    asyncio.run(story())


def test_one_search_with_many_queries_is_cut() -> None:
    async def story() -> None:
        async with asking(server := Server()) as client:
            queries = [f"q{number}" for number in range(150)]
            assert await client.search(queries, 1) == found(queries, 1)
            assert [len(request["queries"]) for request in server.requests] == [64, 64, 22]

    asyncio.run(story())


def test_without_scores_documents_are_ranked() -> None:
    async def bare(data: dict[str, Any]) -> web.Response:
        return web.json_response(write_answer(found(data["queries"], data["topk"]), scores=False))

    async def story() -> None:
        async with asking(Server(bare)) as client:
            ((first, second),) = await client.search(["a"], 2)
            assert (first.passage, second.passage) == (hit("a-0").passage, hit("a-1").passage)
            assert first.score > second.score

    asyncio.run(story())


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_busy_server_is_asked_again(status: int) -> None:
    async def story() -> None:
        busy = web.Response(status=status, text="busy")
        async with asking(server := Server(busy, busy, None)) as client:
            assert await client.search(["a"], 1) == found(["a"], 1)
            assert len(server.requests) == 3

    asyncio.run(story())


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_time_that_the_server_asks_for_is_waited(form: str) -> None:
    async def story() -> None:
        until = datetime.now(UTC) + timedelta(seconds=2)
        after = "0.4" if form == "seconds" else format_datetime(until, usegmt=True)
        busy = web.Response(status=503, headers={"Retry-After": after})
        async with asking(Server(busy, None)) as client:
            start = time.monotonic()
            await client.search(["a"], 1)
            assert time.monotonic() - start >= 0.4

    asyncio.run(story())


@pytest.mark.parametrize("after", ["soon", "-5", "nan", "Thu, 01 Jan 1970 00:00:00 GMT", "1 Jan 99999999999 00:00"])
def test_a_strange_retry_after_is_no_time_at_all(after: str) -> None:
    async def story() -> None:
        busy = web.Response(status=503, headers={"Retry-After": after})
        async with asking(Server(busy, None)) as client:
            assert await client.search(["a"], 1) == found(["a"], 1)

    asyncio.run(story())


def test_a_server_that_stays_busy_is_a_failure_with_what_it_said() -> None:
    async def story() -> None:
        async with asking(server := Server(web.Response(status=503, text="come\nback later"))) as client:
            with pytest.raises(EnvironmentFailure, match=r":\d+/retrieve: 5 attempts .* 503 come back later"):
                await client.search(["a"], 1)
            assert len(server.requests) == http.ATTEMPTS

    asyncio.run(story())


def test_a_slow_server_is_a_timeout() -> None:
    async def slow(data: dict[str, Any]) -> web.Response:
        await asyncio.sleep(30)
        raise AssertionError

    async def story() -> None:
        async with asking(Server(slow), deadline_s=0.2) as client:
            with pytest.raises(EnvironmentTimeout, match=r"not answered in 0\.2 s \(1 queries"):
                await client.search(["a"], 1)

    asyncio.run(story())


def test_the_deadline_holds_for_all_attempts_together() -> None:
    async def story() -> None:
        async with asking(Server(web.Response(status=503, headers={"Retry-After": "30"})), deadline_s=0.2) as client:
            with pytest.raises(EnvironmentTimeout, match="last said: 503"):
                await client.search(["a"], 1)

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>hello</html>", "not an answer of /retrieve .* <html>hello</html>"),
        (b"", r"not an answer of /retrieve .*\(nothing\)"),
        (b'{"result": []}', "0 results for 1 queries"),
        (b'{"result": [[{"id": 1}]]}', "a document needs"),
        (b"\xff\xfe", "not an answer"),
        (b"[" * 100_000, "not an answer"),
        (b'{"result": [[{"document": {"text": "x"}, "score": 1%s}]]}' % (b"0" * 400), "score 0 of a result"),
    ],
)
def test_a_wrong_answer_is_a_failure_with_what_was_said(body: bytes, said: str) -> None:
    async def story() -> None:
        async with asking(server := Server(web.Response(body=body))) as client:
            with pytest.raises(EnvironmentFailure, match=said):
                await client.search(["a"], 1)
            assert len(server.requests) == 1

    asyncio.run(story())


def test_a_query_that_the_server_refuses_fails_alone() -> None:
    async def picky(data: dict[str, Any]) -> web.Response:
        return web.json_response({"detail": "no cats"}, status=422) if "cat" in data["queries"] else good(data)

    async def story() -> None:
        async with asking(Server(picky)) as client:
            outcomes = await asyncio.gather(
                *(client.search([query], 1) for query in ("ant", "cat", "bee")), return_exceptions=True
            )
            assert outcomes[::2] == [found(["ant"], 1), found(["bee"], 1)]
            assert isinstance(outcomes[1], EnvironmentFailure)
            assert "status 422 for 1 queries" in str(outcomes[1])
            assert "no cats" in str(outcomes[1])

    asyncio.run(story())


async def raw_server(replies: list[bytes | None]) -> tuple[asyncio.Server, str, list[bytes]]:
    """Reads a request on each connection, writes the next reply (None: the rest of the right answer), and hangs up."""
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length"))[15:])
        body = await reader.readexactly(length)
        seen.append(body)
        reply = replies[min(len(seen), len(replies)) - 1]
        if reply is None:
            data = json.loads(body)
            answer = json.dumps(write_answer(found(data["queries"], data["topk"]), scores=True)).encode()
            reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
        writer.write(reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/retrieve", seen


@pytest.mark.parametrize("broken", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{"], ids=["at once", "midway"])
def test_a_server_that_hangs_up_is_asked_again(broken: bytes) -> None:
    async def story() -> None:
        server, url, seen = await raw_server([broken, broken, None])
        async with server:
            client = HttpRetriever(url, first_wait_s=0.005)
            assert await client.search(["a"], 1) == found(["a"], 1)
            assert len(seen) == 3
            await client.close()

    asyncio.run(story())


def test_a_server_that_does_not_speak_http_is_a_failure() -> None:
    async def story() -> None:
        server, url, _ = await raw_server([b"220 smtp ready\r\n"])
        async with server:
            client = HttpRetriever(url, first_wait_s=0.005)
            with pytest.raises(EnvironmentFailure, match="retrieve: "):
                await client.search(["a"], 1)
            await client.close()

    asyncio.run(story())


def test_nobody_at_the_address_is_a_failure_that_names_it() -> None:
    async def story() -> None:
        server, url, _ = await raw_server([None])
        server.close()
        await server.wait_closed()
        client = HttpRetriever(url, first_wait_s=0.005)
        with pytest.raises(EnvironmentFailure, match=rf"{url}: 5 attempts failed"):
            await client.search(["a"], 1)
        await client.close()

    asyncio.run(story())


def test_who_is_cancelled_leaves_the_others_their_answers() -> None:
    async def slow(data: dict[str, Any]) -> web.Response:
        await asyncio.sleep(0.1)
        return good(data)

    async def story() -> None:
        async with asking(Server(slow)) as client, asyncio.TaskGroup() as group:
            tasks = [group.create_task(client.search([f"q{number}"], 1)) for number in range(6)]
            await asyncio.sleep(0.05)
            tasks[0].cancel()  # the one that sends for all
            tasks[3].cancel()
            for number in (1, 2, 4, 5):
                assert await tasks[number] == found([f"q{number}"], 1)

    asyncio.run(story())


def test_event_loops_one_after_the_other_have_their_own_connections() -> None:
    server_loop = asyncio.new_event_loop()
    server = Server()
    context = serving(server)
    server_loop.run_until_complete(context.__aenter__())
    client = HttpRetriever(server.url)

    async def ask(query: str) -> list[list[Hit]]:
        return await client.search([query], 1)

    async def beside(query: str) -> list[list[Hit]]:
        """Run a loop of its own in a thread while the server's loop runs here."""
        return await asyncio.to_thread(asyncio.run, ask(query))

    for query in ("a", "b"):  # neither loop closes the client: its connections go with the loop
        assert server_loop.run_until_complete(beside(query)) == found([query], 1)
    server_loop.run_until_complete(client.close())
    server_loop.run_until_complete(context.__aexit__(None, None, None))
    server_loop.run_until_complete(server_loop.shutdown_default_executor())
    server_loop.close()


def test_after_closing_it_connects_again() -> None:
    async def story() -> None:
        async with asking(Server()) as client:
            await client.search(["a"], 1)
            await client.close()
            await client.close()
            assert await client.search(["b"], 1) == found(["b"], 1)

    asyncio.run(story())


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://host/retrieve", "http://", "http://host:99999/x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="retriever url"):
        HttpRetriever(url)


def test_the_index_is_known_by_its_address() -> None:
    assert HttpRetriever("http://host:80/retrieve").index_id == HttpRetriever("http://host/retrieve").index_id
    assert HttpRetriever("http://host/retrieve").index_id != HttpRetriever("http://other/retrieve").index_id
