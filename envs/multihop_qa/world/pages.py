"""Writes the pages of a graph: one an entity, its title the entity's name.

Invariant: a page mentions its subject, the objects of its facts, and nobody else; sentence 0 says what the subject is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from envs.multihop_qa.records import passage_id
from envs.multihop_qa.world.fillers import FILLERS
from envs.multihop_qa.world.graph import Entity, Fact, Graph
from envs.multihop_qa.world.lexicon import ENTITY_KINDS, RELATIONS
from envs.multihop_qa.world.options import WorldOptions
from envs.multihop_qa.world.stream import Stream
from envs.retrieval.protocol import Passage

_LABEL = re.compile(r"the (.+?) (?:of|on|near|that) \{x\}")

_STATISTICS_FILLERS = 2
"""More filler sentences on statistics, which would be the shortest pages, and found first, without."""


class Page(NamedTuple):
    """The page of the entity with the same place."""

    passage: Passage
    sentence_of: dict[str, int]  # number of the sentence that tells a relation
    mentions: frozenset[int]  # entities
    numbers: frozenset[int]


def write_pages(graph: Graph, options: WorldOptions) -> tuple[Page, ...]:
    """One page an entity, in the order of `graph.entities`."""
    stream = Stream(options.seed, "pages")
    return tuple(_page(graph, place, options, stream) for place in range(len(graph.entities)))


def _page(graph: Graph, place: int, options: WorldOptions, stream: Stream) -> Page:
    entity = graph.entities[place]
    tagged = [("", _intro(entity, options, stream))]
    tagged += [(fact.relation, _sentence(graph, fact, options, stream)) for fact in graph.facts[place]]
    fillers = options.filler_sentences + (_STATISTICS_FILLERS if entity.about >= 0 else 0)
    for filler in stream.sample(FILLERS[entity.kind], fillers):
        tagged.insert(1 + stream.below(len(tagged)), ("", filler))
    passage_text = " ".join(sentence for _, sentence in tagged)
    facts = graph.facts[place]
    return Page(
        passage=Passage(passage_id(entity.name, passage_text), entity.name, passage_text),
        sentence_of={relation: number for number, (relation, _) in enumerate(tagged) if relation},
        mentions=frozenset({place, *(one for fact in facts for one in fact.objects)} | ({entity.about} - {-1})),
        numbers=frozenset(fact.number for fact in facts if fact.is_number),
    )


def _intro(entity: Entity, options: WorldOptions, stream: Stream) -> str:
    kind = ENTITY_KINDS[entity.kind]
    if options.style == "card":
        return f"{kind.noun.capitalize()}."
    return _worded(kind.intros, options, stream).format(s=entity.name)


def _sentence(graph: Graph, fact: Fact, options: WorldOptions, stream: Stream) -> str:
    entity = graph.entities[fact.subject]
    subject, inside = _pronouns(entity, plain=options.style == "plain")
    told = (
        str(fact.number) if fact.is_number else listed([_mention(graph, one, options, stream) for one in fact.objects])
    )
    if options.style == "card":
        return f"{card_label(fact.relation).capitalize()}: {told}."
    sentence = _worded(RELATIONS[fact.relation].pages, options, stream).format(s=subject, t=inside, o=told)
    return sentence[0].upper() + sentence[1:]


def card_label(relation: str) -> str:
    """What a card calls a relation: the words with which questions ask for it."""
    words = _LABEL.match(RELATIONS[relation].phrases[0])
    assert words, f"relation {relation} has no label"
    return words[1]


def _pronouns(entity: Entity, *, plain: bool) -> tuple[str, str]:
    """The subject at the start of a sentence and inside one."""
    inside = f"the {ENTITY_KINDS[entity.kind].noun}"
    if entity.about >= 0:  # its name stands in the title alone: whoever looks for the town shall not find this first
        return inside, inside
    if plain:
        return entity.name, entity.name
    pronoun = "It" if entity.kind != "person" else "She" if entity.feminine else "He"
    return pronoun, inside


def _mention(graph: Graph, place: int, options: WorldOptions, stream: Stream) -> str:
    entity = graph.entities[place]
    return entity.alias if entity.alias and stream.chance(options.alias_rate) else entity.name


def listed(names: Sequence[str]) -> str:
    """Names in one sentence."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _worded(wordings: Sequence[str], options: WorldOptions, stream: Stream) -> str:
    """One of the wordings; the plain one unless the paraphrase rate says otherwise."""
    other = stream.chance(options.paraphrase)
    return stream.pick(wordings) if other else wordings[0]
