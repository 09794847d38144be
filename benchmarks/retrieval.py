"""Milliseconds and recall of the indices on real paragraphs, and the server under many clients.

    python -m benchmarks.retrieval [--data ../shared/data] [--clients 200] [--requests 5000] [--out FILE] [--json]

The corpus: every context paragraph of 1,364 HotpotQA, 2WikiMultihopQA and MuSiQue questions, and a 2Wiki corpus file.
`plain` is bm25s as its own page shows it (its tokenizer and stop words, a stemmer, its `retrieve`), with the same k1
and b. CPU seconds of one process; the server is timed by the wall clock on the clients' side, on the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import bm25s
import Stemmer

from benchmarks.retrieval_report import tell_recall, tell_server, tell_speed
from envs.multihop_qa.corpora import from_questions, merge, read_corpus
from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.records import Question
from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.fts5 import Fts5Retriever
from envs.retrieval.http import HttpRetriever
from envs.retrieval.protocol import Passage

SETS = {
    "HotpotQA": ("hotpotqa_dev_distractor_200", "hotpotqa_dev_distractor_extra_100", "hotpotqa_train_distractor_100"),
    "2Wiki": ("2wikimultihopqa_dev_164", "2wikimultihopqa_train_500"),
    "MuSiQue": ("musique_ans_dev_200", "musique_ans_train_100"),
}
CORPUS = "2wikimultihopqa_corpus_6119"

Find = Callable[[str, int], list[str]]
"""Document ids of the best passages for a query."""


class Engine(NamedTuple):
    """One way to search."""

    name: str
    index_s: float  # CPU seconds
    find: Find


def file(data: Path, name: str) -> Path:
    return data / f"{name}.jsonl.gz"


def load(data: Path) -> tuple[dict[str, list[Question]], list[Passage]]:
    """Questions by set, and the corpus."""
    questions = {
        name: [question for part in parts for question in load_questions(file(data, part))]
        for name, parts in SETS.items()
    }
    everything = (question for several in questions.values() for question in several)
    return questions, list(merge(from_questions(everything), read_corpus(file(data, CORPUS))))


# ---- engines ---------------------------------------------------------------------------------------------------------


def make_engines(corpus: Sequence[Passage]) -> list[Engine]:
    return [
        _timed("bm25", lambda: _find_by(Bm25Retriever(corpus))),
        _timed("fts5", lambda: _find_by(Fts5Retriever(corpus))),
        _timed("plain", lambda: _find_plain(corpus)),
    ]


def _timed(name: str, make: Callable[[], Find]) -> Engine:
    begin_s = time.process_time()
    find = make()
    return Engine(name, time.process_time() - begin_s, find)


def _find_by(retriever: Bm25Retriever | Fts5Retriever) -> Find:
    return lambda query, k: [hit.passage.doc_id for hit in retriever.search_now([query], k)[0]]


def _find_plain(corpus: Sequence[Passage]) -> Find:
    """Title and text as one string, as the package's page does with its texts."""
    stemmer = Stemmer.Stemmer("english")
    index = bm25s.BM25(k1=0.9, b=0.4)
    texts = [f"{passage.title}\n{passage.text}" for passage in corpus]
    index.index(bm25s.tokenize(texts, stopwords="en", stemmer=stemmer, show_progress=False), show_progress=False)

    def find(query: str, k: int) -> list[str]:
        tokens = bm25s.tokenize([query], stopwords="en", stemmer=stemmer, show_progress=False)
        rows, _ = index.retrieve(tokens, k=k, show_progress=False)
        return [corpus[row].doc_id for row in rows[0]]

    return find


# ---- measures --------------------------------------------------------------------------------------------------------


def measure_speed(engines: Sequence[Engine], queries: Sequence[str]) -> list[dict[str, Any]]:
    """CPU milliseconds of single queries, top 3; the engines take turns at every query."""
    spent: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for query in queries:
        for engine in engines:
            begin_s = time.process_time()
            engine.find(query, 3)
            spent[engine.name].append(1e3 * (time.process_time() - begin_s))
    return [
        {"engine": engine.name, "index_s": engine.index_s, **_quantiles(spent[engine.name], "ms")} for engine in engines
    ]


def measure_recall(engine: Engine, questions: dict[str, list[Question]]) -> Iterator[dict[str, Any]]:
    """The question as the query: mean share of its gold paragraphs among the first k, share of questions with all."""
    for name, several in questions.items():
        row: dict[str, Any] = {"engine": engine.name, "set": name, "questions": len(several)}
        found = [(set(question.gold_ids), engine.find(question.question, 5)) for question in several]
        for k in (3, 5):
            shares = [len(gold & set(ids[:k])) / len(gold) for gold, ids in found]
            row[f"R@{k}"] = statistics.mean(shares)
            row[f"all@{k}"] = statistics.mean(share == 1.0 for share in shares)
        yield row


def measure_oracle(
    engine: Engine, questions: dict[str, list[Question]], titles: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """What knowing what to ask would find in the top 3: MuSiQue's sub-questions, and the titles of the gold pages."""
    hops = [
        [step.doc_id in engine.find(step.question, 3) for step in question.steps] for question in questions["MuSiQue"]
    ]
    yield {"engine": engine.name, "set": "MuSiQue", "query": "sub-question", **_hop_shares(hops)}
    for name, several in questions.items():
        found = [[doc_id in engine.find(titles[doc_id], 3) for doc_id in question.gold_ids] for question in several]
        yield {"engine": engine.name, "set": name, "query": "gold title", **_hop_shares(found)}


def _hop_shares(hops: Sequence[Sequence[bool]]) -> dict[str, float]:
    return {
        "hops_found": statistics.mean(found for question in hops for found in question),
        "all_hops_found": statistics.mean(all(question) for question in hops),
    }


def _quantiles(values: Sequence[float], unit: str) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{q}_{unit}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 95, 99)}


# ---- the server ------------------------------------------------------------------------------------------------------


@contextmanager
def server_process(data: Path) -> Iterator[tuple[str, int]]:
    """A server over the whole corpus; its address and process id."""
    questions = [str(file(data, part)) for parts in SETS.values() for part in parts]
    arguments = ["--port", "0", "--corpus", str(file(data, CORPUS)), "--questions", *questions]
    command = [sys.executable, "-m", "tools.serve_retriever", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def measure_server(url: str, pid: int, queries: Sequence[str], clients: int) -> list[dict[str, Any]]:
    """`raw`: each client has its connection and asks one query after the other. `client`: they share HttpRetriever."""
    begin_s = cpu_s(pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask_raw(query: str) -> bool:
            body = {"queries": [query], "topk": 3, "return_scores": True}
            async with session.post(url, json=body) as response:
                answer = await response.json()
                return response.status == 200 and len(answer["result"][0]) == 3

        raw = await _load("raw", ask_raw, queries, clients)
    middle_s = cpu_s(pid)
    retriever = HttpRetriever(url)

    async def ask_client(query: str) -> bool:
        return len((await retriever.search([query], 3))[0]) == 3

    shared = await _load("client", ask_client, queries, clients)
    await retriever.close()
    per_query = 1e3 / len(queries)
    raw["server_cpu_ms"], shared["server_cpu_ms"] = (
        (middle_s - begin_s) * per_query,
        (cpu_s(pid) - middle_s) * per_query,
    )
    return [raw, shared]


async def _load(name: str, ask: Callable[[str], Any], queries: Sequence[str], clients: int) -> dict[str, Any]:
    """All queries by so many workers; an exception counts as an error."""
    todo = iter(queries)
    spent_ms: list[float] = []
    errors = 0

    async def work() -> None:
        nonlocal errors
        for query in todo:
            begin_s = time.perf_counter()
            try:
                good = await ask(query)
            except Exception:  # noqa: BLE001 - counted
                good = False
            spent_ms.append(1e3 * (time.perf_counter() - begin_s))
            errors += not good

    begin_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(clients)))
    rate = len(queries) / (time.perf_counter() - begin_s)
    counts = {"clients": clients, "requests": len(queries), "errors": errors}
    return {"side": name, **counts, "queries_per_s": rate, **_quantiles(spent_ms, "ms")}


def main() -> None:
    """Parse, measure, tell, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--out", type=Path, default=Path("docs/results/retrieval.json"))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    questions, corpus = load(arguments.data)
    queries = [question.question for several in questions.values() for question in several]
    engines = make_engines(corpus)
    speed = measure_speed(engines, queries)
    tell_speed(speed, num_passages=len(corpus), num_queries=len(queries))
    recall = [row for engine in engines for row in measure_recall(engine, questions)]
    titles = {passage.doc_id: passage.title for passage in corpus}
    oracle = [row for engine in engines for row in measure_oracle(engine, questions, titles)]
    tell_recall(recall, oracle)
    repeated = list(islice((query for _ in range(arguments.requests) for query in queries), arguments.requests))
    with server_process(arguments.data) as (url, pid):
        server = asyncio.run(measure_server(url, pid, repeated, arguments.clients))
    tell_server(server)
    result = {"passages": len(corpus), "speed": speed, "recall": recall, "oracle": oracle, "server": server}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps(result))  # noqa: T201


if __name__ == "__main__":
    main()
