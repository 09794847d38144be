"""A small policy made from nothing: a standard Llama decoder with a word tokenizer and a chat template of its own.

For tasks whose conversations use few distinct words. The result is an ordinary transformers folder, so every other
local folder takes the same path through this package. Never: training, or words of one particular environment.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

_SPACE = "▁"  # stands in front of a token that begins a word
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
    return _with_chat(tokenizer)


def subword_tokenizer(words: Sequence[str], pieces: Sequence[str], *, punctuation: str) -> PreTrainedTokenizerFast:
    """One token for each of `words`; names and numbers are spelled from `pieces` and digits.

    Reads lower case. `decode` gives the text back with its spaces, so that what the policy writes can be compared with
    what it has read. Raises ValueError where words or pieces are not lower case or hold white space.
    """
    if odd := [word for word in (*words, *pieces) if word != word.lower() or len(word.split()) != 1]:
        raise ValueError(f"words and pieces must be lower case and without white space, not {odd[:5]}")
    spelling = (*pieces, *string.ascii_lowercase, *string.digits, *punctuation)
    beginnings = [f"{_SPACE}{text}" for text in (*words, *spelling)]
    vocabulary = [_PAD, _UNKNOWN, _END, _PROMPT, *dict.fromkeys((*beginnings, *spelling))]
    # Equal scores: the fewest tokens win, so a word that has a token of its own is that token.
    model = models.Unigram([(token, -1.0) for token in vocabulary], unk_id=vocabulary.index(_UNKNOWN))
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")]
    )
    # The blanks that the chat template sets around these are not text.
    tokenizer.add_special_tokens([AddedToken(token, lstrip=True, rstrip=True) for token in (_END, _PROMPT)])
    tokenizer.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    return _with_chat(tokenizer)


def _with_chat(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
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
