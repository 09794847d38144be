"""The engine on other decoders: right to 1e-4, or refused at the start; and which ones it computes its own way."""

from __future__ import annotations

import asyncio
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.engines.kit import FAST, MAX_TOKENS, NEVER, OTHERS, VOCABULARY, decoder
from tests.engines.test_local import request, with_engine
from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation
from trace_async.engines import llama_weights
from trace_async.engines.local import LocalEngine
from trace_async.errors import PolicyError


@pytest.mark.parametrize("kind", FAST + OTHERS)
def test_every_logprob_is_that_of_a_plain_forward_pass(kind: str) -> None:
    """Ragged requests, then ragged continuations on cached prefixes, all longer than the window of 8."""
    model = decoder(kind)
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


def test_a_model_with_an_option_that_the_own_decoder_does_not_know_takes_the_general_way() -> None:
    assert llama_weights.fits(decoder("llama"))
    assert not llama_weights.fits(decoder("llama", hidden_act="gelu"))
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not llama_weights.fits(decoder("llama", rope_parameters=dynamic))
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert not llama_weights.fits(decoder("qwen2", **windows))
    assert not llama_weights.fits(MasksNothing(llama_config()))


def test_joined_weights_are_the_models_own_memory() -> None:
    model = decoder("qwen2")
    joined = llama_weights.join(model).layers[1]
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.fill_(3.0)
        model.model.layers[1].self_attn.v_proj.bias.fill_(5.0)
        model.model.layers[1].mlp.up_proj.weight.fill_(7.0)
    assert joined.qkv_bias is not None
    np.testing.assert_array_equal((joined.qkv == 3.0).all(dim=1), [False] * 32 + [True] * 16 + [False] * 16)
    np.testing.assert_array_equal(joined.qkv_bias == 5.0, [False] * 48 + [True] * 16)
    np.testing.assert_array_equal((joined.gate_up == 7.0).all(dim=1), [False] * 48 + [True] * 48)


def llama_config() -> LlamaConfig:
    config = decoder("llama").config
    assert isinstance(config, LlamaConfig)
    return config


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
    config = llama_config()
    config.initializer_range = initializer_range
    torch.manual_seed(0)
    with pytest.raises(PolicyError, match=f"{wrong.__name__}.*plain forward pass"):
        LocalEngine(
            wrong(config), base=Path(), config=EngineConfig(), stop_ids=(NEVER,), pad_id=0, max_tokens=MAX_TOKENS
        )
