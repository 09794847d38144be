"""Where the real samples lie, for the tests that read them in place; records written by hand, and files of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from envs.multihop_qa.loading import load_questions
from envs.multihop_qa.records import Question

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"

QUESTIONS_WITH_CONTEXT = {
    "hotpotqa_dev_distractor_200.jsonl.gz": 200,
    "hotpotqa_dev_distractor_extra_100.jsonl.gz": 100,
    "hotpotqa_train_distractor_100.jsonl.gz": 100,
    "2wikimultihopqa_dev_164.jsonl.gz": 164,
    "2wikimultihopqa_train_500.jsonl.gz": 500,
    "musique_ans_dev_200.jsonl.gz": 200,
    "musique_ans_train_100.jsonl.gz": 100,
}
"""Number of questions by file."""

HOTPOTQA: dict[str, Any] = {
    "_id": "h1",
    "question": "Were Scott and Ed of the same nationality?",
    "answer": "yes",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Scott", 0], ["Ed", 1], ["Scott", 2]],
    "context": [["Ed", ["Ed is.", " He was."]], ["Other", ["No."]], ["Scott", ["Scott is."]]],
}
TWO_WIKI: dict[str, Any] = {
    **HOTPOTQA,
    "type": "bridge_comparison",
    "answer_id": "Q7",
    "entity_ids": "Q1_Q2",
    "evidences": [["Ed", "country", "US"], ["Scott", "country", "US"]],
    "evidences_id": [],
}
MUSIQUE: dict[str, Any] = {
    "id": "3hop2__1_2_3",
    "paragraphs": [
        {"idx": 0, "title": "X", "paragraph_text": "About X.", "is_supporting": True},
        {"idx": 1, "title": "Y", "paragraph_text": "About Y.", "is_supporting": False},
        {"idx": 2, "title": "X", "paragraph_text": "More on X.", "is_supporting": True},
        {"idx": 3, "title": "Z", "paragraph_text": "About Z.", "is_supporting": True},
    ],
    "question": "Who leads it?",
    "question_decomposition": [
        {"id": 1, "question": "X >> part of", "answer": "Ypsi", "paragraph_support_idx": 2},
        {"id": 2, "question": "which #1 hit had #2 in it", "answer": "$1 \\g<0>", "paragraph_support_idx": 3},
        {"id": 3, "question": "#2 and #1 >> #3 #12 #0", "answer": "Zoe", "paragraph_support_idx": 0},
    ],
    "answer": "Zoe",
    "answer_aliases": ["Zoë", "Zoe", " "],
    "answerable": True,
}
FLASHRAG: dict[str, Any] = {"id": "test_0", "question": "who?", "golden_answers": ["A", "B"], "metadata": {"type": "x"}}
VERL: dict[str, Any] = {
    "data_source": "some/nq",
    "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Do so.\nQuestion: who?\n"}],
    "ability": "fact-reasoning",
    "reward_model": {"style": "rule", "ground_truth": {"target": ["A"]}},
    "extra_info": {"split": "train", "index": 5},
}


def sample(name: str) -> Path:
    """The file, or a skipped test."""
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    return path


def write_lines(path: Path, records: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def load(folder: Path, *records: object, format: str = "auto", aliases: Path | None = None) -> list[Question]:
    return list(load_questions(write_lines(folder / "file.jsonl", records), format=format, aliases=aliases))


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def nested(record: dict[str, Any]) -> dict[str, Any]:
    """The form with objects of parallel lists."""
    facts, context = record["supporting_facts"], record["context"]
    return {
        **{key: value for key, value in record.items() if key != "_id"},
        "id": record["_id"],
        "supporting_facts": {"title": [title for title, _ in facts], "sent_id": [number for _, number in facts]},
        "context": {"title": [title for title, _ in context], "sentences": [lines for _, lines in context]},
    }
