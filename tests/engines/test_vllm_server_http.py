"""The wire to a vLLM server, where the engine's tests over a stand-in do not reach: a client that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from trace_async.engines.vllm_server_http import VllmHttp

_IDLE_S = 0.05
"""After so long this server closes a connection; vLLM does after 5 s."""


class _Hasty(BaseHTTPRequestHandler):
    """Answers everything with {}."""

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextmanager
def hasty_server() -> Iterator[str]:
    """In a thread of its own: it goes on while the client's event loop stands still."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hasty) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_client_that_stood_still_while_the_server_closed_idle_connections_loses_no_request() -> None:
    async def main(url: str) -> None:
        async with asyncio.timeout(20), VllmHttp(url, max_requests=1) as http:
            for _ in range(3):
                assert await http.generate({}, deadline_s=5.0) == {}
                assert await http.score({}) == {}
                time.sleep(4 * _IDLE_S)  # noqa: ASYNC251 - as a process that gets no CPU

    with hasty_server() as url:
        asyncio.run(main(url))
