"""Whether a vLLM server is one that this engine can sample with: its settings, its model, its log-probabilities.

Asked each time the server is found, because it may come back with other flags. Never changes anything at the server but
that it samples again if something left it paused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trace_async.core.types import Json
from trace_async.engines.vllm_common import GREEDY_PROCESSOR, OWN_SETTINGS
from trace_async.engines.vllm_server_http import ServerRefused, VllmHttp
from trace_async.errors import ConfigError, EngineError

_CURE = "start it with `trace-async vllm-server CONFIG`, or look at what that command prints with --print"

_DEMANDED = ("logprobs_mode", "generation_config")
"""Of `OWN_SETTINGS`; with other values of the rest answers are the same, or there are none."""

_NO_SUCH_PATH = (403, 404, 405)

_PROBE_TOKENS, _PROBE_CHOICES = 8, 5
_PROBE_TEMPERATURE = 0.5
_FLAT_NATS = 1e-2
"""Candidates whose log-probabilities lie closer together than this tell nothing about a temperature."""

_LOGIT_SLACK = 1e-3
"""Log-probabilities are at most 0, but for rounding; logits are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What the server must serve."""

    vocabulary_size: int
    unknown_id: int  # the first token id that neither the model nor its tokenizer has
    max_tokens: int  # the longest context that will be asked for
    dtype: str
    temperature: float


async def check_server(server: VllmHttp, expected: Expected) -> None:
    """Raises ConfigError, with the cure, for a server that will not do; ServerFailure when it does not answer."""
    for complaint in _complaints(await _settings(server), expected):
        raise ConfigError(f"engine.server_url: {server.url} {complaint}; {_CURE}")
    await server.resume()  # whoever used it before may have been killed between pause and resume
    await _check_vocabulary(server, expected)
    await _check_logprobs(server, expected)


async def _settings(server: VllmHttp) -> Json:
    try:
        return await server.settings()
    except ServerRefused as error:
        if error.status in _NO_SUCH_PATH:
            raise ConfigError(
                f"engine.server_url: {error}. The server has no endpoints for new weights, which vLLM opens with "
                f"VLLM_SERVER_DEV_MODE=1 in its environment; {_CURE}"
            ) from error
        if "no attribute" in str(error):
            raise ConfigError(
                f"engine.server_url: {error}. The server's workers lack our extension (--worker-extension-cls "
                f"{OWN_SETTINGS['worker_extension_cls']}); {_CURE}"
            ) from error
        raise


def _complaints(settings: Json, expected: Expected) -> Iterator[str]:
    for key in _DEMANDED:
        if settings.get(key) != OWN_SETTINGS[key]:
            flag = f"--{key.replace('_', '-')} {OWN_SETTINGS[key]}"
            yield f"runs with {key} {settings.get(key)!r}, {OWN_SETTINGS[key]!r} is needed ({flag})"
    if settings.get("skip_tokenizer_init") == "True":
        yield "has no tokenizer, so it takes token ids unchecked and dies of an unknown one (no --skip-tokenizer-init)"
    dtype = str(settings.get("dtype")).removeprefix("torch.")
    if dtype != expected.dtype:
        yield f"computes in {dtype}, engine.dtype is {expected.dtype} (--dtype {expected.dtype})"
    length = str(settings.get("max_model_len"))
    if not length.isdigit() or int(length) < expected.max_tokens:
        yield (
            f"takes contexts of {length} tokens, tree.max_context_tokens is {expected.max_tokens} "
            f"(--max-model-len {expected.max_tokens})"
        )
    if expected.temperature != 1.0 and GREEDY_PROCESSOR not in str(settings.get("logits_processors")):
        yield f"lacks the logits processor {GREEDY_PROCESSOR} (--logits-processors {GREEDY_PROCESSOR})"


async def _check_vocabulary(server: VllmHttp, expected: Expected) -> None:
    """Whether the last token is known and the next one is not."""
    last = expected.vocabulary_size - 1
    for token, known in ((last, True), (expected.unknown_id, False)):
        try:
            await server.score({"token_ids": [token], "sampling_params": {"max_tokens": 1, "detokenize": False}})
            found = True
        except ServerRefused as error:
            if error.status in _NO_SUCH_PATH:
                raise ConfigError(
                    f"engine.server_url: {error}. The server takes no token ids (--enable-scale-out); {_CURE}"
                ) from error
            if error.status != 400:
                raise
            found = False
        if found != known:
            raise ConfigError(
                f"engine.server_url: {server.url} {'takes' if found else 'refuses'} token id {token}, but the policy "
                f"has {expected.vocabulary_size} tokens: it serves another model; start it with that of policy.path"
            )


async def _check_logprobs(server: VllmHttp, expected: Expected) -> None:
    """Whether log-probabilities are those of the sampled distribution: halving the temperature doubles their gaps."""
    one, half = await _candidates(server, expected, 1.0), await _candidates(server, expected, _PROBE_TEMPERATURE)
    both = sorted(one.keys() & half.keys(), key=lambda token: one[token])
    gap = one[both[-1]] - one[both[0]] if both else 0.0
    if max(*one.values(), *half.values()) > _LOGIT_SLACK:
        raise ConfigError(f"engine.server_url: {server.url} reports logits; {_needs_mode()}")
    if gap < _FLAT_NATS:
        return  # a policy that has learnt nothing; the setting itself was looked at already
    ratio = (half[both[-1]] - half[both[0]]) / gap
    if abs(ratio * _PROBE_TEMPERATURE - 1) > abs(ratio - 1):
        raise ConfigError(
            f"engine.server_url: {server.url} reports log-probabilities before the temperature, not those of the "
            f"sampled distribution (at temperature {_PROBE_TEMPERATURE:g} their gaps are {ratio:.3g} times those at 1, "
            f"not {1 / _PROBE_TEMPERATURE:g} times); {_needs_mode()}"
        )


def _needs_mode() -> str:
    return f"it needs --logprobs-mode {OWN_SETTINGS['logprobs_mode']}: {_CURE}"


async def _candidates(server: VllmHttp, expected: Expected, temperature: float) -> dict[int, float]:
    """The most likely next tokens after a fixed prompt, and their log-probabilities."""
    prompt = np.arange(_PROBE_TOKENS) * 31 % expected.vocabulary_size
    fields = {"temperature": temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 1, "detokenize": False}
    reply = await server.score(
        {"token_ids": prompt.tolist(), "sampling_params": {**fields, "seed": 0, "logprobs": _PROBE_CHOICES}}
    )
    try:
        top = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        return {int(entry["token_id"]): float(entry["logprob"]) for entry in top}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"{server.url}: unreadable reply to a probe: {type(error).__name__}: {error}") from error
