"""The engine on other decoders: right to 1e-4, or refused at the start."""

from __future__ import annotations

import asyncio
from functools import wraps
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.engines.test_local import NEVER, VOCABULARY, request, tiny_model, with_engine
from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation
from trace_async.engines.local import LocalEngine
from trace_async.errors import PolicyError

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": 0,
}


def decoder(kind: str, **options: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, **options
        )
        return GPT2LMHeadModel(config)
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**(COMMON | {"tie_word_embeddings": True} | options)))
    if kind == "gemma2":
        return Gemma2ForCausalLM(Gemma2Config(**(COMMON | {"sliding_window": 8} | options)))
    return MistralForCausalLM(MistralConfig(**(COMMON | {"sliding_window": 8} | options)))


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "mistral", "gemma2"])
def test_every_logprob_is_that_of_a_plain_forward_pass(kind: str) -> None:
    """Ragged requests, then ragged continuations on cached prefixes, all longer than the window of 8."""
    model = decoder(kind)  # the engine puts it in evaluation mode
    rng = np.random.default_rng(0)
    answered: list[tuple[GenerateRequest, Generation]] = []

    async def body(engine: LocalEngine) -> None:
        lengths = [3, 17, 5, 30, 9, 12]
        asks = [request(f"r{n}", rng.integers(2, VOCABULARY, n).tolist(), max_tokens=9, seed=n) for n in lengths]
        found = await asyncio.gather(*(engine.generate(ask) for ask in asks))
        answered.extend(zip(asks, found, strict=True))
        more = []
        for place, (ask, answer) in enumerate(answered):
            longer = [*ask.prefix_ids.tolist(), *answer.token_ids.tolist()]
            longer += rng.integers(2, VOCABULARY, 1 + place).tolist()
            more.append(request(f"{ask.request_id}+", longer, max_tokens=9, seed=place))
        found = await asyncio.gather(*(engine.generate(ask) for ask in more))
        answered.extend(zip(more, found, strict=True))
        assert engine.counters()["reused_tokens"] > 0

    with_engine(body, model=model, stop_id=NEVER)
    for ask, answer in answered:
        tokens = torch.tensor([[*ask.prefix_ids.tolist(), *answer.token_ids.tolist()]])
        with torch.inference_mode():
            own = torch.log_softmax(model(tokens).logits[0].float(), -1)[len(ask.prefix_ids) - 1 : -1]
        expected = own.gather(-1, tokens[0, len(ask.prefix_ids) :, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=1e-4)


class PositionsByPlace(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """Counts positions by place in the batch, so that padding moves them. `wraps`: the engine reads argument names."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, **inputs: Any) -> Any:  # type: ignore[override]
        inputs.pop("position_ids", None)
        return super().forward(**inputs)


class MasksNothing(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A decoder that sees padding."""

    @wraps(LlamaForCausalLM.forward)
    def forward(self, **inputs: Any) -> Any:  # type: ignore[override]
        inputs.pop("attention_mask", None)
        return super().forward(**inputs)


@pytest.mark.parametrize("wrong", [PositionsByPlace, MasksNothing])
@pytest.mark.parametrize("initializer_range", [0.4, 0.02])
def test_a_decoder_that_batches_would_change_is_refused_at_the_start(
    wrong: type[LlamaForCausalLM], initializer_range: float
) -> None:
    config = tiny_model().config
    config.initializer_range = initializer_range
    torch.manual_seed(0)
    with pytest.raises(PolicyError, match=f"{wrong.__name__}.*plain forward pass"):
        LocalEngine(wrong(config), config=EngineConfig(), stop_ids=(NEVER,), pad_id=0, max_tokens=64)
