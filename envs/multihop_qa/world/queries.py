"""What a question asks, as an expression over the triple store, and the two ways to read one.

`evaluate` gives everything that fits, from the whole store; `lookups` gives the path of a reader: which page is opened
for what, in order. A question is kept only when the first has one element and the path leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from envs.multihop_qa.world.graph import Graph
from envs.multihop_qa.world.lexicon import RELATIONS


class Name(NamedTuple):
    """An entity, called by its name."""

    entity: int


class Of(NamedTuple):
    """The object of a relation with one value; a number only at the top of a question."""

    relation: str
    subject: Noun


class Extreme(NamedTuple):
    """The one of two with the greater or smaller number."""

    relation: str
    most: bool
    first: Noun
    second: Noun


class Common(NamedTuple):
    """The one entity on the lists of both."""

    relation: str
    first: Noun
    second: Noun


class Member(NamedTuple):
    """The entity on the list of one that has an object for another relation: borders X and pays in Y."""

    lists: str
    owner: Noun
    relation: str
    value: int


class ExtremeMember(NamedTuple):
    """The entity on a list with the greatest or smallest number."""

    lists: str
    owner: Noun
    relation: str
    most: bool


Noun: TypeAlias = "Name | Of | Extreme | Common | Member | ExtremeMember"


class Number(NamedTuple):
    """The number that a relation gives."""

    relation: str
    subject: Noun


class Count(NamedTuple):
    """Length of a list, of the members above a limit where there is one."""

    lists: str
    owner: Noun
    relation: str = ""
    limit: int = -1


class Same(NamedTuple):
    """Whether two nouns are one entity."""

    first: Noun
    second: Noun


class Missing(NamedTuple):
    """What stands on no page."""

    relation: str
    subject: Noun


Query: TypeAlias = "Noun | Number | Count | Same | Missing"


class Lookup(NamedTuple):
    """One page that is opened: for a relation of its subject."""

    page: int
    relation: str


def page_of(graph: Graph, entity: int, relation: str) -> int | None:
    """The page that tells a relation of an entity: its own, its statistics, or none."""
    for page in (entity, graph.statistics_of.get(entity, -1)):
        if (page, relation) in graph.by_relation:
            return page
    return None


def number_of(graph: Graph, entity: int, relation: str) -> int | None:
    """The number that stands on some page for a relation of an entity."""
    page = page_of(graph, entity, relation)
    return None if page is None else graph.by_relation[page, relation].number


def evaluate(graph: Graph, noun: Noun) -> frozenset[int]:
    """All entities that fit a noun, by the whole store."""
    match noun:
        case Name(entity):
            return frozenset({entity})
        case Of(relation, subject):
            return frozenset(one for s in evaluate(graph, subject) for one in _objects(graph, s, relation))
        case Extreme(relation, most, first, second):
            return _extreme(graph, evaluate(graph, first) | evaluate(graph, second), relation, most=most)
        case Common(relation, first, second):
            return _members(graph, relation, first) & _members(graph, relation, second)
        case Member(lists, owner, relation, value):
            members = _members(graph, lists, owner)
            return frozenset(one for one in members if value in _objects(graph, one, relation))
        case ExtremeMember(lists, owner, relation, most):
            return _extreme(graph, _members(graph, lists, owner), relation, most=most)


def lookups(graph: Graph, query: Query) -> Iterator[tuple[Lookup, Query]]:
    """The path of a reader, and for each page what is asked there, with the answers before filled in."""
    match query:
        case Name():
            return
        case Of(relation, subject) | Number(relation, subject):
            yield from lookups(graph, subject)
            entity = one_of(graph, subject)
            yield _lookup(graph, entity, relation), type(query)(relation, Name(entity))
        case Extreme(relation, _, first, second):
            yield from lookups(graph, first)
            yield from lookups(graph, second)
            for entity in (one_of(graph, first), one_of(graph, second)):
                yield _lookup(graph, entity, relation), Number(relation, Name(entity))
        case Common(relation, first, second):
            for noun in (first, second):
                yield from lookups(graph, noun)
                yield _list_lookup(graph, one_of(graph, noun), relation)
        case Member(lists, owner, relation, _):
            yield from lookups(graph, owner)
            yield _list_lookup(graph, one_of(graph, owner), lists)
            entity = one_of(graph, query)
            yield _lookup(graph, entity, relation), Of(relation, Name(entity))
        case ExtremeMember(lists, owner, relation, _) | Count(lists, owner, relation, _):
            yield from lookups(graph, owner)
            page = one_of(graph, owner)
            yield _list_lookup(graph, page, lists)
            for entity in graph.by_relation[page, lists].objects if relation else ():
                yield _lookup(graph, entity, relation), Number(relation, Name(entity))
        case Missing(relation, subject):
            yield from lookups(graph, subject)
            entity = one_of(graph, subject)
            yield Lookup(entity, relation), Missing(relation, Name(entity))
        case Same(first, second):
            yield from lookups(graph, first)
            yield from lookups(graph, second)


def one_of(graph: Graph, noun: Noun) -> int:
    """The one entity that a noun stands for. ValueError when there is none or are several."""
    found = evaluate(graph, noun)
    if len(found) != 1:
        raise ValueError(f"{noun} stands for {len(found)} entities")
    return next(iter(found))


def names_in(query: Query) -> Iterator[int]:
    """Entities that a question calls by name, from the left of the expression."""
    match query:
        case Name(entity):
            yield entity
        case Of(_, noun) | Number(_, noun) | Missing(_, noun):
            yield from names_in(noun)
        case Count(_, noun, _, _) | ExtremeMember(_, noun, _, _):
            yield from names_in(noun)
        case Member(_, noun, _, value):
            yield from names_in(noun)
            yield value
        case Extreme(_, _, first, second) | Common(_, first, second) | Same(first, second):
            yield from names_in(first)
            yield from names_in(second)


def kind_of(graph: Graph, noun: Noun) -> str:
    """The kind of entity that a noun stands for."""
    match noun:
        case Name(entity):
            return graph.entities[entity].kind
        case Of(relation, _) | Common(relation, _, _):
            return RELATIONS[relation].object
        case Extreme(_, _, first, _):
            return kind_of(graph, first)
        case Member(lists, _, _, _) | ExtremeMember(lists, _, _, _):
            return RELATIONS[lists].object


def _lookup(graph: Graph, entity: int, relation: str) -> Lookup:
    page = page_of(graph, entity, relation)
    if page is None:
        raise ValueError(f"no page tells {relation} of {graph.entities[entity].name}")
    return Lookup(page, relation)


def _list_lookup(graph: Graph, entity: int, relation: str) -> tuple[Lookup, Query]:
    return _lookup(graph, entity, relation), Count(relation, Name(entity))


def _objects(graph: Graph, subject: int, relation: str) -> tuple[int, ...]:
    fact = graph.by_relation.get((subject, relation))
    return fact.objects if fact else ()


def _members(graph: Graph, relation: str, owner: Noun) -> frozenset[int]:
    """Members of a list; neighbours of a country whichever page tells them."""
    owners = evaluate(graph, owner)
    if relation == "borders":
        return frozenset(one for country in owners for one in graph.neighbours.get(country, ()))
    return frozenset(one for subject in owners for one in _objects(graph, subject, relation))


def _extreme(graph: Graph, entities: frozenset[int], relation: str, *, most: bool) -> frozenset[int]:
    """Those with the greatest or smallest number; none when a number is missing."""
    numbers = {one: number_of(graph, one, relation) for one in entities}
    known = [number for number in numbers.values() if number is not None]
    if len(known) < max(2, len(numbers)):
        return frozenset()
    best = max(known) if most else min(known)
    return frozenset(one for one, number in numbers.items() if number == best)
