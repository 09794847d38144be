"""Words for what people make: towers, companies, schools, books."""

from __future__ import annotations

from envs.multihop_qa.world.schema import NUMBER, EntityKind, Relation

KINDS = (
    EntityKind(
        name="tower",
        noun="tower",
        weight=80,
        least=4,
        intros=("{s} is a tower.", "{s} is a stone tower.", "{s} is a tall tower.", "{s} is an old tower."),
    ),
    EntityKind(
        name="company",
        noun="company",
        weight=75,
        least=4,
        intros=("{s} is a company.", "{s} is a small company.", "{s} is a large company.", "{s} is an old company."),
    ),
    EntityKind(
        name="school",
        noun="school",
        weight=55,
        least=3,
        intros=("{s} is a school.", "{s} is a small school.", "{s} is a good school.", "{s} is an old school."),
    ),
    EntityKind(
        name="book",
        noun="book",
        weight=90,
        least=4,
        intros=("{s} is a book.", "{s} is a short book.", "{s} is a long book.", "{s} is a popular book."),
    ),
)

RELATIONS = (
    Relation(
        name="architect",
        subject="tower",
        object="person",
        pages=(
            "The architect of {t} was {o}.",
            "{s} was designed by {o}.",
            "{o} was the architect of {t}.",
            "{s} had {o} as its architect.",
        ),
        phrases=("the architect of {x}", "the person who designed {x}"),
    ),
    Relation(
        name="tower_town",
        subject="tower",
        object="town",
        pages=(
            "The town of {t} is {o}.",
            "{s} stands in {o}.",
            "{s} stands in the town of {o}.",
            "{s} looks over the town of {o}.",
        ),
        phrases=("the town of {x}", "the town where {x} stands"),
    ),
    Relation(
        name="owner",
        subject="tower",
        object="company",
        pages=(
            "The owner of {t} is {o}.",
            "{s} is owned by {o}.",
            "{o} is the owner of {t}.",
            "{s} has {o} as its owner.",
        ),
        phrases=("the owner of {x}", "the company that owns {x}"),
    ),
    Relation(
        name="opened",
        subject="tower",
        object=NUMBER,
        pages=(
            "The opening year of {t} is {o}.",
            "{s} was opened in {o}.",
            "{s} was opened in the year {o}.",
            "{o} is the opening year of {t}.",
        ),
        phrases=("the opening year of {x}", "the year when {x} was opened"),
        most=("the newer of {x} and {y}", "the one of {x} and {y} that was opened later"),
        least=("the older of {x} and {y}", "the one of {x} and {y} that was opened first"),
    ),
    Relation(
        name="founder",
        subject="company",
        object="person",
        pages=(
            "The founder of {t} was {o}.",
            "{s} was founded by {o}.",
            "{o} was the founder of {t}.",
            "{s} had {o} as its founder.",
        ),
        phrases=("the founder of {x}", "the person who founded {x}"),
    ),
    Relation(
        name="director",
        subject="company",
        object="person",
        pages=(
            "The director of {t} is {o}.",
            "{s} is run by {o}.",
            "{o} is the director of {t}.",
            "{s} has {o} as its director.",
        ),
        phrases=("the director of {x}", "the person who runs {x}"),
    ),
    Relation(
        name="office",
        subject="company",
        object="town",
        pages=(
            "The home town of {t} is {o}.",
            "{s} has its office in {o}.",
            "{o} is the home town of {t}.",
            "{s} has its main office in {o}.",
        ),
        phrases=("the home town of {x}", "the town where {x} has its office"),
    ),
    Relation(
        name="company_river",
        subject="company",
        object="river",
        pages=(
            "The namesake of {t} is the river {o}.",
            "{s} is named after the river {o}.",
            "{s} got its name from the river {o}.",
            "{o} is the river that gave its name to {t}.",
        ),
        phrases=("the river that {x} is named after", "the namesake river of {x}"),
    ),
    Relation(
        name="school_head",
        subject="school",
        object="person",
        pages=(
            "The head of {t} is {o}.",
            "{s} is led by {o}.",
            "{o} is the head of {t}.",
            "{s} has {o} as its head.",
        ),
        phrases=("the head of {x}", "the person who leads {x}"),
    ),
    Relation(
        name="school_town",
        subject="school",
        object="town",
        pages=(
            "The town of {t} is {o}.",
            "{s} is in {o}.",
            "{s} is in the town of {o}.",
            "{s} is a school of the town {o}.",
        ),
        phrases=("the town of {x}", "the town that {x} is in"),
    ),
    Relation(
        name="school_owner",
        subject="school",
        object="company",
        pages=(
            "The sponsor of {t} is {o}.",
            "{s} is paid for by {o}.",
            "{o} is the sponsor of {t}.",
            "{s} has {o} as its sponsor.",
        ),
        phrases=("the sponsor of {x}", "the company that pays for {x}"),
    ),
    Relation(
        name="author",
        subject="book",
        object="person",
        pages=(
            "The author of {t} is {o}.",
            "{s} was written by {o}.",
            "{o} is the author of {t}.",
            "{s} has {o} as its author.",
        ),
        phrases=("the author of {x}", "the person who wrote {x}"),
    ),
    Relation(
        name="publisher",
        subject="book",
        object="company",
        pages=(
            "The publisher of {t} is {o}.",
            "{s} was printed by {o}.",
            "{o} is the publisher of {t}.",
            "{s} has {o} as its publisher.",
        ),
        phrases=("the publisher of {x}", "the company that printed {x}"),
    ),
    Relation(
        name="setting",
        subject="book",
        object="town",
        pages=(
            "The setting of {t} is {o}.",
            "{s} takes place in {o}.",
            "{o} is the setting of {t}.",
            "{s} tells a story about {o}.",
        ),
        phrases=("the setting of {x}", "the town where {x} takes place"),
    ),
    Relation(
        name="book_year",
        subject="book",
        object=NUMBER,
        pages=(
            "The printing year of {t} is {o}.",
            "{s} came out in {o}.",
            "{s} came out in the year {o}.",
            "{o} is the printing year of {t}.",
        ),
        phrases=("the printing year of {x}", "the year when {x} came out"),
        most=("the newer of {x} and {y}", "the one of {x} and {y} that came out later"),
        least=("the older of {x} and {y}", "the one of {x} and {y} that came out first"),
    ),
)
