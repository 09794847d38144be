"""Records of the data sets that bring paragraphs and evidence: HotpotQA, 2WikiMultihopQA, MuSiQue.

A paragraph's identity is `passage_id(title, text)`; sentences are joined so that equal paragraphs of different files
get the same text: HotpotQA's carry their own leading spaces, 2Wiki's are joined with one. Never: files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from envs.multihop_qa.loading.record import Record
from envs.multihop_qa.records import Question, SubQuestion, passage_id
from envs.retrieval.protocol import Passage

NUM_HOTPOTQA_HOPS = 2
UNANSWERABLE = "unanswerable"

_BACK_REFERENCE = re.compile(r"#([0-9]{1,3})(?![0-9])")
_MUSIQUE_GRAPH = re.compile(r"(\d)hop\d*")


def gold_answers(record: Record, answer: str, aliases: Iterable[str] = ()) -> tuple[str, ...]:
    """The answer, then its aliases, distinct and without blank ones."""
    if not record.has(answer):
        raise record.wrong(answer, "there (questions without gold answers, as in test splits, cannot be judged)")
    return tuple(dict.fromkeys([record.text(answer), *(alias for alias in aliases if alias.strip())]))


def hotpotqa(record: Record) -> Question:
    """The list form and the nested form, in which `context` and `supporting_facts` are objects of parallel lists."""
    return _with_context(record, "hotpotqa", "".join, NUM_HOTPOTQA_HOPS)


def two_wiki(record: Record, aliases: Mapping[str, Sequence[str]]) -> Question:
    """HotpotQA's forms with evidences; `aliases` by Wikidata id extend the answers."""
    known = aliases.get(record.text_or_empty("answer_id"), ())
    hops = 4 if record.text_or_empty("type") == "bridge_comparison" else 2
    return _with_context(record, "2wiki", " ".join, hops, known)


def musique(record: Record) -> Question:
    """Sub-questions get the answers of earlier ones filled in for #1, #2, ....

    MuSiQue-Full holds each question twice under one id: the copy whose paragraphs do not answer it gets the kind
    "unanswerable" and an id of its own.
    """
    question_id = record.text("id")
    graph = _MUSIQUE_GRAPH.match(question_id)
    answerable = record.flag("answerable") if record.has("answerable") else True
    pages, supporting = _musique_paragraphs(record)
    steps = _musique_steps(record, pages)
    gold = {p.doc_id: p.title for p in [pages[i] for _, i in steps if i is not None] + supporting}
    aliases = record.texts("answer_aliases") if record.has("answer_aliases") else ()
    return Question(
        question_id=question_id if answerable else f"{question_id}/{UNANSWERABLE}",
        question=record.text("question"),
        answers=gold_answers(record, "answer", aliases),
        dataset="musique",
        kind=UNANSWERABLE if not answerable else graph[0] if graph else "",
        hops=int(graph[1]) if graph else len(steps),
        gold_titles=tuple(dict.fromkeys(gold.values())),
        gold_ids=tuple(gold),
        steps=tuple(step for step, _ in steps),
        paragraphs=tuple(pages.values()),
    )


def _with_context(
    record: Record, dataset: str, join: Callable[[list[str]], str], hops: int, aliases: Iterable[str] = ()
) -> Question:
    facts = _supporting_facts(record)
    titles = dict.fromkeys(title for title, _ in facts)
    paragraphs = _context(record, join)
    by_title: dict[str, list[str]] = {}
    for passage in paragraphs:
        by_title.setdefault(passage.title, []).append(passage.doc_id)
    return Question(
        question_id=record.identity("_id", "id") or record.text("_id"),
        question=record.text("question"),
        answers=gold_answers(record, "answer", aliases),
        dataset=dataset,
        kind=record.text_or_empty("type"),
        hops=hops,
        level=record.text_or_empty("level"),
        gold_titles=tuple(titles),
        gold_ids=tuple(dict.fromkeys(doc_id for title in titles for doc_id in by_title.get(title, ()))),
        supporting_facts=facts,
        evidences=_evidences(record),
        paragraphs=paragraphs,
    )


def _supporting_facts(record: Record) -> tuple[tuple[str, int], ...]:
    """A sentence number beyond the paragraph is left as it is: both data sets have some."""
    name = "supporting_facts"
    if isinstance(record.fields.get(name), Mapping):
        pairs = _parallel(record.record(name), "title", "sent_id")
    else:
        pairs = [record.as_list(f"{name}[{i}]", item, 2) for i, item in enumerate(record.items(name))]
    return tuple(
        (record.as_text(f"{name}[{i}][0]", title), record.as_whole(f"{name}[{i}][1]", sentence))
        for i, (title, sentence) in enumerate(pairs)
    )


def _context(record: Record, join: Callable[[list[str]], str]) -> tuple[Passage, ...]:
    name = "context"
    if isinstance(record.fields.get(name), Mapping):
        pairs = _parallel(record.record(name), "title", "sentences")
    else:
        pairs = [record.as_list(f"{name}[{i}]", item, 2) for i, item in enumerate(record.items(name))]
    return tuple(
        _passage(record.as_text(f"{name}[{i}][0]", title), join(record.as_texts(f"{name}[{i}][1]", sentences)))
        for i, (title, sentences) in enumerate(pairs)
    )


def _parallel(columns: Record, first: str, second: str) -> list[list[object]]:
    left, right = columns.items(first), columns.items(second)
    if len(left) != len(right):
        raise columns.wrong(second, f"a list as long as {first} ({len(left)})", right)
    return [list(pair) for pair in zip(left, right, strict=True)]


def _evidences(record: Record) -> tuple[tuple[str, str, str], ...]:
    if not record.has("evidences"):
        return ()
    triples = []
    for i, item in enumerate(record.items("evidences")):
        subject, relation, obj = record.as_texts(f"evidences[{i}]", record.as_list(f"evidences[{i}]", item, 3))
        triples.append((subject, relation, obj))
    return tuple(triples)


def _musique_paragraphs(record: Record) -> tuple[dict[int, Passage], list[Passage]]:
    """Paragraphs by their number, and those that support the answer."""
    pages: dict[int, Passage] = {}
    supporting = []
    for paragraph in record.records("paragraphs"):
        number = paragraph.whole("idx")
        if number in pages:
            raise paragraph.wrong("idx", "a number of its own", number)
        pages[number] = _passage(paragraph.text_or_empty("title"), paragraph.text("paragraph_text"))
        if paragraph.has("is_supporting") and paragraph.flag("is_supporting"):
            supporting.append(pages[number])
    return pages, supporting


def _musique_steps(record: Record, pages: Mapping[int, Passage]) -> list[tuple[SubQuestion, int | None]]:
    """The sub-questions, each with the number of the paragraph that answers it, None where none does."""
    steps: list[tuple[SubQuestion, int | None]] = []
    for part in record.records("question_decomposition") if record.has("question_decomposition") else ():
        number = part.whole("paragraph_support_idx") if part.has("paragraph_support_idx") else None
        if number is not None and number not in pages:
            raise part.wrong("paragraph_support_idx", "the idx of a paragraph", number)
        page = Passage("", "", "") if number is None else pages[number]
        question = _filled(part.text("question"), [step.answer for step, _ in steps])
        steps.append((SubQuestion(question, part.text("answer"), page.title, page.doc_id), number))
    return steps


def _filled(question: str, answers: Sequence[str]) -> str:
    """A # with the number of an earlier step becomes its answer; other numbers ("a #1 hit") stay."""

    def answer(found: re.Match[str]) -> str:
        number = int(found[1])
        return answers[number - 1] if 1 <= number <= len(answers) else found[0]

    return _BACK_REFERENCE.sub(answer, question)


def _passage(title: str, text: str) -> Passage:
    return Passage(passage_id(title, text), title, text)
