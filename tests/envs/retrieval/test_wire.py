from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.multihop_qa.records import passage_id
from envs.retrieval.protocol import Hit, Passage
from envs.retrieval.wire import read_answer, read_document, split_contents, write_answer, write_document, write_request

passages = st.builds(Passage, st.text(min_size=1), st.text(), st.text())
hits = st.builds(Hit, passages, st.floats(-1e6, 1e6))


def test_the_request_is_search_r1s() -> None:
    assert write_request(("a", "b"), 3) == {"queries": ["a", "b"], "topk": 3, "return_scores": True}


def test_the_answer_is_search_r1s() -> None:
    found = [[Hit(Passage("7", "Pau", "A town."), 1.5)], []]
    document = {"id": "7", "title": "Pau", "contents": '"Pau"\nA town.'}
    assert write_answer(found, scores=True) == {"result": [[{"document": document, "score": 1.5}], []]}
    assert write_answer(found, scores=False) == {"result": [[document], []]}


@given(st.lists(st.lists(hits, max_size=3), max_size=3))
def test_what_is_written_is_read_back(found: list[list[Hit]]) -> None:
    answer = json.loads(json.dumps(write_answer(found, scores=True)))
    assert read_answer(answer, num_queries=len(found), k=3) == found


@given(st.lists(hits, max_size=5))
def test_without_scores_the_order_stays_and_scores_fall(found: list[Hit]) -> None:
    answer = json.loads(json.dumps(write_answer([found], scores=False)))
    (read,) = read_answer(answer, num_queries=1, k=5)
    assert [one.passage for one in read] == [one.passage for one in found]
    assert [one.score for one in read] == [1.0 / (rank + 1) for rank in range(len(found))]


def test_what_is_beyond_k_is_left_out() -> None:
    answer = write_answer([[Hit(Passage(str(number), "", "x"), 1.0) for number in range(5)]], scores=True)
    assert len(read_answer(answer, num_queries=1, k=2)[0]) == 2


@pytest.mark.parametrize(
    ("document", "passage"),
    [
        (
            {"id": "0", "contents": '"Evan Morris"\nEvan L. Morris was'},
            Passage("0", "Evan Morris", "Evan L. Morris was"),
        ),
        ({"id": 7, "contents": "Plain title\ntext\nmore"}, Passage("7", "Plain title", "text\nmore")),
        ({"id": "1", "title": "T", "text": "x"}, Passage("1", "T", "x")),
        ({"id": "1", "text": "x"}, Passage("1", "", "x")),
        ({"id": "1", "contents": "only a line"}, Passage("1", "", "only a line")),
        ({"contents": '"T"\nx', "wikipedia_id": "12"}, Passage(passage_id("T", "x"), "T", "x")),
        ({"id": None, "title": "T", "text": "x"}, Passage(passage_id("T", "x"), "T", "x")),
        ({"id": "1", "title": "T", "contents": '"T"\nx', "text": "other"}, Passage("1", "T", "x")),
        ({"id": "\ud800", "contents": "T\udfff\nx\ud83d\ude00"}, Passage("\ufffd", "T\ufffd", "x\U0001f600")),
        ({"title": "T", "text": "\ud800"}, Passage(passage_id("T", "\ufffd"), "T", "\ufffd")),
    ],
)
def test_documents_come_in_both_forms(document: dict[str, Any], passage: Passage) -> None:
    assert read_document(document) == passage


@pytest.mark.parametrize(
    ("contents", "parts"),
    [
        ('"The ""Old"" Man"\ntext', ('The "Old" Man', "text")),
        ("\ntext", ("", "text")),
        ('"\ntext', ('"', "text")),
        ("", ("", "")),
    ],
)
def test_contents_are_a_title_line_and_text(contents: str, parts: tuple[str, str]) -> None:
    assert split_contents(contents) == parts


@given(passages)
def test_the_title_line_alone_gives_a_title_of_one_line_back(passage: Passage) -> None:
    contents = write_document(passage)["contents"]
    assert split_contents(contents) == (" ".join(passage.title.splitlines()), passage.text)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, 'no list "result"'),
        ({"results": []}, 'no list "result"'),
        ({"result": {}}, 'no list "result"'),
        ({"result": [[], []]}, "2 results for 1 queries"),
        ({"result": ["x"]}, "result is str, not a list"),
        ({"result": [["x"]]}, "entry 0 of a result is str"),
        ({"result": [[{"document": "x", "score": 1}]]}, "document 0 of a result is str"),
        ({"result": [[{"document": {"text": "x"}, "score": "high"}]]}, "score 0 of a result is 'high'"),
        ({"result": [[{"document": {"text": "x"}, "score": None}]]}, "score 0 of a result is None"),
        ({"result": [[{"document": {"text": "x"}, "score": 10**400}]]}, "score 0 of a result is a number without end"),
        ({"result": [[{"id": "1", "body": "x"}]]}, r"it has \['body', 'id'\]"),
        ({"result": [[{"id": "1", "title": "x"}]]}, 'needs "contents", or "title" and "text"'),
    ],
)
def test_an_answer_that_is_none_is_said_to_be(answer: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_answer(answer, num_queries=1, k=3)
