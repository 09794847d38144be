"""The JSON of Search-R1's `POST /retrieve`, both ways.

Request {"queries": [str], "topk": int or null, "return_scores": bool}; answer {"result": one list per query}, whose
entries are {"document": D, "score": number}, or bare D without scores. A document D has "contents", whose first line is
the title in quotes, or "title" and "text"; and an "id". Pure functions. Never: sockets, retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.multihop_qa.records import passage_id
from envs.retrieval.local import without_surrogates
from envs.retrieval.protocol import Hit, Passage


def write_request(queries: Sequence[str], k: int) -> dict[str, Any]:
    return {"queries": list(queries), "topk": k, "return_scores": True}


def write_answer(found: Sequence[Sequence[Hit]], *, scores: bool) -> dict[str, Any]:
    """Hits of each query, in order."""
    return {"result": [[_write_hit(hit, scores=scores) for hit in hits] for hits in found]}


def _write_hit(hit: Hit, *, scores: bool) -> dict[str, Any]:
    document = write_document(hit.passage)
    return {"document": document, "score": hit.score} if scores else document


def write_document(passage: Passage) -> dict[str, Any]:
    title = " ".join(passage.title.splitlines()).replace('"', '""')
    return {"id": passage.doc_id, "title": passage.title, "contents": f'"{title}"\n{passage.text}'}


def read_answer(answer: Any, *, num_queries: int, k: int) -> list[list[Hit]]:
    """The at most `k` hits of each query. ValueError says what is wrong with the answer.

    Without scores, hits get 1, 1/2, 1/3, ... by rank.
    """
    result = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(result, list):
        raise ValueError('there is no list "result"')
    if len(result) != num_queries:
        raise ValueError(f"{len(result)} results for {num_queries} queries")
    return [_read_hits(entries, k) for entries in result]


def _read_hits(entries: Any, k: int) -> list[Hit]:
    if not isinstance(entries, list):
        raise ValueError(f"a query's result is {type(entries).__name__}, not a list")
    hits = []
    for rank, entry in enumerate(entries[:k]):
        if not isinstance(entry, dict):
            raise ValueError(f"entry {rank} of a result is {type(entry).__name__}, not an object")
        document = entry.get("document", entry)
        score = entry.get("score", 1.0 / (rank + 1)) if "document" in entry else 1.0 / (rank + 1)
        if not isinstance(document, dict):
            raise ValueError(f"document {rank} of a result is {type(document).__name__}, not an object")
        if isinstance(score, bool) or not isinstance(score, int | float):
            raise ValueError(f"score {rank} of a result is {score!r}, not a number")
        try:
            hits.append(Hit(read_document(document), float(score)))
        except OverflowError:
            raise ValueError(f"score {rank} of a result is a number without end") from None
    return hits


def read_document(document: Mapping[str, Any]) -> Passage:
    """A passage; without an "id" it gets the identity of its content; halves of surrogate pairs become U+FFFD, so
    that any tokenizer takes them. ValueError when it has no text."""
    contents, title, text = (document.get(name) for name in ("contents", "title", "text"))
    if isinstance(contents, str):
        first, text = split_contents(contents)
        title = title if isinstance(title, str) else first
    elif not isinstance(text, str):
        raise ValueError(f'a document needs "contents", or "title" and "text"; it has {sorted(document)}')
    title, text = without_surrogates(title if isinstance(title, str) else ""), without_surrogates(text)
    doc_id = document.get("id")
    known = isinstance(doc_id, str | int) and not isinstance(doc_id, bool) and doc_id != ""
    return Passage(without_surrogates(str(doc_id)) if known else passage_id(title, text), title, text)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of FlashRAG's contents; a single line is text without a title."""
    first, newline, rest = contents.partition("\n")
    if not newline:
        return "", contents
    title = first.strip()
    if len(title) > 1 and title[0] == title[-1] == '"':
        title = title[1:-1].replace('""', '"')
    return title, rest
