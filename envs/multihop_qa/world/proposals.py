"""Draws queries of a wanted kind and number of hops. What comes out is a proposal: `questions` decides on it.

Invariant: every entity of a proposal is on the wanted side of the split. None means that this draw led nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from envs.multihop_qa.world.graph import Fact, Graph
from envs.multihop_qa.world.lexicon import RELATIONS, relations_of
from envs.multihop_qa.world.lexicon_lists import EXTREME_MEMBERS, MEMBERS, MEMBERS_ABOVE
from envs.multihop_qa.world.queries import (
    Common,
    Count,
    Extreme,
    ExtremeMember,
    Member,
    Missing,
    Name,
    Noun,
    Number,
    Of,
    Query,
    Same,
    number_of,
    page_of,
)
from envs.multihop_qa.world.stream import Stream

_STATISTICS = "population"


class Proposals:
    """Draws for one side of one world."""

    def __init__(self, graph: Graph, split: str, stream: Stream) -> None:
        self._graph = graph
        self._split = split
        self._stream = stream
        self._own = [place for place, one in enumerate(graph.entities) if one.split == split and one.about < 0]
        self._backward = self._links()
        self._owners = {name: self._lists(name) for name in ("borders", "river_towns", "peaks")}
        self._numbered = {name: self._with_number(name) for name in sorted(RELATIONS) if RELATIONS[name].most}
        self._ends = [place for place in self._own if place in self._backward]
        self._draws: Mapping[str, Callable[[int], Query | None]] = {
            "chain": self._chain,
            "comparison": self._comparison,
            "intersection": self._intersection,
            "superlative": self._superlative,
            "count": self._count,
            "yes_no": self._yes_no,
        }

    def draw(self, kind: str, hops: int) -> Query | None:
        """A query of this kind that should need so many pages."""
        return self._draws[kind](hops)

    def unanswerable(self, hops: int) -> Query | None:
        """A chain whose last page does not tell what is asked."""
        noun = self._forward(Name(self._stream.pick(self._own)), hops - 1)
        if noun is None:
            return None
        entity = noun[1]
        relations = relations_of(self._graph.entities[entity].kind)
        untold = [one for one in relations if not one.many and page_of(self._graph, entity, one.name) is None]
        return Missing(self._stream.pick(untold).name, noun[0]) if untold else None

    def _links(self) -> Mapping[int, Sequence[Fact]]:
        """Facts with one value by their object."""
        links: dict[int, list[Fact]] = {}
        for place in self._own:
            for fact in self._graph.single(place):
                if not fact.is_number and self._is_own(fact.objects[0]):
                    links.setdefault(fact.objects[0], []).append(fact)
        return links

    def _is_own(self, entity: int) -> bool:
        return self._graph.entities[entity].split == self._split

    def _lists(self, relation: str) -> Sequence[int]:
        return [place for place in self._own if (place, relation) in self._graph.by_relation]

    def _with_number(self, relation: str) -> Sequence[int]:
        return [place for place in self._own if number_of(self._graph, place, relation) is not None]

    def _forward(self, start: Noun, steps: int, entity: int = -1) -> tuple[Noun, int] | None:
        """The noun so many links behind a start, and its entity."""
        if isinstance(start, Name):
            entity = start.entity
        noun = start
        for _ in range(steps):
            facts = [fact for fact in self._graph.single(entity) if not fact.is_number]
            if not facts:
                return None
            fact = self._stream.pick(facts)
            entity, noun = fact.objects[0], Of(fact.relation, noun)
            if not self._is_own(entity):
                return None
        return noun, entity

    def _asked(self, start: Noun, steps: int, entity: int) -> Query | None:
        """A query for the link or number so many links behind a start."""
        before = self._forward(start, steps - 1, entity)
        if before is None:
            return None
        noun, entity = before
        facts = self._graph.single(entity) + self._graph.single(self._graph.statistics_of.get(entity, entity))
        if not facts:
            return None
        fact = self._stream.pick(facts)
        if fact.is_number:
            return Number(fact.relation, noun)
        return Of(fact.relation, noun) if self._is_own(fact.objects[0]) else None

    def _behind(self, entity: int, steps: int) -> Noun | None:
        """A noun that leads to an entity over so many links."""
        relations: list[str] = []
        for _ in range(steps):
            links = self._backward.get(entity)
            if not links:
                return None
            fact = self._stream.pick(links)
            relations.append(fact.relation)
            entity = fact.subject
        noun: Noun = Name(entity)
        for relation in reversed(relations):
            noun = Of(relation, noun)
        return noun

    def _chain(self, hops: int) -> Query | None:
        start = self._stream.pick(self._own)
        return self._asked(Name(start), hops, start)

    def _comparison(self, hops: int) -> Query | None:
        """Two entities, named or one link away, and what is linked to the winner."""
        relation = self._stream.pick([name for name in self._numbered if len(self._numbered[name]) > 1] or [""])
        if not relation:
            return None
        pair = self._stream.sample(self._numbered[relation], 2)
        away = self._stream.below(2) if hops > 3 else 0
        first, second = (self._behind(entity, away) for entity in pair)
        numbers = [number_of(self._graph, entity, relation) or 0 for entity in pair]
        if first is None or second is None or numbers[0] == numbers[1]:
            return None
        most = self._stream.chance(0.5)
        winner = pair[0] if (numbers[0] > numbers[1]) == most else pair[1]
        # the winner's own page is among those compared, unless its number stands on a page of statistics
        steps = hops - 2 - 2 * away + (relation != _STATISTICS)
        return self._asked(Extreme(relation, most, first, second), steps, winner) if steps > 0 else None

    def _intersection(self, hops: int) -> Query | None:
        """What is linked to the one entity on two lists, or on one list with a link of its own."""
        lists = self._stream.pick(("borders", "river_towns"))
        if len(self._owners[lists]) < 2:
            return None
        if self._stream.chance(0.3):
            return self._member(lists, hops)
        first = self._stream.pick(self._owners[lists])
        found = self._stream.pick(self._graph.by_relation[first, lists].objects)
        others = [one for one in self._owners[lists] if one != first]
        sharing = [one for one in others if found in self._graph.by_relation[one, lists].objects]
        if not sharing:
            return None
        return self._asked(Common(lists, Name(first), Name(self._stream.pick(sharing))), hops - 2, found)

    def _member(self, lists: str, hops: int) -> Query | None:
        owner = self._stream.pick(self._owners[lists])
        found = self._stream.pick(self._graph.by_relation[owner, lists].objects)
        facts = [fact for fact in self._graph.single(found) if (lists, fact.relation) in MEMBERS]
        if not facts:
            return None
        fact = self._stream.pick(facts)
        if not self._is_own(fact.objects[0]):
            return None
        return self._asked(Member(lists, Name(owner), fact.relation, fact.objects[0]), hops - 1, found)

    def _superlative(self, hops: int) -> Query | None:
        """What is linked to the first or last of a list by number; the list perhaps one link away."""
        lists, relation, most = self._stream.pick(sorted(EXTREME_MEMBERS))
        if not self._owners[lists]:
            return None
        owner = self._stream.pick(self._owners[lists])
        members = self._graph.by_relation[owner, lists].objects
        numbers = {number_of(self._graph, one, relation) or 0: one for one in members}
        winner = numbers[max(numbers) if most else min(numbers)]
        room = hops - 1 - len(members)  # pages left for a way to the list and on from the winner's page
        if room < 0:
            return None
        away = self._stream.below(2) if room else 0
        noun = self._behind(owner, away)
        if noun is None:
            return None
        return self._asked(ExtremeMember(lists, noun, relation, most), room - away + 1, winner)

    def _count(self, hops: int) -> Query | None:
        """The length of a list some links away, or how many of a list are above a limit."""
        lists = self._stream.pick(("peaks", "river_towns"))
        if not self._owners[lists]:
            return None
        owner = self._stream.pick(self._owners[lists])
        members = self._graph.by_relation[owner, lists].objects
        relation = next((one for name, one in MEMBERS_ABOVE if name == lists), "")
        if not relation or len(members) >= hops or self._stream.chance(0.5):
            noun = self._behind(owner, hops - 1)
            return None if noun is None else Count(lists, noun)
        noun = self._behind(owner, hops - 1 - len(members))
        numbers = sorted(number_of(self._graph, one, relation) or 0 for one in members)
        limit = (numbers[self._stream.below(len(numbers) - 1)] // 100 + 1) * 100
        return None if noun is None or limit >= numbers[-1] else Count(lists, noun, relation, limit)

    def _yes_no(self, hops: int) -> Query | None:
        """Whether two ways lead to one entity; half of them do."""
        if not self._ends:
            return None
        first = self._stream.pick(self._ends)
        kind = self._graph.entities[first].kind
        same = [place for place in self._graph.of_kind(kind, self._split) if place in self._backward]
        second = first if self._stream.chance(0.5) else self._stream.pick(same)
        near = 1 + self._stream.below(hops - 1)
        nouns = self._behind(first, near), self._behind(second, hops - near)
        if nouns[0] is None or nouns[1] is None:
            return None
        return Same(nouns[0], nouns[1])
