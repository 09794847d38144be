"""Whatever is wrong with a file is a ConfigError that names the file, the place, the field and the cure."""

from __future__ import annotations

import copy
import gzip
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.records import Question
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

R1_SEARCHER = {"idx": 1, "question": "who?", "answer": "A"}
JSONL = {"id": "x", "question": "who?", "answers": ["A"]}
WORLD: dict[str, Any] = dict(
    Question(
        question_id="w",
        question="who?",
        answers=("A",),
        supporting_facts=(("T", 0),),
        evidences=(("s", "r", "o"),),
    )
    .to_task("train")
    .data
)
RECORDS: dict[str, dict[str, Any]] = {
    "hotpotqa": HOTPOTQA,
    "2wiki": TWO_WIKI,
    "musique": MUSIQUE,
    "flashrag": FLASHRAG,
    "verl": VERL,
    "r1_searcher": R1_SEARCHER,
    "jsonl": JSONL,
    "world": {**WORLD, "steps": [["q", "a", "t", "d"]]},
}
JUNK: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, -1, 1.5, "", " ", "x", "\ud800", [], [[]], ["x"], {}, {"target": 5}, 10**30]
)


@pytest.mark.parametrize(
    ("format", "change", "field", "found"),
    [
        ("hotpotqa", {"question": 5}, "question", "int 5"),
        ("hotpotqa", {"question": "  "}, "question", "str '  '"),
        ("hotpotqa", {"answer": None}, "answer", "nothing"),
        ("hotpotqa", {"_id": None}, "_id", "nothing"),
        ("hotpotqa", {"supporting_facts": [["A", "0"]]}, "supporting_facts[0][1]", "str '0'"),
        ("hotpotqa", {"supporting_facts": [["A", True]]}, "supporting_facts[0][1]", "bool True"),
        ("hotpotqa", {"supporting_facts": [["A", 0], ["A"]]}, "supporting_facts[1]", "list ['A']"),
        ("hotpotqa", {"supporting_facts": {"title": ["A"], "sent_id": []}}, "supporting_facts.sent_id", "list []"),
        ("hotpotqa", {"context": [["A", ["ok", 7]]]}, "context[0][1][1]", "int 7"),
        ("hotpotqa", {"context": [["A", "text"]]}, "context[0][1]", "str 'text'"),
        ("hotpotqa", {"context": {"title": ["A"]}}, "context.sentences", "nothing"),
        ("hotpotqa", {"context": None}, "context", "nothing"),
        ("2wiki", {"evidences": [["s", "r"]]}, "evidences[0]", "list ['s', 'r']"),
        ("2wiki", {"answer_id": 7}, "answer_id", "int 7"),
        ("musique", {"answerable": "yes"}, "answerable", "str 'yes'"),
        ("musique", {"paragraphs": [{"idx": 0, "title": "X"}]}, "paragraphs[0].paragraph_text", "nothing"),
        ("musique", {"paragraphs": [MUSIQUE["paragraphs"][0]] * 2}, "paragraphs[1].idx", "int 0"),
        ("musique", {"paragraphs": []}, "question_decomposition[0].paragraph_support_idx", "int 2"),
        ("musique", {"answer_aliases": "Zoë"}, "answer_aliases", "str 'Zoë'"),
        ("flashrag", {"golden_answers": []}, "golden_answers", "list []"),
        ("flashrag", {"golden_answers": [" "]}, "golden_answers", "list [' ']"),
        ("flashrag", {"golden_answers": None}, "golden_answers", "nothing"),
        ("flashrag", {"id": 1.5}, "id", "float 1.5"),
        ("verl", {"reward_model": {"ground_truth": {"target": 5}}}, "reward_model.ground_truth.target", "int 5"),
        ("verl", {"reward_model": {"style": "rule"}}, "reward_model.ground_truth", "nothing"),
        ("verl", {"prompt": [{"role": "system", "content": "x"}]}, "prompt", "list [{"),
        ("verl", {"prompt": [{"role": "user", "content": "Question: "}]}, "prompt", "str 'Question: '"),
        ("verl", {"data_source": 3}, "data_source", "int 3"),
        ("r1_searcher", {"answer": ["A"]}, "answer", "list ['A']"),
        ("jsonl", {"answers": [1]}, "answers[0]", "int 1"),
        ("jsonl", {"question": "\ud800"}, "question", "str"),
        ("world", {"answers": "A"}, "answers", "str 'A'"),
        ("world", {"hops": "2"}, "hops", "str '2'"),
        ("world", {"steps": [["q", "a"]]}, "steps[0]", "list ['q', 'a']"),
        ("world", {"gold_titles": "T"}, "gold_titles", "str 'T'"),
    ],
)
def test_a_damaged_field_is_named_with_its_file_line_and_cure(
    tmp_path: Path, format: str, change: dict[str, Any], field: str, found: str
) -> None:
    path = tmp_path / "file.jsonl"
    lines = [json.dumps(RECORDS[format]), "", json.dumps({**RECORDS[format], **change})]
    path.write_text("\n".join(lines), encoding="utf-8")
    expected = f"{path}, line 3: field {field!r} of a {format} record must be "
    with pytest.raises(
        ConfigError, match=f"^{re.escape(expected)}.*found {re.escape(found)}.*; mend the record"
    ) as told:
        list(load_questions(path, format=format))
    assert len(str(told.value)) < 500 + len(str(path))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", "holds no question; check"),
        ("a.jsonl", b"\n \n", "holds no question; check"),
        ("a.json", b"[]", "holds no question; check"),
        ("a.jsonl", b"{}\n", r"a.jsonl, line 1: no known format of questions has the fields \(none\); name the format"),
        ("a.jsonl", b'{"q": 1, "p": 2}\n', "line 1: no known format of questions has the fields p, q; name the format"),
        ("a.jsonl", b'{"question": "x"}\n', "fields question; name the format as FORMAT:PATH, one of hotpotqa, "),
        ("a.jsonl", b'{"question": \n', r"a.jsonl, line 1: not JSON \(Expecting value.*; write one JSON object a line"),
        ("a.jsonl", b'{"question": "x", "answer": "\xff"}\n', "line 1: not UTF-8 .*; convert the file"),
        ("a.jsonl", b"5\n", "line 1: a record must be a JSON object, found int; mend it"),
        ("a.jsonl", b"{" + b'"a":{' * 100_000, "line 1: not JSON"),
        (
            "a.json",
            b'[\n{"question": "x", "answer": "y"},\n[]]',
            r"element 2 \(line 3\): a record must be .* found list",
        ),
        (
            "a.json",
            b'[{"question": "x", "answer": "y"}\n',
            "a.json, line 2: the end of the text after element 1 .*; mend",
        ),
        ("a.json", b'[{"question": "x", "answer": "y"}, "\xff"]', "not UTF-8 .*; convert the file"),
        ("a.csv", b"question,question\n", "line 1: the header .* names a column twice; rename one"),
        ("a.csv", b"question,answer\nx\n", "line 2: 1 cells under 2 columns; quote"),
        ("a.csv", b'question,answer\n"x"y,z\n', r"line 2: not CSV \(.*\); mend the quoting"),
        (
            "a.csv",
            b"question,answer\nx,y\n,z\n",
            "line 3: field 'question' of a csv record must be a text that is not blank",
        ),
        ("a.csv", b"question,answers\nx,|\n", "line 2: field 'answers' of a csv record must be at least one answer"),
        ("a.csv", b"q,a\nx,y\n", r"line 2: field 'answer' of a csv record must be there .*\(fields there: a, q\)"),
        ("a.csv", b"question,answer\nx,\xff\n", "not UTF-8 .*; convert the file"),
        ("a.jsonl.gz", gzip.compress(b'{"question": "x"}' * 99)[:-9], "cannot be read .*; check .* fetch it again"),
        ("a.jsonl.gz", b"\x1f\x8bnothing", "cannot be read .*; check .* fetch it again"),
        ("a.parquet", b"PAR1 nothing PAR1", r"damaged Parquet after row 0 .*; fetch it again"),
    ],
)
def test_a_damaged_file_is_named_with_the_place_and_the_cure(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{re.escape(str(tmp_path))}.*{message}"):
        list(load_questions(tmp_path / name))


def test_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.jsonl: no such file; check the path"):
        next(load_questions(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"cannot be read .*; check its permissions"):
        next(load_questions(tmp_path))


def test_a_line_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.multihop_qa.loading.rows.MAX_LINE_BYTES", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps(JSONL) + "\n" + " " * 10_000, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2: longer than 1,000 bytes; write one record a line"):
        list(load_questions(tmp_path / "a.jsonl"))


def test_parquet_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'trace-async[parquet]'")):
        next(load_questions(tmp_path / "a.parquet"))


def test_rows_of_parquet_are_counted(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", [VERL, {**VERL, "data_source": None}])
    with pytest.raises(ConfigError, match=r"a.parquet, row 2: field 'data_source' of a verl record must be there"):
        list(load_questions(path))


def test_a_damaged_alias_file_is_named(tmp_path: Path) -> None:
    aliases = write_lines(tmp_path / "aliases.json", [{"Q_id": "Q1", "aliases": "x", "demonyms": []}])
    with pytest.raises(ConfigError, match=r"json, line 1: field 'aliases' of a 2wiki alias record must be a list"):
        load(tmp_path, TWO_WIKI, aliases=aliases)


def questions_or_none(path: Path, format: str = "auto") -> list[Question] | None:
    """What is loaded; None when a ConfigError that names the file is raised. Any other error fails the test."""
    try:
        return list(load_questions(path, format=format))
    except ConfigError as error:
        if not str(error).startswith(str(path)):
            raise
        return None


def paths(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a nested value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(deeper for key, part in inner for deeper in paths(part, (*path, key)))]


def damaged(record: dict[str, Any], draw: Callable[[st.SearchStrategy[Any]], Any]) -> object:
    """The record with one place replaced by junk or taken away."""
    record = copy.deepcopy(record)
    path = draw(st.sampled_from(paths(record)))
    if not path:
        return draw(JUNK)
    holder: Any = record
    for key in path[:-1]:
        holder = holder[key]
    if draw(st.booleans()):
        holder[path[-1]] = draw(JUNK)
    else:
        del holder[path[-1]]
    return record


@settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_damage_of_a_record_is_a_config_error_or_a_sound_question(tmp_path: Path, data: st.DataObject) -> None:
    format = data.draw(st.sampled_from(sorted(RECORDS)))
    record = RECORDS[format]
    record = nested(record) if "context" in record and data.draw(st.booleans()) else record
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps(damaged(record, data.draw)), encoding="utf-8")
    for asked in (format, "auto"):
        for question in questions_or_none(path, asked) or []:
            assert replace(question, paragraphs=()) == Question.from_data(question.to_task("x").data)
            assert question.question.strip()
            assert question.answers
            assert all(answer.strip() for answer in question.answers)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.jsonl.gz", "a.csv"])
def test_any_damage_of_the_bytes_is_a_config_error_or_gives_questions(tmp_path: Path, name: str) -> None:
    records = [HOTPOTQA, TWO_WIKI]
    whole = {
        "a.jsonl": "\n".join(map(json.dumps, records)).encode(),
        "a.json": json.dumps(records).encode(),
        "a.jsonl.gz": gzip.compress("\n".join(map(json.dumps, records)).encode()),
        "a.csv": 'question,answers\n"who, é?",A|B\nwhere?,"C\nD"\n'.encode(),
    }[name]
    rng = random.Random(name)
    told = 0
    for _ in range(120):
        content = bytearray(whole[: rng.randrange(1, len(whole))] if rng.random() < 0.2 else whole)
        content[rng.randrange(len(content))] = rng.choice([rng.randrange(256), *b'"[]{},\n\\'])
        (tmp_path / name).write_bytes(content)
        told += questions_or_none(tmp_path / name) is None
    assert told > 20


def test_any_damage_of_a_parquet_file_is_a_config_error_or_gives_questions(tmp_path: Path) -> None:
    whole = write_parquet(tmp_path / "a.parquet", [VERL] * 3).read_bytes()
    rng = random.Random(0)
    told = 0
    for _ in range(60):
        content = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.2 else whole)
        if content:
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        (tmp_path / "a.parquet").write_bytes(content)
        told += questions_or_none(tmp_path / "a.parquet") is None
    assert told > 10
