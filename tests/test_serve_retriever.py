"""The retrieval server: its queue in virtual time, its application on real sockets, and the real process."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.http import HttpRetriever
from envs.retrieval.local import LocalRetriever
from envs.retrieval.protocol import Hit, Passage
from tools.retriever_app import MAX_BATCH, MAX_BODY_BYTES, read_request
from tools.retriever_metrics import Histogram, ServerMetrics
from tools.retriever_queue import QueueFull, SearchFailed, SearchQueue
from tools.serve_retriever import main, make_index, serve

REPO = Path(__file__).parent.parent
WORDS = [f"word{number}" for number in range(40)]
PAGES = [Passage(f"p{n:03}", f"Page {n}", f"{WORDS[n % 40]} {WORDS[n * 7 % 40]} lies here") for n in range(120)]


class SlowIndex(LocalRetriever):
    """Searches when it is let; an index that fails on "poison"."""

    def __init__(self) -> None:
        super().__init__(index_id="slow", size=1, inline_limit=0)
        self.may_search = threading.Event()
        self.searching = threading.Event()
        self.batches: list[list[str]] = []

    def search_now(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.batches.append(list(queries))
        self.searching.set()
        assert self.may_search.wait(30)
        if "poison" in queries:
            raise OSError("disk gone")
        return [[Hit(Passage(query, query, "text"), 1.0)] * k for query in queries]


# ---- reading requests, metrics -------------------------------------------------------------------------------------


def test_a_request_is_read_with_search_r1s_defaults() -> None:
    assert read_request(b'{"queries": ["a"]}', default_topk=3) == (["a"], 3, False)
    body = b'{"queries": ["a", ""], "topk": null, "return_scores": true, "more": 1}'
    assert read_request(body, default_topk=5) == (["a", ""], 5, True)


BAD_REQUESTS = (
    (b"", "the body is not JSON"),
    (b"\xff", "the body is not JSON"),
    (b"[" * 100_000, "the body is not JSON"),
    (b"[]", "the body must be an object with queries, topk and return_scores, not a list"),
    (b"{}", "queries must be a list of strings, not null"),
    (b'{"queries": "x"}', "queries must be a list of strings, not a string"),
    (b'{"queries": ["a", 1]}', r"queries\[1\] must be a string, not a number"),
    (b'{"queries": ["a"], "topk": 0}', r"topk must be null or an integer within 1\.\.1000, not 0"),
    (b'{"queries": ["a"], "topk": 1001}', "not 1001"),
    (b'{"queries": ["a"], "topk": "3"}', 'not "3"'),
    (b'{"queries": ["a"], "topk": 2.5}', "not 2.5"),
    (b'{"queries": ["a"], "topk": true}', "not true"),
    (b'{"queries": ["a"], "return_scores": 1}', "return_scores must be true or false, not a number"),
    (b'{"queries": ["a"], "topk_retrieval": 10, "topk_rerank": 3}', "this server has no reranker"),
    (json.dumps({"queries": ["a"] * 1025}).encode(), "at most 1024 queries, this one has 1025"),
)


@pytest.mark.parametrize(("body", "said"), BAD_REQUESTS, ids=[said for _, said in BAD_REQUESTS])
def test_a_bad_request_is_told_what_is_wrong(body: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_request(body, default_topk=3)


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert list(histogram.lines("h")) == [
        'h_bucket{le="1.0"} 2',
        'h_bucket{le="2.0"} 4',
        'h_bucket{le="+Inf"} 5',
        "h_sum 8.0",
        "h_count 5",
    ]


def test_metrics_are_prometheus_text() -> None:
    metrics = ServerMetrics()
    metrics.requests[200] += 2
    line = re.compile(r'(# (HELP|TYPE) trace_retriever_\w+ .+)|(trace_retriever_\w+(\{\w+="[^"]+"\})? [0-9.e+-]+)')
    text = metrics.render(queued=7)
    assert all(line.fullmatch(one) for one in text.splitlines())
    assert 'trace_retriever_requests_total{code="200"} 2\n' in text
    assert "trace_retriever_queue_queries 7\n" in text


# ---- the queue -----------------------------------------------------------------------------------------------------


def make_queue(index: LocalRetriever, *, max_queued: int = 100, max_batch: int = 4) -> SearchQueue:
    return SearchQueue(index, ServerMetrics(), max_queued=max_queued, max_batch=max_batch)


async def wait_until_searching(index: SlowIndex) -> None:
    assert await asyncio.to_thread(index.searching.wait, 30)


def test_requests_that_wait_are_searched_together_in_their_order() -> None:
    async def story() -> None:
        index = SlowIndex()
        queue = make_queue(index)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(queue.run())
            first = group.create_task(queue.search(["first"], 1))
            await wait_until_searching(index)
            sizes = (2, 1, 1, 3, 1)
            rest = [group.create_task(queue.search([f"q{n}"] * size, 1)) for n, size in enumerate(sizes)]
            other_k = group.create_task(queue.search(["k"], 2))
            await asyncio.sleep(0)
            assert queue.queued == 10
            index.may_search.set()
            answers = await asyncio.gather(first, *rest, other_k)
            running.cancel()
        assert [[hits[0].passage.title for hits in answer] for answer in answers] == [
            ["first"],
            *([f"q{n}"] * size for n, size in enumerate(sizes)),
            ["k"],
        ]
        assert index.batches == [["first"], ["q0", "q0", "q1", "q2"], ["q3", "q3", "q3", "q4"], ["k"]]
        assert queue.queued == 0

    asyncio.run(story())


def test_what_does_not_fit_is_refused_at_once_and_a_place_comes_free() -> None:
    async def story() -> None:
        index = SlowIndex()
        queue = make_queue(index, max_queued=3)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(queue.run())
            tasks = [group.create_task(queue.search([name], 1)) for name in "abc"]
            await wait_until_searching(index)
            with pytest.raises(QueueFull, match="3 queries are waiting already") as refused:
                await queue.search(["d"], 1)
            assert refused.value.retry_after_s >= 1
            index.may_search.set()
            await asyncio.gather(*tasks)
            await queue.search(["d", "e", "f"], 1)
            running.cancel()

    asyncio.run(story())


def test_a_search_that_fails_fails_its_requests_only() -> None:
    async def story() -> None:
        index = SlowIndex()
        index.may_search.set()
        queue = make_queue(index)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(queue.run())
            with pytest.raises(SearchFailed, match="OSError: disk gone"):
                await queue.search(["poison"], 1)
            assert len(await queue.search(["fine"], 1)) == 1
            assert queue.queued == 0
            running.cancel()

    asyncio.run(story())


def test_a_request_whose_client_left_is_not_searched() -> None:
    async def story() -> None:
        index = SlowIndex()
        queue = make_queue(index)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(queue.run())
            first = group.create_task(queue.search(["first"], 1))
            await wait_until_searching(index)
            left = group.create_task(queue.search(["left"], 1))
            stays = group.create_task(queue.search(["stays"], 1))
            await asyncio.sleep(0)
            left.cancel()
            index.may_search.set()
            await asyncio.gather(first, stays)
            running.cancel()
        assert index.batches == [["first"], ["stays"]]
        assert queue.queued == 0

    asyncio.run(story())


# ---- the application -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def serving(index: LocalRetriever, *, max_queued: int = 1000) -> AsyncIterator[str]:
    """The address of /retrieve."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with asyncio.TaskGroup() as group:
        group.create_task(
            serve(
                index,
                stop,
                host="127.0.0.1",
                port=0,
                default_topk=3,
                max_queued=max_queued,
                tell=address.set_result,
            )
        )
        yield await address
        stop.set()


class Reply(NamedTuple):
    status: int
    data: Any
    headers: Any


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> Reply:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with session.post(url, data=io.BytesIO(data)) as response:
        return Reply(response.status, json.loads(await response.read()), response.headers)


def test_the_protocol_is_search_r1s() -> None:
    async def story() -> None:
        index = Bm25Retriever(PAGES)
        async with serving(index) as url, aiohttp.ClientSession() as session:
            query = {"queries": ["word3", "nothing"], "topk": 2}
            status, scored, _ = await post(session, url, {**query, "return_scores": True})
            (first, second) = index.search_now(["word3"], 2)[0]
            assert status == 200
            assert [sorted(entry) for entry in scored["result"][0]] == [["document", "score"]] * 2
            assert [entry["score"] for entry in scored["result"][0]] == [first.score, second.score]
            page = first.passage
            document = {"id": page.doc_id, "title": page.title, "contents": f'"{page.title}"\n{page.text}'}
            assert scored["result"][0][0]["document"] == document
            assert scored["result"][1] == []
            _, bare, _ = await post(session, url, query)
            assert bare["result"] == [[entry["document"] for entry in hits] for hits in scored["result"]]
            _, default, _ = await post(session, url, {"queries": ["word3"], "topk": None})
            assert len(default["result"][0]) == 3
            assert (await post(session, url, {"queries": []})).data == {"result": []}

    asyncio.run(story())


def test_our_client_gets_what_the_index_finds() -> None:
    async def story() -> None:
        index = Bm25Retriever(PAGES)
        async with serving(index) as url:
            client = HttpRetriever(url)
            assert await client.search([*WORDS, ""], 4) == index.search_now([*WORDS, ""], 4)
            await client.close()

    asyncio.run(story())


def test_bad_requests_get_400_and_a_sentence_and_are_counted() -> None:
    async def story() -> None:
        async with serving(Bm25Retriever(PAGES), max_queued=5000) as url, aiohttp.ClientSession() as session:
            for body, said in BAD_REQUESTS:
                status, data, _ = await post(session, url, body)
                assert (status, list(data)) == (400, ["detail"])
                assert re.search(said, data["detail"])
            async with session.get(url) as response:
                assert response.status == 405
            async with session.get(url.replace("retrieve", "metrics")) as response:
                text = await response.text()
            assert f'trace_retriever_requests_total{{code="400"}} {len(BAD_REQUESTS)}\n' in text

    asyncio.run(story())


def test_a_body_that_is_not_packed_as_it_says_gets_400() -> None:
    async def story() -> None:
        async with serving(Bm25Retriever(PAGES)) as url, aiohttp.ClientSession() as session:
            packed = {"Content-Encoding": "gzip"}
            async with session.post(url, data=b'{"queries": ["word1"]}', headers=packed) as response:
                assert response.status == 400
                assert (await response.json())["detail"].startswith("the body cannot be read: ")
            assert (await post(session, url, {"queries": ["word1"]})).status == 200

    asyncio.run(story())


def test_a_body_that_is_too_big_gets_413() -> None:
    async def story() -> None:
        async with serving(Bm25Retriever(PAGES)) as url, aiohttp.ClientSession() as session:
            status, data, _ = await post(session, url, b" " * (MAX_BODY_BYTES + 1))
            assert (status, data) == (413, {"detail": f"a request may have at most {MAX_BODY_BYTES} bytes"})
            assert (await post(session, url, {"queries": ["word1"]})).status == 200

    asyncio.run(story())


def test_an_overloaded_server_says_503_and_when_to_come_back() -> None:
    async def story() -> None:
        index = SlowIndex()
        async with serving(index, max_queued=4) as url, aiohttp.ClientSession() as session:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(post(session, url, {"queries": ["a", "b"]})) for _ in range(6)]
                done, _ = await asyncio.wait(tasks[:], return_when=asyncio.FIRST_COMPLETED)
                while len(done) < 4:
                    done, _ = await asyncio.wait(tasks, timeout=0.01)
                refused = [task.result() for task in done]
                assert [reply.status for reply in refused] == [503] * 4
                assert all(int(reply.headers["Retry-After"]) >= 1 for reply in refused)
                assert "4 queries are waiting already" in refused[0].data["detail"]
                async with session.get(url.replace("retrieve", "metrics")) as response:
                    text = await response.text()
                index.may_search.set()
            assert sorted(task.result().status for task in tasks) == [200, 200, 503, 503, 503, 503]
            assert "trace_retriever_rejected_queries_total 8\n" in text
            assert "trace_retriever_queue_queries 4\n" in text

    asyncio.run(story())


def test_our_client_gets_through_to_an_overloaded_server() -> None:
    async def story() -> None:
        index = Bm25Retriever(PAGES)
        async with serving(index, max_queued=MAX_BATCH) as url:
            clients = [HttpRetriever(url) for _ in range(4)]
            queries = [WORDS[n % 40] for n in range(MAX_BATCH)]
            expected = index.search_now(queries, 3)
            found = await asyncio.gather(*(client.search(queries, 3) for client in clients))
            assert found == [expected] * 4
            for client in clients:
                await client.close()

    asyncio.run(story())


def test_an_index_that_fails_is_a_500_with_what_happened() -> None:
    async def story() -> None:
        index = SlowIndex()
        index.may_search.set()
        async with serving(index) as url, aiohttp.ClientSession() as session:
            status, data, _ = await post(session, url, {"queries": ["poison"]})
            assert (status, data) == (500, {"detail": "OSError: disk gone"})
            assert (await post(session, url, {"queries": ["fine"]})).status == 200

    asyncio.run(story())


# ---- the process ---------------------------------------------------------------------------------------------------


def write_corpus(folder: Path) -> Path:
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": p.doc_id, "title": p.title, "text": p.text}) + "\n" for p in PAGES))
    return path


def test_the_paragraphs_of_questions_are_served_beside_the_corpus(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    question = {
        "_id": "q1",
        "question": "Where is Pau?",
        "answer": "France",
        "type": "bridge",
        "level": "easy",
        "supporting_facts": [["Pau", 0]],
        "context": [["Pau", ["Pau is in France."]], ["Ulm", ["Ulm is in Germany."]]],
    }
    path.write_text(json.dumps(question) + "\n")
    files = {"corpus": [write_corpus(tmp_path)], "questions": [f"hotpotqa:{path}"]}
    index = make_index(argparse.Namespace(**files, kind="bm25", path="", encoder=""))
    assert index.size == len(PAGES) + 2
    assert index.search_now(["Germany"], 1)[0][0].passage.title == "Ulm"


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The server's process and its address."""
    command = [sys.executable, "-m", "tools.serve_retriever", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server, server.stdout.readline().strip()
        finally:
            server.kill()


def test_two_hundred_clients_are_served_and_a_signal_ends_it_in_order(tmp_path: Path) -> None:
    index = Bm25Retriever(PAGES)
    expected = dict(zip(WORDS, index.search_now(WORDS, 2), strict=True))

    async def client(url: str, number: int, session: aiohttp.ClientSession) -> int:
        for step in range(5):
            word = WORDS[(number + 7 * step) % 40]
            status, data, _ = await post(session, url, {"queries": [word], "topk": 2, "return_scores": True})
            assert status == 200
            assert [entry["document"]["id"] for entry in data["result"][0]] == [
                found.passage.doc_id for found in expected[word]
            ]
        return 5

    async def story(url: str) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            served = await asyncio.gather(*(client(url, number, session) for number in range(200)))
            assert sum(served) == 1000
            async with session.get(url.replace("retrieve", "health")) as response:
                health = await response.json()
            assert health == {"status": "ok", "index_id": index.index_id, "passages": len(PAGES)}
            async with session.get(url.replace("retrieve", "metrics")) as response:
                assert 'requests_total{code="200"} 1000\n' in await response.text()

    with process("--corpus", str(write_corpus(tmp_path))) as (server, url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/retrieve", url)
        asyncio.run(story(url))
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None
        assert "Traceback" not in server.stderr.read()


def test_what_was_asked_before_the_signal_is_answered(tmp_path: Path) -> None:
    queries = [" ".join(WORDS[n % 40 :]) for n in range(1000)]

    async def story(server: subprocess.Popen[str], url: str) -> Reply:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            asked = group.create_task(post(session, url, {"queries": queries}))
            queued = "trace_retriever_queue_queries 1000\n"
            while not asked.done():
                async with session.get(url.replace("retrieve", "metrics")) as response:
                    if queued in await response.text():
                        break
            server.send_signal(signal.SIGTERM)
            return await asked

    with process("--corpus", str(write_corpus(tmp_path)), "--kind", "fts5") as (server, url):
        reply = asyncio.run(story(server, url))
        assert reply.status == 200
        assert len(reply.data["result"]) == 1000
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "there is nothing to serve: name files with --corpus, --questions or both"),
        (("--corpus", "/nothing/here.jsonl"), "/nothing/here.jsonl"),
        (("--questions", "klingon:x.jsonl"), "'klingon' is no format of questions"),
        (("--encoder", "x", "--corpus", "x"), "encoder: kind 'bm25' does not read it"),
    ],
)
def test_mistakes_of_the_caller_exit_2_with_a_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--topk", "0"), "--topk: need 1..1000, got 0"),
        (("--max-queued", "0"), "--max-queued: need >= 1, got 0"),
        (("--port", "65536"), "--port: need 0..65535, got 65536"),
        (("--kind", "http"), "invalid choice: 'http'"),
    ],
)
def test_arguments_that_make_no_sense_exit_2_with_a_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["--corpus", str(write_corpus(tmp_path)), "--port", port]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
