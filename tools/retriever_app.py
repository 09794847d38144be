"""HTTP face of the retrieval server: Search-R1's `POST /retrieve`, `GET /health`, `GET /metrics`.

Errors are JSON {"detail": one sentence}: 400 for what cannot be read, 413 for what is too big, 503 with Retry-After
when the queue is full, 500 when the index fails. The variant with a reranker (topk_retrieval, topk_rerank) is refused.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from aiohttp import web

from envs.retrieval.local import LocalRetriever
from envs.retrieval.wire import write_answer
from tools.retriever_metrics import ServerMetrics
from tools.retriever_queue import QueueFull, SearchFailed, SearchQueue

MAX_BODY_BYTES = 8 * 1024 * 1024
MAX_QUERIES = 1024  # of one request
MAX_TOPK = 1000
MAX_BATCH = 64

_RERANK = ("topk_retrieval", "topk_rerank")


class Wanted(NamedTuple):
    """A request that could be read."""

    queries: list[str]
    k: int
    scores: bool


def read_request(body: bytes, *, default_topk: int, max_queries: int = MAX_QUERIES) -> Wanted:
    """ValueError says in a sentence what is wrong."""
    try:
        data: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"the body must be an object with queries, topk and return_scores, not {_kind(data)}")
    if any(name in data for name in _RERANK):
        raise ValueError(f"this server has no reranker: leave out {' and '.join(_RERANK)}, and send topk")
    queries, topk, scores = data.get("queries"), data.get("topk"), data.get("return_scores", False)
    if not isinstance(queries, list):
        raise ValueError(f"queries must be a list of strings, not {_kind(queries)}")
    if len(queries) > max_queries:
        raise ValueError(f"a request may have at most {max_queries} queries, this one has {len(queries)}")
    for number, query in enumerate(queries):
        if not isinstance(query, str):
            raise ValueError(f"queries[{number}] must be a string, not {_kind(query)}")
    topk = default_topk if topk is None else topk
    if isinstance(topk, bool) or not isinstance(topk, int) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be null or an integer within 1..{MAX_TOPK}, not {json.dumps(topk)[:40]}")
    if not isinstance(scores, bool):
        raise ValueError(f"return_scores must be true or false, not {_kind(scores)}")
    return Wanted(queries, topk, scores)


def make_app(
    index: LocalRetriever, queue: SearchQueue, metrics: ServerMetrics, *, default_topk: int, max_queries: int
) -> web.Application:
    """The application; `queue.run` must be running beside it."""

    async def retrieve(request: web.Request) -> web.Response:
        try:
            wanted = read_request(await request.read(), default_topk=default_topk, max_queries=max_queries)
            found = await queue.search(wanted.queries, wanted.k) if wanted.queries else []
        except ValueError as error:
            return _refuse(400, str(error))
        except web.RequestPayloadError as error:
            response = _refuse(400, f"the body cannot be read: {' '.join(str(error).split())}")
            response.force_close()  # what is left of the body is lost
            return response
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
        except QueueFull as error:
            return _refuse(503, str(error), headers={"Retry-After": str(error.retry_after_s)})
        except SearchFailed as error:
            return _refuse(500, str(error))
        return web.json_response(write_answer(found, scores=wanted.scores))

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "index_id": index.index_id, "passages": index.size})

    async def show_metrics(request: web.Request) -> web.Response:
        text = metrics.render(queued=queue.queued)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app.router.add_post("/retrieve", _timed(retrieve, metrics))
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", show_metrics)
    return app


Handler = Callable[[web.Request], Awaitable[web.Response]]


def _timed(handler: Handler, metrics: ServerMetrics) -> Handler:
    async def timed(request: web.Request) -> web.Response:
        start = time.perf_counter()
        response = await handler(request)
        metrics.request_s.observe(time.perf_counter() - start)
        metrics.requests[response.status] += 1
        return response

    return timed


def _refuse(status: int, sentence: str, *, headers: dict[str, str] | None = None) -> web.Response:
    return web.json_response({"detail": sentence}, status=status, headers=headers)


def _kind(value: Any) -> str:
    """How JSON calls it."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
