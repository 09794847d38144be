"""Which kinds of entities and relations a world is made of. Records only; the words are in `lexicon_*`."""

from __future__ import annotations

from dataclasses import dataclass

NUMBER = "number"
"""Object kind of relations whose value is a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityKind:
    """One kind of entity; each entity has a page."""

    name: str
    noun: str
    weight: int  # entities of this kind in a thousand pages, before persons take the rest
    least: int = 2  # in each split, however small
    intros: tuple[str, ...] = ()  # first sentences of a page; {s} is the name
    kinds: tuple[str, ...] = ()  # needed for these kinds of questions alone; () always there


@dataclass(frozen=True, slots=True, kw_only=True)
class Relation:
    """One kind of fact.

    `pages` know {s} the subject at the start of a sentence (its name, or He, She, It), {t} the same inside a sentence
    (its name, or "the town") and {o} the object. `phrases` know {x}, the noun phrase of the subject. The first wording
    is the plain one. Where templates are split, even places are for training, odd ones for held-out questions.
    """

    name: str  # unique
    subject: str  # name of an entity kind
    object: str  # name of an entity kind, or NUMBER
    pages: tuple[str, ...]  # at least four
    phrases: tuple[str, ...] = ()  # at least two; of list relations: phrases of the whole list
    many: bool = False  # the value is a list
    both: tuple[str, ...] = ()  # lists: noun phrase of the one entity on the lists of {x} and {y}
    how_many: tuple[str, ...] = ()  # lists: questions for the length of the list of {x}, at least six
    most: tuple[str, ...] = ()  # numbers: the greater of {x} and {y}
    least: tuple[str, ...] = ()  # numbers: the smaller of {x} and {y}

    @property
    def is_number(self) -> bool:
        return self.object == NUMBER
