"""What is asked of a vLLM server's /inference/v1/generate, and what its replies say; plain data in and out.

That endpoint and not /v1/completions: it takes and gives integer token ids, pairs each with its log-probability, and
says which weights sampled which tokens; the other one gives tokens as text and nothing of weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from trace_async.core.types import FloatArray, GenerateRequest, IntArray, Json, StopReason
from trace_async.engines.vllm_common import canary_fields, read_stop, sampling_fields
from trace_async.errors import EngineError

_NOT_A_NUMBER = -9999.0
"""What vLLM writes for a log-probability that is infinite or NaN, or that it does not have."""


class Span(NamedTuple):
    """Tokens [start, end) of an answer and the label of the weights that sampled them."""

    label: str
    start: int
    end: int


class Answer(NamedTuple):
    """One answered request."""

    token_ids: IntArray  # [A]
    logprobs: FloatArray  # [A] nats
    spans: tuple[Span, ...]
    stop: StopReason
    cached_tokens: int  # prefix tokens whose key/values were there already; 0 where the server does not say


def generate_body(
    request: GenerateRequest, *, temperature: float, stop_ids: Sequence[int], salt: str
) -> dict[str, Any]:
    """The JSON of one request; key/values are shared between requests of the same `salt`."""
    return {
        "request_id": request.request_id,
        "token_ids": request.prefix_ids.tolist(),
        "cache_salt": salt,
        "sampling_params": sampling_fields(request, temperature=temperature, stop_ids=stop_ids),
    }


def score_body(prompt: IntArray, *, salt: str) -> dict[str, Any]:
    """The JSON of a request for the log-probabilities of `prompt` int32 [L] itself."""
    return {"token_ids": prompt.tolist(), "cache_salt": salt, "sampling_params": canary_fields()}


def read_answer(reply: Json, *, request_id: str, vocabulary_size: int) -> Answer:
    """Raises EngineError for a reply that is not what was asked for."""
    try:
        choice = reply["choices"][0]
        token_ids = np.asarray(choice["token_ids"], dtype=np.int32)
        content = choice["logprobs"]["content"] if len(token_ids) else []
        named = [entry["token_id"] for entry in content]
        logprobs = np.asarray([entry["logprob"] for entry in content], dtype=np.float32)
        spans = _read_spans(choice)
        details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
        cached_tokens = int(details.get("cached_tokens") or 0)
        finish_reason = choice["finish_reason"]
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise EngineError(f"{request_id}: unreadable reply: {type(error).__name__}: {error}") from error
    stop = read_stop(finish_reason, request_id=request_id)
    if not len(token_ids):
        raise EngineError(f"{request_id}: the server ended the answer before its first token ({finish_reason})")
    if named != token_ids.tolist():
        raise EngineError(f"{request_id}: log-probabilities of tokens {named} to tokens {token_ids.tolist()}")
    if not 0 <= token_ids.min() <= token_ids.max() < vocabulary_size:
        raise EngineError(f"{request_id}: token ids {token_ids.tolist()} outside a vocabulary of {vocabulary_size}")
    if (logprobs <= _NOT_A_NUMBER).any():
        raise EngineError(f"{request_id}: the server has no log-probability of a token it sampled")
    return Answer(token_ids, logprobs, spans, stop, cached_tokens)


def read_scored(reply: Json, prompt: IntArray) -> tuple[FloatArray, set[str]]:
    """Log-probabilities float32 [L - 1] of prompt[1:], and labels of the weights that the server holds.

    Raises EngineError when the reply has no such thing.
    """
    try:
        found = reply["prompt_logprobs"][1:]
        scores = [place[str(token)]["logprob"] for place, token in zip(found, prompt[1:].tolist(), strict=True)]
        return np.asarray(scores, dtype=np.float32), labels_of(_read_spans(reply["choices"][0]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"unreadable scores of a canary prompt: {type(error).__name__}: {error}") from error


def labels_of(spans: Sequence[Span]) -> set[str]:
    """Of the spans that hold any token."""
    return {span.label for span in spans if span.end > span.start}


def _read_spans(choice: Json) -> tuple[Span, ...]:
    return tuple(Span(str(span["version"]), int(span["start"]), int(span["end"])) for span in choice["weight_versions"])
