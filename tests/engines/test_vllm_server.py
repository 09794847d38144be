"""The vLLM server engine against a stand-in over real sockets: whose answers get out, what becomes of others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engines.vllm_stand_in import MAX_TOKENS, VOCABULARY, Faults, ToyHost, canary_of, logprobs_of, toy_host
from trace_async.config import EngineConfig
from trace_async.core.types import Adapter, GenerateRequest, Generation, StopReason
from trace_async.engines.vllm_server import VllmServerEngine
from trace_async.engines.vllm_server_checks import Expected
from trace_async.engines.vllm_server_http import ServerGone
from trace_async.errors import ConfigError, EngineError, PolicyError

BASE = Path("/base")
NEVER = VOCABULARY
"""A stop token that the toy model never samples."""

Body = Callable[[VllmServerEngine, ToyHost], Awaitable[None]]


def request(
    name: str, prefix: Sequence[int] = (3, 4), *, max_tokens: int = 4, seed: int = 0, greedy: bool = False
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name, prefix_ids=np.array(prefix, np.int32), max_tokens=max_tokens, seed=seed, greedy=greedy
    )


def expected(*, temperature: float = 1.0) -> Expected:
    return Expected(
        vocabulary_size=VOCABULARY,
        unknown_id=VOCABULARY,
        max_tokens=MAX_TOKENS,
        dtype="float32",
        temperature=temperature,
    )


def make_engine(host: ToyHost, config: EngineConfig) -> VllmServerEngine:
    return VllmServerEngine(
        config=config_at(host, config),
        expected=expected(temperature=config.temperature),
        stop_ids=(NEVER,),
        base=BASE,
    )


def config_at(host: ToyHost, config: EngineConfig) -> EngineConfig:
    return replace(config, kind="vllm_server", server_url=host.url)


async def load(
    engine: VllmServerEngine, folder: Path, *, version: int, weights: int, canary: int | None = None
) -> None:
    """Publish `weights` as `version`; the canary is that of other weights where asked for."""
    path = folder / f"v{version}"
    path.write_text(str(weights), encoding="utf-8")
    await engine.load(
        version=version,
        epoch=0,
        weights=path,
        canary=canary_of(weights if canary is None else canary),
        adapter=None,
    )


def with_engine(
    body: Body, *, config: EngineConfig | None = None, faults: Faults | None = None, step_s: float = 0.002
) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), toy_host(step_s=step_s) as host:
            if faults is not None:
                host.server.faults = host.faults = faults
            engine = make_engine(host, config or EngineConfig())
            async with asyncio.TaskGroup() as group:
                running = group.create_task(engine.run())
                await body(engine, host)
                running.cancel()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    """Polls: what is waited for happens on the other side of a socket."""
    while not condition():  # noqa: ASYNC110 - nobody there can wake us
        await asyncio.sleep(0.002)


def assert_true_to(weights: int, ask: GenerateRequest, answer: Generation, *, temperature: float = 1.0) -> None:
    right = logprobs_of(weights, ask.prefix_ids, answer.token_ids, temperature=temperature)
    np.testing.assert_allclose(answer.logprobs, right, atol=1e-5)


def test_an_answer_has_the_servers_tokens_their_logprobs_at_the_temperature_and_the_loaded_version(
    tmp_path: Path,
) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=3, weights=11)
        asks = [request(f"r{i}", (3, i), seed=i) for i in range(12)]
        answers = await asyncio.gather(*(engine.generate(ask) for ask in asks))
        for ask, answer in zip(asks, answers, strict=True):
            assert_true_to(11, ask, answer, temperature=0.7)
            assert (answer.version_min, answer.version_max, answer.kv_version_min) == (3, 3, 3)
            assert answer.stop is StopReason.LENGTH
            assert len(answer.token_ids) == 4
        assert engine.version == 3
        assert engine.counters()["sampled_tokens"] == 48
        assert {salt for salt in host.server.salts if salt} == {"e0v3-1"}

    processor = {"logits_processors": "['trace_async.engines.vllm_processor:GreedyTemperature']"}
    with_engine(body, config=EngineConfig(temperature=0.7), faults=Faults(settings=processor))


def test_requests_wait_unsent_until_a_version_is_proven(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        asking = asyncio.create_task(engine.generate(request("early")))
        await asyncio.sleep(0.1)
        assert engine.version == -1
        assert engine.counters()["waiting"] == 1
        assert not asking.done()
        await load(engine, tmp_path, version=0, weights=5)
        assert (await asking).version_min == 0

    with_engine(body)


def test_no_more_requests_are_under_way_than_the_batch_has_places(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=0, weights=5)
        await asyncio.gather(*(engine.generate(request(f"r{i}", seed=i)) for i in range(20)))
        assert host.server.most_running == 3
        assert engine.counters()["waiting"] == engine.counters()["active"] == 0

    with_engine(body, config=EngineConfig(max_batch=3))


def test_a_request_that_cannot_fit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=0, weights=5)
        sent = len(host.server.salts)
        with pytest.raises(EngineError, match=r"45 prefix tokens \+ 4 new ones exceed the 48.*max_context_tokens"):
            await engine.generate(request("long", [1] * 45))
        assert len(host.server.salts) == sent
        assert len((await engine.generate(request("just", [1] * 44))).token_ids) == 4

    with_engine(body)


def test_draining_lets_requests_finish_on_the_old_weights_and_holds_the_new_ones(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        first = request("first", max_tokens=20)
        old = asyncio.create_task(engine.generate(first))
        await until(lambda: any(r.sampled for r in host.server.running))
        loading = asyncio.create_task(load(engine, tmp_path, version=2, weights=6))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate(request("late")))
        answer = await old
        assert_true_to(5, first, answer)
        assert (answer.version_min, answer.version_max) == (1, 1)
        await loading
        assert_true_to(6, request("late"), await late)
        assert (await late).version_min == 2
        assert host.server.log[-5:] == [
            "pause wait",
            "load_version",
            "reset_prefix_cache",
            "update_weight_version",
            "resume",
        ]

    with_engine(body)


def test_continuing_keeps_requests_and_says_which_tokens_are_of_which_version(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asks = [request(f"r{i}", max_tokens=30, seed=i) for i in range(3)]
        asking = [asyncio.create_task(engine.generate(ask)) for ask in asks]
        await until(lambda: len(host.server.running) == 3 and len(host.server.running[0].sampled) > 3)
        await load(engine, tmp_path, version=2, weights=6)
        for ask, task in zip(asks, asking, strict=True):
            answer = await task
            assert (answer.version_min, answer.version_max, answer.kv_version_min) == (1, 2, 1)
            by_old, by_new = (logprobs_of(w, ask.prefix_ids, answer.token_ids) for w in (5, 6))
            changes = int(np.argmax(~np.isclose(answer.logprobs, by_old, atol=1e-5)))
            assert 3 < changes < 30
            np.testing.assert_allclose(answer.logprobs[changes:], by_new[changes:], atol=1e-5)
        assert "pause keep" in host.server.log

    with_engine(body, config=EngineConfig(on_update="continue"))


def test_weights_that_do_not_act_fence_the_engine_and_none_of_their_answers_gets_out(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("caught", max_tokens=40)))
        await until(lambda: any(len(r.sampled) > 2 for r in host.server.running))
        host.server.faults.keeps_weights = True
        with pytest.raises(PolicyError, match="version 2 does not act"):
            await load(engine, tmp_path, version=2, weights=6)
        with pytest.raises(EngineError, match="request caught: the answer is refused: version 2 was not proven"):
            await asking
        assert engine.version == -1
        assert host.server.log[-1] == "pause abort"
        held = asyncio.create_task(engine.generate(request("held")))
        await asyncio.sleep(0.05)
        assert not held.done()
        host.server.faults.keeps_weights = False
        await load(engine, tmp_path, version=2, weights=6)
        assert_true_to(6, request("held"), await held)

    with_engine(body, config=EngineConfig(on_update="continue"))


@pytest.mark.parametrize("version", [2, 1], ids=["newer", "same"])
@pytest.mark.parametrize("canary", [6, 7], ids=["right", "wrong"])
def test_answers_of_new_weights_are_held_until_the_canary_has_spoken(tmp_path: Path, canary: int, version: int) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("fast", max_tokens=12)))
        await until(lambda: any(r.sampled for r in host.server.running))
        host.server.scores.clear()
        loading = asyncio.create_task(load(engine, tmp_path, version=version, weights=6, canary=canary))
        await until(lambda: host.server.log[-1] == "resume" and not host.server.running)
        await asyncio.sleep(0.1)
        assert not asking.done()
        host.server.scores.set()
        if canary == 6:
            await loading
            assert (await asking).version_max == version
            return
        with pytest.raises(EngineError, match="fast: the answer is refused"):
            await asking
        with pytest.raises(PolicyError, match="does not act"):
            await loading

    with_engine(body, config=EngineConfig(on_update="continue"))


@pytest.mark.parametrize("on_update", ["drain", "continue"])
def test_a_file_that_does_not_fit_leaves_the_old_weights_in_use(tmp_path: Path, on_update: str) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        ask = request("r", max_tokens=20)
        asking = asyncio.create_task(engine.generate(ask))
        await until(lambda: any(r.sampled for r in host.server.running))
        bad = tmp_path / "bad"
        bad.write_text("no weights", encoding="utf-8")
        with pytest.raises(PolicyError, match="version 2 is refused by the vLLM server: 'no weights' is no number"):
            await engine.load(version=2, epoch=0, weights=bad, canary=canary_of(5), adapter=None)
        assert_true_to(5, ask, await asking)
        assert engine.version == 1
        assert (await engine.generate(request("later"))).version_max == 1

    with_engine(body, config=EngineConfig(on_update=on_update))


@pytest.mark.parametrize("fault", [{"refuses_load": "failed half-way"}, {"half_loads": True}, {"keeps_cache": True}])
def test_a_load_that_fails_half_way_fences_until_a_later_one_succeeds(tmp_path: Path, fault: dict[str, object]) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        for name, value in fault.items():
            setattr(host.server.faults, name, value)
        with pytest.raises(EngineError, match=r"half-way|some did not|did not throw away its key/values"):
            await load(engine, tmp_path, version=2, weights=6)
        assert engine.version == -1
        for name in fault:
            setattr(host.server.faults, name, getattr(Faults(), name))
        await load(engine, tmp_path, version=3, weights=7)
        assert_true_to(7, request("r"), await engine.generate(request("r")))

    with_engine(body)


def test_an_adapter_is_named_to_the_worker_as_text(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        path = tmp_path / "adapter"
        path.write_text("4", encoding="utf-8")
        await engine.load(version=0, epoch=2, weights=path, canary=canary_of(4), adapter=Adapter(rank=8, alpha=32.0))
        assert host.server.label == "e2v0"
        assert host.server.loads[-1] == {
            "weights": str(path),
            "base": str(BASE),
            "adapter_rank": "8",
            "adapter_alpha": "32.0",
        }

    with_engine(body)


def test_a_killed_server_fails_what_is_under_way_and_is_waited_for_then_loaded_again(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("dying", max_tokens=40)))
        await until(lambda: any(r.sampled for r in host.server.running))
        await host.kill()
        with pytest.raises(EngineError, match="request dying"):
            await asking
        assert engine.version == -1
        held = asyncio.create_task(engine.generate(request("held")))
        await asyncio.sleep(0.05)
        await host.start()
        await engine.lost.wait()
        assert not held.done()
        engine.lost.clear()
        await load(engine, tmp_path, version=1, weights=5)
        assert_true_to(5, request("held"), await held)
        assert engine.counters()["server_absences"] == 1
        assert not engine.lost.is_set()

    with_engine(body)


def test_a_restart_that_nobody_saw_is_noticed_by_the_next_answer_which_is_refused(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        await host.kill()
        await host.start()
        with pytest.raises(EngineError, match=r"sampled by weights \['default'\], which were not proven"):
            await engine.generate(request("after"))
        await engine.lost.wait()
        assert engine.version == -1
        assert engine.counters()["refused_answers"] == 1

    with_engine(body)


def test_a_server_that_dies_during_a_load_is_waited_for_and_asked_again(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        host.server.faults.never_loads = True
        loading = asyncio.create_task(load(engine, tmp_path, version=2, weights=6))
        await until(lambda: host.server.log[-1] == "load_version")
        await host.kill()
        await asyncio.sleep(0.05)
        await host.start()
        await loading
        assert (host.server.label, host.server.weights, engine.version) == ("e0v2", 6, 2)

    with_engine(body)


def test_a_connection_that_breaks_during_a_load_does_not_resume_the_server_in_the_middle_of_it(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = [asyncio.create_task(engine.generate(request(f"r{i}", max_tokens=40, seed=i))) for i in range(2)]
        await until(lambda: len(host.server.running) == 2)
        host.server.faults.load_s = 0.2
        loading = asyncio.create_task(load(engine, tmp_path, version=2, weights=6))
        await until(lambda: host.server.log[-1] == "load_version")
        since = len(host.server.log)
        asking[0].cancel()
        engine._miss(ServerGone("the network broke"))  # as the request's own connection would have it
        await asyncio.gather(loading, *asking, return_exceptions=True)
        assert "resume" in host.server.log[since:]
        until_resumed = host.server.log[since : since + host.server.log[since:].index("resume")]
        assert any("reset_prefix_cache" in entry for entry in until_resumed)
        assert (await engine.generate(request("after"))).version_min == 2

    with_engine(body, config=EngineConfig(on_update="continue"))


def test_while_a_server_is_out_of_reach_nobody_is_to_begin_trees_and_then_it_goes_on(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("cut", max_tokens=40)))
        await until(lambda: any(r.sampled for r in host.server.running))
        host.break_connections()
        with pytest.raises(EngineError, match="request cut"):
            await asking
        assert engine.lost.is_set()
        assert (await engine.generate(request("next"))).version_min == 1
        await load(engine, tmp_path, version=1, weights=5)
        assert not engine.lost.is_set()

    with_engine(body)


def test_a_cancelled_request_is_aborted_at_the_server(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("unwanted", max_tokens=40)))
        await until(lambda: any(r.sampled for r in host.server.running))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: "abort unwanted" in host.server.log)
        assert not host.server.running
        assert engine.counters()["active"] == 0

    with_engine(body)


def test_a_request_that_misses_its_deadline_fails_and_is_given_up(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        with pytest.raises(EngineError, match=r"request slow: .* took longer than 0.2 s"):
            await engine.generate(request("slow", max_tokens=40))
        await until(lambda: "abort slow" in host.server.log)

    with_engine(body, config=EngineConfig(request_deadline_s=0.2), step_s=0.02)


def test_control_calls_do_not_wait_for_connections_that_requests_hold(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        host.server.faults.silent = frozenset({"/inference/v1/generate"})
        asking = [asyncio.create_task(engine.generate(request(f"r{i}"))) for i in range(8)]
        await asyncio.sleep(0.05)
        host.server.faults.silent = frozenset()
        async with asyncio.timeout(2):
            await load(engine, tmp_path, version=2, weights=6)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    with_engine(body, config=EngineConfig(max_batch=4, on_update="continue"))


def test_a_cancelled_load_that_was_draining_lets_requests_in_again(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        asking = asyncio.create_task(engine.generate(request("long", max_tokens=30)))
        await until(lambda: any(r.sampled for r in host.server.running))
        loading = asyncio.create_task(load(engine, tmp_path, version=2, weights=6))
        await asyncio.sleep(0.01)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert (await engine.generate(request("next"))).version_min == 1
        assert (await asking).version_max == 1

    with_engine(body)


def test_a_cancelled_load_that_had_begun_to_replace_weights_fences(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        await load(engine, tmp_path, version=1, weights=5)
        host.server.faults.never_loads = True
        loading = asyncio.create_task(load(engine, tmp_path, version=2, weights=6))
        await until(lambda: host.server.log[-1] == "load_version")
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert engine.version == -1
        assert host.server.log[-1] == "pause abort"

    with_engine(body)


def test_closing_the_engine_fails_everybody_who_waits(tmp_path: Path) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), toy_host() as host:
            engine = make_engine(host, EngineConfig(max_batch=1))
            running = asyncio.create_task(engine.run())
            await load(engine, tmp_path, version=1, weights=5)
            asking = [asyncio.create_task(engine.generate(request(f"r{i}", max_tokens=40))) for i in range(3)]
            await until(lambda: bool(host.server.running))
            running.cancel()
            results = await asyncio.gather(running, *asking, return_exceptions=True)
            assert isinstance(results[0], asyncio.CancelledError)
            assert all(isinstance(result, EngineError) for result in results[1:])
            with pytest.raises(EngineError, match="closed"):
                await engine.generate(request("late"))
            with pytest.raises(EngineError, match="closed"):
                await load(engine, tmp_path, version=2, weights=6)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("faults", "complaint"),
    [
        (Faults(no_dev_mode=True), "VLLM_SERVER_DEV_MODE=1"),
        (Faults(no_scale_out=True), "--enable-scale-out"),
        (Faults(raw_logprobs=True), "--logprobs-mode processed_logprobs"),
        (Faults(settings={"logprobs_mode": "raw_logprobs"}), "--logprobs-mode processed_logprobs"),
        (Faults(no_extension=True), "--worker-extension-cls trace_async"),
        (Faults(settings={"generation_config": "auto"}), "--generation-config vllm"),
        (Faults(settings={"skip_tokenizer_init": "True"}), "no --skip-tokenizer-init"),
        (Faults(settings={"dtype": "torch.bfloat16"}), "--dtype float32"),
        (Faults(settings={"max_model_len": "47"}), "--max-model-len 48"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_server_that_will_not_do_ends_the_engine_with_the_cure(faults: Faults, complaint: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), toy_host() as host:
            host.server.faults = faults
            with pytest.raises(ExceptionGroup) as caught:
                await make_engine(host, EngineConfig()).run()
            error = caught.value.exceptions[0]
            assert isinstance(error, ConfigError)
            assert complaint in str(error)
            assert "trace-async vllm-server CONFIG" in str(error)

    asyncio.run(main())


@pytest.mark.parametrize(("tokens", "said"), [(VOCABULARY - 1, "takes token id 19"), (VOCABULARY + 1, "refuses")])
def test_a_server_of_another_model_is_refused(tokens: int, said: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), toy_host() as host:
            engine = VllmServerEngine(
                config=config_at(host, EngineConfig()),
                expected=Expected(
                    vocabulary_size=tokens,
                    unknown_id=tokens,
                    max_tokens=MAX_TOKENS,
                    dtype="float32",
                    temperature=1.0,
                ),
                stop_ids=(NEVER,),
                base=BASE,
            )
            with pytest.raises(ExceptionGroup) as caught:
                await engine.run()
            assert said in str(caught.value.exceptions[0])
            assert "another model" in str(caught.value.exceptions[0])

    asyncio.run(main())


def test_other_temperatures_need_the_processor_for_greedy_requests() -> None:
    async def main() -> None:
        async with asyncio.timeout(20), toy_host() as host:
            with pytest.raises(ExceptionGroup) as caught:
                await make_engine(host, EngineConfig(temperature=0.7)).run()
            assert "--logits-processors" in str(caught.value.exceptions[0])

    asyncio.run(main())


def test_the_engine_waits_for_a_server_that_starts_after_it(tmp_path: Path) -> None:
    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        asking = asyncio.create_task(engine.generate(request("early")))
        loading = asyncio.create_task(load(engine, tmp_path, version=1, weights=5))
        await asyncio.sleep(0.05)
        assert not loading.done()
        await host.start()
        await loading
        assert (await asking).version_min == 1

    async def main() -> None:
        async with asyncio.timeout(20), toy_host() as host:
            await host.kill()
            engine = make_engine(host, EngineConfig())
            async with asyncio.TaskGroup() as group:
                running = group.create_task(engine.run())
                await body(engine, host)
                running.cancel()

    asyncio.run(main())


class Storm:
    """Requests under way all along, while versions come and go; remembers which weights each version really has."""

    def __init__(self, engine: VllmServerEngine, host: ToyHost, folder: Path) -> None:
        self.answers: list[tuple[GenerateRequest, Generation]] = []
        self.proven: dict[int, int] = {}  # version -> weights
        self._engine, self._host, self._folder = engine, host, folder

    async def ask_on(self, client: int) -> None:
        """One request after the other, every fifth with a deadline that it will hardly meet."""
        for number in range(10_000):
            ask = request(f"c{client}n{number}", (client, 3), max_tokens=12, seed=number)
            with suppress(EngineError, TimeoutError):
                async with asyncio.timeout(0.03 if number % 5 == 4 else 5.0):
                    self.answers.append((ask, await self._engine.generate(ask)))

    async def act(self, kind: str, version: int) -> None:
        weights = 100 + version
        if kind == "refused":
            (self._folder / "bad").write_text("bad", encoding="utf-8")
            with pytest.raises(PolicyError):
                await self._engine.load(
                    version=version, epoch=0, weights=self._folder / "bad", canary=canary_of(0), adapter=None
                )
            return
        if kind == "restart":
            await self._host.kill()
            await self._host.start()
        if kind == "false":
            with pytest.raises(PolicyError):
                await load(self._engine, self._folder, version=version, weights=weights, canary=0)
            weights = 200 + version  # the same version again, as it should be
        self.proven[version] = weights
        await load(self._engine, self._folder, version=version, weights=weights)

    def check(self) -> None:
        for ask, answer in self.answers:
            versions = [v for v in range(answer.version_min, answer.version_max + 1) if v in self.proven]
            right = [logprobs_of(self.proven[v], ask.prefix_ids, answer.token_ids) for v in versions]
            assert versions[0] == answer.version_min == answer.kv_version_min
            assert versions[-1] == answer.version_max
            same = np.isclose(answer.logprobs, right, atol=1e-5)
            assert same.any(axis=0).all()
            assert same[0, 0]
            assert same[-1, -1]


@pytest.mark.parametrize("on_update", ["drain", "continue"])
@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_an_answer_that_gets_out_is_true_to_its_stamps(
    tmp_path: Path, seed: int, on_update: str
) -> None:
    rng = np.random.default_rng(seed)

    async def body(engine: VllmServerEngine, host: ToyHost) -> None:
        storm = Storm(engine, host, tmp_path)
        asking = [asyncio.create_task(storm.ask_on(client)) for client in range(6)]
        for version, kind in enumerate(["good", *rng.permutation(["good", "good", "false", "refused", "restart"])]):
            await storm.act(str(kind), version)
            enough = len(storm.answers) + int(rng.integers(1, 9))
            await until(lambda enough=enough: len(storm.answers) >= enough)  # type: ignore[misc]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        storm.check()

    with_engine(body, config=EngineConfig(on_update=on_update, max_batch=4))
