"""The triple store of a world: entities, facts, and nothing else.

A fact stands on exactly one page, that of its subject; what stands on no page is not true. Neighbourhood of countries
holds both ways but stands on one of the two pages. Each entity is on one side of the split, "train" or "heldout".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from envs.multihop_qa.world.lexicon import RELATIONS

SPLITS = ("train", "heldout")


class Entity(NamedTuple):
    """One entity, known by its place in `Graph.entities`."""

    kind: str
    split: str
    name: str
    alias: str = ""  # short form; "" none
    feminine: bool = False  # persons: she
    about: int = -1  # statistics: whose


class Fact(NamedTuple):
    """One fact: a list or a single entity, or a number."""

    subject: int
    relation: str
    objects: tuple[int, ...] = ()
    number: int = -1

    @property
    def is_number(self) -> bool:
        return not self.objects


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A whole world without words."""

    entities: tuple[Entity, ...]
    facts: tuple[tuple[Fact, ...], ...]  # by subject

    @cached_property
    def by_relation(self) -> Mapping[tuple[int, str], Fact]:
        """A fact by its subject and relation."""
        return {(fact.subject, fact.relation): fact for facts in self.facts for fact in facts}

    @cached_property
    def neighbours(self) -> Mapping[int, frozenset[int]]:
        """Countries that border each country, both ways."""
        pairs = [
            (a, b) for (a, relation), fact in self.by_relation.items() if relation == "borders" for b in fact.objects
        ]
        both = pairs + [(b, a) for a, b in pairs]
        return {a: frozenset(b for first, b in both if first == a) for a, _ in both}

    @cached_property
    def statistics_of(self) -> Mapping[int, int]:
        """The statistics page of an entity."""
        return {entity.about: place for place, entity in enumerate(self.entities) if entity.about >= 0}

    def of_kind(self, kind: str, split: str) -> Sequence[int]:
        """Entities of a kind on one side, in rising order."""
        return self._by_kind.get((kind, split), ())

    def single(self, subject: int) -> list[Fact]:
        """Facts of a page with one value."""
        return [fact for fact in self.facts[subject] if not RELATIONS[fact.relation].many]

    @cached_property
    def _by_kind(self) -> Mapping[tuple[str, str], tuple[int, ...]]:
        groups: dict[tuple[str, str], list[int]] = {}
        for place, entity in enumerate(self.entities):
            groups.setdefault((entity.kind, entity.split), []).append(place)
        return {key: tuple(places) for key, places in groups.items()}
