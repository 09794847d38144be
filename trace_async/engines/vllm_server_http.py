"""The wire to a vLLM server: its HTTP endpoints as functions, with deadlines, and three ways in which a call can fail.

Two sessions: one for requests, with as many connections as requests may be under way, and one for control (pause, new
weights, resume, canary, health), so that control never waits for a connection behind requests. Invariants: every call
has a deadline and a connection of its own; a reply is at most MAX_REPLY_BYTES; closing a connection is how a request is
given up: the server then aborts it. Never: retries, decides what a failure means for versions, or keeps state beside
the sessions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

import aiohttp

from trace_async.core.types import Json
from trace_async.errors import EngineError

CONNECT_DEADLINE_S = 10.0
CONTROL_DEADLINE_S = 60.0
"""For a call that does little; on a busy CPU the server answers between two steps of its engine."""

LOAD_DEADLINE_S = 240.0
"""For reading and taking over a version's weights."""

MAX_REPLY_BYTES = 64 * 1024 * 1024

_CONTROL_CONNECTIONS = 16


class ServerFailure(EngineError):
    """A call to the server came to nothing."""


class ServerGone(ServerFailure):
    """The connection could not be made, or broke."""


class ServerLate(ServerFailure):
    """The server missed the deadline."""


class ServerRefused(ServerFailure):
    """The server answered with an error."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class VllmHttp:
    """One server. An async context manager: calls are possible inside it only."""

    def __init__(self, url: str, *, max_requests: int) -> None:
        self.url = url.rstrip("/")
        self._max_requests = max_requests
        self._requests: aiohttp.ClientSession | None = None
        self._control: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> VllmHttp:
        self._requests = _session(connections=self._max_requests)
        self._control = _session(connections=_CONTROL_CONNECTIONS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sessions, self._requests, self._control = (self._requests, self._control), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    # -- requests

    async def generate(self, body: Json, *, deadline_s: float) -> Json:
        """One request; cancellation and the deadline close the connection, upon which the server aborts the request."""
        return await self._call(self._requests, "POST", "/inference/v1/generate", body=body, deadline_s=deadline_s)

    # -- control

    async def score(self, body: Json) -> Json:
        """As `generate`, on the control session."""
        return await self._ask("POST", "/inference/v1/generate", body=body)

    async def settings(self) -> Json:
        """What `WorkerExtension.served_settings` says; not the server's own /server_info, which runs pip and lscpu."""
        return dict((await self._call_workers("served_settings"))[0])

    async def label(self) -> str:
        """What the server calls its weights; "default" from its start to the first `set_label`."""
        return str((await self._ask("GET", "/weight_info")).get("weight_version"))

    async def set_label(self, label: str) -> None:
        """Every token sampled from now on is said to be of these weights."""
        await self._ask("POST", "/update_weight_version", body={"new_version": label})

    async def pause(self, mode: Literal["abort", "wait", "keep"], *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Sample nothing more: requests in flight are aborted, finished first, or kept; key/values are thrown away."""
        await self._ask("POST", "/pause", query={"mode": mode, "clear_cache": "true"}, deadline_s=deadline_s)

    async def resume(self, *, deadline_s: float = CONTROL_DEADLINE_S) -> None:
        """Sample again; does no harm to a server that is not paused."""
        await self._ask("POST", "/resume", deadline_s=deadline_s)

    async def reset_prefix_cache(self) -> None:
        """Throw away all key/values, also of requests that a pause keeps. Raises ServerRefused when some stay."""
        reply = await self._ask("POST", "/reset_prefix_cache", query={"reset_running_requests": "true"})
        if reply.get("success") is not True:
            raise ServerRefused(f"{self.url} did not throw away its key/values: {dict(reply)}", status=200)

    async def load_version(self, arguments: Mapping[str, str]) -> list[str]:
        """Have each worker call `WorkerExtension.load_version`; what each says: "" = done."""
        return [str(word) for word in await self._call_workers("load_version", arguments, deadline_s=LOAD_DEADLINE_S)]

    async def _call_workers(
        self, method: str, arguments: Mapping[str, str] | None = None, *, deadline_s: float = CONTROL_DEADLINE_S
    ) -> list[Any]:
        """What each worker answers. Raises ServerRefused when one cannot."""
        body = {"method": method, "kwargs": dict(arguments or {}), "timeout": deadline_s}
        results = (await self._ask("POST", "/collective_rpc", body=body, deadline_s=deadline_s)).get("results")
        if not isinstance(results, list) or not results:
            raise ServerRefused(f"{self.url}: no worker answered to {method}", status=200)
        return results

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        deadline_s: float = CONTROL_DEADLINE_S,
    ) -> Json:
        return await self._call(self._control, method, path, body=body, query=query, deadline_s=deadline_s)

    async def _call(
        self,
        session: aiohttp.ClientSession | None,
        method: str,
        path: str,
        *,
        body: Json | None = None,
        query: Mapping[str, str] | None = None,
        deadline_s: float,
    ) -> Json:
        if session is None:
            raise ServerGone(f"{self.url}{path}: the engine is closed")
        limits = aiohttp.ClientTimeout(total=deadline_s, sock_connect=CONNECT_DEADLINE_S)
        try:
            async with session.request(
                method, self.url + path, json=body, params=query, timeout=limits, allow_redirects=False
            ) as reply:
                content = await _read(reply)
        except TimeoutError as error:  # aiohttp's own are TimeoutErrors too
            raise ServerLate(f"{self.url}{path} took longer than {deadline_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ServerGone(f"{self.url}{path}: {type(error).__name__}: {error}") from error
        return _parse(content, where=f"{self.url}{path}", status=reply.status)


def _session(*, connections: int) -> aiohttp.ClientSession:
    # No connection is used twice: vLLM closes one that was idle for 5 s, and what is sent on it then is lost. How long
    # it was idle cannot be told here: a process that waits for a CPU learns of a reply, and of the end, seconds late.
    connector = aiohttp.TCPConnector(limit=connections, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in reply.content.iter_any():
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise aiohttp.ClientPayloadError(f"the reply is longer than {MAX_REPLY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _parse(content: bytes, *, where: str, status: int) -> dict[str, Any]:
    if status != 200:
        raise ServerRefused(f"{where} answered {status}: {_error_text(content)}", status=status)
    if not content:
        return {}
    try:
        found = json.loads(content)
    except ValueError as error:
        raise ServerRefused(f"{where} answered something that is not JSON: {content[:100]!r}", status=status) from error
    if not isinstance(found, dict):
        raise ServerRefused(f"{where} answered JSON that is no object: {content[:100]!r}", status=status)
    return found


def _error_text(content: bytes) -> str:
    """vLLM's errors are {"error": {"message": ...}}, {"error": ...} or {"detail": ...}."""
    try:
        found = json.loads(content)
        error = found.get("error", found.get("detail"))
        return str(error["message"] if isinstance(error, dict) else error)[:2000]
    except (ValueError, AttributeError, KeyError):
        return content[:200].decode(errors="replace")
