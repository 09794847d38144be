"""Episodes behind the Environment protocol: the contract of branching, searches that fail, the library they share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.multihop_qa.episode import MultihopQA
from envs.multihop_qa.library import Library
from envs.multihop_qa.records import Question
from envs.retrieval.protocol import Passage
from envs.retrieval.registry import RetrieverOptions
from tests.envs.multihop_qa.small_world import small_kit
from tests.envs.multihop_qa.test_game import rules
from trace_async.core.types import Task
from trace_async.environment import Branching, Environment, StepResult
from trace_async.errors import EnvironmentFailure

FTS5 = RetrieverOptions(kind="fts5")
PAGES = [Passage("1", "Brenal", "Its mayor is Ann ."), Passage("2", "Ann Tor", "Born in Ulm .")]
QUESTION = Question(question_id="q", question="Where?", answers=("Ulm",), gold_titles=("Brenal", "Ann Tor"))


def task_of(collection: str = "main") -> Task:
    task = QUESTION.to_task("train")
    return Task(task.task_id, {**task.data, "collection": collection})


class Shelf:
    """Passages that count how often they are read, and in which thread."""

    def __init__(self, *passages: Passage) -> None:
        self.passages = passages
        self.threads: list[int] = []

    def __call__(self) -> Iterator[Passage]:
        self.threads.append(threading.get_ident())
        return iter(self.passages)


async def play(environment: Environment, turns: Sequence[str]) -> list[StepResult]:
    results: list[StepResult] = []
    for turn in turns:
        if not results or not (results[-1].terminated or results[-1].truncated):
            results.append(await environment.step(turn))
    return results


def test_an_episode_searches_the_collection_of_its_task_and_builds_no_other_index() -> None:
    async def episodes() -> None:
        main, other = Shelf(*PAGES), Shelf(Passage("9", "Brenal", "Another town ."))
        library = Library(FTS5, {"main": main, "other": other})
        environment = MultihopQA(rules(), library, top_k=1)
        await environment.reset(task_of(), seed=0)
        assert main.threads == []
        results = await play(environment, ["search mayor of Brenal", "search ann tor", "answer ulm"])
        shown = [result.messages[0].content for result in results[:-1]]
        assert shown == ["Brenal : Its mayor is Ann .", "Ann Tor : Born in Ulm ."]
        assert (results[-1].reward, results[-1].metrics["support_em"]) == (1.0, 1.0)
        assert other.threads == []
        await environment.reset(task_of("other"), seed=0)
        (shown_there,) = await play(environment, ["search brenal"])
        assert shown_there.messages[0].content == "Brenal : Another town ."
        assert len(main.threads) == 1
        await library.close()
        await library.close()

    asyncio.run(episodes())


def test_searches_at_the_same_time_build_one_index_off_the_event_loop() -> None:
    async def searches() -> list[str]:
        library = Library(FTS5, {"main": shelf})
        found = await asyncio.gather(*(library.search("main", "ann tor", 1) for _ in range(8)))
        await library.close()
        return [hits[0].passage.title for hits in found]

    shelf = Shelf(*PAGES)
    assert asyncio.run(searches()) == ["Ann Tor"] * 8
    assert len(shelf.threads) == 1
    assert shelf.threads != [threading.get_ident()]


def test_a_collection_that_is_not_there_is_named() -> None:
    async def search() -> None:
        await Library(FTS5, {"main": Shelf(*PAGES)}).search("mian", "x", 1)

    with pytest.raises(ValueError, match="no collection 'mian'; there are main"):
        asyncio.run(search())


def test_a_search_that_fails_is_no_turn_and_can_be_tried_again() -> None:
    class Broken(Library):
        is_broken = True

        async def search(self, collection: str, query: str, k: int) -> list[object]:  # type: ignore[override]
            if self.is_broken:
                raise EnvironmentFailure("no answer")
            return await super().search(collection, query, k)  # type: ignore[return-value]

    async def episode() -> None:
        library = Broken(FTS5, {"main": Shelf(*PAGES)})
        environment = MultihopQA(rules(), library, top_k=1)
        await environment.reset(task_of(), seed=0)
        before = environment.snapshot()
        with pytest.raises(EnvironmentFailure, match="no answer"):
            await environment.step("search brenal")
        assert environment.snapshot() == before
        library.is_broken = False
        (result,) = await play(environment, ["search brenal"])
        assert result.metrics["searches"] == 1.0
        await library.close()

    asyncio.run(episode())


def test_an_episode_that_was_not_started_or_was_closed_says_so() -> None:
    async def episode() -> None:
        environment = small_kit().make_environment()
        assert (environment.name, environment.branching) == ("multihop_qa", Branching.STATELESS)
        with pytest.raises(RuntimeError, match="reset or restore first"):
            await environment.step("answer x")
        await environment.reset(small_kit().tasks.task("train", 0), seed=0)
        await environment.close()
        await environment.close()
        with pytest.raises(RuntimeError, match="reset or restore first"):
            environment.snapshot()
        with pytest.raises(KeyError):
            await environment.reset(Task("no question", {}), seed=0)

    asyncio.run(episode())


TURNS = st.lists(
    st.sampled_from(["search the town", "search mayor", "search zzz", "look", "answer 4", "search old mountain range"]),
    max_size=5,
)


@given(before=TURNS, after=TURNS, index=st.integers(0, 19), seeds=st.tuples(st.integers(0, 9), st.integers(0, 9)))
@settings(max_examples=40)
def test_forked_restored_and_replayed_episodes_go_on_alike_whatever_their_seeds(
    before: list[str], after: list[str], index: int, seeds: tuple[int, int]
) -> None:
    async def episode() -> None:
        kit = small_kit()
        task = kit.tasks.task("train", index)
        parent = kit.make_environment()
        assert await parent.reset(task, seed=seeds[0]) == kit.opening(task)  # type: ignore[misc]
        results = await play(parent, before)
        if results and (results[-1].terminated or results[-1].truncated):
            return
        state = parent.snapshot()
        forked, restored, replayed = await parent.fork(seed=seeds[1]), kit.make_environment(), kit.make_environment()
        restored.restore(state)
        await replayed.reset(task, seed=seeds[1])
        assert str(await play(replayed, before)) == str(results)
        ends = [str(await play(environment, after)) for environment in (forked, restored, replayed)]
        assert ends[0] == ends[1] == ends[2]
        assert parent.snapshot() == state
        assert str(await play(parent, after)) == ends[0]

    asyncio.run(episode())
