"""What both vLLM engines share: version labels, sampling parameters, stamps from spans, and which settings are refused.

Invariants
    - Every sampling parameter that changes the sampled distribution is given explicitly with each request, so that a
      model folder's generation_config.json never leaks in; the engine-wide settings in `OWN_SETTINGS` go with them.
    - Log-probabilities are those of the distribution that was sampled: vLLM's "processed" ones, after temperature.
    - A stamp is what vLLM says of the tokens of one answer; a label that this project did not give is an error.

Plain data only: nothing here imports vllm or torch, waits, or touches a process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trace_async.core.types import Adapter, Canary, GenerateRequest, StopReason
from trace_async.errors import ConfigError, EngineError

WORKER_EXTENSION = "trace_async.engines.vllm_worker.WorkerExtension"
"""Given to vLLM as worker_extension_cls; its `load_version` is called by collective_rpc."""

GREEDY_PROCESSOR = "trace_async.engines.vllm_processor:GreedyTemperature"
"""Given to vLLM as logits_processors when the temperature is not 1; see `sampling_fields`."""

GREEDY_TEMPERATURE = "greedy_temperature"
"""Key in a request's extra_args that the processor reads."""

KV_BLOCK_TOKENS = 32
"""Tokens of one key/value block, the unit in which prefixes are shared, on a CPU; vLLM takes multiples of 32 there."""

OWN_SETTINGS: dict[str, Any] = {
    "logprobs_mode": "processed_logprobs",  # the default, "raw_logprobs", is before the temperature
    "generation_config": "vllm",  # not the model folder's
    "enable_prefix_caching": True,
    "worker_extension_cls": WORKER_EXTENSION,
}
"""Engine arguments that both engines need exactly so: one sets them, the other demands them of its server's command."""

_SEED_BITS = 63  # vLLM hands seeds to torch as int64

_LABEL = re.compile(r"e(\d+)v(\d+)")

_REFUSED: dict[str, str] = {
    "model": "is policy.path",
    "tokenizer": "is policy.path",
    "model_weights": "is policy.path",
    "hf_config_path": "is policy.path",
    "skip_tokenizer_init": "is set by this engine: token ids go in and out",
    "dtype": "is engine.dtype",
    "seed": "is useless here: every request carries its own",
    "max_model_len": "is tree.max_context_tokens",
    "max_num_seqs": "is engine.max_batch",
    "kv_cache_memory_bytes": "is engine.prefix_cache_bytes on a CPU, and on a GPU gpu_memory_utilization says it",
    "logits_processors": "would change what is sampled behind the recorded log-probabilities",
    "override_generation_config": "would change what is sampled behind the recorded log-probabilities",
    "speculative_config": "proposes tokens whose log-probabilities vLLM does not report after processing",
    "spec_method": "proposes tokens whose log-probabilities vLLM does not report after processing",
    "spec_model": "proposes tokens whose log-probabilities vLLM does not report after processing",
    "spec_tokens": "proposes tokens whose log-probabilities vLLM does not report after processing",
    "watermark_config": "would change what is sampled behind the recorded log-probabilities",
    "diffusion_config": "samples several tokens at once, whose log-probabilities vLLM does not report",
    "return_sampling_mask": "is for truncated sampling, which is off",
    "quantization": "computes with other weights than the published ones; no canary would pass",
    "quantization_config": "computes with other weights than the published ones; no canary would pass",
    "kv_cache_dtype": "is engine.dtype",
    "load_format": "may start with weights that are not the policy's",
    "hf_overrides": "may make another model of the policy's folder",
    "enable_lora": "is not needed: published low-rank additions are merged into the weights",
    "enable_sleep_mode": "drops weights behind the version that was confirmed",
    "weight_transfer_config": "is another way of replacing weights, behind the version that was confirmed",
    "enable_trace_replay": "makes vLLM emit tokens that nobody sampled",
    "kv_sharing_fast_prefill": "makes vLLM report wrong log-probabilities of prompts, which prove a version",
    "kv_transfer_config": "brings key/values of unknown weights",
    "kv_offloading_size": "keeps key/values of older weights outside the cache that is reset",
    "kv_offloading_backend": "keeps key/values of older weights outside the cache that is reset",
    "data_parallel_size": "splits one engine into several with weights of their own; start more actors instead",
    "trust_remote_code": "runs code from a model folder",
    "worker_cls": "is set by this engine",
    "scheduler_cls": "may not keep requests across an update",
    "enable_log_requests": "logs every request",
}


class Stamps(NamedTuple):
    """Fields of a `Generation`."""

    version_min: int
    version_max: int
    kv_version_min: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A version to take over."""

    version: int
    epoch: int
    weights: Path  # a safetensors file
    canary: Canary
    adapter: Adapter | None

    @property
    def label(self) -> str:
        """What vLLM calls these weights."""
        return version_label(version=self.version, epoch=self.epoch)


def version_label(*, version: int, epoch: int) -> str:
    """What vLLM is told of a version's weights; it says it back of the tokens they sampled."""
    return f"e{epoch}v{version}"


def read_label(label: str) -> tuple[int, int]:
    """(version, epoch) of a label. Raises EngineError for one that `version_label` did not make, e.g. "default"."""
    found = _LABEL.fullmatch(label)
    if not found:
        raise EngineError(f"vLLM says of tokens that weights {label!r} sampled them, which is no published version")
    return int(found[2]), int(found[1])


def cache_salt(label: str, *, load: int) -> str:
    """Key/values are shared under the same salt only: a new one for each load, also when a version is loaded again."""
    return f"{label}-{load}"


def sampling_fields(request: GenerateRequest, *, temperature: float, stop_ids: Sequence[int]) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams for one request, all of JSON's kinds.

    A greedy request asks for temperature 0, of which vLLM reports log-probabilities at temperature 1. Where
    `temperature` is another, `GREEDY_PROCESSOR` must be installed: it divides the logits of such a request, which
    leaves their order and makes the log-probabilities those of the sampled distribution.
    """
    fields: dict[str, Any] = {
        "n": 1,
        "temperature": 0.0 if request.greedy else temperature,
        "seed": request.seed % (1 << _SEED_BITS),
        "max_tokens": request.max_tokens,
        "min_tokens": 0,
        "stop_token_ids": [int(token) for token in stop_ids],
        "ignore_eos": True,  # else the model folder's eos tokens would stop a turn beside `stop_ids`
        "logprobs": 0,  # of the sampled token only
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "detokenize": False,
    }
    if request.greedy and temperature != 1.0:
        fields["extra_args"] = {GREEDY_TEMPERATURE: temperature}
    return fields


def canary_fields() -> dict[str, Any]:
    """Fields of vLLM's SamplingParams that make it score a whole prompt at temperature 1, with nothing from a cache."""
    return {
        "n": 1,
        "temperature": 0.0,
        "max_tokens": 1,
        "ignore_eos": True,
        "prompt_logprobs": 0,
        "detokenize": False,
        "skip_reading_prefix_cache": True,  # vLLM scores only the part of a prompt that it computes
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    }


def read_stamps(spans: Sequence[tuple[str, int, int]], *, num_tokens: int, request_id: str) -> Stamps:
    """Stamps from vLLM's own (label, start, end) spans over the answer's tokens.

    Key/values are as old as the oldest token's version and never older: an update recomputes those of requests in
    flight, empties the prefix cache and changes its salt. Raises EngineError unless the spans cover every token.
    """
    edges = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != edges[:-1] or edges[-1] != num_tokens or num_tokens < 1:
        raise EngineError(f"{request_id}: vLLM's version spans {list(spans)} do not cover its {num_tokens} tokens")
    versions = [read_label(label)[0] for label, start, end in spans if end > start]
    return Stamps(min(versions), max(versions), min(versions))


def read_stop(finish_reason: str | None, *, request_id: str) -> StopReason:
    """Why vLLM ended an answer. Raises EngineError when it did not, or did so because of an error."""
    reasons = {"stop": StopReason.STOP, "length": StopReason.LENGTH, "abort": StopReason.ABORT}
    if finish_reason not in reasons:
        raise EngineError(f"{request_id}: vLLM ended the answer with {finish_reason!r}")
    return reasons[finish_reason]


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for engine arguments of vLLM that this project sets itself or cannot record truthfully."""
    for key in sorted(options):
        if key in OWN_SETTINGS:
            raise ConfigError(
                f"engine.options.{key} must stay {OWN_SETTINGS[key]!r}, which this engine sets; remove it"
            )
        if key in _REFUSED:
            raise ConfigError(f"engine.options.{key} is refused: it {_REFUSED[key]}; remove it")


def check_length(request: GenerateRequest, *, max_model_tokens: int) -> None:
    """Raises EngineError for a request that cannot fit, before vLLM is asked."""
    length = len(request.prefix_ids)
    if request.max_tokens < 1 or length < 1:
        raise EngineError(f"request {request.request_id}: {length} prefix tokens, max_tokens {request.max_tokens}")
    if length + request.max_tokens > max_model_tokens:
        raise EngineError(
            f"request {request.request_id}: {length} prefix tokens + {request.max_tokens} new ones exceed the "
            f"{max_model_tokens} that vLLM was started for; lower tree.max_context_tokens"
        )
