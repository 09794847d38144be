"""Every option does what it says, and refuses what it cannot be."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

from envs.multihop_qa.world import World, WorldOptions, make_world
from envs.multihop_qa.world.lexicon import ENTITY_KINDS, RELATIONS
from envs.multihop_qa.world.lexicon_lists import EXTREME_MEMBERS, MEMBERS, MEMBERS_ABOVE
from envs.multihop_qa.world.options import HOPS_OF_KIND, LEAST_PAGES
from tests.envs.multihop_qa.worlds import all_questions, small, tiny
from trace_async.errors import ConfigError

FEW: dict[str, Any] = {"pages": 300, "questions": 100, "filler_sentences": 0}


def few(**changes: Any) -> World:
    return small(**{**FEW, **changes})


def sentences(world: World) -> list[int]:
    return [page.text.count(". ") + 1 for page in world.pages if not page.title.startswith("Statistics")]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_facts_per_page_is_the_number_of_sentences_behind_the_first(number: int) -> None:
    world = tiny(facts_per_page=number, questions=60, pages=300)
    assert set(sentences(world)) <= {number + 1, 3, 4}  # some kinds have fewer relations than that
    assert max(sentences(world)) == number + 1


def test_filler_sentences_come_on_top() -> None:
    more = few(filler_sentences=3)
    assert [long - short for long, short in zip(sentences(more), sentences(few()), strict=True)] == [3] * len(
        sentences(more)
    )


def longest_list(world: World) -> int:
    lists = (step.answer for one in all_questions(world) if one.kind == "count" for step in one.steps)
    return max(answer.count(",") + answer.count(" and ") + 1 for answer in lists)


def test_branching_is_the_length_of_the_longest_list() -> None:
    assert longest_list(few(branching=2)) == 2
    assert longest_list(few(branching=6, questions=200)) == 6


def near_pairs(world: World) -> int:
    """Names of one word with a twin that differs by two letters."""
    words = {page.title for page in world.pages if " " not in page.title}
    forms: Counter[str] = Counter()
    for word in words:
        places = range(len(word))
        forms.update({"".join("?" if at in (a, b) else word[at] for at in places) for a in places for b in range(a)})
    return sum(number > 1 for number in forms.values())


def test_near_names_are_as_frequent_as_ordered() -> None:
    none, some, many = (near_pairs(few(near_names=share)) for share in (0.0, 0.1, 0.4))
    assert none < some / 2 < some < many / 2


def test_alias_rate_is_the_share_of_mentions_by_the_short_form() -> None:
    for rate in (0.0, 0.4, 1.0):
        world = few(alias_rate=rate)
        people = {page.title for page in world.pages if " " in page.title and "Statistics" not in page.title}
        text = " ".join(page.text for page in world.pages)
        full = sum(text.count(name) for name in people) - len(people)  # each page says its subject's name once
        last = Counter(re.findall(r"\w+", text))
        every = sum(last[name.split()[1]] for name in people) - len(people)
        assert (every - full) / every == pytest.approx(rate, abs=0.08)


def frame(question: str) -> str:
    """A question without names and numbers."""
    return re.sub(r"(?<=\s)[A-Z]\w+( [A-Z]\w+)?", "NAME", re.sub(r"\d+", "N", question))


def test_paraphrase_zero_asks_the_same_thing_in_the_same_words() -> None:
    plain = {frame(one.question) for one in all_questions(tiny(paraphrase=0.0)) if one.hops == 1}
    varied = {frame(one.question) for one in all_questions(tiny()) if one.hops == 1}
    assert len(varied) > 2 * len(plain)
    assert all(re.match("(What|Who) is the ", text) for text in plain)


def test_split_templates_keep_the_wordings_of_the_splits_apart() -> None:
    for world, shared in ((tiny(split_templates=True), False), (tiny(), True)):
        train, heldout = (
            {frame(one.question) for one in world.questions[split] if one.hops <= 2} for split in ("train", "heldout")
        )
        assert bool(train & heldout) is shared


@pytest.mark.parametrize(
    ("style", "pronouns", "names"), [("natural", True, 1), ("plain", False, 3), ("card", False, 0)]
)
def test_styles_speak_of_the_subject_in_their_way(style: str, pronouns: bool, names: int) -> None:
    pages = tiny(style=style, questions=60).pages
    assert any(re.search(r"\b(He|She|It)\b", page.text) for page in pages) is pronouns
    assert {page.text.count(page.title) for page in pages} == {names}


@pytest.mark.parametrize("kind", sorted(HOPS_OF_KIND))
def test_kinds_and_hops_are_those_ordered(kind: str) -> None:
    low, high = HOPS_OF_KIND[kind]
    world = few(pages=600, questions=40, kinds=(kind,), hops=tuple(range(low, high + 1)))
    assert {one.kind for one in all_questions(world)} == {kind}
    assert {one.hops for one in all_questions(world)} == set(range(low, high + 1))


def test_heldout_share_divides_pages_and_questions() -> None:
    world = few(heldout_share=0.4)
    assert len(world.questions["heldout"]) == 40


def test_every_side_of_the_smallest_world_has_room_for_every_kind_of_entity() -> None:
    assert sum(kind.least for kind in ENTITY_KINDS.values()) <= LEAST_PAGES
    world = make_world(WorldOptions(pages=120, heldout_share=0.5, questions=10, kinds=("chain",)))
    assert len(world.pages) == 120


def test_every_pattern_has_wordings_enough_and_both_halves_of_them() -> None:
    for relation in RELATIONS.values():
        assert len(set(relation.pages)) >= 4
        assert len(set(relation.phrases)) >= 2
        assert all("{o}" in text for text in relation.pages)
        assert all("{x}" in text for text in relation.phrases)
        assert not relation.many or relation.both or len(set(relation.how_many)) >= 6
    assert all(len(set(phrases)) >= 2 for table in (MEMBERS, EXTREME_MEMBERS) for phrases in table.values())
    assert all(len(set(questions)) >= 6 for questions in MEMBERS_ABOVE.values())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "world.seed: need 0 <= seed"),
        ({"name_family": 16}, "world.name_family: need 0 <= name_family <= 15, got 16"),
        ({"pages": 10}, "world.pages: need 120 <= pages"),
        ({"pages": 200}, "world.pages: each split needs at least 60 pages, and 200 pages with heldout_share=0.2"),
        ({"questions": 0}, "world.questions: need 10 <="),
        ({"heldout_share": 1.0}, "world.heldout_share"),
        ({"kinds": ()}, "world.kinds: need at least one kind"),
        ({"kinds": ("chain", "chain")}, "each once"),
        ({"kinds": ("riddle",)}, "world.kinds: need one of chain, comparison"),
        ({"kinds": ("comparison",), "hops": (1, 2)}, "world.hops: comparison questions have 3 to 5 hops"),
        ({"kinds": ("comparison",), "hops": (2, 3)}, r"world.hops: no question of kinds \['comparison'\] has 2 hops"),
        ({"hops": (1, 2)}, r"got \[1, 2\]; add such a number, or take comparison out of kinds"),
        ({"hops": (1, 9)}, "world.hops: need 1 <= hops <= 5, got 9"),
        ({"hops": ()}, "hops"),
        ({"hops": (3, 1)}, "world.hops: need numbers in rising order"),
        ({"kinds": ("chain",), "hops": (1, 6)}, "world.hops: need 1 <= hops <= 5, got 6"),
        ({"facts_per_page": 0}, "world.facts_per_page"),
        ({"filler_sentences": -1}, "world.filler_sentences"),
        ({"branching": 1}, "world.branching"),
        ({"near_names": 0.9}, "world.near_names"),
        ({"paraphrase": 1.5}, "world.paraphrase"),
        ({"alias_rate": float("nan")}, "world.alias_rate"),
        ({"unanswerable": -0.1}, "world.unanswerable"),
        ({"style": "verse"}, "world.style: need one of natural, plain, card, got 'verse'"),
        ({"check_top_k": 0}, "world.check_top_k"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        WorldOptions(**options)


def test_more_questions_than_a_world_yields_are_refused_with_the_number_it_yields() -> None:
    options = WorldOptions(pages=300, questions=4000, kinds=("superlative",), hops=(3, 4, 5), filler_sentences=0)
    with pytest.raises(ConfigError, match=r"world of 300 pages .* yields \d+ train questions .* 3200 were wanted"):
        make_world(options)
