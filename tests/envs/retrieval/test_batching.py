from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs.retrieval.batching import Batcher, Found, Refused
from tests.envs.retrieval.kit import hit
from tests.virtual_time import run
from trace_async.errors import EnvironmentFailure


def answer(queries: Sequence[str], k: int) -> Found:
    return [[hit(f"{query}-{rank}") for rank in range(k)] for query in queries]


class Server:
    """Answers after a second; refuses batches with a query "bad", fails when `down`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.under_way = self.most_under_way = 0
        self.down = False

    async def send(self, queries: Sequence[str], k: int) -> Found:
        self.calls.append(list(queries))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(1.0)
        finally:
            self.under_way -= 1
        if self.down:
            raise EnvironmentFailure("down")
        if "bad" in queries:
            raise Refused("bad")
        return answer(queries, k)


def test_who_asks_in_the_same_moment_shares_a_call() -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=2, max_queries=4)
        found = await asyncio.gather(*(batcher.ask([f"q{number}"], 1) for number in range(6)))
        assert found == [answer([f"q{number}"], 1) for number in range(6)]
        assert server.calls == [["q0", "q1", "q2", "q3"], ["q4", "q5"]]

    run(story())


def test_a_lone_caller_does_not_wait_for_company() -> None:
    async def story() -> None:
        batcher = Batcher(Server().send, max_calls=2, max_queries=4)
        await batcher.ask(["a"], 1)
        assert asyncio.get_running_loop().time() == 1.0

    run(story())


def test_calls_are_joined_while_all_slots_are_taken() -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=1, max_queries=10)
        async with asyncio.TaskGroup() as group:
            for number in range(5):
                group.create_task(batcher.ask([f"q{number}"], 1))
                await asyncio.sleep(0.1)
        assert server.calls == [["q0"], ["q1", "q2", "q3", "q4"]]

    run(story())


def test_callers_who_want_another_k_go_by_themselves() -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=1, max_queries=10)
        found = await asyncio.gather(*(batcher.ask([f"q{number}"], 1 + number % 2) for number in range(4)))
        assert found == [answer([f"q{number}"], 1 + number % 2) for number in range(4)]
        assert server.calls == [["q0", "q2"], ["q1", "q3"]]

    run(story())


def test_a_refusal_in_company_is_found_out_one_by_one() -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=2, max_queries=10)
        outcomes = await asyncio.gather(
            *(batcher.ask([query], 1) for query in ("a", "bad", "b")), return_exceptions=True
        )
        assert outcomes[::2] == [answer(["a"], 1), answer(["b"], 1)]
        assert isinstance(outcomes[1], Refused)
        assert sorted(server.calls[1:]) == [["a"], ["b"], ["bad"]]

    run(story())


def test_a_failure_fails_the_whole_call_and_nobody_else() -> None:
    async def story() -> None:
        server = Server()
        server.down = True
        batcher = Batcher(server.send, max_calls=1, max_queries=2)
        async with asyncio.TaskGroup() as group:
            late = group.create_task(_later(0.5, batcher))
            outcomes = await asyncio.gather(*(batcher.ask([query], 1) for query in "ab"), return_exceptions=True)
            server.down = False
        assert [str(outcome) for outcome in outcomes] == ["down", "down"]
        assert outcomes[0] is not outcomes[1]
        assert late.result() == answer(["late"], 1)

    run(story())


async def _later(delay_s: float, batcher: Batcher) -> Found:
    await asyncio.sleep(delay_s)
    return await batcher.ask(["late"], 1)


class Visit:
    """One caller of the property below."""

    def __init__(self, start_s: float, patience_s: float, k: int, size: int) -> None:
        self.start_s, self.patience_s, self.k, self.size = start_s, patience_s, k, size

    def __repr__(self) -> str:
        return f"Visit({self.start_s}, {self.patience_s}, {self.k}, {self.size})"


visits = st.builds(
    Visit,
    st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
    st.sampled_from([0.0, 0.3, 1.0, 1.3, 99.0]),
    st.integers(1, 2),
    st.integers(1, 3),
)


@settings(max_examples=100)
@given(st.lists(visits, max_size=12), st.integers(1, 3), st.integers(1, 5))
def test_whoever_leaves_the_others_are_served_within_the_bounds(
    callers: list[Visit], max_calls: int, max_queries: int
) -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=max_calls, max_queries=max_queries)

        async def call(number: int, visit: Visit) -> bool:
            await asyncio.sleep(visit.start_s)
            queries = [f"{number}-{place}" for place in range(visit.size)]
            try:
                found = await asyncio.wait_for(batcher.ask(queries, visit.k), visit.patience_s)
            except TimeoutError:
                return False
            assert found == answer(queries, visit.k)
            return True

        served = await asyncio.gather(*(call(number, visit) for number, visit in enumerate(callers)))
        assert all(done or visit.patience_s < 99.0 for done, visit in zip(served, callers, strict=True))
        assert server.most_under_way <= max_calls
        assert all(len(call) <= max(max_queries, 3) for call in server.calls)
        assert await batcher.ask(["last"], 1) == answer(["last"], 1)  # no slot was lost

    run(story())


@pytest.mark.parametrize("rounds", range(4))
def test_a_caller_cancelled_at_any_round_of_the_loop_loses_no_slot(rounds: int) -> None:
    async def story() -> None:
        server = Server()
        batcher = Batcher(server.send, max_calls=1, max_queries=10)
        async with asyncio.TaskGroup() as group:
            victim = group.create_task(batcher.ask(["victim"], 1))
            other = group.create_task(batcher.ask(["other"], 1))
            for _ in range(rounds):
                await asyncio.sleep(0)
            victim.cancel()
        assert other.result() == answer(["other"], 1)
        assert await batcher.ask(["last"], 1) == answer(["last"], 1)

    run(story())
