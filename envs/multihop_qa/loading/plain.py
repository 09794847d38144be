"""Records that bring a question and its answers, with or without more: FlashRAG, verl, R1-Searcher, plain, our own.

Never: files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from envs.multihop_qa.loading.multihop import gold_answers
from envs.multihop_qa.loading.record import Record
from envs.multihop_qa.records import Question, SubQuestion

ALTERNATIVES_SEPARATOR = "|"

_QUESTION_MARKER = "Question:"


def flashrag(record: Record, number: int) -> Question:
    """FlashRAG's lines, which Search-R1, Tree-GRPO and AT²PO read too."""
    metadata = record.record("metadata") if record.has("metadata") else record.inside("metadata", {})
    return Question(
        question_id=record.identity("id") or str(number),
        question=record.text("question"),
        answers=_distinct(record, "golden_answers", record.fields.get("golden_answers")),
        dataset="flashrag",
        kind=metadata.text_or_empty("type") or metadata.text_or_empty("kind"),
    )


def verl(record: Record, number: int) -> Question:
    """verl's rows; the data set is the last part of `data_source`.

    The ground truth is a text, a list of texts, or an object with either as its target. The question is the column of
    that name, or `extra_info.question`, or the last user message (behind its last "Question:", where it has one).
    """
    extra = record.record("extra_info") if record.has("extra_info") else record.inside("extra_info", {})
    reward = record.record("reward_model")
    truth = reward.fields.get("ground_truth")
    if isinstance(truth, Mapping):
        reward = reward.as_record("ground_truth", truth)
        answers = _distinct(reward, "target", truth.get("target"))
    else:
        answers = _distinct(reward, "ground_truth", truth)
    index = extra.identity("index")
    split = extra.text_or_empty("split")
    return Question(
        question_id=record.identity("id") or (f"{split}_{index}" if split and index else index) or str(number),
        question=_verl_question(record, extra),
        answers=answers,
        dataset=record.text("data_source").rstrip("/").rpartition("/")[2],
    )


def r1_searcher(record: Record, number: int) -> Question:
    """R1-Searcher's records: idx, question, one answer."""
    return Question(
        question_id=record.identity("idx") or str(number),
        question=record.text("question"),
        answers=gold_answers(record, "answer"),
        dataset="r1_searcher",
    )


def jsonl(record: Record, number: int) -> Question:
    """A question with `answers` (a list) or `answer` (a text, or a list); an id if there is one."""
    name = "answers" if record.has("answers") else "answer"
    return Question(
        question_id=record.identity("id", "_id", "question_id") or str(number),
        question=record.text("question"),
        answers=_distinct(record, name, record.fields.get(name)),
    )


def table(record: Record, number: int) -> Question:
    """A row of CSV or TSV with the columns question and answer, or answers with | between alternatives; an id column
    if there is one. The cell of `answer` is one answer, whatever it holds."""
    if "answers" in record.fields:
        cell = record.text("answers")
        answers = _distinct(record, "answers", [part.strip() for part in cell.split(ALTERNATIVES_SEPARATOR)])
    else:
        answers = gold_answers(record, "answer")
    return Question(
        question_id=(record.text_or_empty("id") if record.has("id") else "") or str(number),
        question=record.text("question"),
        answers=answers,
    )


def world(record: Record, number: int) -> Question:
    """What `Question.to_task` puts into a task's data: the lines of a generated world."""
    return Question(
        question_id=record.text("question_id"),
        question=record.text("question"),
        answers=_distinct(record, "answers", record.items("answers")),
        dataset=record.text_or_empty("dataset"),
        kind=record.text_or_empty("kind"),
        hops=record.whole("hops") if record.has("hops") else 0,
        level=record.text_or_empty("level"),
        gold_titles=tuple(record.texts("gold_titles")) if record.has("gold_titles") else (),
        gold_ids=tuple(record.texts("gold_ids")) if record.has("gold_ids") else (),
        supporting_facts=tuple(_facts(record)),
        evidences=tuple(_triples(record)),
        steps=tuple(_steps(record)),
    )


def _verl_question(record: Record, extra: Record) -> str:
    for holder in (record, extra):
        if holder.has("question"):
            return holder.text("question")
    messages = [message for message in record.records("prompt") if message.text("role") == "user"]
    if not messages:
        raise record.wrong("prompt", "messages of which one is the user's", record.fields["prompt"])
    content = messages[-1].text("content")
    question = content.rpartition(_QUESTION_MARKER)[2].strip()
    if not question:
        raise record.wrong("prompt", "messages whose last one by the user holds the question", content)
    return question


def _distinct(record: Record, label: str, value: object) -> tuple[str, ...]:
    """Gold answers from a text or a list of texts: distinct, without blank ones, at least one."""
    if value is None:
        raise record.wrong(label, "there (questions without gold answers, as in test splits, cannot be judged)")
    texts = [record.as_text(label, value)] if isinstance(value, str) else record.as_texts(label, value)
    answers = tuple(dict.fromkeys(text for text in texts if text.strip()))
    if not answers:
        raise record.wrong(label, "at least one answer that is not blank", value)
    return answers


def _rows(record: Record, name: str, length: int) -> Iterable[list[object]]:
    items = record.items(name) if record.has(name) else []
    return [record.as_list(f"{name}[{i}]", item, length) for i, item in enumerate(items)]


def _facts(record: Record) -> Iterable[tuple[str, int]]:
    for i, (title, sentence) in enumerate(_rows(record, "supporting_facts", 2)):
        label = f"supporting_facts[{i}]"
        yield record.as_text(f"{label}[0]", title), record.as_whole(f"{label}[1]", sentence)


def _triples(record: Record) -> Iterable[tuple[str, str, str]]:
    for i, row in enumerate(_rows(record, "evidences", 3)):
        subject, relation, obj = record.as_texts(f"evidences[{i}]", row)
        yield subject, relation, obj


def _steps(record: Record) -> Iterable[SubQuestion]:
    for i, row in enumerate(_rows(record, "steps", len(SubQuestion._fields))):
        yield SubQuestion(*record.as_texts(f"steps[{i}]", row))
