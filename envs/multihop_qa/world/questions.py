"""Fills the splits with questions: draws proposals, has them judged and worded, and writes the records.

Numbers of hops come in equal shares and, within each, the kinds that have such questions, as far as the world yields
them; what one kind cannot give is taken from the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from envs.multihop_qa.records import Question, SubQuestion
from envs.multihop_qa.world.graph import SPLITS, Graph
from envs.multihop_qa.world.judging import Judge, Path
from envs.multihop_qa.world.options import WorldOptions
from envs.multihop_qa.world.pages import Page, listed
from envs.multihop_qa.world.proposals import Proposals
from envs.multihop_qa.world.queries import Lookup, Missing, Query
from envs.multihop_qa.world.stream import Stream
from envs.multihop_qa.world.wording import UNKNOWN, Wording
from trace_async.errors import ConfigError

DATASET = "world"

_PATIENCE = 400
"""Draws in vain, one after the other, until a kind counts as exhausted."""

_ANSWER_SHARE = 0.02
"""No name is the answer to a greater share of a split's questions, so that guessing it does not pay."""

_LEVELS = {1: "easy", 2: "medium", 3: "medium", 4: "hard", 5: "hard"}

Cell = tuple[str, int]  # kind and hops
K = TypeVar("K")


def write_questions(graph: Graph, pages: tuple[Page, ...], options: WorldOptions) -> Mapping[str, tuple[Question, ...]]:
    """Questions of both splits in random order. Raises ConfigError when there are not as many as wanted."""
    judge = Judge(graph, pages, options.check_top_k)
    heldout = round(options.questions * options.heldout_share)
    wanted = dict(zip(SPLITS, (options.questions - heldout, heldout), strict=True))
    return {split: _Writer(graph, pages, options, judge, split).write(wanted[split]) for split in SPLITS}


class _Writer:
    """One split."""

    def __init__(self, graph: Graph, pages: tuple[Page, ...], options: WorldOptions, judge: Judge, split: str) -> None:
        self._graph = graph
        self._pages = pages
        self._options = options
        self._judge = judge
        self._split = split
        self._stream = Stream(options.seed, f"questions/{split}")
        self._proposals = Proposals(graph, split, self._stream)
        self._wording = Wording(graph, options, self._stream)
        self._seen: set[Query] = set()
        self._texts: set[str] = set()
        self._answers: Counter[str] = Counter()
        self._most_of_one = 0

    def write(self, wanted: int) -> tuple[Question, ...]:
        """So many questions. ConfigError when there are fewer, or none of some kind."""
        self._most_of_one = max(3, int(wanted * _ANSWER_SHARE))
        found: dict[Cell, list[Question]] = {cell: [] for cell in self._cells()}
        open_cells = set(found)
        while open_cells and (missing := wanted - sum(map(len, found.values()))) > 0:
            for cell, number in self._shares(missing, found, open_cells):
                fresh = list(self._draw(cell, number))
                found[cell] += fresh
                if len(fresh) < number:
                    open_cells.discard(cell)
        self._check(wanted, found, open_cells)
        questions = [question for cell in found for question in found[cell]]
        order = self._stream.shuffled(questions)
        return tuple(self._numbered(place, question) for place, question in enumerate(order))

    def _cells(self) -> Iterator[Cell]:
        for hops in self._options.hops:
            for kind in self._options.kinds_of(hops):
                yield kind, hops

    def _shares(
        self, missing: int, found: Mapping[Cell, list[Question]], open_cells: set[Cell]
    ) -> Iterator[tuple[Cell, int]]:
        """Spreads questions over hops and kinds that still have some, most to those that have fewest."""
        by_hops = {
            hops: sum(len(found[cell]) for cell in found if cell[1] == hops)
            for hops in self._options.hops
            if any(cell[1] == hops for cell in open_cells)
        }
        for hops, more in _levelled(missing, by_hops).items():
            cells = {cell: len(found[cell]) for cell in found if cell in open_cells and cell[1] == hops}
            yield from _levelled(more, cells).items()

    def _draw(self, cell: Cell, number: int) -> Iterator[Question]:
        """Up to so many new questions."""
        kind, hops = cell
        in_vain = 0
        while number > 0 and in_vain < _PATIENCE:
            question = self._question(kind, hops)
            if question is None:
                in_vain += 1
                continue
            number, in_vain = number - 1, 0
            yield question

    def _question(self, kind: str, hops: int) -> Question | None:
        if kind == "chain" and hops > 1 and self._stream.chance(self._options.unanswerable):
            query = self._proposals.unanswerable(hops)
        else:
            query = self._proposals.draw(kind, hops)
        if query is None or query in self._seen:
            return None
        path = self._judge.path(query, hops, self._split)
        if path is None:
            return None
        answers = self._answer(path)
        if self._is_too_common(path, answers[0]):
            return None
        text = self._wording.question(query, self._split)
        if text in self._texts or not self._judge.accepts(path, text):
            return None
        self._seen.add(query)
        self._texts.add(text)
        self._answers[answers[0]] += 1
        return self._record(kind, path, text, answers)

    def _is_too_common(self, path: Path, answer: str) -> bool:
        """Names have a limit; yes and no keep level."""
        if path.text in ("yes", "no"):
            return self._answers[answer] > min(self._answers["yes"], self._answers["no"])
        return not path.text and self._answers[answer] >= self._most_of_one

    def _answer(self, path: Path) -> tuple[str, ...]:
        if path.entity >= 0:
            entity = self._graph.entities[path.entity]
            return (entity.name, entity.alias) if entity.alias else (entity.name,)
        if path.text == UNKNOWN[0]:
            return UNKNOWN
        return (path.text or str(path.number),)

    def _record(self, kind: str, path: Path, text: str, answers: tuple[str, ...]) -> Question:
        passages = [self._pages[place].passage for place in path.pages]
        told = [lookup for lookup, query in path.steps if not isinstance(query, Missing)]
        return Question(
            question_id="",
            question=text,
            answers=answers,
            dataset=DATASET,
            kind=kind,
            hops=len(path.pages),
            level="unanswerable" if isinstance(path.query, Missing) else _LEVELS[len(path.pages)],
            gold_titles=tuple(passage.title for passage in passages),
            gold_ids=tuple(passage.doc_id for passage in passages),
            supporting_facts=tuple(dict.fromkeys(self._sentence(lookup) for lookup in told)),
            evidences=tuple(dict.fromkeys(triple for lookup in told for triple in self._triples(lookup))),
            steps=tuple(self._step(lookup, query) for lookup, query in path.steps),
        )

    def _numbered(self, place: int, question: Question) -> Question:
        return replace(question, question_id=f"{question.kind}-{question.hops}-{self._split}-{place:05d}")

    def _sentence(self, lookup: Lookup) -> tuple[str, int]:
        page = self._pages[lookup.page]
        return page.passage.title, page.sentence_of[lookup.relation]

    def _told(self, lookup: Lookup) -> list[str]:
        """Names of the objects, or the number, that a page tells."""
        fact = self._graph.by_relation[lookup]
        return [str(fact.number)] if fact.is_number else [self._graph.entities[one].name for one in fact.objects]

    def _triples(self, lookup: Lookup) -> Iterator[tuple[str, str, str]]:
        entity = self._graph.entities[lookup.page]
        subject = self._graph.entities[entity.about].name if entity.about >= 0 else entity.name
        for told in self._told(lookup):
            yield subject, lookup.relation, told

    def _step(self, lookup: Lookup, query: Query) -> SubQuestion:
        passage = self._pages[lookup.page].passage
        answer = UNKNOWN[0] if isinstance(query, Missing) else listed(self._told(lookup))
        return SubQuestion(self._wording.plain(query), answer, passage.title, passage.doc_id)

    def _check(self, wanted: int, found: Mapping[Cell, list[Question]], open_cells: set[Cell]) -> None:
        total = sum(map(len, found.values()))
        world = f"a world of {self._options.pages} pages with {self._options.facts_per_page} facts a page"
        if total < wanted:
            raise ConfigError(
                f"world.questions: {world} yields {total} {self._split} questions of these kinds and hops, "
                f"{wanted} were wanted; ask for fewer, or raise pages or facts_per_page"
            )
        for what, values in (("kinds", self._options.kinds), ("hops", self._options.hops)):
            for value in values:
                if not any(found[cell] or cell in open_cells for cell in found if value in cell):
                    raise ConfigError(
                        f"world.{what}: {world} yields no {self._split} question of {what} = {value}; "
                        "leave it out, or raise pages or facts_per_page"
                    )


def _levelled(number: int, counts: dict[K, int]) -> dict[K, int]:
    """Shares out a number so that the counts, with it, come as near to each other as they can."""
    added = dict.fromkeys(counts, 0)
    order = list(counts)
    for _ in range(number):
        lowest = min(order, key=lambda key: counts[key] + added[key])
        added[lowest] += 1
    return added
