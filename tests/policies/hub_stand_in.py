"""A model hub for one model, as far as the hub client's snapshot download asks it; on a port of this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "c0ffee" + "0" * 34


@contextmanager
def serving(model: str, folder: Path) -> Iterator[str]:
    """The address at which `folder` is the hub's model `model`."""
    files = {path.name: path.read_bytes() for path in folder.iterdir()}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

        def _answer(self, *, with_body: bool) -> None:
            path = urlsplit(self.path).path
            name = path.rpartition("/")[2]
            if path.startswith(f"/api/models/{model}/revision/"):
                told = {"id": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self._send(json.dumps(told).encode(), "application/json", with_body=with_body)
            elif path.startswith(f"/api/models/{model}/tree/"):
                rows = [
                    {"type": "file", "path": name, "size": len(data), "oid": _etag(data)}
                    for name, data in files.items()
                ]
                self._send(json.dumps(rows).encode(), "application/json", with_body=with_body)
            elif path.startswith(f"/{model}/resolve/") and name in files:
                self._send(files[name], "application/octet-stream", with_body=with_body)
            else:
                self.send_error(404)

        def _send(self, data: bytes, kind: str, *, with_body: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{_etag(data)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if with_body:
                self.wfile.write(data)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, name="hub")
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
