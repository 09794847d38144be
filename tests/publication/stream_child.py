"""What tests of the weight stream run in processes of their own, to be killed and stopped.

serve DIRECTORY ADDRESS             a weight server; says its address, then its counters when a line comes in
fetch ADDRESS ENTRY TARGET          one transfer; says "begin", then how far its own memory grew, in bytes
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from tests.publication.stream_kit import notice_at
from trace_async.publication.manifest import FileEntry
from trace_async.publication.stream_client import StreamSource
from trace_async.publication.stream_server import WeightServer


def say(word: object) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def serve(directory: str, address: str) -> None:
    with WeightServer(Path(directory), address=address) as server:
        say(server.address)
        for _ in sys.stdin:
            say(json.dumps(server.counters()))


def fetch(address: str, entry: str, target: str) -> None:
    told = json.loads(Path(entry).read_text())
    told["chunk_digests"] = tuple(told["chunk_digests"])
    source = StreamSource()
    say("begin")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    source.bring(notice_at(address), FileEntry(**told), Path(target))
    say(1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before))
    source.close()


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "serve":
        serve(*words)
    else:
        fetch(*words)
