"""A small policy made from nothing: a standard Llama decoder with a word tokenizer and a chat template of its own.

For tasks whose conversations use few distinct words. The result is an ordinary transformers folder, so every other
local folder takes the same path through this package. Never: training, or words of one particular environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_PAD, _UNKNOWN, _END, _PROMPT = "<pad>", "<unk>", "<end>", ">"
# One token opens an assistant's turn and one closes it; everything else is the words themselves.
_CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}{{ '> ' + message.content + ' <end> ' }}"
    "{%- else %}{{ message.content + ' ' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '> ' }}{%- endif %}"
)


def tiny_tokenizer(words: Sequence[str]) -> PreTrainedTokenizerFast:
    """One token for each of `words`, which white space separates, plus padding, unknown, end and prompt tokens."""
    vocabulary = {word: index for index, word in enumerate((_PAD, _UNKNOWN, _END, _PROMPT, *words))}
    if len(vocabulary) != len(words) + 4:
        raise ValueError("words must be distinct and none of <pad>, <unk>, <end>, >")
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token=_PAD, unk_token=_UNKNOWN, eos_token=_END, padding_side="left"
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


def tiny_model(
    tokenizer: PreTrainedTokenizerFast, *, seed: int, hidden_size: int = 128, num_layers: int = 4
) -> LlamaForCausalLM:
    """A float32 Llama decoder with random weights drawn from `seed`; 0.9 M parameters at the default size."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=hidden_size,
            intermediate_size=3 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=512,
            # Untied, because some engines pack a tied output head once and miss later weight updates.
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def save_policy(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a transformers folder: config, weights as one safetensors file, tokenizer, chat template."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
