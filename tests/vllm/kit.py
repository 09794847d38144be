"""Tiny policies for the vLLM tests, what transformers says of their tokens, an engine that a module's tests share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trace_async.config import EngineConfig
from trace_async.core.types import Canary, FloatArray, GenerateRequest, Generation, IntArray
from trace_async.engines.vllm_engine import VllmEngine
from trace_async.engines.vllm_process import Launch
from trace_async.weights import find_aliases, write_weights

T = TypeVar("T")

START_S = 500.0
"""For vLLM to start, of which it takes 15 s on two idle cores."""

VOCABULARY = 96
CONTEXT = 480
NEVER = 95
"""A stop token that these models hardly ever sample."""


def tied_model(seed: int) -> Any:
    """A Llama whose output head is its embedding; its heads are of 32, since vLLM on a CPU knows no smaller ones."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # at their first size, logits are so flat that old and new weights look alike
                parameter.mul_(4.0)
    return model


def save_version(model: torch.nn.Module | dict[str, torch.Tensor], path: Path) -> Path:
    """A published file of the model's weights."""
    state = model if isinstance(model, dict) else model.state_dict()
    aliases = find_aliases(state)
    write_weights(path, {name: t for name, t in state.items() if name not in aliases}, aliases=aliases)
    return path


@torch.no_grad()
def logits_of(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """Logits float32 [L, vocabulary] after each of the tokens."""
    found: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0].float()
    return found


def logprobs_of(model: torch.nn.Module, tokens: Sequence[int], *, temperature: float = 1.0) -> FloatArray:
    """Log-probabilities float32 [L - 1] of tokens[1:]."""
    table = torch.log_softmax(logits_of(model, tokens)[:-1] / temperature, dim=-1)
    found: FloatArray = table.gather(-1, torch.tensor(list(tokens))[1:, None])[:, 0].numpy()
    return found


def canary_of(model: torch.nn.Module, *, seed: int = 0) -> Canary:
    """Two prompts and what `model` says of them. Never while requests are under way: see `test_server.Served`."""
    rng = np.random.default_rng(seed)
    prompts = tuple(rng.integers(3, VOCABULARY - 1, size=size, dtype=np.int32) for size in (40, 9))
    return Canary(prompts=prompts, logprobs=tuple(logprobs_of(model, prompt.tolist()) for prompt in prompts))


def request(
    name: str, prefix: Sequence[int], *, max_tokens: int = 16, seed: int = 0, greedy: bool = False
) -> GenerateRequest:
    """One turn to sample."""
    ids: IntArray = np.asarray(prefix, dtype=np.int32)
    return GenerateRequest(request_id=name, prefix_ids=ids, max_tokens=max_tokens, seed=seed, greedy=greedy)


def gap(
    model: torch.nn.Module, ask: GenerateRequest, answer: Generation, *, temperature: float = 1.0, first: int = 0
) -> FloatArray:
    """|engine's - transformers'| log-probabilities, in nats, of the answer's tokens from `first` on."""
    tokens = [*ask.prefix_ids.tolist(), *answer.token_ids.tolist()]
    expected = logprobs_of(model, tokens, temperature=temperature)[len(ask.prefix_ids) - 1 :]
    found: FloatArray = np.abs(answer.logprobs - expected)[first:]
    return found


def vllm_processes() -> list[Any]:
    """The engines and workers, as psutil knows them, that vLLM has started from this process and that still live."""
    import psutil

    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(child.cmdline()):
                found.append(child)
    return found


async def until(condition: Callable[[], bool]) -> None:
    """Returns when it holds; whoever calls has the deadline."""
    while not condition():  # noqa: ASYNC110 - other processes wake nobody
        await asyncio.sleep(0.005)


class EngineHost:
    """An engine and the event loop it lives on, which turns while a test runs something there."""

    def __init__(self, engine: VllmEngine, runner: asyncio.Runner) -> None:
        self.engine = engine
        self._runner = runner

    def do(self, body: Callable[[VllmEngine], Awaitable[T]], *, deadline_s: float = 60.0) -> T:
        """Run one coroutine on the engine's loop."""

        async def limited() -> T:
            async with asyncio.timeout(deadline_s):
                return await body(self.engine)

        return self._runner.run(limited())


@contextmanager
def hosted_engine(
    folder: Path, config: EngineConfig, *, version: int = -1, max_tokens: int = CONTEXT
) -> Iterator[EngineHost]:
    """A running engine for the tests of a module; afterwards none of its processes is left."""
    with asyncio.Runner() as runner:
        launch = Launch(folder=folder, config=config, max_tokens=max_tokens)
        engine = VllmEngine(launch, stop_ids=(NEVER,), version=version)
        running = runner.get_loop().create_task(engine.run())
        try:
            yield EngineHost(engine, runner)
        finally:
            running.cancel()
            runner.run(_ended(running))
            gc.collect()  # vLLM's sockets complain now, not when pytest ends


async def _ended(running: asyncio.Task[None]) -> None:
    await asyncio.wait([running], timeout=60.0)
