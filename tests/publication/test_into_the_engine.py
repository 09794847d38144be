"""From the learner's files into the local engine: the whole way of a version, with a follower in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.engines.kit import NEVER, canary_of, decoder, write
from tests.engines.test_local import assert_says, request, with_engine
from tests.fakes import LoopLearner
from trace_async.acting.versions import VersionFollower
from trace_async.core.types import VersionNotice
from trace_async.engines.local import LocalEngine
from trace_async.publication.staging import Source, Stager
from trace_async.publication.staging_folder import StagingFolder
from trace_async.publication.store import VersionStore


async def until(ready: Callable[[], bool]) -> None:
    """The test's own deadline ends a wait for nothing."""
    while not ready():  # noqa: ASYNC110 - engine and disk tell nobody
        await asyncio.sleep(0.001)


def no_stream() -> Source:
    raise AssertionError("the files are here")


def publish(store: VersionStore, model: PreTrainedModel, version: int, *, says: PreTrainedModel) -> VersionNotice:
    """A version of `model`'s weights, with the canary of `says`."""

    def write_weights(path: Path) -> None:
        write(model, path)

    return store.publish(
        version=version,
        epoch=1,
        write=write_weights,
        predictor={},
        canary=canary_of(says),
        adapter=None,
    ).notice


@asynccontextmanager
async def following(engine: LocalEngine, root: Path) -> AsyncIterator[tuple[VersionFollower, LoopLearner]]:
    learner = LoopLearner()
    with StagingFolder("a", root=root) as folder, Stager(folder, make_stream=no_stream) as stager:
        follower = VersionFollower(
            road=learner.channel,
            engine=engine,
            fetcher=stager,
            load_predictor=lambda state, version: None,
            on_loaded=lambda: None,
        )
        async with asyncio.TaskGroup() as group:
            running = group.create_task(follower.run())
            yield follower, learner
            running.cancel()


def tell(learner: LoopLearner, notice: VersionNotice) -> None:
    learner.channel.announced.append(notice)
    learner.channel.wake()


def test_a_version_that_is_retired_while_the_batch_drains_is_loaded_all_the_same(tmp_path: Path) -> None:
    old, new = decoder("llama"), decoder("llama", seed=1)

    async def body(engine: LocalEngine) -> None:
        with VersionStore(tmp_path / "versions") as store:
            async with following(engine, tmp_path / "staging") as (follower, learner), asyncio.TaskGroup() as group:
                long = group.create_task(engine.generate(request("long", [3, 4], max_tokens=100)))
                await until(lambda: engine.counters()["sampled_tokens"] > 0)
                tell(learner, publish(store, new, 1, says=new))
                await until(lambda: any((tmp_path / "staging").glob("*/*.safetensors")))
                store.clear()
                await until(lambda: bool(learner.confirmed))
                assert (long.result().version_max, follower.version) == (0, 1)
            ask = request("after", [3, 4])
            assert_says(new, ask, await engine.generate(ask))

    with_engine(body, model=old, stop_id=NEVER)


@pytest.mark.parametrize("tied", [False, True])
def test_weights_that_are_not_the_learners_are_never_confirmed_and_the_next_version_is(
    tmp_path: Path, tied: bool
) -> None:
    kind = "llama_tied" if tied else "llama"
    wrong, right = decoder(kind, seed=1), decoder(kind, seed=2)

    async def body(engine: LocalEngine) -> None:
        with VersionStore(tmp_path / "versions") as store:
            async with following(engine, tmp_path / "staging") as (follower, learner):
                tell(learner, publish(store, wrong, 1, says=right))
                await until(lambda: follower.counters()["failed_loads"] > 0)
                assert (follower.fenced, engine.version, learner.confirmed) == (True, -1, [])
                tell(learner, publish(store, right, 2, says=right))
                await until(lambda: bool(learner.confirmed))
                assert (follower.fenced, engine.version) == (False, 2)
            ask = request("after", [3, 4])
            assert_says(right, ask, await engine.generate(ask))

    with_engine(body, model=decoder(kind), stop_id=NEVER)
