"""Questions have one answer, by a slow reading of all triples, and records say on which page each part of it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from envs.multihop_qa.world import UNKNOWN, World
from envs.multihop_qa.world.graph import Graph
from envs.multihop_qa.world.growth import grow
from envs.multihop_qa.world.judging import Judge, Path
from envs.multihop_qa.world.pages import write_pages
from envs.multihop_qa.world.proposals import Proposals
from envs.multihop_qa.world.queries import Common, Extreme, ExtremeMember, Member, Name, Noun, Of, Same
from envs.multihop_qa.world.stream import Stream
from tests.envs.multihop_qa.worlds import all_questions, holds, names_an_entity, small, tiny

T = TypeVar("T")


@dataclass(frozen=True)
class Triples:
    """Everything that is true, as (subject, relation, object) with entities by place; numbers belong to the entity
    that they are about."""

    links: frozenset[tuple[int, str, int]]
    numbers: frozenset[tuple[int, str, int]]

    @classmethod
    def of(cls, graph: Graph) -> Triples:
        links, numbers = set(), set()
        for facts in graph.facts:
            for fact in facts:
                about = graph.entities[fact.subject].about
                if fact.objects:
                    links |= {(fact.subject, fact.relation, one) for one in fact.objects}
                else:
                    numbers.add((about if about >= 0 else fact.subject, fact.relation, fact.number))
        links |= {(b, r, a) for a, r, b in links if r == "borders"}
        return cls(frozenset(links), frozenset(numbers))

    def fits(self, noun: Noun) -> set[int]:
        """All entities that a noun may stand for, by scanning every triple."""
        match noun:
            case Name(entity):
                return {entity}
            case Of(relation, subject):
                return self.objects(relation, self.fits(subject))
            case Extreme(relation, most, first, second):
                return self.best(relation, self.fits(first) | self.fits(second), max if most else min)
            case Common(relation, first, second):
                return self.objects(relation, self.fits(first)) & self.objects(relation, self.fits(second))
            case Member(lists, owner, relation, value):
                having = {s for s, r, o in self.links if r == relation and o == value}
                return self.objects(lists, self.fits(owner)) & having
            case ExtremeMember(lists, owner, relation, most):
                return self.best(relation, self.objects(lists, self.fits(owner)), max if most else min)

    def objects(self, relation: str, subjects: set[int]) -> set[int]:
        return {o for s, r, o in self.links if r == relation and s in subjects}

    def best(self, relation: str, among: set[int], choose: Callable[[list[int]], int]) -> set[int]:
        known = {s: number for s, r, number in self.numbers if r == relation and s in among}
        assert set(known) == among, "a number of something compared stands nowhere"
        return {s for s, number in known.items() if number == choose(list(known.values()))}


@pytest.mark.parametrize("kind", ["chain", "comparison", "intersection", "superlative", "yes_no"])
def test_the_path_of_a_reader_ends_at_the_only_thing_that_fits_in_the_whole_store(kind: str) -> None:
    options = small().options
    graph = grow(options)
    judge = Judge(graph, write_pages(graph, options), options.check_top_k)
    triples = Triples.of(graph)
    proposals = Proposals(graph, "train", Stream(3, kind))
    judged = 0
    for _ in range(400):
        query = proposals.draw(kind, 4)
        path = None if query is None else judge.path(query, 4, "train")
        if path is None:
            continue
        judged += 1
        if isinstance(path.query, Same):
            ends = triples.fits(path.query.first), triples.fits(path.query.second)
            assert [len(end) for end in ends] == [1, 1]
            assert path.text == ("yes" if ends[0] == ends[1] else "no")
        elif path.entity >= 0:
            assert triples.fits(noun_of(path)) == {path.entity}
    assert judged >= 20


def noun_of(path: Path) -> Noun:
    assert isinstance(path.query, Name | Of | Extreme | Common | Member | ExtremeMember)
    return path.query


def sentence(world: World, title: str, number: int) -> str:
    (page,) = [page for page in world.pages if page.title == title]
    return page.text.split(". ")[number]


@pytest.mark.parametrize("world", [small(), tiny(), small(style="card"), small(alias_rate=0.5, near_names=0.4)])
def test_supporting_sentences_say_what_the_steps_found(world: World) -> None:
    for question in all_questions(world):
        told = " ".join(sentence(world, title, number) for title, number in question.supporting_facts)
        for step in question.steps:
            for part in step.answer.replace(" and ", ", ").split(", "):
                assert holds(told, part) or holds(told, part.split()[-1]), (question, part)


def test_steps_walk_over_the_gold_pages_in_their_order() -> None:
    world = small(unanswerable=0.5)
    titles = {page.doc_id: page.title for page in world.pages}
    for question in all_questions(world):
        assert list(question.gold_titles) == distinct([step.title for step in question.steps])
        assert list(question.gold_ids) == distinct([step.doc_id for step in question.steps])
        assert [titles[one] for one in question.gold_ids] == list(question.gold_titles)
        assert len(question.gold_ids) == question.hops
        assert {title for title, _ in question.supporting_facts} <= set(question.gold_titles)


def test_each_step_of_a_chain_asks_for_what_the_step_before_it_found() -> None:
    for question in all_questions(tiny()):
        for before, step in zip(question.steps, question.steps[1:], strict=False):
            assert step.title == before.answer
            assert holds(step.question, before.answer)
        assert question.steps[-1].answer == question.answers[0]


def test_evidences_are_triples_whose_last_object_answers_a_chain() -> None:
    for question in all_questions(tiny()):
        assert [subject for subject, _, _ in question.evidences] == list(question.gold_titles)
        assert question.evidences[-1][2] == question.answers[0]


def test_comparisons_name_both_or_ways_to_both_and_compare_what_stands_on_their_pages() -> None:
    questions = [one for one in all_questions(small()) if one.kind == "comparison"]
    for question in questions:
        compared = [step for step in question.steps if step.answer.isdigit()][:2]
        assert len(compared) == 2
        assert compared[0].answer != compared[1].answer
        least = any(word in question.question for word in ("older", "lower", "smaller", "first", "fewer"))
        most = any(word in question.question for word in ("younger", "higher", "larger", "newer", "later", "more"))
        assert least or most
    assert any(step.title.startswith("Statistics of") for one in questions for step in one.steps)


def test_counts_count_the_list_of_the_last_step() -> None:
    plain = [one for one in all_questions(small()) if one.kind == "count" and "meters" not in one.question]
    assert plain
    for question in plain:
        assert question.answers[0] == str(len(question.steps[-1].answer.replace(" and ", ", ").split(", ")))


def test_counts_above_a_limit_count_the_numbers_of_the_last_steps() -> None:
    limited = [one for one in all_questions(small()) if one.kind == "count" and "meters" in one.question]
    assert limited
    for question in limited:
        (limit,) = [int(word) for word in question.question.strip("?.").split() if word.isdigit()]
        numbers = [int(step.answer) for step in question.steps if step.answer.isdigit()]
        assert question.answers[0] == str(sum(number > limit for number in numbers))
        assert 0 < int(question.answers[0]) < len(numbers)


def test_yes_and_no_are_right_as_often_as_each_other() -> None:
    for questions in small().questions.values():
        said = [one.answers[0] for one in questions if one.kind == "yes_no"]
        assert abs(said.count("yes") - said.count("no")) <= 1


def test_the_last_page_of_an_unanswerable_question_does_not_tell_what_is_asked() -> None:
    world = small(unanswerable=0.5)
    unknown = [one for one in all_questions(world) if one.level == "unanswerable"]
    chains = [one for one in all_questions(world) if one.kind == "chain" and one.hops > 1]
    assert 0.3 < len(unknown) / len(chains) < 0.7
    for question in unknown:
        assert question.answers == UNKNOWN
        assert question.steps[-1].answer == UNKNOWN[0]
        assert len(question.supporting_facts) == question.hops - 1
    assert not [one for one in all_questions(small()) if one.level == "unanswerable"]


def test_names_with_a_short_form_have_it_among_their_answers_where_pages_use_it() -> None:
    people = [
        one
        for one in all_questions(small(alias_rate=0.5, near_names=0.4))
        if names_an_entity(one) and " " in one.answers[0]
    ]
    assert people
    assert all(one.answers == (one.answers[0], one.answers[0].split()[-1]) for one in people)
    assert all(len(one.answers) == 1 for one in all_questions(small()) if names_an_entity(one))


def test_levels_follow_the_number_of_hops() -> None:
    levels = {1: "easy", 2: "medium", 3: "medium", 4: "hard", 5: "hard"}
    assert all(one.level == levels[one.hops] and one.dataset == "world" for one in all_questions(small()))


def distinct(items: list[T]) -> list[T]:
    return list(dict.fromkeys(items))
