"""Words for lists and statistics: what intersections, superlatives, counts and comparisons are made of."""

from __future__ import annotations

from envs.multihop_qa.world.schema import NUMBER, EntityKind, Relation

KINDS = (
    EntityKind(
        name="statistics",
        noun="town",
        weight=0,
        least=0,
        intros=("These are the numbers of a town.", "This page counts a town.", "Here are the numbers of a town."),
    ),
)

RELATIONS = (
    Relation(
        name="river_towns",
        subject="river",
        object="town",
        many=True,
        pages=(
            "The towns on {t} are {o}.",
            "{s} flows through {o}.",
            "{s} passes the towns of {o}.",
            "{o} lie on {t}.",
        ),
        phrases=("the towns on {x}", "the towns that {x} flows through"),
        both=("the town on both {x} and {y}", "the town that {x} and {y} flow through"),
        how_many=(
            "How many towns are on {x}?",
            "How many towns does {x} flow through?",
            "What is the number of towns on {x}?",
            "Count the towns on {x}.",
            "Give the number of towns on {x}.",
            "Through how many towns does {x} flow?",
        ),
    ),
    Relation(
        name="peaks",
        subject="range",
        object="mountain",
        many=True,
        pages=(
            "The peaks of {t} are {o}.",
            "{s} has the peaks {o}.",
            "{s} is made up of {o}.",
            "{o} are the peaks of {t}.",
        ),
        phrases=("the peaks of {x}", "the mountains of {x}"),
        how_many=(
            "How many peaks are in {x}?",
            "How many mountains does {x} have?",
            "What is the number of peaks in {x}?",
            "Count the peaks in {x}.",
            "Give the number of peaks in {x}.",
            "How many peaks does {x} have?",
        ),
    ),
    Relation(
        name="population",
        subject="statistics",
        object=NUMBER,
        pages=(
            "The population of {t} is {o}.",
            "{s} has {o} people.",
            "{s} is the home of {o} people.",
            "The number of people in {t} is {o}.",
        ),
        phrases=("the population of {x}", "the number of people in {x}"),
        most=("the larger of {x} and {y}", "the one of {x} and {y} that has more people"),
        least=("the smaller of {x} and {y}", "the one of {x} and {y} that has fewer people"),
    ),
)

MEMBERS = {
    ("borders", "currency"): (
        "the country that borders {x} and pays in {y}",
        "the country next to {x} that uses {y} as its currency",
    ),
    ("borders", "language"): (
        "the country that borders {x} and has {y} as its language",
        "the country next to {x} that uses the language {y}",
    ),
    ("river_towns", "region"): (
        "the town on {x} in the region of {y}",
        "the town that {x} flows through in the region {y}",
    ),
}
"""The entity on the list of {x} whose other relation has the object {y}."""

EXTREME_MEMBERS = {
    ("peaks", "height", True): ("the highest peak of {x}", "the peak of {x} that is the highest"),
    ("peaks", "height", False): ("the lowest peak of {x}", "the peak of {x} that is the lowest"),
}
"""The entity on the list of {x} with the greatest (True) or smallest number."""

MEMBERS_ABOVE = {
    ("peaks", "height"): (
        "How many peaks of {x} are higher than {n} meters?",
        "How many mountains of {x} are above {n} meters?",
        "What is the number of peaks of {x} higher than {n} meters?",
        "Count the peaks of {x} that are higher than {n} meters.",
        "Give the number of peaks of {x} above {n} meters.",
        "Of the peaks of {x}, how many are higher than {n} meters?",
    )
}
"""Questions for how many on the list of {x} have a number greater than {n}."""
