"""The vLLM server engine against a real server, started by the command that users start it with."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; run: make test-vllm")

import torch
from transformers import LlamaForCausalLM

from tests.vllm.kit import CONTEXT, VOCABULARY, canary_of, gap, request, save_version, tied_model
from trace_async.app.wiring import policy_path
from trace_async.config import EngineConfig
from trace_async.core.types import Canary, Generation, StopReason
from trace_async.engines.vllm_server import VllmServerEngine
from trace_async.engines.vllm_server_checks import Expected
from trace_async.errors import EngineError, PolicyError

T = TypeVar("T")
Body = Callable[[VllmServerEngine], Awaitable[T]]

REPO = Path(__file__).parent.parent.parent
TOKENIZER_IDS = 333
LONG_TOKENS = 400
"""An answer that takes a second or more, so that something can happen meanwhile."""

MAX_GAP = 1e-3
"""In nats, float32; measured: 1e-5."""


class Served(NamedTuple):
    """A running server, the folder it was started with, and versions of its model.

    What models say is computed before the server starts, or when it is idle: beside requests under way this process may
    get no CPU until they have ended. 0.2 s of torch for a canary took 5 s there, and the pause came too late for all.
    """

    process: subprocess.Popen[bytes]
    command: list[str]
    url: str
    folder: Path
    models: list[LlamaForCausalLM]
    files: list[Path]
    canaries: list[Canary]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def start(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Its processes are a group of their own, so that all of them can be killed at once."""
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with log.open("ab") as out:
        return subprocess.Popen(command, cwd=REPO, env=environment, stdout=out, stderr=out, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    models = [tied_model(seed) for seed in range(3)]
    models[0].save_pretrained(folder / "policy")
    for file in policy_path("builtin:frozenlake-tiny").glob("tokenizer*"):  # the server wants one; nobody uses it
        shutil.copy(file, folder / "policy")
    url = f"http://127.0.0.1:{free_port()}"
    config = folder / "config.toml"
    config.write_text(
        f'[policy]\npath = "{folder / "policy"}"\n'
        f'[engine]\nkind = "vllm_server"\nserver_url = "{url}"\nmax_batch = 8\n'
        f"[tree]\nmax_context_tokens = {CONTEXT}\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "trace_async", "vllm-server", str(config)]
    files = [save_version(model, folder / f"v{number}.safetensors") for number, model in enumerate(models)]
    canaries = [canary_of(model) for model in models]
    process = start(command, folder / "server.log")
    try:
        found = Served(process, command, url, folder, models, files, canaries)
        wait_until_ready(found)
        yield found
    finally:
        if process.poll() is None:
            kill(process)


def wait_until_ready(served: Served) -> None:
    give_up_s = time.monotonic() + 280
    while time.monotonic() < give_up_s:
        assert served.process.poll() is None, (served.folder / "server.log").read_text(encoding="utf-8")[-3000:]
        try:
            with urllib.request.urlopen(f"{served.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError((served.folder / "server.log").read_text(encoding="utf-8")[-3000:])


def with_engine(served: Served, body: Body[T], *, on_update: str = "drain", deadline_s: float = 60.0) -> T:
    async def main() -> T:
        engine = VllmServerEngine(
            config=EngineConfig(kind="vllm_server", server_url=served.url, max_batch=8, on_update=on_update),
            expected=Expected(
                vocabulary_size=VOCABULARY,
                unknown_id=TOKENIZER_IDS,
                max_tokens=CONTEXT,
                dtype="float32",
                temperature=1.0,
            ),
            stop_ids=(),  # so that an answer is as long as it was asked for
            base=served.folder / "policy",
        )
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as group:
            running = group.create_task(engine.run())
            found = await body(engine)
            running.cancel()
        return found

    return asyncio.run(main())


async def load(engine: VllmServerEngine, served: Served, number: int, *, canary: int | None = None) -> None:
    """Model `number` as version `number`."""
    await engine.load(
        version=number,
        epoch=0,
        weights=served.files[number],
        canary=served.canaries[number if canary is None else canary],
        adapter=None,
    )


@torch.no_grad()
def most_likely(model: LlamaForCausalLM, tokens: list[int], number: int) -> list[int]:
    """Each token after all before it, by plain forward passes."""
    for _ in range(number):
        tokens = [*tokens, int(model(torch.tensor([tokens])).logits[0, -1].argmax())]
    return tokens[-number:]


def counted(served: Served, metric: str, label: str = "") -> float:
    """The sum of one of the server's own metrics."""
    with urllib.request.urlopen(f"{served.url}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(metric + "{") and label in line)


async def until(condition: Callable[[], bool]) -> None:
    """Polls: what is waited for happens in another process."""
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - nobody can wake us
        await asyncio.sleep(0.02)


def ask_for_long(engine: VllmServerEngine, number: int) -> list[asyncio.Task[Generation]]:
    asks = [request(f"long{i}", [4, 5 + i], seed=i, max_tokens=LONG_TOKENS) for i in range(number)]
    return [asyncio.create_task(engine.generate(ask)) for ask in asks]


async def sampled(served: Served, tokens: int) -> None:
    """Returns when the server has sampled so many more."""
    enough = await asyncio.to_thread(counted, served, "vllm:generation_tokens_total") + tokens
    await until(lambda: counted(served, "vllm:generation_tokens_total") >= enough)


def test_greedy_tokens_are_those_of_transformers_and_logprobs_agree(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        asks = [request(f"g{i}", [5, 6, 7 + i], greedy=True) for i in range(4)]
        for ask, answer in zip(asks, await asyncio.gather(*(engine.generate(ask) for ask in asks)), strict=True):
            assert answer.token_ids.tolist() == most_likely(served.models[0], ask.prefix_ids.tolist(), 16)
            assert gap(served.models[0], ask, answer).max() < MAX_GAP
            assert (answer.version_min, answer.version_max, answer.kv_version_min) == (0, 0, 0)
            assert answer.stop is StopReason.LENGTH

    with_engine(served, body)


def test_sampled_tokens_depend_on_the_seed_only(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        shared = list(range(3, 70))
        asks = [request(f"s{i}", shared, seed=i) for i in range(8)]
        together = await asyncio.gather(*(engine.generate(ask) for ask in asks))
        alone = [await engine.generate(ask) for ask in asks]
        assert [a.token_ids.tolist() for a in together] == [a.token_ids.tolist() for a in alone]
        assert len({tuple(a.token_ids.tolist()) for a in alone}) > 4
        assert max(gap(served.models[0], ask, a).max() for ask, a in zip(asks, together, strict=True)) < MAX_GAP
        assert engine.counters()["reused_tokens"] > 0

    with_engine(served, body)


def test_draining_finishes_requests_on_the_old_weights(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        asks = [request(f"d{i}", [4, 5 + i], seed=i, max_tokens=LONG_TOKENS) for i in range(6)]
        asking = [asyncio.create_task(engine.generate(ask)) for ask in asks]
        await sampled(served, 12)
        await load(engine, served, 1)
        for ask, answer in zip(asks, await asyncio.gather(*asking), strict=True):
            assert (answer.version_min, answer.version_max) == (0, 0)
            assert gap(served.models[0], ask, answer).max() < MAX_GAP
        after = request("after", [4, 5], seed=9)
        answer = await engine.generate(after)
        assert (answer.version_min, answer.kv_version_min) == (1, 1)
        assert gap(served.models[1], after, answer).max() < MAX_GAP

    with_engine(served, body)


def test_continuing_requests_go_on_under_the_new_weights_with_everything_recomputed(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        beside = asyncio.create_task(engine.generate(request("beside", [4, 5], max_tokens=20)))
        lengths = [390 + 2 * i for i in range(16)]  # for 8 places
        asks = [request(f"c{i}", [*range(3, 43), 50 + i], seed=i, max_tokens=n) for i, n in enumerate(lengths)]
        asking = [asyncio.create_task(engine.generate(ask)) for ask in asks]
        await beside  # seven others have some twenty tokens of their four hundred
        await load(engine, served, 1)
        seen = set()
        for ask, answer in zip(asks, await asyncio.gather(*asking), strict=True):
            by_old, by_new = (gap(model, ask, answer) for model in served.models[:2])
            changed = int(np.argmax(by_old > MAX_GAP)) if answer.version_max else len(by_old)
            assert changed > 0 or answer.version_min == 1
            assert answer.kv_version_min == answer.version_min
            assert (by_old[:changed] < MAX_GAP).all()
            assert (by_new[changed:] < MAX_GAP).all()
            seen.add((answer.version_min, answer.version_max))
        assert (0, 1) in seen

    with_engine(served, body, on_update="continue")


def test_weights_that_are_not_the_learners_fence_the_engine(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        asking = ask_for_long(engine, 8)
        while engine.counters()["active"] < 8:  # noqa: ASYNC110 - they are let in one after the other
            await asyncio.sleep(0)
        with pytest.raises(PolicyError, match="version 1 does not act"):
            await load(engine, served, 1, canary=2)
        assert engine.version == -1
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert all(isinstance(end, EngineError) or end.version_max == 0 for end in ended)  # type: ignore[union-attr]
        assert "the answer is refused: version 1 was not proven" in str(ended)
        held = asyncio.create_task(engine.generate(request("held", [4, 5])))
        await load(engine, served, 2)
        assert (await held).version_min == 2

    with_engine(served, body, on_update="continue")


def test_a_file_that_vllm_cannot_take_leaves_the_old_weights(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 1)
        bad = served.folder / "bad.safetensors"
        bad.write_bytes(b"nothing of the kind")
        with pytest.raises(PolicyError, match="version 5 is refused"):
            await engine.load(version=5, epoch=0, weights=bad, canary=served.canaries[0], adapter=None)
        ask = request("still", [4, 5])
        answer = await engine.generate(ask)
        assert answer.version_min == engine.version == 1
        assert gap(served.models[1], ask, answer).max() < MAX_GAP

    with_engine(served, body)


def test_cancelled_requests_are_aborted_in_the_server(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        before = counted(served, "vllm:generation_tokens_total")
        asking = ask_for_long(engine, 8)
        await sampled(served, 8)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: counted(served, "vllm:num_requests_running") == 0)
        assert counted(served, "vllm:generation_tokens_total") - before < 0.9 * 8 * LONG_TOKENS
        assert any(task.cancelled() for task in asking)

    with_engine(served, body)


def test_a_context_overflow_is_refused_before_the_request(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 0)
        before = counted(served, "vllm:request_success_total")
        with pytest.raises(EngineError, match=f"exceed the {CONTEXT} that"):
            await engine.generate(request("long", [4] * (CONTEXT - 3), max_tokens=4))
        assert counted(served, "vllm:request_success_total") == before
        just = request("just", [4] * (CONTEXT - 4), max_tokens=4)
        assert gap(served.models[0], just, await engine.generate(just)).max() < MAX_GAP

    with_engine(served, body)


def test_a_killed_and_restarted_server_is_fenced_until_it_was_loaded_again(served: Served) -> None:
    async def body(engine: VllmServerEngine) -> None:
        await load(engine, served, 1)
        asking = ask_for_long(engine, 8)
        await sampled(served, 8)
        await asyncio.to_thread(kill, served.process)
        ended = await asyncio.gather(*asking, return_exceptions=True)
        assert any(isinstance(end, EngineError) for end in ended)
        assert engine.version == -1
        held = asyncio.create_task(engine.generate(request("held", [4, 5])))
        again = start(served.command, served.folder / "server.log")
        try:
            await engine.lost.wait()
            assert not held.done()
            engine.lost.clear()
            await load(engine, served, 1)
            answer = await held
            assert answer.version_min == 1
            assert gap(served.models[1], request("held", [4, 5]), answer).max() < MAX_GAP
        finally:
            await asyncio.to_thread(kill, again)

    with_engine(served, body, deadline_s=280)
