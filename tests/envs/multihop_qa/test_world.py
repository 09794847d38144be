"""A world is the same everywhere, has what was ordered, and shares nothing where nothing may be shared."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from envs.multihop_qa.answers import normalise
from envs.multihop_qa.records import passage_id
from envs.multihop_qa.world import (
    PUNCTUATION,
    SYLLABLES,
    World,
    WorldOptions,
    make_world,
    new_world_options,
    vocabulary,
)
from tests.envs.multihop_qa.worlds import SMALL, all_questions, names_an_entity, small, tiny

REPO = Path(__file__).parents[3]


def test_the_digest_of_a_world_never_changes() -> None:
    assert small().digest == "4bdaee365552ccc2b3627cc4c0b9e76ee993472d7873b5e91c2b18de0a04cd93"


def test_a_process_with_other_hashes_makes_the_same_world() -> None:
    code = (
        "from envs.multihop_qa.world import *\n"
        f"print(make_world(WorldOptions(**{ {**SMALL, 'questions': 100}!r})).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "4242"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == small(questions=100).digest


def test_the_digest_is_that_of_the_pages_and_questions() -> None:
    world = small()
    lines: list[object] = [list(page) for page in world.pages]
    for split in ("train", "heldout"):
        lines += [{"split": split, **question.to_task(split).data} for question in world.questions[split]]
    text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
    assert world.digest == hashlib.sha256(text.encode()).hexdigest()


def test_every_option_that_changes_the_content_changes_the_digest() -> None:
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"name_family": 1}, {"paraphrase": 0.0}]
    assert len({small(questions=100, **change).digest for change in changes}) == 4


def test_pages_are_as_many_as_ordered_and_known_by_their_content() -> None:
    pages = small().pages
    assert len(pages) == 320
    assert all(page.doc_id == passage_id(page.title, page.text) for page in pages)
    assert len({normalise(page.title) for page in pages}) == 320


def test_questions_are_as_many_as_ordered_and_all_different() -> None:
    world = small()
    assert {split: len(questions) for split, questions in world.questions.items()} == {"train": 264, "heldout": 66}
    for what in ("question_id", "question"):
        assert len({getattr(question, what) for question in all_questions(world)}) == 330


def test_numbers_of_hops_come_in_equal_shares_and_every_kind_is_there() -> None:
    for questions in small().questions.values():
        hops = Counter(question.hops for question in questions)
        assert set(hops) == {1, 2, 3, 4, 5}
        assert max(hops.values()) - min(hops.values()) <= 1
        kinds = Counter(question.kind for question in questions)
        assert set(kinds) == {"chain", "comparison", "intersection", "superlative", "count", "yes_no"}


def test_kinds_share_the_questions_of_a_number_of_hops_where_the_world_has_enough() -> None:
    cells = Counter((one.hops, one.kind) for one in small().questions["train"])
    numbers = [cells[4, kind] for kind in ("comparison", "intersection", "yes_no")]
    assert max(numbers) - min(numbers) <= 1


def test_no_page_and_no_answer_is_used_in_both_splits() -> None:
    for world in (small(), tiny()):
        train, heldout = world.questions["train"], world.questions["heldout"]
        gold = [{one for question in questions for one in question.gold_ids} for questions in (train, heldout)]
        assert gold[0].isdisjoint(gold[1])
        answers = [{one.answers[0] for one in part if names_an_entity(one)} for part in (train, heldout)]
        assert answers[0].isdisjoint(answers[1])


def words_of(world: World) -> set[str]:
    """Words of names; titles of statistics hold others."""
    titles = (page.title for page in world.pages if not page.title.startswith("Statistics of "))
    return {word.lower() for title in titles for word in title.split()}


def family_of(word: str) -> int:
    """From the syllables, which can be read off a word in one way."""
    parts = re.findall("|".join(sorted(SYLLABLES, key=len, reverse=True)), word)
    assert "".join(parts) == word
    return sum(SYLLABLES.index(part) for part in parts) % 16


@pytest.mark.parametrize("family", [0, 1, 15])
def test_every_word_of_every_name_tells_its_family_so_that_families_share_none(family: int) -> None:
    world = small(name_family=family, questions=100)
    assert {family_of(word) for word in words_of(world)} == {family}


def test_no_syllable_begins_another_so_that_words_can_be_read_in_one_way_only() -> None:
    assert len(SYLLABLES) == len(set(SYLLABLES)) == 120
    assert all(re.fullmatch("[a-z]+", one) for one in SYLLABLES)
    assert not [(a, b) for a in SYLLABLES for b in SYLLABLES if a != b and b.startswith(a)]


def test_a_new_world_has_another_graph_and_no_name_in_common() -> None:
    options = small().options
    fresh = new_world_options(options)
    assert fresh == replace(options, seed=1, name_family=1)
    assert new_world_options(replace(options, name_family=15)).name_family == 0
    assert words_of(small()).isdisjoint(words_of(make_world(replace(fresh, questions=50))))


@pytest.mark.parametrize("style", ["natural", "plain", "card"])
def test_all_words_are_of_the_vocabulary_or_names_or_numbers(style: str) -> None:
    world = small(style=style, alias_rate=0.4, unanswerable=0.2, questions=150)
    names = words_of(world)
    known = set(vocabulary()) | names
    assert names.isdisjoint(vocabulary())
    for text in texts_of(world):
        assert text.isascii()
        assert not re.sub(f"[A-Za-z0-9 {re.escape(PUNCTUATION)}]", "", text), text
        assert {word for word in re.findall("[a-z]+", text.lower()) if word not in known} == set(), text


def texts_of(world: World) -> list[str]:
    questions = all_questions(world)
    texts = [f"{page.title} {page.text}" for page in world.pages]
    texts += [text for one in questions for text in (one.question, *one.answers)]
    return texts + [text for one in questions for step in one.steps for text in (step.question, step.answer)]


def test_vocabulary_holds_no_word_that_nobody_says() -> None:
    said: set[str] = set()
    for style in ("natural", "plain", "card"):
        world = small(style=style, alias_rate=0.4, unanswerable=0.2, questions=150)
        said |= {word for text in texts_of(world) for word in re.findall("[a-z]+", text.lower())}
    assert len(set(vocabulary()) - said) < 0.1 * len(vocabulary())
    assert vocabulary() == tuple(sorted(vocabulary()))


def test_a_tiny_policy_gets_short_pages_and_short_questions() -> None:
    lengths = [len(page.text.split()) for page in tiny().pages]
    assert min(lengths) >= 12
    assert max(lengths) <= 25
    assert max(len(one.question.split()) for one in all_questions(tiny())) <= 27


def test_default_pages_are_of_the_length_of_wikipedia_passages() -> None:
    pages = make_world(WorldOptions(pages=300, questions=20)).pages
    assert 50 <= sum(len(page.text.split()) for page in pages) / len(pages) <= 110
