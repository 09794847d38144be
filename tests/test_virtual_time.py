"""The virtual-time loop keeps asyncio's meaning and costs no real time."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests import virtual_time
from tests.fakes import loop_clock


def test_a_day_of_sleep_takes_no_time_and_moves_the_clock_by_a_day() -> None:
    async def main() -> float:
        await asyncio.sleep(86_400 * 3)
        return loop_clock()

    started_s = time.monotonic()
    assert virtual_time.run(main()) == pytest.approx(86_400 * 3)
    assert time.monotonic() - started_s < 5.0


def test_timers_fire_in_their_order_whatever_the_order_of_their_making() -> None:
    seen: list[tuple[float, int]] = []

    async def sleeper(number: int, seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((loop_clock(), number))

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number, seconds in enumerate((3.0, 1.0, 2.0)):
                group.create_task(sleeper(number, seconds))

    virtual_time.run(main())
    assert seen == [(1.0, 1), (2.0, 2), (3.0, 0)]


def test_asyncio_timeout_expires_at_its_virtual_second() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7.5):
                await asyncio.Event().wait()
        return loop_clock()

    assert virtual_time.run(main()) == 7.5


def test_waiting_on_nothing_names_the_tasks_and_where_they_wait() -> None:
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_ever(), name="the lost one")

    with pytest.raises(virtual_time.Stuck, match=r"the lost one: Event\.wait .*locks\.py"):
        virtual_time.run(main())


def test_a_heartbeat_does_not_hide_that_nothing_else_can_happen() -> None:
    async def heart() -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(1.0)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(heart(), name="heart")
            await asyncio.Event().wait()

    with pytest.raises(virtual_time.Stuck, match=r"not finished after 100 virtual seconds:\n.*Event\.wait"):
        virtual_time.run(main(), limit_s=100.0)


def test_a_task_left_behind_is_an_error_that_names_it() -> None:
    kept: list[asyncio.Task[None]] = []

    async def main() -> None:
        kept.append(asyncio.get_running_loop().create_task(asyncio.sleep(1.0), name="orphan"))

    with pytest.raises(AssertionError, match="1 tasks left behind:\n  orphan"):
        virtual_time.run(main())


def test_a_function_for_a_thread_runs_at_once_and_its_error_comes_back() -> None:
    def broken() -> None:
        raise ValueError("no such file")

    async def main() -> int:
        with pytest.raises(ValueError, match="no such file"):
            await asyncio.to_thread(broken)
        return await asyncio.to_thread(int, "41")

    assert virtual_time.run(main()) == 41


def test_what_the_main_coroutine_raises_comes_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        virtual_time.run(main())
