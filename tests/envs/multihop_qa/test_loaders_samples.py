"""The loaders on real samples of the data sets, where those are there, and on the files of a generated world."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from envs.multihop_qa.answers import answer_scores, cover_exact_match, exact_match, rule_of
from envs.multihop_qa.corpora import read_corpus
from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.support import fact_scores, title_scores
from envs.multihop_qa.world import WorldOptions, make_world, write_world
from tests.envs.multihop_qa.samples import QUESTIONS_WITH_CONTEXT, sample

OTHERS = {
    "2wikimultihopqa_dev_joined_qa.jsonl.gz": ("flashrag", 1091),
    "bamboogle_test_125.jsonl": ("flashrag", 125),
    "flashrag_quickstart_nq.jsonl": ("flashrag", 17),
    "nq_test_100.jsonl.gz": ("flashrag", 100),
    "popqa_test_100.jsonl.gz": ("flashrag", 100),
    "triviaqa_test_100.jsonl.gz": ("flashrag", 100),
    "verl_bamboogle_test.parquet": ("bamboogle", 125),
}


@pytest.mark.parametrize("name", sorted(QUESTIONS_WITH_CONTEXT))
def test_every_question_with_paragraphs_knows_its_gold_pages(name: str) -> None:
    questions = list(load_questions(sample(name)))
    assert len(questions) == len({question.question_id for question in questions}) == QUESTIONS_WITH_CONTEXT[name]
    for question in questions:
        pages = {passage.doc_id: passage.title for passage in question.paragraphs}
        assert question.gold_ids
        assert {pages[doc_id] for doc_id in question.gold_ids} == set(question.gold_titles)
        assert question.hops >= len(question.gold_titles)
        assert exact_match(question.answers[0], question.answers) == 1.0
        assert title_scores(question.gold_titles, question.gold_titles).em == 1.0


def test_hotpotqa_levels_and_kinds() -> None:
    questions = list(load_questions(sample("hotpotqa_train_distractor_100.jsonl.gz")))
    assert Counter(question.kind for question in questions) == {"bridge": 78, "comparison": 22}
    assert Counter(question.level for question in questions) == {"medium": 69, "easy": 16, "hard": 15}
    assert {(question.dataset, question.hops) for question in questions} == {("hotpotqa", 2)}
    facts = questions[0].supporting_facts
    assert facts == (("Alû", 3), ("Lilu (mythology)", 0))
    assert fact_scores(facts[:1], facts) == (1.0, 0.5, 2 / 3, 0.0)


def test_2wiki_evidences_and_hops() -> None:
    questions = list(load_questions(sample("2wikimultihopqa_dev_164.jsonl.gz")))
    kinds = {"compositional": 57, "comparison": 54, "bridge_comparison": 43, "inference": 10}
    assert Counter(question.kind for question in questions) == kinds
    assert {question.hops for question in questions if question.kind == "bridge_comparison"} == {4}
    assert questions[0].evidences[0] == ("Forbidden Ground", "director", "Pál Gábor")
    assert {len(question.gold_titles) for question in questions} == {2, 4}


def test_musique_steps_lead_to_the_answer() -> None:
    for name in ("musique_ans_dev_200.jsonl.gz", "musique_ans_train_100.jsonl.gz"):
        for question in load_questions(sample(name)):
            assert len(question.steps) == question.hops == int(question.kind[0])
            assert tuple(dict.fromkeys(step.title for step in question.steps)) == question.gold_titles
            assert {step.doc_id for step in question.steps} == set(question.gold_ids)
            assert question.steps[-1].answer in question.answers
            assert not any("#1" in step.question for step in question.steps[1:])


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_questions_without_paragraphs(name: str) -> None:
    dataset, count = OTHERS[name]
    questions = list(load_questions(sample(name)))
    assert len(questions) == len({question.question_id for question in questions}) == count
    assert {question.dataset for question in questions} == {dataset}
    assert all(question.question and not question.paragraphs for question in questions)


def test_two_forms_of_bamboogle_ask_the_same() -> None:
    lines = load_questions(sample("bamboogle_test_125.jsonl"))
    rows = load_questions(sample("verl_bamboogle_test.parquet"))
    for line, row in zip(lines, rows, strict=True):
        assert (row.question_id, row.question, row.answers) == (line.question_id, line.question, line.answers)


def test_metrics_on_real_answers_with_aliases() -> None:
    question = next(q for q in load_questions(sample("triviaqa_test_100.jsonl.gz")) if q.answers[0] == "Mark Twain")
    assert exact_match("samuel l clemens", question.answers) == 1.0
    assert cover_exact_match("It was Mark Twain, of course.", question.answers) == 1.0
    assert answer_scores("Mark", question.answers, rule_of(question.dataset)).f1 == pytest.approx(2 / 3)


def test_the_files_of_a_generated_world_are_questions_and_a_corpus(tmp_path: Path) -> None:
    world = make_world(WorldOptions(pages=300, questions=40))
    write_world(world, tmp_path / "w", new_world=None)
    for split, questions in world.questions.items():
        assert tuple(load_questions(tmp_path / "w" / f"{split}.jsonl")) == questions
    assert tuple(read_corpus(tmp_path / "w" / "corpus.jsonl")) == world.pages
