"""Puts queries into words, and knows every word that pages and questions can hold.

The whole picks a question and every node of the query a phrase, but nodes in the middle of a chain, which keep to the
plain one: clauses within clauses are hard to read. Where templates are split, the splits share no question, no phrase
of a chain's two ends, and no phrase of any other node.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from envs.multihop_qa.world.fillers import FILLERS
from envs.multihop_qa.world.graph import SPLITS, Graph
from envs.multihop_qa.world.lexicon import ENTITY_KINDS, RELATIONS
from envs.multihop_qa.world.lexicon_lists import EXTREME_MEMBERS, MEMBERS, MEMBERS_ABOVE
from envs.multihop_qa.world.options import WorldOptions
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
    kind_of,
)
from envs.multihop_qa.world.stream import Stream

PUNCTUATION = ".,?':-"
"""Every character of pages and questions that is no letter, digit or blank is one of these."""

UNKNOWN = ("unknown", "not known", "nobody knows")
"""Answers to a question whose last fact stands nowhere."""

_ENTITY_QUESTIONS = (
    "{who} is {np}?",
    "What is the name of {np}?",
    "Do you know the name of {np}?",
    "Tell me the name of {np}.",
    "Name {np}.",
    "Give the name of {np}.",
)

_NUMBER_QUESTIONS = (
    "What is {np}?",
    "Do you know {np}?",
    "Tell me {np}.",
    "Give {np}.",
    "Find {np}.",
    "I want to know {np}.",
)

_SAME_QUESTIONS = (
    "Is {a} the same as {b}?",
    "Are {a} and {b} the same?",
    "Is it true that {a} is also {b}?",
    "Yes or no: {a} is {b}?",
    "Is {a} also {b}?",
    "Are {a} and {b} one and the same?",
)

_LIST_QUESTION = "What are {np}?"


class Wording:
    """Words for one world; draws from its stream."""

    def __init__(self, graph: Graph, options: WorldOptions, stream: Stream) -> None:
        self._graph = graph
        self._options = options
        self._stream = stream

    def question(self, query: Query, split: str) -> str:
        """One of the questions that ask for the query, within what the split may say."""
        match query:
            case Count(lists, owner, "", _):
                return self._pick(RELATIONS[lists].how_many, split).format(x=self._noun(owner, split, inner=True))
            case Count(lists, owner, relation, limit):
                above = self._pick(MEMBERS_ABOVE[lists, relation], split)
                return above.format(x=self._noun(owner, split, inner=True), n=limit)
            case Same(first, second):
                a, b = self._noun(first, split, inner=True), self._noun(second, split, inner=True)
                return self._pick(_SAME_QUESTIONS, split).format(a=a, b=b)
            case Number() | Missing():
                return self._around(query, self._relation(query.relation, query.subject, split), split)
            case _:
                return self._around(query, self._noun(query, split), split)

    def plain(self, query: Query) -> str:
        """The question for one page, in the first wording."""
        match query:
            case Count(lists, Name(entity), _, _):
                phrase = RELATIONS[lists].phrases[0].format(x=self._graph.entities[entity].name)
                return _LIST_QUESTION.format(np=phrase)
            case Of(relation, Name(entity)) | Number(relation, Name(entity)) | Missing(relation, Name(entity)):
                phrase = RELATIONS[relation].phrases[0].format(x=self._graph.entities[entity].name)
                return _filled(_around_of(query)[0], phrase, RELATIONS[relation].object)
            case _:
                raise ValueError(f"{query} is not answered by one page")

    def _around(self, query: Query, phrase: str, split: str) -> str:
        kind = RELATIONS[query.relation].object if isinstance(query, Number | Missing) else ""
        return _filled(self._pick(_around_of(query), split), phrase, kind or kind_of(self._graph, _as_noun(query)))

    def _noun(self, noun: Noun, split: str, *, inner: bool = False) -> str:
        match noun:
            case Name(entity):
                return self._graph.entities[entity].name
            case Of(relation, subject):
                if inner and not isinstance(subject, Name):
                    return RELATIONS[relation].phrases[0].format(x=self._noun(subject, split, inner=True))
                return self._relation(relation, subject, split)
            case Extreme(relation, most, first, second):
                phrases = RELATIONS[relation].most if most else RELATIONS[relation].least
                return self._pair(phrases, first, second, split)
            case Common(relation, first, second):
                return self._pair(RELATIONS[relation].both, first, second, split)
            case Member(lists, owner, relation, value):
                return self._pair(MEMBERS[lists, relation], owner, Name(value), split)
            case ExtremeMember(lists, owner, relation, most):
                phrase = self._pick(EXTREME_MEMBERS[lists, relation, most], split)
                return phrase.format(x=self._noun(owner, split, inner=True))

    def _pair(self, phrases: Sequence[str], first: Noun, second: Noun, split: str) -> str:
        phrase = self._pick(phrases, split)
        return phrase.format(x=self._noun(first, split, inner=True), y=self._noun(second, split, inner=True))

    def _relation(self, relation: str, subject: Noun, split: str) -> str:
        return self._pick(RELATIONS[relation].phrases, split).format(x=self._noun(subject, split, inner=True))

    def _pick(self, templates: Sequence[str], split: str) -> str:
        if self._options.split_templates:
            templates = templates[SPLITS.index(split) :: 2]
        return self._stream.pick(templates) if self._stream.chance(self._options.paraphrase) else templates[0]


def _as_noun(query: Query) -> Noun:
    assert not isinstance(query, Number | Missing | Count | Same)
    return query


def _around_of(query: Query) -> tuple[str, ...]:
    number = isinstance(query, Number) or (isinstance(query, Missing) and RELATIONS[query.relation].is_number)
    return _NUMBER_QUESTIONS if number else _ENTITY_QUESTIONS


def _filled(template: str, phrase: str, kind: str) -> str:
    return template.format(np=phrase, who="Who" if kind == "person" else "What")


@cache
def vocabulary() -> tuple[str, ...]:
    """Every word of pages and questions but names and numbers, in lower case and alphabetical order."""
    texts = [*_ENTITY_QUESTIONS, *_NUMBER_QUESTIONS, *_SAME_QUESTIONS, _LIST_QUESTION, *UNKNOWN]
    texts += ["Who What", "He She It", "and", "yes no", "Statistics of"]
    for kind in ENTITY_KINDS.values():
        texts += [*kind.intros, f"the {kind.noun}", *FILLERS[kind.name]]
    for relation in RELATIONS.values():
        texts += [*relation.pages, *relation.phrases, *relation.both, *relation.how_many, *relation.most]
        texts += relation.least
    for table in (MEMBERS, EXTREME_MEMBERS, MEMBERS_ABOVE):
        texts += [text for wordings in table.values() for text in wordings]
    found = {word for text in texts for word in re.findall("[a-z]+", re.sub("{[a-z]+}", " ", text).lower())}
    return tuple(sorted(found))
