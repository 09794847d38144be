"""Serves a corpus to many clients: Search-R1's retrieval server on one process, without a GPU.

    python -m tools.serve_retriever --corpus FILE ... [--questions FILE ...] [--kind bm25|fts5|dense] [--port 8000]

Corpus files as `envs.multihop_qa.corpora.read_corpus` takes them; `--questions` adds the context paragraphs of
question files (FORMAT:PATH or PATH). Prints the address when it can be asked (port 0: any free one). SIGTERM or SIGINT:
no new connections, what was asked is answered, exit 0. Mistakes of the caller exit 2.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from aiohttp import web

from envs.multihop_qa.corpora import from_questions, merge, read_corpus
from envs.multihop_qa.loading import load_questions, parse_source
from envs.multihop_qa.records import Question
from envs.retrieval.local import LocalRetriever
from envs.retrieval.protocol import Passage
from envs.retrieval.registry import RetrieverOptions, make_retriever
from tools.retriever_app import MAX_BATCH, MAX_QUERIES, MAX_TOPK, make_app
from tools.retriever_metrics import ServerMetrics
from tools.retriever_queue import SearchQueue
from trace_async.errors import ConfigError, UserError

_LOG = logging.getLogger(__name__)
_GRACE_S = 20.0  # for what was asked before the signal


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    try:
        index = make_index(args)
        _LOG.info("%d passages, index %s", index.size, index.index_id)
        asyncio.run(_serve_until_signal(index, args))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def make_index(args: argparse.Namespace) -> LocalRetriever:
    """ConfigError for files that cannot be read, or options that do not go together."""
    if not args.corpus and not args.questions:
        raise ConfigError("there is nothing to serve: name files with --corpus, --questions or both")

    def passages() -> Iterator[Passage]:
        return merge(*map(read_corpus, args.corpus), from_questions(_questions(args.questions)))

    options = RetrieverOptions(kind=args.kind, path=args.path, encoder=args.encoder, cache_entries=0)
    index = make_retriever(options, passages)
    assert isinstance(index, LocalRetriever)
    return index


def _questions(sources: Sequence[str]) -> Iterator[Question]:
    for source in sources:
        format, path = parse_source(source)
        yield from load_questions(path, format=format)


async def serve(
    index: LocalRetriever,
    stop: asyncio.Event,
    *,
    host: str,
    port: int,
    default_topk: int,
    max_queued: int,
    tell: Callable[[str], None],
) -> None:
    """Serve until `stop`; `tell` gets the address. ConfigError when the address cannot be had."""
    metrics = ServerMetrics()
    queue = SearchQueue(index, metrics, max_queued=max_queued, max_batch=MAX_BATCH)
    app = make_app(index, queue, metrics, default_topk=default_topk, max_queries=min(MAX_QUERIES, max_queued))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_GRACE_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} ({error}); name another --host or --port") from error
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        async with asyncio.TaskGroup() as group:
            searching = group.create_task(queue.run())
            tell(f"http://{shown}:{address[1]}/retrieve")
            await stop.wait()
            await runner.cleanup()  # answers what was asked: the queue is still running
            searching.cancel()
    finally:
        await runner.cleanup()
        await index.close()


async def _serve_until_signal(index: LocalRetriever, args: argparse.Namespace) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(
        index,
        stop,
        host=args.host,
        port=args.port,
        default_topk=args.topk,
        max_queued=args.max_queued,
        tell=_print,
    )


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.serve_retriever", description="Search-R1 retrieval server.")
    parser.add_argument("--corpus", nargs="+", type=Path, default=[], metavar="FILE", help="passages")
    parser.add_argument("--questions", nargs="+", default=[], metavar="FILE", help="questions with their paragraphs")
    parser.add_argument("--kind", choices=("bm25", "fts5", "dense"), default="bm25")
    parser.add_argument("--path", default="", help="fts5: file of the index; dense: file of the vectors")
    parser.add_argument("--encoder", default="", help="dense: folder of a transformers encoder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    parser.add_argument("--topk", type=int, default=3, help="passages for requests that do not say")
    parser.add_argument("--max-queued", type=int, default=4 * MAX_QUERIES, help="queries waiting; above: status 503")
    args = parser.parse_args(arguments)
    if not 1 <= args.topk <= MAX_TOPK:
        parser.error(f"--topk: need 1..{MAX_TOPK}, got {args.topk}")
    if args.max_queued < 1:
        parser.error(f"--max-queued: need >= 1, got {args.max_queued}")
    if not 0 <= args.port < 65536:
        parser.error(f"--port: need 0..65535, got {args.port}")
    return args


if __name__ == "__main__":
    sys.exit(main())
