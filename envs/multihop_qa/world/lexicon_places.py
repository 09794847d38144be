"""Words for countries, regions, towns and airports."""

from __future__ import annotations

from envs.multihop_qa.world.schema import NUMBER, EntityKind, Relation

KINDS = (
    EntityKind(
        name="country",
        noun="country",
        weight=14,
        least=4,
        intros=("{s} is a country.", "{s} is a small country.", "{s} is a large country.", "{s} is an old country."),
    ),
    EntityKind(
        name="region",
        noun="region",
        weight=45,
        least=4,
        intros=("{s} is a region.", "{s} is a quiet region.", "{s} is a green region.", "{s} is a wide region."),
    ),
    EntityKind(
        name="town",
        noun="town",
        weight=180,
        least=8,
        intros=("{s} is a town.", "{s} is a small town.", "{s} is a busy town.", "{s} is an old town."),
    ),
    EntityKind(
        name="airport",
        noun="airport",
        weight=45,
        least=3,
        intros=("{s} is an airport.", "{s} is a small airport.", "{s} is a modern airport.", "{s} is a busy airport."),
    ),
)

RELATIONS = (
    Relation(
        name="capital",
        subject="country",
        object="town",
        pages=(
            "The capital of {t} is {o}.",
            "{s} has {o} as its capital.",
            "{o} is the capital of {t}.",
            "{s} is ruled from its capital, {o}.",
        ),
        phrases=("the capital of {x}", "the capital town of {x}"),
    ),
    Relation(
        name="currency",
        subject="country",
        object="currency",
        pages=(
            "The currency of {t} is the {o}.",
            "{s} uses the {o} as its currency.",
            "The {o} is the currency of {t}.",
            "{s} pays in a currency called the {o}.",
        ),
        phrases=("the currency of {x}", "the money of {x}"),
    ),
    Relation(
        name="language",
        subject="country",
        object="language",
        pages=(
            "The language of {t} is {o}.",
            "{s} has {o} as its language.",
            "{o} is the language of {t}.",
            "{s} uses a language called {o}.",
        ),
        phrases=("the language of {x}", "the official language of {x}"),
    ),
    Relation(
        name="president",
        subject="country",
        object="person",
        pages=(
            "The president of {t} is {o}.",
            "{s} has {o} as its president.",
            "{o} is the president of {t}.",
            "{s} chose {o} as president.",
        ),
        phrases=("the president of {x}", "the person who is president of {x}"),
    ),
    Relation(
        name="borders",
        subject="country",
        object="country",
        many=True,
        pages=(
            "{s} borders {o}.",
            "{s} shares a border with {o}.",
            "The neighbours of {t} are {o}.",
            "{s} lies next to {o}.",
        ),
        phrases=("the neighbours of {x}", "the countries next to {x}"),
        both=("the country that borders {x} and {y}", "the country next to {x} and {y}"),
    ),
    Relation(
        name="country",
        subject="region",
        object="country",
        pages=(
            "The country of {t} is {o}.",
            "{s} is part of the country {o}.",
            "{s} lies in the country of {o}.",
            "{s} belongs to the country {o}.",
        ),
        phrases=("the country of {x}", "the country that {x} is part of"),
    ),
    Relation(
        name="seat",
        subject="region",
        object="town",
        pages=(
            "The main town of {t} is {o}.",
            "{s} has {o} as its main town.",
            "{o} is the main town of {t}.",
            "{s} is run from its main town, {o}.",
        ),
        phrases=("the main town of {x}", "the first town of {x}"),
    ),
    Relation(
        name="governor",
        subject="region",
        object="person",
        pages=(
            "The governor of {t} is {o}.",
            "{s} has {o} as its governor.",
            "{o} is the governor of {t}.",
            "{s} is led by its governor, {o}.",
        ),
        phrases=("the governor of {x}", "the person who is governor of {x}"),
    ),
    Relation(
        name="region",
        subject="town",
        object="region",
        pages=(
            "The region of {t} is {o}.",
            "{s} is in the region of {o}.",
            "{s} lies in the region {o}.",
            "{s} belongs to the region of {o}.",
        ),
        phrases=("the region of {x}", "the region that {x} is in"),
    ),
    Relation(
        name="mayor",
        subject="town",
        object="person",
        pages=(
            "The mayor of {t} is {o}.",
            "{s} has {o} as its mayor.",
            "{o} is the mayor of {t}.",
            "{s} is led by its mayor, {o}.",
        ),
        phrases=("the mayor of {x}", "the person who is mayor of {x}"),
    ),
    Relation(
        name="town_hero",
        subject="town",
        object="person",
        pages=(
            "The hero of {t} is {o}.",
            "{s} has {o} as its hero.",
            "{o} is the hero of {t}.",
            "{s} was once saved by its hero, {o}.",
        ),
        phrases=("the hero of {x}", "the person who is the hero of {x}"),
    ),
    Relation(
        name="town_year",
        subject="town",
        object=NUMBER,
        pages=(
            "The founding year of {t} is {o}.",
            "{s} was founded in {o}.",
            "{s} was founded in the year {o}.",
            "{o} is the founding year of {t}.",
        ),
        phrases=("the founding year of {x}", "the year when {x} was founded"),
    ),
    Relation(
        name="airport_town",
        subject="airport",
        object="town",
        pages=(
            "The town of {t} is {o}.",
            "{s} serves the town of {o}.",
            "{s} is the airport of {o}.",
            "{s} lies near the town {o}.",
        ),
        phrases=("the town of {x}", "the town that {x} serves"),
    ),
    Relation(
        name="airport_namesake",
        subject="airport",
        object="person",
        pages=(
            "The namesake of {t} is {o}.",
            "{s} is named after {o}.",
            "{o} is the namesake of {t}.",
            "{s} got its name from {o}.",
        ),
        phrases=("the namesake of {x}", "the person that {x} is named after"),
    ),
    Relation(
        name="airport_view",
        subject="airport",
        object="range",
        pages=(
            "The nearest mountain range of {t} is {o}.",
            "{s} lies at the foot of {o}.",
            "{s} looks up at {o}.",
            "{o} is the nearest mountain range of {t}.",
        ),
        phrases=("the mountain range near {x}", "the mountain range above {x}"),
    ),
)
