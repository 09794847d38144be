"""What a decoder consists of, as arithmetic: its tensors, their shapes, and the bytes of one token's key/values.

Knows Llama and Mistral, Qwen2 (and Qwen2.5) and Qwen3, from a transformers `config.json` or from a table of published
models, so that a run can be planned where neither the model nor torch is. Pure. Never: files, torch, memory budgets.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from trace_async.errors import ConfigError

KINDS = ("llama", "mistral", "qwen2", "qwen3")

_MODEL, _HEAD = "model.", "lm_head.weight"


class Tensor(NamedTuple):
    """One parameter."""

    name: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Numbers in it."""
        return prod(self.shape)

    def share(self, ranks: int) -> int:
        """Numbers that each of `ranks` holds of it: FSDP2 cuts the first dimension, and pads all parts to the first."""
        return -(-self.shape[0] // ranks) * prod(self.shape[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of one decoder; `kind` is transformers' model_type."""

    kind: str
    vocabulary: int
    hidden: int
    inner: int  # of the gated MLP
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool  # the output head is the embedding
    positions: int
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalised head by head."""
        return self.kind == "qwen3"

    @property
    def linear(self) -> tuple[tuple[str, int, int, bool], ...]:
        """A layer's matrices: name, outputs, inputs, whether there is a bias."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            ("self_attn.q_proj", queries, self.hidden, self.qkv_bias),
            ("self_attn.k_proj", keys, self.hidden, self.qkv_bias),
            ("self_attn.v_proj", keys, self.hidden, self.qkv_bias),
            ("self_attn.o_proj", self.hidden, queries, self.out_bias),
            ("mlp.gate_proj", self.inner, self.hidden, self.mlp_bias),
            ("mlp.up_proj", self.inner, self.hidden, self.mlp_bias),
            ("mlp.down_proj", self.hidden, self.inner, self.mlp_bias),
        )

    def layer(self) -> list[Tensor]:
        """Tensors of one layer, in the model's order; all layers are alike."""
        found = []
        for name, outputs, inputs, bias in self.linear:
            found.append(Tensor(f"{name}.weight", (outputs, inputs)))
            if bias:
                found.append(Tensor(f"{name}.bias", (outputs,)))
            if self.head_norms and name == "self_attn.o_proj":
                found += [Tensor(f"self_attn.{part}_norm.weight", (self.head_dim,)) for part in "qk"]
        norms = ("input_layernorm", "post_attention_layernorm")
        return [*found, *(Tensor(f"{name}.weight", (self.hidden,)) for name in norms)]

    def root(self) -> list[Tensor]:
        """Tensors outside the layers, a tied head once."""
        found = [
            Tensor(f"{_MODEL}embed_tokens.weight", (self.vocabulary, self.hidden)),
            Tensor(f"{_MODEL}norm.weight", (self.hidden,)),
        ]
        return found if self.tied else [*found, Tensor(_HEAD, (self.vocabulary, self.hidden))]

    def tensors(self) -> list[Tensor]:
        """All of them, each once, under transformers' names and in the model's order."""
        embedding, *behind = self.root()
        return [embedding, *self._everywhere(self.layer()), *behind]

    def layer_pairs(self, rank: int) -> list[Tensor]:
        """A layer's low-rank pairs: every matrix has A [rank, inputs] and B [outputs, rank]."""
        return [
            pair
            for name, outputs, inputs, _ in self.linear
            for pair in (
                Tensor(f"{name}.lora_A.weight", (rank, inputs)),
                Tensor(f"{name}.lora_B.weight", (outputs, rank)),
            )
        ]

    def pairs(self, rank: int) -> list[Tensor]:
        """All low-rank pairs."""
        return list(self._everywhere(self.layer_pairs(rank)))

    def _everywhere(self, layer: list[Tensor]) -> Iterator[Tensor]:
        for index in range(self.layers):
            yield from (Tensor(f"{_MODEL}layers.{index}.{name}", shape) for name, shape in layer)

    @property
    def parameters(self) -> int:
        """Numbers in all tensors."""
        return count(self.root()) + self.layers * count(self.layer())

    def kv_token_bytes(self, number_bytes: int, *, shards: int = 1) -> int:
        """Keys and values of one token on one of `shards` tensor-parallel devices; no head is cut."""
        return 2 * self.layers * -(-self.kv_heads // shards) * self.head_dim * number_bytes


def count(tensors: list[Tensor]) -> int:
    """Numbers in them."""
    return sum(tensor.numel for tensor in tensors)


def share_of(tensors: list[Tensor], ranks: int) -> int:
    """Numbers of them that each of `ranks` holds; all of them for one."""
    return sum(tensor.share(ranks) for tensor in tensors)


def read_shape(table: Mapping[str, Any], *, source: str) -> ModelShape:
    """The sizes that a `config.json` of transformers says. Raises ConfigError with `source` where it cannot be read."""
    kind = table.get("model_type")
    if kind not in KINDS:
        raise ConfigError(
            f"{source}: model_type is {kind!r}; sizes are known of {', '.join(KINDS)} only, so this model cannot be "
            "planned"
        )
    heads = _size(table, "num_attention_heads", source)
    hidden = _size(table, "hidden_size", source)
    attention_bias = bool(table.get("attention_bias", False))
    return ModelShape(
        kind=str(kind),
        vocabulary=_size(table, "vocab_size", source),
        hidden=hidden,
        inner=_size(table, "intermediate_size", source),
        layers=_size(table, "num_hidden_layers", source),
        heads=heads,
        kv_heads=_size(table, "num_key_value_heads", source, otherwise=heads),
        head_dim=_size(table, "head_dim", source, otherwise=128 if kind == "qwen3" else hidden // heads),
        tied=bool(table.get("tie_word_embeddings", False)),
        positions=_size(table, "max_position_embeddings", source),
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind in ("llama", "qwen3") and attention_bias,
        mlp_bias=kind == "llama" and bool(table.get("mlp_bias", False)),
    )


def _size(table: Mapping[str, Any], key: str, source: str, *, otherwise: int | None = None) -> int:
    value = table.get(key)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or value < 1:
        raise ConfigError(f"{source}: {key} must be a positive integer, got {value!r}")
    return value


_PUBLISHED: dict[str, tuple[str, int, int, int, int, int, int, int, bool, int]] = {
    # kind, vocabulary, hidden, inner, layers, heads, kv_heads, head_dim, tied, positions
    "Qwen3-0.6B": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True, 40960),
    "Qwen3-1.7B": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True, 40960),
    "Qwen3-4B": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True, 40960),
    "Qwen3-8B": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False, 40960),
    "Qwen3-14B": ("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, False, 40960),
    "Qwen3-32B": ("qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False, 40960),
    "Qwen2.5-1.5B": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True, 32768),
    "Qwen2.5-3B": ("qwen2", 151936, 2048, 11008, 36, 16, 2, 128, True, 32768),
    "Qwen2.5-7B": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False, 32768),
    "Qwen2.5-14B": ("qwen2", 152064, 5120, 13824, 48, 40, 8, 128, False, 32768),
    "SmolLM2-135M": ("llama", 49152, 576, 1536, 30, 9, 3, 64, True, 8192),
    "SmolLM2-360M": ("llama", 49152, 960, 2560, 32, 15, 5, 64, True, 8192),
    "SmolLM2-1.7B": ("llama", 49152, 2048, 8192, 24, 32, 32, 64, True, 8192),
    "Llama-3.2-1B": ("llama", 128256, 2048, 8192, 16, 32, 8, 64, True, 131072),
    "Llama-3.2-3B": ("llama", 128256, 3072, 8192, 28, 24, 8, 128, True, 131072),
    "Llama-3.1-8B": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False, 131072),
}
"""Sizes as their authors publish them in each model's config.json."""

PUBLISHED = tuple(_PUBLISHED)

_VARIANT = re.compile(r"(-Base|-Instruct)?(-\d{4})?$")


def published_name(name: str) -> str | None:
    """Which published model the last part of a hub id or folder means, whether base or tuned; None for none."""
    found = _VARIANT.sub("", name.rstrip("/").rpartition("/")[2])
    return found if found in _PUBLISHED else None


def published_shape(name: str) -> ModelShape:
    """Sizes of one of `PUBLISHED`."""
    kind, vocabulary, hidden, inner, layers, heads, kv_heads, head_dim, tied, positions = _PUBLISHED[name]
    return ModelShape(
        kind=kind,
        vocabulary=vocabulary,
        hidden=hidden,
        inner=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=tied,
        positions=positions,
        qkv_bias=kind == "qwen2",
    )
