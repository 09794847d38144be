"""What a generated world is made of: its options, checked. Never: the world itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from trace_async.errors import ConfigError

FAMILIES = 16
"""Name families; worlds of different families share no name."""

HOPS_OF_KIND = MappingProxyType(
    {
        "chain": (1, 5),
        "comparison": (3, 5),
        "intersection": (3, 5),
        "superlative": (3, 5),
        "count": (1, 5),
        "yes_no": (3, 5),
    }
)
"""Fewest and most pages that a question of each kind needs. Kinds that combine two pages start at three: with fewer,
one search with both names in it finds them all."""

SEEDS = 2**63

LEAST_PAGES = 60
"""Pages that each split needs to have every kind of entity."""

STYLES = ("natural", "plain", "card")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldOptions:
    """Size, kinds of questions and difficulty of a world; ConfigError when a value is out of range."""

    seed: int = 0
    name_family: int = 0  # 0..15
    pages: int = 2000  # exactly so many
    questions: int = 5000  # of both splits together
    heldout_share: float = 0.2  # share of the pages and of the questions that are held out
    kinds: tuple[str, ...] = ("chain", "comparison", "intersection", "superlative", "count", "yes_no")
    hops: tuple[int, ...] = (1, 2, 3, 4, 5)  # numbers of pages that a question may need; as equal shares as there are
    facts_per_page: int = 3  # facts with one value on a page; lists and statistics come on top
    filler_sentences: int = 4  # sentences on a page that say nothing of use
    branching: int = 4  # most entries of a list on a page
    near_names: float = 0.1  # share of entities whose name differs from another one's by two letters
    paraphrase: float = 1.0  # share of sentences and questions not in the first wording of their kind
    alias_rate: float = 0.0  # share of mentions, of entities that have one, by the short form
    unanswerable: float = 0.0  # share of chain questions of two hops or more whose last fact stands nowhere
    split_templates: bool = False  # train and held-out questions are worded differently
    style: str = "natural"  # pages: "natural" says he, she, it; "plain" the name; "card" just "Founder: NAME."
    check_top_k: int = 3  # passages of one search with the question that must not answer it

    def __post_init__(self) -> None:
        self._check_kinds()
        _within("seed", self.seed, 0, SEEDS - 1)
        _within("name_family", self.name_family, 0, FAMILIES - 1)
        _within("pages", self.pages, 2 * LEAST_PAGES, 20_000)
        _within("questions", self.questions, 10, 1_000_000)
        _within("facts_per_page", self.facts_per_page, 1, 6)
        _within("filler_sentences", self.filler_sentences, 0, 20)
        _within("branching", self.branching, 2, 6)
        _within("check_top_k", self.check_top_k, 1, 10)
        _within("heldout_share", self.heldout_share, 0.1, 0.9)
        if min(self.heldout_pages, self.pages - self.heldout_pages) < LEAST_PAGES:
            raise ConfigError(
                f"world.pages: each split needs at least {LEAST_PAGES} pages, and {self.pages} pages with "
                f"heldout_share={self.heldout_share:g} leave {self.heldout_pages} held out; raise pages"
            )
        _within("near_names", self.near_names, 0.0, 0.5)
        for name in ("paraphrase", "alias_rate", "unanswerable"):
            _within(name, getattr(self, name), 0.0, 1.0)
        _one_of("style", self.style, STYLES)

    @property
    def heldout_pages(self) -> int:
        """Pages of the held-out side."""
        return round(self.pages * self.heldout_share)

    def _check_kinds(self) -> None:
        for number in self.hops:
            _within("hops", number, 1, 5)
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise ConfigError(f"world.kinds: need at least one kind, each once, got {list(self.kinds)}")
        for kind in self.kinds:
            _one_of("kinds", kind, tuple(HOPS_OF_KIND))
            low, high = HOPS_OF_KIND[kind]
            if not any(low <= number <= high for number in self.hops):
                raise ConfigError(
                    f"world.hops: {kind} questions have {low} to {high} hops, got {list(self.hops)}; "
                    f"add such a number, or take {kind} out of kinds"
                )
        if not self.hops or list(self.hops) != sorted(set(self.hops)):
            raise ConfigError(f"world.hops: need numbers in rising order, got {list(self.hops)}")
        for number in self.hops:
            if not any(low <= number <= high for low, high in (HOPS_OF_KIND[kind] for kind in self.kinds)):
                raise ConfigError(f"world.hops: no question of kinds {list(self.kinds)} has {number} hops")

    def kinds_of(self, hops: int) -> tuple[str, ...]:
        """The kinds that have questions of so many hops, in the order of `HOPS_OF_KIND`."""
        wanted = (kind for kind in HOPS_OF_KIND if kind in self.kinds)
        return tuple(kind for kind in wanted if HOPS_OF_KIND[kind][0] <= hops <= HOPS_OF_KIND[kind][1])


def new_world_options(options: WorldOptions) -> WorldOptions:
    """The same kind of world with another graph and without any name in common."""
    return replace(options, seed=(options.seed + 1) % SEEDS, name_family=(options.name_family + 1) % FAMILIES)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"world.{name}: need {low} <= {name} <= {high}, got {value}")


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"world.{name}: need one of {', '.join(known)}, got {value!r}")
