"""A server that speaks those of vLLM's HTTP endpoints that the engine uses, over a toy model, on a real socket.

Its weights are one number, read from a file; the next token's distribution depends on them and on the last two tokens.
Tokens are made one at a time for everybody under way, as vLLM does; a paused server, kept requests, aborted ones and a
closed connection behave as vLLM's do, where that matters here. `Faults` are what a server can get wrong.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from trace_async.core.types import Canary, FloatArray, IntArray
from trace_async.engines.vllm_common import OWN_SETTINGS

VOCABULARY = 20
MAX_TOKENS = 48

Distribution = np.ndarray[Any, np.dtype[np.float64]]


_SETTINGS = {
    "logprobs_mode": str(OWN_SETTINGS["logprobs_mode"]),
    "generation_config": str(OWN_SETTINGS["generation_config"]),
    "dtype": "torch.float32",
    "max_model_len": str(MAX_TOKENS),
    "logits_processors": "None",
}


@dataclass
class Faults:
    """What this server does wrong; can be changed while it runs."""

    raw_logprobs: bool = False  # log-probabilities before the temperature
    keeps_weights: bool = False  # says that it took new weights over and goes on with the old ones
    half_loads: bool = False  # one worker takes new weights over, the other refuses them
    never_loads: bool = False  # does not answer to a load
    load_s: float = 0.0  # what a load takes; until then nothing else is done
    refuses_load: str = ""  # error text of every load
    no_dev_mode: bool = False
    no_scale_out: bool = False
    no_extension: bool = False
    keeps_cache: bool = False
    silent: frozenset[str] = frozenset()  # paths that are never answered
    settings: dict[str, str] = field(default_factory=dict)  # reported instead of the right ones


@dataclass(eq=False)
class _Running:
    tokens: list[int]
    params: dict[str, Any]
    done: asyncio.Future[str]
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)  # [label, start, end]


class ToyServer:
    """One life of a server process: weights 0 and the label "default" at its start."""

    def __init__(self, faults: Faults, *, step_s: float) -> None:
        self.faults = faults
        self.weights, self.label = 0, "default"
        self.paused = ""  # "", "new" (no new requests) or "all"
        self.running: list[_Running] = []
        self.waiting: list[_Running] = []
        self.log: list[str] = []  # control calls and aborts, in order
        self.salts: list[str] = []
        self.loads: list[dict[str, str]] = []
        self.most_running = 0
        self.scores = asyncio.Event()  # cleared: prompts' log-probabilities are not told
        self.scores.set()
        self._step_s = step_s
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._behave])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_get("/weight_info", self._weight_info)
        for name in ("pause", "resume", "reset_prefix_cache", "update_weight_version", "collective_rpc"):
            app.router.add_post(f"/{name}", getattr(self, f"_{name}"))
        return app

    async def steps(self) -> None:
        """One token for everybody under way, again and again."""
        while True:
            await self._work.wait()
            await asyncio.sleep(self._step_s)
            if self.paused != "all":
                if not self.paused:
                    self.running += self.waiting
                    self.waiting = []
                self.most_running = max(self.most_running, len(self.running))
                for request in list(self.running):
                    self._advance(request)
            self._note()

    def _note(self) -> None:
        idle = not self.running and (self.paused != "" or not self.waiting)
        (self._empty.set if not self.running else self._empty.clear)()
        (self._work.clear if idle or self.paused == "all" else self._work.set)()

    def _advance(self, request: _Running) -> None:
        params, sampled = request.params, request.sampled
        table = log_softmax(logits(self.weights, request.tokens))
        temperature = params["temperature"]
        scaled = log_softmax(table / temperature) if temperature else table
        rng = np.random.default_rng([params.get("seed", 0), len(sampled)])
        token = int(np.argmax(scaled + rng.gumbel(size=VOCABULARY))) if temperature else int(np.argmax(table))
        sampled.append(token)
        request.tokens.append(token)
        reported = table if self.faults.raw_logprobs else scaled
        request.logprobs.append(float(reported[token]))
        request.params.setdefault("tables", []).append(reported)
        if request.spans and request.spans[-1][0] == self.label:
            request.spans[-1][2] = len(sampled)
        else:
            request.spans.append([self.label, len(sampled) - 1, len(sampled)])
        if token in params.get("stop_token_ids", ()):
            self._finish(request, "stop")
        elif len(sampled) >= params["max_tokens"]:
            self._finish(request, "length")

    def _finish(self, request: _Running, reason: str) -> None:
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        if not request.done.done():
            request.done.set_result(reason)

    # -- endpoints

    @web.middleware
    async def _behave(self, request: web.Request, handler: Any) -> web.StreamResponse:
        name = request.path.rpartition("/")[2]
        if request.path in self.faults.silent:
            await asyncio.sleep(3600)
        if self.faults.no_dev_mode and name != "generate":
            return web.json_response({"detail": "Not Found"}, status=404)
        if self.faults.no_scale_out and name == "generate":
            return web.json_response({"error": {"message": "scale-out is disabled"}}, status=403)
        if name not in ("generate", "weight_info", "collective_rpc"):
            self.log.append(f"{name} {request.query['mode']}" if "mode" in request.query else name)
        response: web.StreamResponse = await handler(request)
        return response

    async def _generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        token_ids, params = body["token_ids"], body["sampling_params"]
        if max(token_ids) >= VOCABULARY:
            return web.json_response(
                {"error": {"message": f"Token id {max(token_ids)} is out of vocabulary"}}, status=400
            )
        params.setdefault("temperature", 1.0)
        if params.get("seed") is not None:
            self.salts.append(body.get("cache_salt", ""))
        request = _Running(list(token_ids), params, asyncio.get_running_loop().create_future())
        self.waiting.append(request)
        self._work.set()
        try:
            reason = await request.done
        except asyncio.CancelledError:
            self.log.append(f"abort {body.get('request_id')}")
            self._finish(request, "abort")
            raise
        if "prompt_logprobs" in params:
            await self.scores.wait()
        return web.json_response(self._reply(body, request, reason))

    def _reply(self, body: Any, request: _Running, reason: str) -> dict[str, Any]:
        params = request.params
        content = [
            {"token_id": t, "logprob": p, "top_logprobs": _top(params["tables"][i], params.get("logprobs", 0))}
            for i, (t, p) in enumerate(zip(request.sampled, request.logprobs, strict=True))
        ]
        scores = None
        if "prompt_logprobs" in params:
            scores = [None, *({str(t): {"logprob": float(p)}} for t, p in score(self.weights, body["token_ids"]))]
        spans = [{"version": label, "start": start, "end": end} for label, start, end in request.spans]
        choice = {
            "index": 0,
            "token_ids": request.sampled,
            "finish_reason": reason,
            "logprobs": {"content": content},
            "weight_versions": spans,
        }
        return {"choices": [choice], "prompt_logprobs": scores, "usage": {"prompt_tokens_details": None}}

    async def _weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        self.label = (await http.json())["new_version"]
        return web.json_response({"success": True})

    async def _pause(self, http: web.Request) -> web.Response:
        mode = http.query["mode"]
        self.paused = "all" if mode == "keep" else "new"
        if mode == "abort":
            for request in [*self.running, *self.waiting]:
                self._finish(request, "abort")
        self._note()
        if mode == "wait":
            await self._empty.wait()
        return web.json_response({"status": "paused"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = ""
        self._work.set()
        return web.json_response({"status": "resumed"})

    async def _reset_prefix_cache(self, _: web.Request) -> web.Response:
        return web.json_response({"success": not self.faults.keeps_cache})

    async def _collective_rpc(self, http: web.Request) -> web.Response:
        body = await http.json()
        if self.faults.no_extension:
            return _failed(f"'CPUWorker' object has no attribute '{body['method']}'")
        if body["method"] == "served_settings":
            return web.json_response({"results": [{**_SETTINGS, **self.faults.settings}]})
        self.log.append("load_version")
        self.loads.append(body["kwargs"])
        if self.faults.never_loads:
            await asyncio.sleep(3600)
        await asyncio.sleep(self.faults.load_s)
        if self.faults.refuses_load:
            return _failed(self.faults.refuses_load)
        text = Path(body["kwargs"]["weights"]).read_text(encoding="utf-8")  # noqa: ASYNC240 - a few bytes
        if not text.isdigit():
            return web.json_response({"results": [f"{text!r} is no number"]})
        if not self.faults.keeps_weights:
            self.weights = int(text)
        return web.json_response({"results": ["", "does not fit"] if self.faults.half_loads else [""]})


class ToyHost:
    """A port on which a server can be started, killed and started again."""

    def __init__(self, *, step_s: float) -> None:
        self.port = 0
        self.faults = Faults()
        self.server: ToyServer
        self._step_s = step_s
        self._listener: socket.socket
        self._runner: web.AppRunner | None = None
        self._steps: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """A new life: nothing of an earlier one is left."""
        self.server = ToyServer(replace(self.faults), step_s=self._step_s)
        self._runner = web.AppRunner(self.server.application(), handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self.port = self._listener.getsockname()[1]
        await web.SockSite(self._runner, self._listener).start()
        self._steps = asyncio.create_task(self.server.steps())

    async def kill(self) -> None:
        """Every connection breaks, nobody is told anything."""
        runner, steps, listener = self._runner, self._steps, self._listener
        self._runner = self._steps = None
        if steps is not None:
            steps.cancel()
            with suppress(asyncio.CancelledError):
                await steps
        if runner is not None:
            self.break_connections(runner)
            # A connection that asyncio has just accepted is lost, unclosed, when its listener closes in the same turn.
            asyncio.get_running_loop().remove_reader(listener)
            await asyncio.sleep(0.01)
            self.break_connections(runner)
            await runner.cleanup()

    def break_connections(self, runner: web.AppRunner | None = None) -> None:
        """As a network does; the server lives on."""
        runner = runner or self._runner
        assert runner is not None
        assert runner.server is not None
        for protocol in list(runner.server.connections):
            if protocol.transport is not None:
                protocol.transport.abort()


@asynccontextmanager
async def toy_host(*, step_s: float = 0.002) -> AsyncIterator[ToyHost]:
    """A started server at a free port of loopback."""
    host = ToyHost(step_s=step_s)
    await host.start()
    try:
        yield host
    finally:
        await host.kill()


# -- the model, also for whoever wants to know what is right


def logits(weights: int, tokens: list[int]) -> Distribution:
    """Of the token after `tokens`."""
    return 2.0 * np.random.default_rng([weights, *tokens[-2:]]).normal(size=VOCABULARY)


def log_softmax(table: Distribution) -> Distribution:
    shifted = table - table.max()
    found: Distribution = shifted - np.log(np.exp(shifted).sum())
    return found


def score(weights: int, tokens: list[int]) -> list[tuple[int, float]]:
    """(token, log-probability) of every token but the first."""
    return [(tokens[i], float(log_softmax(logits(weights, tokens[:i]))[tokens[i]])) for i in range(1, len(tokens))]


def logprobs_of(weights: int, prefix: IntArray, sampled: IntArray, *, temperature: float = 1.0) -> FloatArray:
    """Log-probabilities float32 [A] of `sampled` after `prefix`."""
    tokens, start = [*prefix.tolist(), *sampled.tolist()], len(prefix)
    return np.array(
        [log_softmax(logits(weights, tokens[:i]) / temperature)[tokens[i]] for i in range(start, start + len(sampled))],
        np.float32,
    )


def canary_of(weights: int) -> Canary:
    """Two prompts and what these weights say of them."""
    prompts = (np.array([1, 2, 3, 4, 5], np.int32), np.array([7, 7, 8], np.int32))
    scores = tuple(np.array([p for _, p in score(weights, prompt.tolist())], np.float32) for prompt in prompts)
    return Canary(prompts=prompts, logprobs=scores)


def _failed(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=500)


def _top(table: Distribution, count: int) -> list[dict[str, Any]]:
    best = np.argsort(-table)[: max(count, 1)]
    return [{"token_id": int(token), "logprob": float(table[token])} for token in best]
