"""What is written in a format and loaded is what was written, for drawn questions."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.records import Question, SubQuestion, passage_id
from envs.retrieval.protocol import Passage
from tests.envs.multihop_qa.samples import load, nested, write_parquet

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
FILLED = TEXTS.filter(str.strip)
FACTS = st.lists(st.tuples(TEXTS, st.integers(0, 9)), max_size=3)
CONTEXTS = st.lists(st.tuples(TEXTS, st.lists(TEXTS, max_size=3)), max_size=3)
same_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def drawn(data: st.DataObject) -> Question:
    """A question with everything that a world's line can say."""
    return data.draw(
        st.builds(
            Question,
            question_id=FILLED,
            question=FILLED,
            answers=st.lists(FILLED, min_size=1, max_size=3, unique=True).map(tuple),
            dataset=TEXTS,
            kind=TEXTS,
            hops=st.integers(0, 5),
            level=TEXTS,
            gold_titles=st.lists(TEXTS, max_size=2).map(tuple),
            gold_ids=st.lists(TEXTS, max_size=2).map(tuple),
            supporting_facts=FACTS.map(tuple),
            evidences=st.lists(st.tuples(TEXTS, TEXTS, TEXTS), max_size=2).map(tuple),
            steps=st.lists(st.builds(SubQuestion, TEXTS, TEXTS, TEXTS, TEXTS), max_size=2).map(tuple),
        )
    )


@same_folder
@given(st.data())
def test_round_trip_of_our_own_lines(tmp_path: Path, data: st.DataObject) -> None:
    question = drawn(data)
    line = dict(question.to_task("train").data)
    assert load(tmp_path, line) == [question]
    assert Question.from_data(line) == question


@same_folder
@given(st.data(), CONTEXTS, FACTS)
def test_round_trip_of_hotpotqa_and_2wiki(
    tmp_path: Path, data: st.DataObject, context: list[tuple[str, list[str]]], facts: list[tuple[str, int]]
) -> None:
    question = replace(drawn(data), supporting_facts=tuple(facts), steps=(), hops=2)
    record = {
        "_id": question.question_id,
        "question": question.question,
        "answer": question.answers[0],
        "type": question.kind,
        "level": question.level,
        "supporting_facts": facts,
        "context": context,
    }
    for dataset, join, more in (("hotpotqa", "", {}), ("2wiki", " ", {"evidences": question.evidences})):
        passages = tuple(Passage(passage_id(t, join.join(s)), t, join.join(s)) for t, s in context)
        titles = tuple(dict.fromkeys(title for title, _ in facts))
        expected = replace(
            question,
            answers=question.answers[:1],
            dataset=dataset,
            evidences=question.evidences if more else (),
            gold_titles=titles,
            gold_ids=tuple(dict.fromkeys(p.doc_id for title in titles for p in passages if p.title == title)),
            paragraphs=passages,
        )
        assert load(tmp_path, record | more) == load(tmp_path, nested(record | more)) == [expected]


@same_folder
@given(FILLED, FILLED, st.lists(FILLED, min_size=1, max_size=3, unique=True))
def test_round_trip_of_question_and_answers(tmp_path: Path, name: str, question: str, answers: list[str]) -> None:
    expected = Question(question_id=name, question=question, answers=tuple(answers))
    flashrag = {"id": name, "question": question, "golden_answers": answers, "metadata": {}}
    assert load(tmp_path, flashrag) == [replace(expected, dataset="flashrag")]
    assert load(tmp_path, {"id": name, "question": question, "answers": answers}) == [expected]
    r1_searcher = {"idx": name, "question": question, "answer": answers[0]}
    assert load(tmp_path, r1_searcher) == [replace(expected, answers=expected.answers[:1], dataset="r1_searcher")]
    text = io.StringIO(newline="")
    csv.writer(text).writerows([["id", "question", "answer"], [name, question, answers[0]]])
    if "\0" not in text.getvalue():
        (tmp_path / "file.csv").write_bytes(text.getvalue().encode())
        assert list(load_questions(tmp_path / "file.csv")) == [replace(expected, answers=expected.answers[:1])]
    if not any("|" in answer or answer != answer.strip() for answer in answers) and "\0" not in "".join(answers):
        text = io.StringIO(newline="")
        csv.writer(text).writerows([["question", "answers"], ["who?", "|".join(answers)]])
        (tmp_path / "file.csv").write_bytes(text.getvalue().encode())
        assert [q.answers for q in load_questions(tmp_path / "file.csv")] == [tuple(answers)]


@settings(parent=same_folder, max_examples=15)
@given(st.lists(st.tuples(FILLED, st.lists(FILLED, min_size=1, max_size=3, unique=True)), min_size=1, max_size=3))
def test_round_trip_of_verl_parquet(tmp_path: Path, pairs: list[tuple[str, list[str]]]) -> None:
    rows = [
        {
            "data_source": "nq",
            "prompt": [{"role": "user", "content": "instruction"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": answers}},
            "extra_info": {"split": "dev", "index": i, "question": question},
        }
        for i, (question, answers) in enumerate(pairs)
    ]
    assert list(load_questions(write_parquet(tmp_path / "file.parquet", rows))) == [
        Question(question_id=f"dev_{i}", question=question, answers=tuple(answers), dataset="nq")
        for i, (question, answers) in enumerate(pairs)
    ]
