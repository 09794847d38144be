"""Small random decoders, an oracle without batches and caches, and weight files, for the tests of the local engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trace_async.core.types import Canary, FloatArray, IntArray
from trace_async.engines.rows import uniform
from trace_async.weights import write_weights

VOCABULARY = 24
STOP = 1
NEVER = 99  # no token id
MAX_TOKENS = 160

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_TOKENS,
    "initializer_range": 0.4,  # far from uniform, so that a wrong context shows
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_KINDS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama_yarn": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"sliding_window": 8, "tie_word_embeddings": True}),
}
FAST = ("llama", "llama_tied", "llama_biased", "llama_yarn", "qwen2", "qwen3")
"""Kinds that the engine has a decoder of its own for."""
OTHERS = ("gpt2", "mistral", "gemma2")


def decoder(kind: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A random model of two layers whose distributions are far from flat; biases and norms are not trivial either."""
    torch.manual_seed(seed)
    if kind == "gpt2":
        sizes: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "n_positions": MAX_TOKENS,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
        }
        model: PreTrainedModel = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.4, **options))
    else:
        config, cls, own = _KINDS[kind]
        model = cls(config(**(_COMMON | own | options)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
            assert torch.isfinite(parameter).all(), name
    model.eval()  # type: ignore[no-untyped-call]
    return model


def logprobs_of(model: PreTrainedModel, tokens: IntArray, *, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities [L, vocabulary] behind each token, by one plain forward pass."""
    with torch.inference_mode():
        logits = model(torch.from_numpy(tokens).long()[None]).logits[0].float()
    return torch.log_softmax(logits / temperature, dim=-1)


def write(model: PreTrainedModel, path: Path) -> Path:
    """A version's weights as the learner writes them."""
    tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
    aliases = {
        name: next(n for n, t in tensors.items() if t is tensor or t.data_ptr() == tensor.data_ptr())
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in tensors
    }
    write_weights(path, tensors, aliases=aliases)
    return path


def canary_of(model: PreTrainedModel, *prompts: list[int]) -> Canary:
    """What the learner would say of these prompts."""
    arrays = [np.array(prompt, np.int32) for prompt in prompts or ([3, 4, 5, 6, 7], [9, 2])]
    return Canary(prompts=tuple(arrays), logprobs=tuple(_spoken(model, prompt) for prompt in arrays))


def _spoken(model: PreTrainedModel, prompt: IntArray) -> FloatArray:
    scores = logprobs_of(model, prompt)[:-1]
    return scores.gather(-1, torch.from_numpy(prompt[1:]).long()[:, None])[:, 0].numpy()


def assert_drawn_from(
    model: PreTrainedModel,
    *,
    tokens: IntArray,
    start: int,
    logprobs: FloatArray,
    seed: int,
    greedy: bool,
    first: int = 0,
    temperature: float = 1.0,
) -> None:
    """tokens[start:] are what `model` alone, unbatched and uncached, draws with the request's numbers `first`, ...

    A token next to the one that float rounding could have chosen instead passes: its number then lies within 1e-5 of
    the border between the two. Log-probabilities agree to 1e-4.
    """
    scores = logprobs_of(model, tokens, temperature=temperature)[start - 1 : -1]
    for step, (distribution, token) in enumerate(zip(scores, tokens[start:].tolist(), strict=True)):
        if greedy:
            assert distribution.max() - distribution[token] <= 1e-5
        else:
            cumulative = distribution.double().exp().cumsum(-1)
            number = uniform(seed, first + step) * float(cumulative[-1])
            below = float(cumulative[token - 1]) if token else 0.0
            assert below - 1e-5 <= number <= float(cumulative[token]) + 1e-5, (first + step, token)
    found = scores.gather(-1, torch.from_numpy(tokens[start:]).long()[:, None])[:, 0].numpy()
    np.testing.assert_allclose(logprobs, found, atol=1e-4)
