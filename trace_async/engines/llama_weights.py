"""The weights of decoders of Llama's kind, laid out for few large matrix products.

Query, key and value projections are one matrix, and so are gate and up: they are joined once, and the model's own
parameters become views of the joined ones. So nothing is held twice, and whoever writes new weights into the model
writes them here. Knows Llama, Qwen2 and Qwen3 (SmolLM2 is a Llama); `fits` says whether a model is one of these and
uses nothing else. Never: a forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

_CLASSES = (LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
_ROTATIONS = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the longest row


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights; biases and norms that a model has not are None. H heads, K key/value heads, D head_dim."""

    attention_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(H + 2 K) D, hidden]
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None  # [D]
    key_norm: torch.Tensor | None  # [D]
    output: torch.Tensor  # [hidden, H D]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaWeights:
    """A whole model."""

    embedding: torch.Tensor  # [vocabulary, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocabulary, hidden]
    rotation: torch.nn.Module  # transformers' own: cosines and sines of positions
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float  # of every norm


def fits(model: torch.nn.Module) -> bool:
    """Whether the model is exactly one of the known classes, with options that are known too."""
    if type(model) not in _CLASSES:
        return False
    config: Any = model.config
    rotation = (config.rope_parameters or {}).get("rope_type", "default")
    layer_types = getattr(config, "layer_types", None) or ["full_attention"]
    return config.hidden_act == "silu" and rotation in _ROTATIONS and set(layer_types) == {"full_attention"}


def join(model: torch.nn.Module) -> LlamaWeights:
    """The weights of a model that `fits`; its parameters share their memory from now on."""
    whole: Any = model
    inner = whole.model
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return LlamaWeights(
        embedding=inner.embed_tokens.weight,
        layers=tuple(_layer(layer) for layer in inner.layers),
        norm=inner.norm.weight,
        head=whole.lm_head.weight,
        rotation=inner.rotary_emb,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        epsilon=config.rms_norm_eps,
    )


def _layer(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    qkv, qkv_bias = _joined(projections)
    gate_up, gate_up_bias = _joined([mlp.gate_proj, mlp.up_proj])
    return Layer(
        attention_norm=layer.input_layernorm.weight,
        qkv=qkv,
        qkv_bias=qkv_bias,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=attention.o_proj.weight,
        output_bias=attention.o_proj.bias,
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
    )


def _joined(linears: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One weight and one bias for several linears on the same input; the linears' own become views of them."""
    weight = _join_parameters([linear.weight for linear in linears])
    if linears[0].bias is None:
        return weight, None
    return weight, _join_parameters([linear.bias for linear in linears])


def _join_parameters(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = torch.cat([parameter.data for parameter in parameters])
    start = 0
    for parameter in parameters:
        parameter.data = joined[start : start + len(parameter)]
        start += len(parameter)
    return joined
