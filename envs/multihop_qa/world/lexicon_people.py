"""Words for persons and for what bears their mark: currencies and languages."""

from __future__ import annotations

from envs.multihop_qa.world.schema import NUMBER, EntityKind, Relation

KINDS = (
    EntityKind(
        name="person",
        noun="person",
        weight=200,
        least=8,
        intros=("{s} is a person.", "{s} is a well known person.", "{s} is a famous person.", "{s} is a kind person."),
    ),
    EntityKind(
        name="currency",
        noun="currency",
        weight=14,
        least=3,
        intros=(
            "{s} is a currency.",
            "{s} is a strong currency.",
            "{s} is an old currency.",
            "{s} is a currency name.",
        ),
    ),
    EntityKind(
        name="language",
        noun="language",
        weight=14,
        least=3,
        intros=("{s} is a language.", "{s} is a rare language.", "{s} is an old language.", "{s} is a soft language."),
    ),
)

RELATIONS = (
    Relation(
        name="birthplace",
        subject="person",
        object="town",
        pages=(
            "The birthplace of {t} is {o}.",
            "{s} was born in {o}.",
            "{s} was born in the town of {o}.",
            "{o} is the birthplace of {t}.",
        ),
        phrases=("the birthplace of {x}", "the town where {x} was born"),
    ),
    Relation(
        name="teacher",
        subject="person",
        object="person",
        pages=(
            "The teacher of {t} was {o}.",
            "{s} was taught by {o}.",
            "{s} had {o} as a teacher.",
            "{o} was the teacher of {t}.",
        ),
        phrases=("the teacher of {x}", "the person who taught {x}"),
    ),
    Relation(
        name="studied",
        subject="person",
        object="school",
        pages=(
            "The school of {t} was {o}.",
            "{s} studied at {o}.",
            "{s} studied at a school called {o}.",
            "{s} went to school at {o}.",
        ),
        phrases=("the school of {x}", "the school where {x} studied"),
    ),
    Relation(
        name="employer",
        subject="person",
        object="company",
        pages=(
            "The employer of {t} is {o}.",
            "{s} works for {o}.",
            "{s} works for the company {o}.",
            "{s} has {o} as an employer.",
        ),
        phrases=("the employer of {x}", "the company that {x} works for"),
    ),
    Relation(
        name="birth_year",
        subject="person",
        object=NUMBER,
        pages=(
            "The birth year of {t} is {o}.",
            "{s} was born in {o}.",
            "{s} was born in the year {o}.",
            "{o} is the birth year of {t}.",
        ),
        phrases=("the birth year of {x}", "the year when {x} was born"),
        most=("the younger of {x} and {y}", "the one of {x} and {y} who was born later"),
        least=("the older of {x} and {y}", "the one of {x} and {y} who was born first"),
    ),
    Relation(
        name="face",
        subject="currency",
        object="person",
        pages=(
            "The face on {t} is {o}.",
            "{s} shows the face of {o}.",
            "{s} shows a picture of {o}.",
            "{o} is the face on {t}.",
        ),
        phrases=("the face on {x}", "the person shown on {x}"),
    ),
    Relation(
        name="mint",
        subject="currency",
        object="town",
        pages=(
            "The mint of {t} is in {o}.",
            "{s} is made in {o}.",
            "{s} comes from a mint in {o}.",
            "{o} has the mint of {t}.",
        ),
        phrases=("the mint town of {x}", "the town where {x} is made"),
    ),
    Relation(
        name="home_region",
        subject="language",
        object="region",
        pages=(
            "The home region of {t} is {o}.",
            "{s} comes from the region of {o}.",
            "{s} was first spoken in {o}.",
            "{o} is the home region of {t}.",
        ),
        phrases=("the home region of {x}", "the region where {x} was first spoken"),
    ),
    Relation(
        name="scholar",
        subject="language",
        object="person",
        pages=(
            "The first scholar of {t} was {o}.",
            "{s} was first written down by {o}.",
            "{o} was the first scholar of {t}.",
            "{s} had {o} as its first scholar.",
        ),
        phrases=("the first scholar of {x}", "the person who first wrote down {x}"),
    ),
)
