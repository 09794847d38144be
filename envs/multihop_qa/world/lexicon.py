"""Every kind and relation by name, and what follows from them. Data; no randomness."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import envs.multihop_qa.world.lexicon_lists as lists
import envs.multihop_qa.world.lexicon_nature as nature
import envs.multihop_qa.world.lexicon_people as people
import envs.multihop_qa.world.lexicon_places as places
import envs.multihop_qa.world.lexicon_works as works
from envs.multihop_qa.world.schema import EntityKind, Relation

_PARTS = (places, nature, people, works, lists)

ENTITY_KINDS: Mapping[str, EntityKind] = MappingProxyType({kind.name: kind for part in _PARTS for kind in part.KINDS})

RELATIONS: Mapping[str, Relation] = MappingProxyType(
    {relation.name: relation for part in _PARTS for relation in part.RELATIONS}
)


def relations_of(kind: str) -> tuple[Relation, ...]:
    """Relations whose subject is of this kind, in the order of their names."""
    return tuple(RELATIONS[name] for name in sorted(RELATIONS) if RELATIONS[name].subject == kind)
