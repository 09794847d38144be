"""The engines that benchmarks/engine.py compares, each answering one workload at a time.

    generate          transformers' generate, one call for each batch of the requests that are ready, in their order
    generate_sorted   the same, but the ready requests are first sorted by how many tokens they want
    continuous        transformers' own continuous batching
    local, vllm       this project's engines, through their public interface

All sample at temperature 1 without truncation, exactly as many tokens as were asked for. Only requested tokens count:
a call of generate lasts until its longest request is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from benchmarks.engine_workload import Growth, Job
from trace_async.acting.versions import VersionedEngine
from trace_async.config import Config, EngineConfig, TreeConfig
from trace_async.core.types import Canary, FloatArray, GenerateRequest, IntArray
from trace_async.rendering import Renderer

Answers = dict[int, tuple[Job, IntArray, FloatArray | None]]
"""Request, sampled tokens and, where the engine tells them, their log-probabilities; by index of the turn."""

MAX_TOKENS = 512
"""The longest context of any workload here."""

CACHE_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Which engine, with what."""

    side: str
    folder: Path
    dtype: str
    threads: int
    max_batch: int


class Side(Protocol):
    """One engine, ready."""

    async def play(self, growth: Growth, *, concurrency: int, logprobs: bool) -> Answers:
        """Answer a whole workload, `concurrency` requests at a time."""
        ...

    async def load(self, weights: Path, canary: Canary, *, version: int) -> None:
        """Take over weights from a file."""
        ...


class Generate:
    """transformers' generate: left padding, sdpa, key/values kept within a call."""

    def __init__(self, setting: Setting) -> None:
        self._model = load_model(setting)
        self._sorts = setting.side == "generate_sorted"

    async def play(self, growth: Growth, *, concurrency: int, logprobs: bool) -> Answers:
        answers: Answers = {}
        while not growth.finished:
            wave = [growth.take() for _ in range(growth.num_ready)]
            if self._sorts:
                wave.sort(key=lambda job: (job.max_tokens, len(job.prefix)))
            for start in range(0, len(wave), concurrency):
                batch = wave[start : start + concurrency]
                for job, tokens, values in self._call(batch, logprobs=logprobs):
                    answers[job.index] = (job, tokens, values)
            for job in wave:
                growth.answer(job.index, answers[job.index][1])
        return answers

    async def load(self, weights: Path, canary: Canary, *, version: int) -> None:
        from safetensors.torch import load_file

        tensors = load_file(weights)
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                if name in tensors:  # a tied head is not in the file
                    tensor.copy_(tensors[name])

    @torch.inference_mode()
    def _call(self, batch: list[Job], *, logprobs: bool) -> list[tuple[Job, IntArray, FloatArray | None]]:
        longest, new = max(len(job.prefix) for job in batch), max(job.max_tokens for job in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, job in enumerate(batch):
            ids[row, longest - len(job.prefix) :] = torch.from_numpy(job.prefix)
            mask[row, longest - len(job.prefix) :] = 1
        found = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=new,
            output_logits=logprobs,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[:, longest:]
        assert tokens.shape[1] == new
        values: torch.Tensor | None = None
        if logprobs:
            all_values = torch.log_softmax(torch.stack(found.logits, dim=1).float(), dim=-1)
            values = all_values.gather(-1, tokens[:, :, None])[:, :, 0]
        return [
            (
                job,
                tokens[row, : job.max_tokens].numpy().astype(np.int32),
                None if values is None else values[row, : job.max_tokens].numpy(),
            )
            for row, job in enumerate(batch)
        ]


class Continuous:
    """transformers' continuous batching, in its own thread; pages of 32 tokens, so that it can share prefixes."""

    def __init__(self, setting: Setting, manager: Any) -> None:
        self._manager = manager
        self._setting = setting
        self._calls = 0

    async def play(self, growth: Growth, *, concurrency: int, logprobs: bool) -> Answers:
        answers: Answers = {}
        flying: dict[str, Job] = {}
        self._calls += 1
        while not growth.finished:
            while growth.num_ready and len(flying) < concurrency:
                job = growth.take()
                name = f"{self._calls}-{job.index}"
                flying[name] = job
                self._manager.add_request(
                    job.prefix.tolist(), request_id=name, max_new_tokens=job.max_tokens, eos_token_id=-1
                )
            done = self._manager.get_result(timeout=120)
            if done is None or done.error is not None:
                raise RuntimeError(f"continuous batching failed: {done}")
            job = flying.pop(done.request_id)
            tokens = np.asarray(done.generated_tokens, np.int32)
            answers[job.index] = (job, tokens, np.asarray(done.logprobs, np.float32))
            growth.answer(job.index, tokens)
        return answers

    async def load(self, weights: Path, canary: Canary, *, version: int) -> None:
        raise NotImplementedError("it keeps what it computed under older weights")


class Ours:
    """One of this project's engines."""

    def __init__(self, engine: VersionedEngine) -> None:
        self.engine = engine
        self._calls = 0

    async def play(self, growth: Growth, *, concurrency: int, logprobs: bool) -> Answers:
        answers: Answers = {}
        self._calls += 1
        changed = asyncio.Condition()

        async def client() -> None:
            while True:
                async with changed:
                    await changed.wait_for(lambda: growth.num_ready or growth.finished)
                    if growth.finished:
                        return
                    job = growth.take()
                found = await self.engine.generate(
                    GenerateRequest(
                        request_id=f"{self._calls}-{job.index}",
                        prefix_ids=job.prefix,
                        max_tokens=job.max_tokens,
                        seed=job.seed,
                    )
                )
                async with changed:
                    answers[job.index] = (job, found.token_ids, found.logprobs)
                    growth.answer(job.index, found.token_ids)
                    changed.notify_all()

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(client())
        return answers

    async def load(self, weights: Path, canary: Canary, *, version: int) -> None:
        await self.engine.load(version=version, epoch=0, weights=weights, canary=canary, adapter=None)


@asynccontextmanager
async def opened(setting: Setting) -> AsyncIterator[Side]:
    """The engine, until the block ends."""
    torch.set_num_threads(setting.threads)
    async with AsyncExitStack() as stack:
        if setting.side.startswith("generate"):
            yield Generate(setting)
        elif setting.side == "continuous":
            yield Continuous(setting, stack.enter_context(_manager(setting)))
        else:
            engine = _ours(setting)
            group = await stack.enter_async_context(asyncio.TaskGroup())
            running = group.create_task(engine.run())
            stack.callback(running.cancel)
            yield Ours(engine)


def load_model(setting: Setting) -> Any:
    """The plain transformers model, sampling without truncation and without an end."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(
        setting.folder, dtype=getattr(torch, setting.dtype), attn_implementation="sdpa", local_files_only=True
    )
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, pad_token_id=0, eos_token_id=None
    )
    return model


def _manager(setting: Setting) -> Any:
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    pages = setting.max_batch * MAX_TOKENS // 32
    config = ContinuousBatchingConfig(page_size=32, num_blocks=pages, max_batch_tokens=512, return_logprobs=True)
    model = load_model(setting)
    return model.continuous_batching_context_manager(continuous_batching_config=config, timeout=30)


class _NoStops:
    """What an engine asks of a renderer: that nothing ends a turn early."""

    stop_ids: tuple[int, ...] = ()
    pad_id = 0


def _ours(setting: Setting) -> VersionedEngine:
    from trace_async.app.engines import make_engine

    engine = EngineConfig(
        kind=setting.side,
        dtype=setting.dtype,
        threads=setting.threads,
        max_batch=setting.max_batch,
        prefix_cache_bytes=CACHE_BYTES,
        device="cpu",
    )
    config = Config(engine=engine, tree=TreeConfig(max_context_tokens=MAX_TOKENS))
    return make_engine(config, setting.folder, renderer=cast(Renderer, _NoStops()), version=0)
