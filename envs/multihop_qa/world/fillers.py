"""Sentences that say nothing of use. They name nobody, hold no number, and belong to a kind of subject."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LAND = (
    "The summers are warm and the winters are long.",
    "Many visitors come here to walk in the hills.",
    "Rain falls on most days of the spring.",
    "The soil is dark and good for growing apples.",
    "Old songs tell of a great flood in this part of the world.",
    "A small museum shows tools and clothes of earlier times.",
    "In the autumn the woods turn red and yellow.",
    "Birds rest here on their way to the south.",
    "The roads are narrow but well kept.",
    "Fish and bread are the usual meal.",
    "Every year a market is held when the harvest is over.",
    "The houses are built of wood and clay.",
    "Snow often closes the high paths.",
    "Wild horses can still be seen in the open fields.",
    "People say that the air is very clean.",
    "An old bridge was lost in a storm and never built again.",
)

_PEOPLE = (
    "Friends praise a sharp memory and a loud laugh.",
    "A love of music was there from an early age.",
    "Most mornings begin with a long walk and a cup of tea.",
    "Letters to friends fill several boxes.",
    "Health was weak in the early years.",
    "A quiet house with a garden was always the dream.",
    "Cooking and chess were the main hobbies.",
    "Not many pictures are left from those days.",
    "A long journey by ship changed everything.",
    "Money was never important in this life.",
    "Two dogs and a cat shared the home.",
    "The family did not talk much about the past.",
    "Some called it luck, others hard work.",
    "A street play about this life was a success.",
    "Fame came late and did not matter much.",
    "Winter evenings were spent with old maps.",
)

_THINGS = (
    "The first plan was much smaller.",
    "Critics did not like it at the beginning.",
    "It took a long time until people noticed it.",
    "Children enjoy it as much as their parents do.",
    "Only a few changes were made later.",
    "The colours blue and white are used everywhere.",
    "A fire destroyed some of the early papers.",
    "Some say that it was made for a bet.",
    "Many copies of it can be found in other places.",
    "There is a short film about how it began.",
    "The work was harder than anybody had thought.",
    "It is open to everybody on the first day of the week.",
    "Students like to write about it.",
    "Its best years are thought to be over.",
    "A song about it is still known today.",
    "The costs were shared by many small donors.",
)

_NUMBERS = (
    "The numbers were checked by an office.",
    "Visitors are not counted here.",
    "Older numbers are kept in an archive.",
    "The count was made by hand.",
    "New numbers are expected soon.",
    "Some of the forms came back late.",
    "The method of counting has not changed.",
    "Errors are thought to be small.",
)

FILLERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("country", "region", "town", "airport", "mountain", "river", "range"), _LAND),
        "person": _PEOPLE,
        **dict.fromkeys(("tower", "company", "school", "book", "currency", "language"), _THINGS),
        "statistics": _NUMBERS,
    }
)
"""By the kind of the page's subject."""
