"""A logits processor for vLLM that keeps the log-probabilities of greedy requests those of the sampled distribution.

vLLM takes a greedy request's token before it divides by a temperature, and reports log-probabilities at temperature 1.
This divides the logits of such requests by the engine's temperature beforehand: the order of tokens stays, and the
log-probabilities become the ones that a sampled token would have had. Imports vllm, whose class it extends; runs in
vLLM's worker processes only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from trace_async.engines.vllm_common import GREEDY_TEMPERATURE

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig


class GreedyTemperature(LogitsProcessor):  # type: ignore[misc]
    """Divides the logits of requests that carry `GREEDY_TEMPERATURE` in their extra_args by it."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._temperatures: dict[int, float] = {}  # by place in the batch

    def is_argmax_invariant(self) -> bool:
        """False, although it is: vLLM applies the others after it has taken the greedy token's log-probabilities."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow which request is where in the batch."""
        process_dict_updates(self._temperatures, batch_update, lambda params, _, __: _temperature_of(params))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits float32 [B, vocabulary], changed in place."""
        if self._temperatures:
            places = torch.tensor(list(self._temperatures), device=logits.device)
            divisors = torch.tensor(list(self._temperatures.values()), dtype=logits.dtype, device=logits.device)
            logits[places] /= divisors[:, None]
        return logits


def _temperature_of(params: SamplingParams) -> float | None:
    return (params.extra_args or {}).get(GREEDY_TEMPERATURE)
