from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from envs.options import read_options
from envs.retrieval.bm25 import Bm25Retriever
from envs.retrieval.cache import CachedRetriever
from envs.retrieval.fts5 import Fts5Retriever
from envs.retrieval.http import HttpRetriever
from envs.retrieval.protocol import Passage
from envs.retrieval.registry import RetrieverOptions, make_retriever
from trace_async.errors import ConfigError

PAGES = [Passage("1", "Pau", "a town in France"), Passage("2", "Ulm", "a town in Germany")]


def never() -> Iterable[Passage]:
    raise AssertionError("the corpus is not needed")


def test_bm25_with_a_cache_is_the_default() -> None:
    retriever = make_retriever(RetrieverOptions(), lambda: PAGES)
    assert isinstance(retriever, CachedRetriever)
    assert isinstance(retriever.inner, Bm25Retriever)
    (hits,) = asyncio.run(retriever.search(["Germany"], 3))
    assert [found.passage for found in hits] == [PAGES[1]]


def test_the_cache_can_be_left_out() -> None:
    assert isinstance(make_retriever(RetrieverOptions(kind="fts5", cache_entries=0), lambda: PAGES), Fts5Retriever)


def test_parameters_arrive() -> None:
    retriever = make_retriever(RetrieverOptions(k1=1.2, b=0.75), lambda: PAGES)
    assert retriever.index_id == Bm25Retriever(PAGES, k1=1.2, b=0.75).index_id


def test_a_server_has_a_corpus_of_its_own() -> None:
    url = "http://127.0.0.1:1/retrieve"
    retriever = make_retriever(RetrieverOptions(kind="http", url=url, cache_entries=0), never)
    assert isinstance(retriever, HttpRetriever)
    assert retriever.index_id == f"http:{url}"


def test_a_file_is_read_while_its_corpus_is_the_same_and_written_anew_when_not(tmp_path: Path) -> None:
    path = tmp_path / "index"
    options = RetrieverOptions(kind="fts5", path=str(path), cache_entries=0)
    first = make_retriever(options, lambda: iter(PAGES))
    written = path.stat().st_mtime_ns, path.stat().st_ino
    again = make_retriever(options, lambda: iter(PAGES[::-1]))
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == written
    other = make_retriever(options, lambda: iter(PAGES[:1]))
    assert again.index_id == first.index_id != other.index_id
    assert asyncio.run(other.search(["Ulm"], 3)) == [[]]
    for retriever in (first, again, other):
        asyncio.run(retriever.close())


def test_a_file_that_is_something_else_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "thesis.tex"
    path.write_text("years of work")
    with pytest.raises(ConfigError, match="not an index of passages"):
        make_retriever(RetrieverOptions(kind="fts5", path=str(path)), lambda: PAGES)
    assert path.read_text() == "years of work"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "lucene"}, r"kind: need one of bm25, fts5, http, dense, got 'lucene'"),
        ({"kind": "http"}, r"url: kind 'http' needs an address"),
        ({"kind": "http", "url": "localhost:8000"}, "needs an address http://HOST:PORT/retrieve, got 'localhost:8000'"),
        ({"kind": "dense"}, "needs the folder of an encoder"),
        ({"url": "http://x/retrieve"}, r"url: kind 'bm25' does not read it; it is for http"),
        ({"kind": "fts5", "k1": 1.2}, r"k1: kind 'fts5' does not read it; it is for bm25"),
        ({"path": "x"}, r"path: kind 'bm25' does not read it; it is for fts5, dense"),
        ({"encoder": "x"}, "encoder: kind 'bm25' does not read it"),
        ({"deadline_s": 5.0}, "deadline_s: kind 'bm25' does not read it"),
        ({"cache_entries": -1}, "cache_entries: need >= 0, got -1"),
        ({"kind": "http", "url": "http://x/retrieve", "deadline_s": 0.0}, "deadline_s: need > 0, got 0.0"),
        ({"k1": -1.0}, "need k1 >= 0"),
        ({"b": float("nan")}, "0 <= b <= 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RetrieverOptions(**options)


def test_options_are_read_from_a_table() -> None:
    table = {"kind": "http", "url": "http://x/retrieve", "deadline_s": 5, "cache_entries": 7}
    read = read_options(RetrieverOptions, table, owner="retriever")
    assert read == RetrieverOptions(kind="http", url="http://x/retrieve", deadline_s=5.0, cache_entries=7)
