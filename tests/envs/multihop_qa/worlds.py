"""Small generated worlds, each made once, and what tests ask of them without the generator's own code."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from envs.multihop_qa.records import Question
from envs.multihop_qa.world import World, WorldOptions, make_world

SMALL: dict[str, Any] = {"pages": 320, "questions": 330, "filler_sentences": 1}
TINY: dict[str, Any] = {
    "pages": 300,
    "questions": 400,
    "kinds": ("chain",),
    "hops": (1, 2, 3, 4),
    "filler_sentences": 0,
    "facts_per_page": 2,
}


@cache
def small(**changes: Any) -> World:
    """A world with every kind of question."""
    return make_world(WorldOptions(**{**SMALL, **changes}))


@cache
def tiny(**changes: Any) -> World:
    """A world for tiny policies: chains over very short pages."""
    return make_world(WorldOptions(**{**TINY, **changes}))


def all_questions(world: World) -> list[Question]:
    return [question for split in ("train", "heldout") for question in world.questions[split]]


def holds(text: str, words: str) -> bool:
    """Whether the words stand in the text as a phrase."""
    return re.search(rf"(?<!\w){re.escape(words)}(?!\w)", text) is not None


def names_an_entity(question: Question) -> bool:
    """Whether the answer is a name, and no number, yes, no or unknown."""
    return question.answers[0][0].isupper()
