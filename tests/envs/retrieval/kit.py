"""Small corpora, a slow BM25, and retrievers that do as they are told."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from hypothesis import strategies as st

from envs.retrieval.protocol import Hit, Passage

WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove")  # each is its own stem, and none a stop word

texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


@st.composite
def corpora(draw: st.DrawFn) -> list[Passage]:
    """1 to 8 passages in any order, at least one with a word."""
    documents = draw(st.lists(st.tuples(texts, texts), min_size=1, max_size=8))
    documents[0] = ("amber", documents[0][1])
    order = draw(st.permutations(range(len(documents))))
    return [Passage(f"d{number}", *documents[number]) for number in order]


def slow_bm25(passages: Sequence[Passage], query: str, *, k1: float, b: float) -> dict[str, float]:
    """Lucene's BM25 by its definition: scores by document id of those above 0, the title counted twice."""
    bags = {doc_id: title.split() * 2 + text.split() for doc_id, title, text in passages}
    average = sum(map(len, bags.values())) / len(bags)
    scores: dict[str, float] = {}
    for doc_id, bag in bags.items():
        score = 0.0
        for word in set(query.split()):
            holders = sum(word in other for other in bags.values())
            count = bag.count(word)
            inverse = math.log(1.0 + (len(bags) - holders + 0.5) / (holders + 0.5))
            score += inverse * count / (count + k1 * (1.0 - b + b * len(bag) / average)) if count else 0.0
        if score > 0.0:
            scores[doc_id] = score
    return scores


def hit(name: str, score: float = 1.0) -> Hit:
    return Hit(Passage(name, name.title(), f"about {name}"), score)


class FakeRetriever:
    """Finds a passage named after the query. Counts what it is asked; waits for `gate` and raises `error` if set."""

    index_id = "fake"

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.closed = 0

    async def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.asked.append(list(queries))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [[hit(f"{query}-{rank}") for rank in range(k)] for query in queries]

    async def close(self) -> None:
        self.closed += 1
