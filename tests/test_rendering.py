"""Token truth: appended ids are the conversation, and templates that would break this are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from trace_async.core.types import Message
from trace_async.errors import PolicyError, TemplateError
from trace_async.rendering import Renderer, load_renderer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# As Qwen3 does: the thoughts of all but the last assistant message are cut away.
THOUGHT_STRIPPING = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NUMBERING_USERS = CHATML.replace("m.role + '\\n'", "m.role + '\\n' + (loop.index|string if m.role == 'user' else '')")
COUNTING_ALL = CHATML.replace("{% for m in", "{{ messages|length }} messages\n{% for m in")
THINKING_PROMPT = CHATML.replace("<|im_start|>assistant\\n", "<|im_start|>assistant\\n<think>\\n")
UNCLOSED = CHATML.replace("m.content + '<|im_end|>\\n'", "m.content + '\\n'")
NEWLINE_BEFORE_END = CHATML.replace("m.content + '<|im_end|>\\n'", "m.content + '\\n<|im_end|>\\n'")
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
WORDS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '> ' + m.content + ' <end> ' }}"
    "{% else %}{{ m.content + ' ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '> ' }}{% endif %}"
)
FastTokenizer: Any = PreTrainedTokenizerFast  # untyped
REPLY = [Message("user", "b2.")]


def byte_level(template: str | None, **special: str) -> Any:
    """A byte-level BPE tokenizer that merges a full stop with a following newline, as the large ones do."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\w+| ?[^\s\w]+\n*|\s"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([".\n", "left right ", "user\nassistant\n"] * 50, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>", "<|text_end|>")])
    made: Any = FastTokenizer(tokenizer_object=tokenizer, **{"eos_token": "<|text_end|>", **special})
    made.chat_template = template
    return made


def word_level(template: str) -> Any:
    """One token a word, like the tiny policy shipped for FrozenLake."""
    words = ["<pad>", "<end>", ">", "?", "left", "down", "right", "up", "a1S", "a2.", "b1.", "b2.", "b2G"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made: Any = FastTokenizer(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    made.chat_template = template
    return made


def appended(renderer: Renderer, tokenizer: Any, opening: list[Message], said: list[tuple[str, str]]) -> list[int]:
    """What the system holds after some turns: opening, then each turn's ids and the reply behind them."""
    ids: list[int] = renderer.opening_ids(opening).tolist()
    for words, reply in said:
        ids += tokenizer.encode(words, add_special_tokens=False)
        ids += [renderer.stop_ids[0], *renderer.reply_ids([Message("user", reply)], closed=True).tolist()]
    return ids


def whole(tokenizer: Any, opening: list[Message], said: list[tuple[str, str]]) -> list[int]:
    """The same conversation rendered and encoded at once."""
    messages = [message._asdict() for message in opening]
    for words, reply in said:
        messages += [{"role": "assistant", "content": words}, {"role": "user", "content": reply}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def test_appended_ids_are_the_whole_chatml_conversation() -> None:
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    renderer.probe()
    opening = [Message("system", "Walk."), Message("user", "grid")]
    said = [("<think>ice.</think>Left.", "b2."), ("right", "You moved.\nP _"), ("up\n", "")]
    assert appended(renderer, tokenizer, opening, said) == whole(tokenizer, opening, said)


def test_a_reply_to_the_tiny_policy_costs_two_tokens_when_the_turn_is_closed_and_three_when_not() -> None:
    tokenizer = word_level(WORDS)
    renderer = Renderer(tokenizer)
    renderer.probe()
    vocabulary = tokenizer.get_vocab()
    assert renderer.reply_ids(REPLY, closed=True).tolist() == [vocabulary["b2."], vocabulary[">"]]
    assert renderer.reply_ids(REPLY, closed=False).tolist() == [vocabulary[w] for w in ("<end>", "b2.", ">")]
    opening = [Message("user", "a1S a2. b1. b2G")]
    assert renderer.opening_ids(opening).tolist() == [vocabulary[w] for w in ("a1S", "a2.", "b1.", "b2G", ">")]
    said = [("down", "b1."), ("up", "? a1S")]
    assert appended(renderer, tokenizer, opening, said) == whole(tokenizer, opening, said)


def test_white_space_between_prompt_and_words_is_the_policys_to_sample() -> None:
    set_off = WORDS.replace("{{ '> ' }}{% endif %}", "{{ '>' }}{% endif %}")
    assert set_off != WORDS
    tokenizer = word_level(set_off)
    renderer = Renderer(tokenizer)
    renderer.probe()
    opening, said = [Message("user", "a1S b2G")], [("down", "b1."), ("right", "a1S")]
    assert appended(renderer, tokenizer, opening, said) == whole(tokenizer, opening, said)


def test_stop_tokens_are_the_templates_own_and_the_end_of_text() -> None:
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    vocabulary = tokenizer.get_vocab()
    assert renderer.stop_ids == (vocabulary["<|im_end|>"], vocabulary["<|text_end|>"])
    assert renderer.pad_id == vocabulary["<|text_end|>"]
    same = Renderer(byte_level(CHATML, eos_token="<|im_end|>", pad_token="<|text_end|>"))
    assert same.stop_ids == (vocabulary["<|im_end|>"],)
    assert same.pad_id == vocabulary["<|text_end|>"]


def test_a_turn_closed_by_the_end_of_text_still_gets_no_second_end() -> None:
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    closed, unclosed = (renderer.reply_ids(REPLY, closed=closed).tolist() for closed in (True, False))
    assert unclosed == [renderer.stop_ids[0], *closed]
    assert tokenizer.decode(closed) == "\n<|im_start|>user\nb2.<|im_end|>\n<|im_start|>assistant\n"


def test_the_text_of_a_turn_is_its_words_without_special_tokens_and_without_tidying() -> None:
    tokenizer = byte_level(CHATML)
    renderer = Renderer(tokenizer)
    words = " <think>it 's ice .</think> Left "
    ids = tokenizer.encode(words, add_special_tokens=False)
    assert renderer.text(np.asarray([*ids, renderer.stop_ids[0]], dtype=np.int32)) == words
    assert renderer.text(np.asarray([renderer.stop_ids[1]], dtype=np.int32)) == ""


def test_rendered_ids_are_read_only_and_repeated_replies_are_shared() -> None:
    renderer = Renderer(byte_level(CHATML))
    first, second = renderer.reply_ids(REPLY, closed=True), renderer.reply_ids(list(REPLY), closed=True)
    assert first is second
    assert first.dtype == np.int32
    for ids in (first, renderer.opening_ids(REPLY)):
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 0


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (THOUGHT_STRIPPING, r"changes earlier text when the conversation grows .* got 'im_start\|>assistant\\nyes"),
        (COUNTING_ALL, "changes earlier text when the conversation grows"),
        (THINKING_PROMPT, "changes earlier text when the conversation grows"),
        (NUMBERING_USERS, r"depends on earlier messages: expected '.*user\\n3AGAIN<.* got '.*user\\n5AGAIN<"),
        (NEWLINE_BEFORE_END, "encoded by itself differs from the same text behind an assistant's 'Go on.'"),
    ],
)
def test_a_template_under_which_appended_ids_would_lie_is_refused_with_the_difference(
    template: str, complaint: str
) -> None:
    renderer = Renderer(byte_level(template))
    with pytest.raises(TemplateError, match=complaint):
        renderer.probe()


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        (UNCLOSED, r"no special token closes an assistant's turn: the chat template writes '\\n'"),
        (CHATML.replace("m.content + '<", "m.content + ' over<"), "no special token closes an assistant's turn"),
        ("{% for m in messages %}{{ m.nothing.at_all }}{% endfor %}", "cannot render messages of roles"),
        (None, "cannot render messages of roles .user, assistant.*chat_template.jinja"),
    ],
)
def test_a_template_without_a_closing_token_or_none_at_all_is_refused(template: str | None, complaint: str) -> None:
    with pytest.raises(TemplateError, match=complaint):
        Renderer(byte_level(template))


def test_a_template_without_system_role_passes_until_an_environment_uses_that_role() -> None:
    renderer = Renderer(byte_level(NO_SYSTEM))
    renderer.probe()
    with pytest.raises(TemplateError, match=r"roles \(system, user\): no system role"):
        renderer.opening_ids([Message("system", "Walk."), Message("user", "grid")])


def test_a_policy_folder_is_loaded_and_probed(tmp_path: Path) -> None:
    word_level(WORDS).save_pretrained(tmp_path / "good")
    byte_level(THOUGHT_STRIPPING).save_pretrained(tmp_path / "bad")
    assert load_renderer(tmp_path / "good").reply_ids(REPLY, closed=True).size == 2
    with pytest.raises(TemplateError, match="changes earlier text"):
        load_renderer(tmp_path / "bad")
    with pytest.raises(PolicyError, match="no tokenizer could be loaded"):
        load_renderer(tmp_path / "absent")
