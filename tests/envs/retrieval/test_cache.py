from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.retrieval.cache import CacheCounts, CachedRetriever
from tests.envs.retrieval.kit import FakeRetriever
from tests.virtual_time import run
from trace_async.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout


def test_a_query_is_asked_once() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        cache = CachedRetriever(inner, max_entries=10)
        first = await cache.search(["a", "b", "a"], 2)
        again = await cache.search(["b", "c"], 2)
        assert first == [*(await FakeRetriever().search(["a", "b", "a"], 2))]
        assert again[0] == first[1]
        assert inner.asked == [["a", "b"], ["c"]]
        assert cache.counts() == CacheCounts(hits=1, shared=0, misses=3)

    run(story())


def test_another_k_is_another_question() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        cache = CachedRetriever(inner, max_entries=10)
        assert [len(hits) for k in (1, 3) for hits in await cache.search(["a"], k)] == [1, 3]
        assert inner.asked == [["a"], ["a"]]

    run(story())


def test_who_changes_an_answer_changes_only_his_own() -> None:
    async def story() -> None:
        cache = CachedRetriever(FakeRetriever(), max_entries=10)
        (hits,) = await cache.search(["a"], 2)
        hits.clear()
        assert len((await cache.search(["a"], 2))[0]) == 2

    run(story())


@given(st.lists(st.sampled_from("abcdef"), max_size=40), st.integers(1, 4))
def test_the_one_not_used_for_longest_is_forgotten(queries: list[str], room: int) -> None:
    async def story() -> None:
        inner = FakeRetriever()
        cache = CachedRetriever(inner, max_entries=room)
        recent: list[str] = []  # oracle: the most recently used last
        expected: list[list[str]] = []
        for query in queries:
            await cache.search([query], 1)
            if query in recent:
                recent.remove(query)
            else:
                expected.append([query])
            recent = [*recent, query][-room:]
        assert inner.asked == expected
        assert len(cache) == len(recent)

    run(story())


def test_equal_questions_at_the_same_time_are_searched_once() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        inner.gate = asyncio.Event()
        cache = CachedRetriever(inner, max_entries=10)
        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(cache.search(["a", "b"], 1)) for _ in range(5)]
            mixed = group.create_task(cache.search(["b", "c"], 1))
            await asyncio.sleep(1.0)
            inner.gate.set()
        assert inner.asked == [["a", "b"], ["c"]]
        assert all(asker.result() == askers[0].result() for asker in askers)
        assert mixed.result()[0] == askers[0].result()[1]
        assert cache.counts() == CacheCounts(hits=0, shared=9, misses=3)

    run(story())


@pytest.mark.parametrize("victim", range(4))
def test_a_cancelled_asker_disturbs_nobody(victim: int) -> None:
    async def story() -> None:
        inner = FakeRetriever()
        inner.gate = asyncio.Event()
        cache = CachedRetriever(inner, max_entries=10)
        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(cache.search(["a"], 1)) for _ in range(4)]
            await asyncio.sleep(1.0)
            askers[victim].cancel()
            await asyncio.sleep(1.0)
            assert askers[victim].cancelled()
            inner.gate.set()
        assert len({str(asker.result()) for asker in askers if not asker.cancelled()}) == 1
        assert len(inner.asked) == (2 if victim == 0 else 1)  # only the first one's own search went with it
        assert await cache.search(["a"], 1) == await FakeRetriever().search(["a"], 1)

    run(story())


def test_when_all_are_cancelled_the_next_one_searches() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        inner.gate = asyncio.Event()
        cache = CachedRetriever(inner, max_entries=10)
        async with asyncio.TaskGroup() as group:
            askers = [group.create_task(cache.search(["a"], 1)) for _ in range(3)]
            await asyncio.sleep(1.0)
            for asker in askers:
                asker.cancel()
        inner.gate.set()
        assert len((await cache.search(["a"], 1))[0]) == 1

    run(story())


def test_a_failure_reaches_all_who_wait_and_is_not_kept() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        inner.gate, inner.error = asyncio.Event(), EnvironmentTimeout("too slow")
        cache = CachedRetriever(inner, max_entries=10)
        async with asyncio.TaskGroup() as group:
            gathered = group.create_task(
                asyncio.wait_for(
                    asyncio.gather(*(cache.search(["a"], 1) for _ in range(3)), return_exceptions=True), 100
                )
            )
            await asyncio.sleep(1.0)
            inner.gate.set()
        outcomes = gathered.result()
        assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(EnvironmentTimeout, "too slow")] * 3
        assert len({id(outcome) for outcome in outcomes}) == 3
        assert inner.asked == [["a"]]
        inner.error = None
        assert len((await cache.search(["a"], 1))[0]) == 1

    run(story())


def test_an_error_that_is_no_failure_is_everybodys_own() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        inner.error = ValueError("k")
        cache = CachedRetriever(inner, max_entries=10)
        outcomes = await asyncio.gather(*(cache.search(["a"], 1) for _ in range(2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [ValueError, ValueError]

    run(story())


def test_event_loops_share_what_is_kept_but_not_what_is_under_way() -> None:
    inner = FakeRetriever()
    cache = CachedRetriever(inner, max_entries=10)

    async def abandoned() -> None:
        inner.gate = asyncio.Event()
        await asyncio.wait_for(cache.search(["a"], 1), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(abandoned())
    inner.gate = None
    first = asyncio.run(cache.search(["a"], 1))
    assert asyncio.run(cache.search(["a"], 1)) == first
    assert inner.asked == [["a"], ["a"]]
    assert cache.counts() == CacheCounts(hits=1, shared=0, misses=1)


def test_it_stands_for_its_index() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        cache = CachedRetriever(inner, max_entries=1)
        assert cache.index_id == "fake"
        await cache.close()
        assert inner.closed == 1

    run(story())


def test_a_cache_needs_room() -> None:
    with pytest.raises(ConfigError, match="max_entries=0"):
        CachedRetriever(FakeRetriever(), max_entries=0)


def test_a_failure_of_one_does_not_hide_what_the_other_found() -> None:
    async def story() -> None:
        inner = FakeRetriever()
        cache = CachedRetriever(inner, max_entries=10)
        await cache.search(["a"], 1)
        inner.error = EnvironmentFailure("down")
        assert await cache.search(["a"], 1)
        with pytest.raises(EnvironmentFailure, match="down"):
            await cache.search(["a", "b"], 1)

    run(story())
