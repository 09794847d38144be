"""Corpora out of files and questions: forms, identities, and the number of distinct paragraphs in the real samples."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.multihop_qa.corpora import from_questions, merge, read_corpus
from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.records import Question, passage_id
from envs.retrieval.protocol import Passage
from envs.retrieval.wire import read_document
from tests.envs.multihop_qa.samples import QUESTIONS_WITH_CONTEXT, sample, write_lines
from trace_async.errors import ConfigError

TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
FILLED = TEXTS.filter(str.strip)
same_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def passage(title: str, text: str, doc_id: str = "") -> Passage:
    return Passage(doc_id or passage_id(title, text), title, text)


def read(folder: Path, *records: object) -> list[Passage]:
    return list(read_corpus(write_lines(folder / "corpus.jsonl", records)))


@pytest.mark.parametrize(
    ("contents", "title", "text"),
    [
        ('"Evan Morris"\nEvan is.', "Evan Morris", "Evan is."),
        ("Evan Morris\nEvan is.\nMore.", "Evan Morris", "Evan is.\nMore."),
        ('"""Weird Al"" Yankovic"\nAl is.', '"Weird Al" Yankovic', "Al is."),
        ('"Heroes" (album)\nAn album.', '"Heroes" (album)', "An album."),
        ('"\nx', '"', "x"),
        ("no title here", "", "no title here"),
        ("Title\n", "Title", ""),
    ],
)
def test_the_first_line_of_contents_is_the_title(tmp_path: Path, contents: str, title: str, text: str) -> None:
    assert read(tmp_path, {"id": "7", "contents": contents}) == [Passage("7", title, text)]


def test_a_title_of_its_own_goes_before_the_first_line(tmp_path: Path) -> None:
    """As it does for documents that come from a retrieval server."""
    document = {"id": "7", "title": "T\nU", "contents": '"T U"\nx'}
    assert read(tmp_path, document) == [Passage("7", "T\nU", "x")] == [read_document(document)]


def test_titles_and_texts_with_and_without_ids(tmp_path: Path) -> None:
    records = [
        {"title": "T", "text": "x"},
        {"id": "vital_0", "title": "T", "text": "x", "topic": "y"},
        {"_id": 3, "text": "z"},
    ]
    assert read(tmp_path, *records) == [passage("T", "x"), Passage("vital_0", "T", "x"), Passage("3", "", "z")]
    packed = tmp_path / "corpus.json.gz"
    packed.write_bytes(gzip.compress(json.dumps(records).encode()))
    assert list(read_corpus(packed)) == read(tmp_path, *records)
    table = tmp_path / "corpus.tsv"
    table.write_text("id\ttext\ttitle\n1\tx y\tT\n", encoding="utf-8")
    assert list(read_corpus(table)) == [Passage("1", "T", "x y")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"title": "T"},
            r"jsonl, line 2: field 'text' of a corpus record must be there.*\(fields there: title\)",
        ),
        ({"title": 5, "text": "x"}, "field 'title' .* must be a text, found int 5"),
        ({"id": "1", "contents": ["x"]}, r"field 'contents' .* must be a text, found list \['x'\]"),
        ({"id": [], "text": "x"}, "field 'id' .* must be a text"),
        ([], "line 2: a record must be a JSON object"),
    ],
)
def test_what_is_no_passage_is_named(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, {"title": "T", "text": "x"}, record)


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no passage; check"):
        read(tmp_path)


def test_merged_corpora_hold_each_document_once_in_order() -> None:
    a, b, c = passage("A", "a"), passage("B", "b"), passage("C", "c")
    assert list(merge([b, a, b], [], [c, a])) == [b, a, c]
    assert list(merge()) == []


def test_one_id_for_two_documents_is_refused() -> None:
    merged = merge([Passage("0", "A", "a")], [Passage("0", "B", "b")])
    assert next(merged).title == "A"
    with pytest.raises(ConfigError, match="id '0' stands for two passages, the second titled 'B'; give"):
        next(merged)


def test_paragraphs_of_questions_are_a_corpus() -> None:
    a, b, c = passage("A", "a"), passage("B", "b"), passage("A", "c")
    questions = [
        Question(question_id=str(i), question="?", answers=("x",), paragraphs=paragraphs)
        for i, paragraphs in enumerate([(a, b), (), (b, c)])
    ]
    assert list(from_questions(questions)) == [a, b, c]


def test_streams_are_read_only_as_far_as_they_are_asked() -> None:
    def endless() -> Iterator[Passage]:
        number = 0
        while True:
            number += 1
            yield passage(str(number), "")

    merged = merge(endless())
    assert [next(merged).title for _ in range(3)] == ["1", "2", "3"]


@same_folder
@given(st.lists(st.tuples(FILLED, TEXTS, FILLED), min_size=1, max_size=4))
def test_round_trip_of_passages(tmp_path: Path, drawn: list[tuple[str, str, str]]) -> None:
    expected = [Passage(doc_id, title, text) for doc_id, title, text in drawn]
    assert read(tmp_path, *({"id": p.doc_id, "title": p.title, "text": p.text} for p in expected)) == expected
    assert read(tmp_path, *({"title": p.title, "text": p.text} for p in expected)) == [
        passage(p.title, p.text) for p in expected
    ]
    quoted = [
        {"id": p.doc_id, "contents": '"{}"\n{}'.format(p.title.replace('"', '""'), p.text)}
        for p in expected
        if "\n" not in p.title
    ]
    if quoted:
        assert read(tmp_path, *quoted) == [p for p in expected if "\n" not in p.title]


def test_the_first_passage_of_the_example_of_search_r1() -> None:
    passages = list(read_corpus(sample("searchr1_example_corpus.jsonl")))
    assert len(passages) == 10
    assert passages[0].title == "Evan Morris"
    assert passages[0].text.startswith("Evan Morris Evan L. Morris (January 26, 1977 – July 9, 2015) was a lobbyist")


def test_the_samples_hold_18_565_distinct_paragraphs_and_28_598_with_the_vital_leads() -> None:
    """Sentences joined as each data set joins them give equal paragraphs equal texts; other ways give more."""
    questions = (question for name in QUESTIONS_WITH_CONTEXT for question in load_questions(sample(name)))
    corpus = list(merge(from_questions(questions), read_corpus(sample("2wikimultihopqa_corpus_6119.jsonl.gz"))))
    assert len(corpus) == 18_565
    assert sum(len(p.title) + len(p.text) for p in corpus) == pytest.approx(8.9e6, rel=0.02)
    assert all(p.doc_id == passage_id(p.title, p.text) for p in corpus)
    assert len(list(merge(corpus, read_corpus(sample("wikipedia_vital10k_leads.jsonl.gz"))))) == 28_598
