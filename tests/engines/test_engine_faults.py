"""What the local engine does when files vanish, copies fail, nothing can be cached, or too many requests wait."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.engines.test_local import (
    NEVER,
    assert_same,
    first_pass,
    reference,
    request,
    tiny_model,
    weights_of,
    with_engine,
)
from trace_async import policy
from trace_async.acting.versions import VersionFollower
from trace_async.config import EngineConfig
from trace_async.core.types import VersionNotice
from trace_async.engines.local import LocalEngine
from trace_async.errors import EngineError


class OneNotice:
    """A road on which exactly one version is ever announced."""

    def __init__(self, notice: VersionNotice) -> None:
        self.notice = notice
        self.confirmed: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait_newer(self, version: int, epoch: int) -> VersionNotice:
        if version >= self.notice.version:
            await asyncio.Event().wait()
        return self.notice

    def confirm(self, version: int, epoch: int) -> None:
        self.confirmed.set_result(version)


def test_a_file_that_is_retired_while_the_batch_drains_is_loaded_all_the_same(tmp_path: Path) -> None:
    old, new = tiny_model(0), tiny_model(1)

    def write(path: Path) -> None:
        path.write_bytes(weights_of(new))

    notice = policy.publish(tmp_path, version=1, epoch=1, write=write, predictor={})

    def fetch(notice: VersionNotice) -> policy.FetchedVersion:
        data = policy.fetch(notice)
        Path(notice.weights).unlink()
        return data

    async def body(engine: LocalEngine) -> None:
        passed = first_pass(old)
        async with asyncio.TaskGroup() as group:
            long = group.create_task(engine.generate(request("long", [3, 4], max_tokens=60)))
            await passed.wait()
            road = OneNotice(notice)
            follower = VersionFollower(
                road=road, engine=engine, fetch=fetch, load_predictor=lambda *_: None, on_loaded=lambda: None
            )
            following = group.create_task(follower.run())
            assert await road.confirmed == 1
            assert long.result().version_max == 0
            following.cancel()
        ask = request("after", [3, 4], max_tokens=1)
        assert_same(await engine.generate(ask), reference(new, ask))
        assert engine.version == 1

    with_engine(body, model=old, stop_id=NEVER)


def test_weights_that_fail_half_way_end_the_engine_and_whoever_waits_is_told() -> None:
    model = tiny_model()
    weights = weights_of(tiny_model(1))

    async def main() -> None:
        engine = LocalEngine(model, config=EngineConfig(), stop_ids=(NEVER,), pad_id=0, max_tokens=64, version=0)
        # Storage shared between rows refuses to be written: the copy fails after the tensors before it were copied.
        shared = torch.nn.Parameter(torch.zeros(1, 32).expand(24, 32), requires_grad=False)
        model.lm_head.weight = shared
        running = asyncio.create_task(engine.run())
        async with asyncio.timeout(20):
            with pytest.raises(EngineError, match="version 3 was not taken over"):
                await engine.load(version=3, epoch=0, weights=weights)
            with pytest.raises(RuntimeError):
                await running
        assert engine.version == 0
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request("late", [3]))
        with pytest.raises(EngineError, match="closed"):
            await engine.load(version=4, epoch=0, weights=weights)

    asyncio.run(main())


@pytest.mark.parametrize(("prefix", "cache_bytes"), [([3, 4, 5, 6], 0), ([3, 4, 5, 6], 700), ([3], 1 << 20)])
def test_twins_go_together_when_their_prefix_cannot_be_kept(prefix: list[int], cache_bytes: int) -> None:
    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", prefix, max_tokens=2, seed=i) for i in range(8)]
        await asyncio.gather(*(engine.generate(ask) for ask in asks))
        assert engine.counters()["forward_passes"] == 2

    # a token's key/values: 2 layers x 2 x 2 heads x 8 x 4 bytes = 256
    with_engine(body, config=EngineConfig(prefix_cache_bytes=cache_bytes), stop_id=NEVER)


def test_twins_wait_for_the_first_when_its_prefix_is_kept() -> None:
    async def body(engine: LocalEngine) -> None:
        asks = [request(f"r{i}", [3, 4, 5, 6], max_tokens=1, seed=i) for i in range(8)]
        await asyncio.gather(*(engine.generate(ask) for ask in asks))
        assert engine.counters()["computed_tokens"] == 4 + 7
        assert engine.counters()["reused_tokens"] == 7 * 3

    with_engine(body, config=EngineConfig(prefix_cache_bytes=768))


def test_more_requests_than_may_wait_are_refused_with_the_cure() -> None:
    async def main() -> None:
        engine = LocalEngine(
            tiny_model(), config=EngineConfig(max_batch=1), stop_ids=(NEVER,), pad_id=0, max_tokens=64, version=0
        )
        waiting = [asyncio.ensure_future(engine.generate(request(f"w{i}", [3]))) for i in range(1024)]
        await asyncio.sleep(0)  # nothing runs: all of them wait
        with pytest.raises(EngineError, match=r"1024 requests wait already.*max_live_roots"):
            await engine.generate(request("one too many", [3]))
        for answer in waiting:
            answer.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(main())
