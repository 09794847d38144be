"""Whether a proposed query makes a good question: one answer, told by nothing shorter than its path.

Everything is checked on the finished pages: the evaluation over the whole store has one result; the answer does not
stand in the question; no page names both an anchor and the answer; and one search with the question, as SQLite's FTS5
ranks, brings neither the answer nor all pages of the path into its top k (nor a little below, for other engines rank
a little differently). A question of one hop, on the contrary, must find its page, and each page of a path must come
first when its title is searched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from envs.multihop_qa.world.graph import Graph
from envs.multihop_qa.world.index import OneSearch
from envs.multihop_qa.world.pages import Page
from envs.multihop_qa.world.queries import (
    Count,
    Lookup,
    Missing,
    Number,
    Query,
    Same,
    lookups,
    names_in,
    number_of,
    one_of,
)
from envs.multihop_qa.world.wording import UNKNOWN

_MARGIN = 2
"""Passages below the top k that must not answer either."""


class Path(NamedTuple):
    """A query that one answer fits, and how it is read."""

    query: Query
    steps: tuple[tuple[Lookup, Query], ...]
    pages: tuple[int, ...]  # distinct, in order
    anchors: tuple[int, ...]  # entities named in the question
    entity: int = -1  # the answer, where it is an entity
    number: int = -1  # the answer, where it is a number that stands on a page
    text: str = ""  # the answer, where it stands on no page: a count, yes, no, unknown


class Judge:
    """Judges for one world."""

    def __init__(self, graph: Graph, pages: Sequence[Page], check_top_k: int) -> None:
        self._graph = graph
        self._pages = pages
        self._top_k = check_top_k
        self._search = OneSearch([page.passage for page in pages])
        self._naming = _naming(pages)
        self._findable: dict[int, bool] = {}

    def path(self, query: Query, hops: int, split: str) -> Path | None:
        """How the query is read; None where it needs another number of pages, leaves its side, or has no one answer."""
        try:
            steps = tuple(lookups(self._graph, query))
            path = self._answered(query, steps)
        except ValueError:  # a noun of the query stands for none or several
            return None
        entities = {*path.pages, *path.anchors} | ({path.entity} - {-1})
        if len(path.pages) != hops or any(self._graph.entities[one].split != split for one in entities):
            return None
        return path if self._is_straight(path) and self._has_no_shortcut(path) else None

    def accepts(self, path: Path, question: str) -> bool:
        """Whether one search with the question does just what it should, and searches by title find the pages."""
        if not all(map(self._is_findable, path.pages)):
            return False
        found = self._search.top(question, self._top_k + _MARGIN)
        if len(path.pages) == 1:
            return path.pages[0] in found[: self._top_k]
        if path.entity >= 0 and any(path.entity in self._pages[place].mentions for place in found):
            return False
        if path.number >= 0 and any(path.number in self._pages[place].numbers for place in found):
            return False
        if isinstance(path.query, Count) and not path.query.relation and path.pages[-1] in found:
            return False
        return not set(path.pages) <= set(found)

    def _answered(self, query: Query, steps: tuple[tuple[Lookup, Query], ...]) -> Path:
        """ValueError when there is not one answer."""
        pages = tuple(dict.fromkeys(lookup.page for lookup, _ in steps))
        path = Path(query, steps, pages, tuple(names_in(query)))
        match query:
            case Number(relation, subject):
                number = number_of(self._graph, one_of(self._graph, subject), relation)
                assert number is not None
                return path._replace(number=number)
            case Count(lists, owner, relation, limit):
                return path._replace(text=str(self._count(one_of(self._graph, owner), lists, relation, limit)))
            case Same(first, second):
                same = one_of(self._graph, first) == one_of(self._graph, second)
                return path._replace(text="yes" if same else "no")
            case Missing():
                return path._replace(text=UNKNOWN[0])
            case _:
                return path._replace(entity=one_of(self._graph, query))

    def _count(self, owner: int, lists: str, relation: str, limit: int) -> int:
        members = self._graph.by_relation[owner, lists].objects
        if not relation:
            return len(members)
        return sum((number_of(self._graph, one, relation) or 0) > limit for one in members)

    def _is_straight(self, path: Path) -> bool:
        """Whether the path leads to its answer without passing it, and no anchor comes up twice."""
        if len(set(path.anchors)) < len(path.anchors) or path.entity in (*path.pages, *path.anchors):
            return False
        lookups_ = [lookup for lookup, _ in path.steps]
        if len(set(lookups_)) < len(lookups_):
            return False
        if path.entity >= 0:  # the way of a reader leads to what the whole store says
            return self._graph.by_relation[lookups_[-1]].objects == (path.entity,)
        return True

    def _has_no_shortcut(self, path: Path) -> bool:
        """Whether no page names an anchor and tells the answer, for questions of several pages."""
        if len(path.pages) == 1:
            return True
        if path.text:
            return self._pages[path.pages[-1]].mentions.isdisjoint(path.anchors[:1])
        telling = self._naming["entity", path.entity] if path.entity >= 0 else self._naming["number", path.number]
        return all(telling.isdisjoint(self._naming["entity", anchor]) for anchor in path.anchors)

    def _is_findable(self, place: int) -> bool:
        known = self._findable.get(place)
        if known is None:
            found = self._search.top(self._pages[place].passage.title, 1)
            known = self._findable[place] = found == [place]
        return known


def _naming(pages: Sequence[Page]) -> Mapping[tuple[str, int], frozenset[int]]:
    """Pages that name an entity, and pages that hold a number."""
    naming: dict[tuple[str, int], set[int]] = {}
    for place, page in enumerate(pages):
        for entity in page.mentions:
            naming.setdefault(("entity", entity), set()).add(place)
        for number in page.numbers:
            naming.setdefault(("number", number), set()).add(place)
    return {key: frozenset(places) for key, places in naming.items()}
