"""Words for mountains, mountain ranges and rivers."""

from __future__ import annotations

from envs.multihop_qa.world.schema import NUMBER, EntityKind, Relation

_LISTS = ("intersection", "superlative", "count")

KINDS = (
    EntityKind(
        name="mountain",
        noun="mountain",
        weight=60,
        least=4,
        intros=("{s} is a mountain.", "{s} is a steep mountain.", "{s} is a peak.", "{s} is a famous peak."),
    ),
    EntityKind(
        name="river",
        noun="river",
        weight=50,
        least=5,
        intros=("{s} is a river.", "{s} is a long river.", "{s} is a slow river.", "{s} is a wide river."),
        kinds=_LISTS,
    ),
    EntityKind(
        name="range",
        noun="mountain range",
        weight=20,
        least=2,
        intros=(
            "{s} is a mountain range.",
            "{s} is an old mountain range.",
            "{s} is the name of a mountain range.",
            "{s} is a long mountain range.",
        ),
        kinds=_LISTS,
    ),
)

RELATIONS = (
    Relation(
        name="mountain_region",
        subject="mountain",
        object="region",
        pages=(
            "The region of {t} is {o}.",
            "{s} stands in the region of {o}.",
            "{s} rises in the region {o}.",
            "{s} lies in the region of {o}.",
        ),
        phrases=("the region of {x}", "the region where {x} stands"),
    ),
    Relation(
        name="climber",
        subject="mountain",
        object="person",
        pages=(
            "The first climber of {t} was {o}.",
            "{s} was first climbed by {o}.",
            "{o} was the first climber of {t}.",
            "{s} had {o} as its first climber.",
        ),
        phrases=("the first climber of {x}", "the person who first climbed {x}"),
    ),
    Relation(
        name="height",
        subject="mountain",
        object=NUMBER,
        pages=(
            "The height of {t} is {o} meters.",
            "{s} is {o} meters high.",
            "{s} has a height of {o} meters.",
            "{s} rises to a height of {o} meters.",
        ),
        phrases=("the height of {x} in meters", "the height in meters of {x}"),
        most=("the higher of {x} and {y}", "the one of {x} and {y} that is higher"),
        least=("the lower of {x} and {y}", "the one of {x} and {y} that is lower"),
    ),
    Relation(
        name="mapper",
        subject="river",
        object="person",
        pages=(
            "The first mapper of {t} was {o}.",
            "{s} was first mapped by {o}.",
            "{o} was the first mapper of {t}.",
            "{s} had {o} as its first mapper.",
        ),
        phrases=("the first mapper of {x}", "the person who first mapped {x}"),
    ),
    Relation(
        name="source",
        subject="river",
        object="mountain",
        pages=(
            "The source of {t} is on {o}.",
            "{s} has its source on {o}.",
            "{s} comes down from {o}.",
            "{o} is the source of {t}.",
        ),
        phrases=("the source of {x}", "the mountain that {x} comes from"),
    ),
)
