"""The calls to a running vLLM: one request, one score, one swap of weights; vLLM's errors as this package's.

Invariants: whatever vLLM raises becomes EngineError; when its engine process is dead, `EngineGone`, and the process's
`ended` is set; weights are replaced only while nothing is scheduled and no key/values are left.
Never: decides when; holds or refuses an answer. Imports vllm in functions only.
"""

from __future__ import annotations

from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from trace_async.core.types import FloatArray, GenerateRequest, IntArray, StopReason
from trace_async.engines.vllm_common import Load, canary_fields, read_stop, sampling_fields
from trace_async.engines.vllm_process import VllmProcess
from trace_async.errors import EngineError

T = TypeVar("T")


class EngineGone(EngineError):
    """vLLM's engine process ended."""


class Answer(NamedTuple):
    """What vLLM says of one request."""

    token_ids: IntArray  # [A]
    logprobs: FloatArray  # [A] nats
    spans: list[tuple[str, int, int]]  # label, start, end
    stop: StopReason
    cached_tokens: int  # prefix tokens whose key/values were there already


class VllmFront:
    """What the engine asks of one running vLLM."""

    def __init__(self, process: VllmProcess, *, base: Path) -> None:
        """`base`: the start policy's folder."""
        self._process = process
        self._llm = process.llm
        self._base = base

    @property
    def is_gone(self) -> bool:
        """Whether the engine's process has ended."""
        return self._process.ended.is_set()

    async def answer(
        self, request: GenerateRequest, *, temperature: float, stop_ids: tuple[int, ...], salt: str
    ) -> Answer:
        """Sample one turn; waits for vLLM. Cancelled, it is aborted there. Raises EngineError."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fields = sampling_fields(request, temperature=temperature, stop_ids=stop_ids)
        params = SamplingParams(**fields, flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"request {request.request_id}"
        output = await self._last_output(request.prefix_ids, params, salt=salt, name=name)
        answer = output.outputs[0]
        if answer.logprobs is None or list(answer.logprobs.token_ids) != list(answer.token_ids):
            raise EngineError(f"{name}: vLLM gave tokens {list(answer.token_ids)}, and log-probabilities of others")
        return Answer(
            token_ids=np.asarray(answer.token_ids, dtype=np.int32),
            logprobs=np.asarray(answer.logprobs.logprobs, dtype=np.float32),
            spans=_spans(answer),
            stop=read_stop(answer.finish_reason, request_id=name),
            cached_tokens=output.num_cached_tokens or 0,
        )

    async def score(self, prompt: IntArray, *, label: str, salt: str) -> FloatArray:
        """Log-probabilities float32 [L - 1] of prompt[1:] under the weights `label`. Raises EngineError."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(**canary_fields(), output_kind=RequestOutputKind.FINAL_ONLY)
        name = f"canary of {label}"
        output = await self._last_output(prompt, params, salt=salt, name=name)
        found = {span[0] for span in _spans(output.outputs[0])}
        if found != {label}:
            raise EngineError(f"{name}: vLLM says that weights {sorted(found)} scored it")
        places = zip(prompt[1:].tolist(), output.prompt_logprobs[1:], strict=True)
        return np.asarray([place[token].logprob for token, place in places], dtype=np.float32)

    async def name_weights(self, label: str) -> None:
        """What vLLM says from now on of the tokens that it samples. Raises EngineError."""
        await self._call(self._llm.update_weight_version(label), what=f"naming weights {label}")

    async def pause(self) -> None:
        """Nothing is scheduled any more; requests in flight stay, every key/value goes. Raises EngineError."""
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=True), what="pausing")

    async def resume(self) -> None:
        """Go on; key/values of requests in flight are computed anew. Raises EngineError."""
        await self._call(self._llm.resume_generation(), what="resuming")

    async def abort_all(self) -> None:
        """End every request in flight and throw every key/value away. Raises EngineError."""
        await self._call(self._llm.pause_generation(mode="abort", clear_cache=True), what="aborting")
        await self.resume()

    async def replace(self, load: Load) -> str:
        """Have the paused vLLM copy new weights: "" when it did, or why no worker took the file, and the old ones stay.

        Raises EngineError when the weights may be half copied or key/values may be left.
        """
        rank, alpha = (load.adapter.rank, load.adapter.alpha) if load.adapter is not None else (0, 0.0)
        arguments = (str(load.weights.absolute()), str(self._base), rank, alpha)
        what = f"loading {load.label}"
        refusals: list[str] = await self._call(self._llm.collective_rpc("load_version", args=arguments), what=what)
        if all(refusals):
            return refusals[0]
        if any(refusals):
            raise EngineError(f"{what}: some workers took it over and some did not: {refusals}")
        if not await self._call(self._llm.reset_prefix_cache(), what="emptying the prefix cache"):
            raise EngineError(f"{what}: vLLM did not empty its prefix cache")
        await self.name_weights(load.label)
        return ""

    async def _last_output(self, tokens: IntArray, params: Any, *, salt: str, name: str) -> Any:
        from vllm.inputs import tokens_input

        prompt = tokens_input(tokens.tolist(), cache_salt=salt)

        async def run() -> Any:
            output = None
            async for found in self._llm.generate(prompt, params, name):
                output = found
            return output

        output = await self._call(run(), what=name)
        if output is None:
            raise EngineError(f"{name}: vLLM gave no output")
        return output

    async def _call(self, call: Awaitable[T], *, what: str) -> T:
        try:
            async with self._process.lifetime():
                return await call
        except Exception as error:  # the boundary to vLLM, which raises errors of its own and plain ones
            if self._llm.errored or self._process.ended.is_set():
                self._process.end()
                raise EngineGone(f"{what}: vLLM's engine process ended") from error
            raise EngineError(f"{what}: {type(error).__name__}: {error}") from error


def _spans(answer: Any) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in answer.weight_versions or ()]
