"""Grows the graph of a world: how many entities of each kind, and who is connected to whom.

Shapes follow real data: few towns, companies and persons are met very often, most hardly ever; countries border
countries that lie near them; capitals lie in their country, main towns in their region. A small share of links leads
to the other side of the split; no question goes that way.
"""

from __future__ import annotations

from collections.abc import Sequence

from envs.multihop_qa.world.graph import SPLITS, Entity, Fact, Graph
from envs.multihop_qa.world.lexicon import ENTITY_KINDS, relations_of
from envs.multihop_qa.world.names import Namer
from envs.multihop_qa.world.options import WorldOptions
from envs.multihop_qa.world.schema import EntityKind, Relation
from envs.multihop_qa.world.stream import Stream

_CROSSING = 0.04
"""Share of links to the other side of the split."""

_STATISTICS = 0.06
"""Share of pages that are statistics, where questions need them."""

_YEARS = (1500, 2000)
_HEIGHTS = (400, 8000)
_POPULATIONS = (1000, 99_999)
_SQUARE = 1 << 20
"""Side of the square that countries lie on."""


def grow(options: WorldOptions) -> Graph:
    """The graph of a world, without its pages."""
    entities = _entities(options)
    return Graph(entities=tuple(entities), facts=_Linker(options, entities).facts())


def present(options: WorldOptions) -> tuple[EntityKind, ...]:
    """Kinds of entities that this world has pages of."""
    return tuple(
        kind
        for kind in ENTITY_KINDS.values()
        if kind.weight and (not kind.kinds or set(kind.kinds) & set(options.kinds))
    )


def _entities(options: WorldOptions) -> list[Entity]:
    """All entities, in random order, so that places of pages tell nothing."""
    plan: list[tuple[str, str]] = []
    for split, pages in zip(SPLITS, (options.pages - options.heldout_pages, options.heldout_pages), strict=True):
        plan += [(kind, split) for kind, number in _numbers(options, pages).items() for _ in range(number)]
    order = Stream(options.seed, "order").shuffled(plan)
    named = _named(options, [key for key in order if key[0] != "statistics"])
    return named + _statistics(named, plan)


def _numbers(options: WorldOptions, pages: int) -> dict[str, int]:
    """How many entities of each kind one side has; persons take what is left."""
    numbers = {kind.name: max(kind.least, pages * kind.weight // 1000) for kind in present(options)}
    if "comparison" in options.kinds:
        numbers["statistics"] = min(int(pages * _STATISTICS), numbers["town"])
    if "range" in numbers:  # every mountain is in one range
        numbers["range"] = max(2, 2 * numbers["mountain"] // (options.branching + 2))
    numbers["person"] = 0
    numbers["person"] = pages - sum(numbers.values())
    return numbers


def _named(options: WorldOptions, order: Sequence[tuple[str, str]]) -> list[Entity]:
    namer = Namer(options.seed, options.name_family)
    stream = Stream(options.seed, "entities")
    last_word: dict[str, str] = {}  # of the newest entity of a kind
    entities = []
    for kind, split in order:
        near = kind in last_word and stream.chance(options.near_names)
        word = namer.near(last_word[kind]) if near else namer.word()
        last_word[kind] = word
        name, alias = word, ""
        if kind == "person":
            name, alias = f"{namer.first_name()} {word}", word if options.alias_rate else ""
        entities.append(Entity(kind, split, name, alias, feminine=stream.chance(0.5)))
    return entities


def _statistics(named: Sequence[Entity], plan: Sequence[tuple[str, str]]) -> list[Entity]:
    """Statistics of the first towns of each side."""
    pages: list[Entity] = []
    for split in SPLITS:
        towns = [place for place, entity in enumerate(named) if (entity.kind, entity.split) == ("town", split)]
        told = towns[: plan.count(("statistics", split))]
        pages += [Entity("statistics", split, f"Statistics of {named[place].name}", about=place) for place in told]
    return pages


class _Linker:
    """Draws the facts of all entities."""

    def __init__(self, options: WorldOptions, entities: Sequence[Entity]) -> None:
        self._options = options
        self._entities = entities
        self._stream = Stream(options.seed, "links")
        self._pools: dict[tuple[str, str], list[int]] = {}
        for place, entity in enumerate(entities):
            self._pools.setdefault((entity.kind, entity.split), []).append(place)
        self._inside = self._parents()

    def facts(self) -> tuple[tuple[Fact, ...], ...]:
        lists = self._lists()
        return tuple((*self._single(place), *lists.get(place, ())) for place in range(len(self._entities)))

    def _pool(self, kind: str, split: str) -> list[int]:
        return self._pools.get((kind, split), [])

    def _parents(self) -> dict[int, int]:
        """The region of each town and the country of each region: both where they lie and what their pages say."""
        parents: dict[int, int] = {}
        for split in SPLITS:
            for child, parent in (("region", "country"), ("town", "region")):
                above = self._pool(parent, split)
                for place in self._pool(child, split):
                    parents[place] = self._stream.pick_skewed(above)
        return parents

    def _single(self, place: int) -> list[Fact]:
        """The facts with one value that the page of an entity tells."""
        entity = self._entities[place]
        possible = [
            relation
            for relation in relations_of(entity.kind)
            if not relation.many and (relation.is_number or self._pool(relation.object, entity.split))
        ]
        listed = [relation for relation in possible if relation.name == "height" and self._pool("range", entity.split)]
        possible = [relation for relation in possible if relation not in listed]
        chosen = self._stream.sample(possible, self._options.facts_per_page) + listed
        facts: list[Fact] = []
        for relation in chosen:
            fact = self._fact(place, relation)
            while fact.objects and any(fact.objects == other.objects for other in facts):
                fact = self._fact(place, relation)  # two facts with one object would hide which of them is read
            facts.append(fact)
        return facts

    def _fact(self, place: int, relation: Relation) -> Fact:
        if relation.is_number:
            return Fact(place, relation.name, number=self._number(relation.name))
        return Fact(place, relation.name, (self._object(place, relation),))

    def _object(self, place: int, relation: Relation) -> int:
        split = self._entities[place].split
        if relation.name in ("region", "country"):
            return self._inside[place]
        if relation.name in ("seat", "capital"):
            within = [town for town in self._pool("town", split) if self._lies_in(town, place)]
            return self._stream.pick(within or self._pool("town", split))
        if self._stream.chance(_CROSSING):
            split = SPLITS[1 - SPLITS.index(split)]
        while True:
            found = self._stream.pick_skewed(self._pool(relation.object, split))
            if found != place:
                return found

    def _lies_in(self, town: int, place: int) -> bool:
        region = self._inside[town]
        return place in (region, self._inside[region])

    def _number(self, relation: str) -> int:
        low, high = {"height": _HEIGHTS, "population": _POPULATIONS}.get(relation, _YEARS)
        return low + self._stream.below(high - low)

    def _lists(self) -> dict[int, tuple[Fact, ...]]:
        lists: dict[int, tuple[Fact, ...]] = {}
        for split in SPLITS:
            for relation, members in (
                ("borders", self._borders(split)),
                ("river_towns", self._river_towns(split)),
                ("peaks", self._peaks(split)),
            ):
                if relation == "borders" and "intersection" not in self._options.kinds:
                    continue
                for place, objects in members.items():
                    lists[place] = (Fact(place, relation, tuple(objects)),)
        return lists

    def _borders(self, split: str) -> dict[int, list[int]]:
        """Countries next to the nearest three; each border stands on the page of one of the two."""
        countries = self._pool("country", split)
        spots = {place: (self._stream.below(_SQUARE), self._stream.below(_SQUARE)) for place in countries}

        def distance(a: int, b: int) -> int:
            return (spots[a][0] - spots[b][0]) ** 2 + (spots[a][1] - spots[b][1]) ** 2

        lists: dict[int, list[int]] = {place: [] for place in countries}
        for a in countries:
            nearest = sorted((b for b in countries if b != a), key=lambda b: (distance(a, b), b))
            for b in nearest[:3]:
                teller, told = (a, b) if self._stream.chance(0.5) else (b, a)
                if b not in lists[a] and a not in lists[b] and len(lists[teller]) < self._options.branching:
                    lists[teller].append(told)
        return {place: objects for place, objects in lists.items() if objects}

    def _river_towns(self, split: str) -> dict[int, list[int]]:
        """Rivers through towns near each other, so that rivers meet."""
        rivers, towns = self._pool("river", split), self._pool("town", split)
        span = max(self._options.branching + 1, min(len(towns), 2 * self._options.branching))
        reach = min(len(towns), max(span, len(rivers) * self._options.branching // 3))
        lists = {}
        for river in rivers:
            start = self._stream.below(max(1, reach - span + 1))
            length = 2 + self._stream.below(self._options.branching - 1)
            lists[river] = self._stream.sample(towns[start : start + span], length)
        return lists

    def _peaks(self, split: str) -> dict[int, list[int]]:
        """Mountain ranges share out the mountains: every third has two, the others up to the longest list."""
        ranges = self._pool("range", split)
        if not ranges:
            return {}
        left = self._stream.shuffled(self._pool("mountain", split))
        lists = {place: [left.pop(), left.pop()] for place in ranges if len(left) >= 2}
        growing = [place for number, place in enumerate(lists) if number % 3]
        for mountain in left:
            open_ranges = [place for place in growing if len(lists[place]) < self._options.branching]
            if open_ranges:
                lists[self._stream.pick(open_ranges)].append(mountain)
        return lists
