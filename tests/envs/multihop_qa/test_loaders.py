"""Each format is read for what it says, on records written by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from envs.multihop_qa.loading import FORMATS, load_questions, parse_source
from envs.multihop_qa.records import Question, SubQuestion, passage_id
from envs.retrieval.protocol import Passage
from tests.envs.multihop_qa.samples import (
    FLASHRAG,
    HOTPOTQA,
    MUSIQUE,
    TWO_WIKI,
    VERL,
    load,
    nested,
    write_lines,
    write_parquet,
)
from trace_async.errors import ConfigError


def test_hotpotqa(tmp_path: Path) -> None:
    scott, ed = passage_id("Scott", "Scott is."), passage_id("Ed", "Ed is. He was.")
    assert load(tmp_path, HOTPOTQA) == [
        Question(
            question_id="h1",
            question="Were Scott and Ed of the same nationality?",
            answers=("yes",),
            dataset="hotpotqa",
            kind="comparison",
            hops=2,
            level="hard",
            gold_titles=("Scott", "Ed"),
            gold_ids=(scott, ed),
            supporting_facts=(("Scott", 0), ("Ed", 1), ("Scott", 2)),
            paragraphs=(
                Passage(ed, "Ed", "Ed is. He was."),
                Passage(passage_id("Other", "No."), "Other", "No."),
                Passage(scott, "Scott", "Scott is."),
            ),
        )
    ]


@pytest.mark.parametrize("record", [HOTPOTQA, TWO_WIKI])
def test_the_nested_form_says_the_same_as_the_list_form(tmp_path: Path, record: dict[str, Any]) -> None:
    assert load(tmp_path, nested(record)) == load(tmp_path, record)
    assert list(load_questions(write_parquet(tmp_path / "a.parquet", [nested(record)]))) == load(tmp_path, record)


def test_hotpotqa_may_lack_gold_paragraphs_and_point_beyond_a_paragraph(tmp_path: Path) -> None:
    (question,) = load(tmp_path, {**HOTPOTQA, "supporting_facts": [["Absent", 0], ["Ed", 99]]})
    assert question.gold_titles == ("Absent", "Ed")
    assert question.gold_ids == (passage_id("Ed", "Ed is. He was."),)


def test_2wiki_joins_sentences_with_a_space(tmp_path: Path) -> None:
    two_sentences = {**TWO_WIKI, "context": [["Ed", ["Ed is.", "He was."]]]}
    (question,) = load(tmp_path, two_sentences)
    assert question.paragraphs == (Passage(passage_id("Ed", "Ed is. He was."), "Ed", "Ed is. He was."),)
    assert question.dataset == "2wiki"
    assert question.evidences == (("Ed", "country", "US"), ("Scott", "country", "US"))


@pytest.mark.parametrize(
    ("kind", "hops"), [("bridge_comparison", 4), ("comparison", 2), ("compositional", 2), ("inference", 2)]
)
def test_hops_of_2wiki_follow_its_type(tmp_path: Path, kind: str, hops: int) -> None:
    (question,) = load(tmp_path, {**TWO_WIKI, "type": kind})
    assert (question.kind, question.hops) == (kind, hops)


def test_aliases_of_2wiki_extend_the_answers_by_wikidata_id(tmp_path: Path) -> None:
    aliases = write_lines(
        tmp_path / "aliases.json",
        [
            {"Q_id": "Q7", "aliases": ["yeah", "yes", ""], "demonyms": ["yup", "yeah"]},
            {"Q_id": "Q8", "aliases": [], "demonyms": []},
        ],
    )
    records = [TWO_WIKI, {**TWO_WIKI, "answer_id": "Q8"}, {**TWO_WIKI, "answer_id": None}]
    answers = [question.answers for question in load(tmp_path, *records, aliases=aliases)]
    assert answers == [("yes", "yeah", "yup"), ("yes",), ("yes",)]
    assert [question.answers for question in load(tmp_path, *records)] == [("yes",)] * 3
    assert load(tmp_path, HOTPOTQA, aliases=aliases) == load(tmp_path, HOTPOTQA)


def test_musique_fills_back_references_and_follows_its_path(tmp_path: Path) -> None:
    (question,) = load(tmp_path, MUSIQUE)
    first, more, last = (passage_id("X", "About X."), passage_id("X", "More on X."), passage_id("Z", "About Z."))
    assert question == Question(
        question_id="3hop2__1_2_3",
        question="Who leads it?",
        answers=("Zoe", "Zoë"),
        dataset="musique",
        kind="3hop2",
        hops=3,
        gold_titles=("X", "Z"),
        gold_ids=(more, last, first),
        steps=(
            SubQuestion("X >> part of", "Ypsi", "X", more),
            SubQuestion("which Ypsi hit had #2 in it", "$1 \\g<0>", "Z", last),
            SubQuestion("$1 \\g<0> and Ypsi >> #3 #12 #0", "Zoe", "X", first),
        ),
        paragraphs=question.paragraphs,
    )
    assert [passage.text for passage in question.paragraphs] == ["About X.", "About Y.", "More on X.", "About Z."]


def test_the_unanswerable_copy_of_a_musique_question_has_a_kind_and_an_id_of_its_own(tmp_path: Path) -> None:
    steps = [{**step, "paragraph_support_idx": None} for step in MUSIQUE["question_decomposition"]]
    copy = {**MUSIQUE, "answerable": False, "question_decomposition": steps}
    answerable, unanswerable = load(tmp_path, MUSIQUE, copy)
    assert unanswerable.question_id == "3hop2__1_2_3/unanswerable" != answerable.question_id
    assert (unanswerable.kind, unanswerable.hops) == ("unanswerable", 3)
    assert unanswerable.steps[0] == SubQuestion("X >> part of", "Ypsi", "", "")
    assert unanswerable.gold_titles == ("X", "Z")


def test_flashrag(tmp_path: Path) -> None:
    record = {**FLASHRAG, "golden_answers": ["A", "B", "A"]}
    bare = {"id": 7, "question": "who?", "golden_answers": ["A"]}
    assert load(tmp_path, record, bare) == [
        Question(question_id="test_0", question="who?", answers=("A", "B"), dataset="flashrag", kind="x"),
        Question(question_id="7", question="who?", answers=("A",), dataset="flashrag"),
    ]


@pytest.mark.parametrize("truth", ["A", ["A"], {"target": ["A"]}, {"target": "A"}])
@pytest.mark.parametrize("container", ["parquet", "jsonl"])
def test_verl_takes_every_form_of_ground_truth(tmp_path: Path, truth: object, container: str) -> None:
    row = {**VERL, "reward_model": {"style": "rule", "ground_truth": truth}}
    path = tmp_path / f"file.{container}"
    write_parquet(path, [row]) if container == "parquet" else write_lines(path, [row])
    (question,) = load_questions(path)
    assert question == Question(question_id="train_5", question="who?", answers=("A",), dataset="nq")


@pytest.mark.parametrize(
    ("change", "question", "question_id"),
    [
        ({}, "of the prompt?", "0"),
        ({"extra_info": {"question": "of extra_info?", "index": 3}}, "of extra_info?", "3"),
        ({"question": "of the column?", "id": "train_9", "extra_info": None}, "of the column?", "train_9"),
        ({"question": "of the column?", "extra_info": {"question": "of extra_info?"}}, "of the column?", "1"),
        ({"extra_info": None}, "of the prompt?", "1"),
        ({"prompt": [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}]}, "last", "0"),
    ],
)
def test_where_verl_keeps_the_question(tmp_path: Path, change: dict[str, Any], question: str, question_id: str) -> None:
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": "of the prompt?"}, {"role": "assistant", "content": "no"}],
        "reward_model": {"ground_truth": "A"},
        "extra_info": {"index": 0},
        **change,
    }
    (loaded,) = load(tmp_path, row)
    assert (loaded.question, loaded.question_id) == (question, question_id)


def test_r1_searcher_and_plain_lines(tmp_path: Path) -> None:
    assert load(tmp_path, {"idx": 3, "question": "who?", "answer": "A"}) == [
        Question(question_id="3", question="who?", answers=("A",), dataset="r1_searcher")
    ]
    plain = [{"question": "who?", "answer": "A|B"}, {"question": "who?", "answers": ["A", "B"], "id": "x"}]
    assert load(tmp_path, *plain) == [
        Question(question_id="1", question="who?", answers=("A|B",)),
        Question(question_id="x", question="who?", answers=("A", "B")),
    ]


def test_tables(tmp_path: Path) -> None:
    path = tmp_path / "file.csv"
    path.write_text('\ufeffquestion, answer\r\n"who, ""now""?","A|B\r\nC"\r\n\r\nwhere?, D\r\n', encoding="utf-8")
    assert [(q.question_id, q.question, q.answers) for q in load_questions(path)] == [
        ("1", 'who, "now"?', ("A|B\r\nC",)),
        ("2", "where?", (" D",)),
    ]
    path = tmp_path / "file.tsv"
    path.write_text("id\tquestion\tanswers\tnote\nq7\twho?\tA | B||A\t\n", encoding="utf-8")
    assert list(load_questions(path)) == [Question(question_id="q7", question="who?", answers=("A", "B"))]


def test_any_format_may_come_as_lines_or_list_packed_or_not(tmp_path: Path) -> None:
    records = [HOTPOTQA, {**HOTPOTQA, "_id": "h2"}]
    expected = load(tmp_path, *records)
    text = json.dumps(records, indent=2).encode()
    (tmp_path / "a.json").write_bytes(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text))
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(map(json.dumps, records)).encode())
    (tmp_path / "d").write_bytes(gzip.compress((tmp_path / "c.jsonl").read_bytes()))
    for name in ("a.json", "b.json.gz", "c.jsonl", "d"):
        assert list(load_questions(tmp_path / name)) == expected
        assert list(load_questions(tmp_path / name, format="hotpotqa")) == expected


def test_a_stream_is_read_only_as_far_as_it_is_asked(tmp_path: Path) -> None:
    """The second question is damaged, and nobody notices until it is asked for."""
    path = tmp_path / "file.json"
    path.write_text(f"[{json.dumps(HOTPOTQA)}, {{]", encoding="utf-8")
    questions = load_questions(path)
    assert next(questions).question_id == "h1"
    with pytest.raises(ConfigError, match="element 2"):
        next(questions)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hotpotqa:/data/a.json", ("hotpotqa", Path("/data/a.json"))),
        ("a.json", ("auto", Path("a.json"))),
        ("./odd:name.json", ("auto", Path("odd:name.json"))),
        ("auto:a:b", ("auto", Path("a:b"))),
        ("C:\\data\\a.json", ("auto", Path("C:\\data\\a.json"))),
        ("world:~/w.jsonl", ("world", Path.home() / "w.jsonl")),
    ],
)
def test_sources_are_format_and_path(text: str, expected: tuple[str, Path]) -> None:
    assert parse_source(text) == expected


@pytest.mark.parametrize("text", ["squad:a.json", "", "verl:"])
def test_sources_that_are_neither_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"hotpotqa|FORMAT:PATH"):
        parse_source(text)


def test_every_format_has_a_name_and_others_are_refused(tmp_path: Path) -> None:
    assert FORMATS == (
        "auto",
        "hotpotqa",
        "2wiki",
        "musique",
        "flashrag",
        "verl",
        "r1_searcher",
        "jsonl",
        "csv",
        "world",
    )
    with pytest.raises(ConfigError, match="'squad' is no format"):
        load_questions(tmp_path / "absent", format="squad")
