"""Messages to token ids and back, by the policy's own chat template, append-only.

A conversation's tokens are: the opening rendered once, then in turn the sampled ids as they are and the ids of each
reply. What a reply adds to the text is found once from the template, by rendering it behind a marker in the place of
an assistant's words. Nothing sampled is ever rendered or encoded again, so this is sound only for templates that
keep earlier text when a conversation grows: `Renderer.probe` refuses all others. Never: sampling, environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from trace_async.core.types import IntArray, Message
from trace_async.errors import PolicyError, TemplateError

_MARKER = "ASSISTANTWORDS"  # one word, so that templates that trim contents leave it alone
_ASK = Message("user", "ASK")
_CACHED = 1024  # environments repeat themselves, siblings above all; bounds memory, not results
_CURE = "give the policy folder a chat template that renders every message by itself and keeps earlier ones unchanged"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def unk_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> list[int]: ...

    @property
    def added_tokens_decoder(self) -> Mapping[int, Any]:
        """Id to token, which has a `special` flag."""
        ...

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """The conversation as one text, when `tokenize` is False."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids; special tokens written in the text are recognised."""
        ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> Any:
        """The text of `token_ids`, nothing tidied up when the last flag is False."""
        ...

    def get_vocab(self) -> Mapping[str, int]:
        """Token to id."""
        ...


class Renderer:
    """Renders for one tokenizer. Immutable; safe to share between coroutines.

    `stop_ids` end a turn when sampled: first the template's own end-of-turn token, then the tokenizer's end-of-text
    token when that is another. Raises TemplateError when no token closes an assistant's turn.
    """

    stop_ids: tuple[int, ...]
    pad_id: int

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = set(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._end_of_turn = self._find_end_of_turn()
        eos = tokenizer.eos_token_id
        self.stop_ids = tuple(dict.fromkeys(i for i in (self._end_of_turn, eos) if i is not None))
        self.pad_id = self.stop_ids[-1] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        self._cached_reply = lru_cache(maxsize=_CACHED)(self._reply)
        self._cached_cut = lru_cache(maxsize=_CACHED)(self._cut)

    @property
    def num_token_ids(self) -> int:
        """One more than the largest token id that the tokenizer knows."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        """int32[P]: the conversation so far, up to where the policy's first word goes."""
        return _read_only(self._encode(self._render(messages, prompt=True)))

    def reply_ids(self, messages: Sequence[Message], *, closed: bool) -> IntArray:
        """int32[O]: what follows a turn's sampled ids when the environment answers with `messages`.

        Ends where the policy's next word goes. `closed`: the turn already ends with a stop token, so the template's
        own is left out. Read-only and shared between equal calls.
        """
        return self._cached_reply(tuple(messages), closed)

    def text(self, action_ids: IntArray) -> str:
        """The words of a turn without special tokens; a view, never encoded again."""
        kept = [i for i in action_ids.tolist() if i not in self.stop_ids]
        return self._decode(kept, skip_special=True)

    def cut(self, text: str, max_tokens: int) -> str:
        """The beginning of `text` that is at most `max_tokens` tokens when encoded by itself; all of it if it fits.

        One more character would be too much. Where a longer beginning merges into fewer tokens again, which of the
        possible ends is taken is the search's choice, the same for equal calls.
        """
        return self._cached_cut(text, max_tokens)

    def probe(self) -> None:
        """Refuse a template under which appending ids would not be the truth.

        Plays small conversations, with and without a system message and with `<think>` in the assistant's words, and
        compares the whole rendering with the appended pieces, as text and as ids. Raises TemplateError with the first
        difference and the cure.
        """
        words = self._known_words()
        said = ("yes", "<think>why</think>yes", "<think>\nwhy\n</think>\n\n<action>yes</action>", *words)
        openings = [[_ASK]]
        if self._accepts([Message("system", "RULES"), _ASK]):
            openings.append([Message("system", "RULES"), _ASK])
        for opening in openings:
            for first in said:
                self._probe_text(opening, (first, "no", first), (_ASK, Message("user", "AGAIN"), _ASK))
        for first in words:
            for second in words:
                self._probe_ids(first, Message("user", second))

    def _reply(self, messages: tuple[Message, ...], closed: bool) -> IntArray:
        ids = self._encode(self._suffix(messages))
        if closed:
            # The whole suffix is encoded and then cut: behind a special token the rest encodes as it does in context.
            ids = ids[ids.index(self._end_of_turn) + 1 :]
        return _read_only(ids)

    def _cut(self, text: str, max_tokens: int) -> str:
        ids = self._encode(text)
        if len(ids) <= max_tokens:
            return text
        if max_tokens < 1:
            return ""

        def fits(length: int) -> bool:
            return len(self._encode(text[:length])) <= max_tokens

        guess = len(self._decode(ids[:max_tokens], skip_special=False))
        return text[: _find_end(fits, guess=max(1, min(guess, len(text) - 1)), length=len(text))]

    def _suffix(self, messages: Sequence[Message]) -> str:
        """The text between an assistant's words and the next assistant's words, when `messages` come between."""
        return self._render([_ASK, Message("assistant", _MARKER), *messages], prompt=True).partition(_MARKER)[2]

    def _render(self, messages: Sequence[Message], *, prompt: bool) -> str:
        conversation = [message._asdict() for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # boundary: a template is foreign code and may raise anything
            roles = ", ".join(message.role for message in messages)
            raise TemplateError(
                f"the chat template cannot render messages of roles ({roles}): {error}; "
                "give the policy folder a chat template (chat_template.jinja) that takes these roles"
            ) from error

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, ids: list[int], *, skip_special: bool) -> str:
        tokenizer = self._tokenizer
        return str(tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))

    def _accepts(self, messages: Sequence[Message]) -> bool:
        try:
            self._render(messages, prompt=True)
        except TemplateError:
            return False
        return True

    def _find_end_of_turn(self) -> int:
        """The special token that the template writes right behind an assistant's words."""
        tail = self._render([_ASK, Message("assistant", _MARKER)], prompt=False).partition(_MARKER)[2]
        ids = self._encode(tail)
        place = next((place for place, token_id in enumerate(ids) if token_id in self._special), None)
        if place is None or self._decode(ids[:place], skip_special=False).strip():
            raise TemplateError(
                f"no special token closes an assistant's turn: the chat template writes {tail!r} behind its words, so "
                "the policy could never end a turn; let the template write the tokenizer's eos_token there, or mark "
                "the token it writes as special"
            )
        return ids[place]

    def _probe_text(self, opening: list[Message], said: Sequence[str], replies: Sequence[Message]) -> None:
        messages = list(opening)
        so_far = self._render(messages, prompt=True)
        for words, reply in zip(said, replies, strict=True):
            messages.append(Message("assistant", words))
            grown = self._render([*messages, reply], prompt=True)
            # A template may set words off with white space that its prompt leaves out: the policy samples it.
            behind = grown[len(so_far) :]
            spoken = so_far + behind[: len(behind) - len(behind.lstrip())] + words
            for rendered in (grown, self._render(messages, prompt=False)):
                if not rendered.startswith(spoken):
                    raise TemplateError(
                        "the chat template changes earlier text when the conversation grows "
                        f"(after an assistant's {words!r}): {_difference(spoken, rendered)}; {_CURE}"
                    )
            suffix = self._suffix([reply])
            if grown != spoken + suffix:
                raise TemplateError(
                    "what the chat template writes behind an assistant's words depends on earlier messages: "
                    f"{_difference(suffix, grown[len(spoken) :])}; {_CURE}"
                )
            messages.append(reply)
            so_far = grown

    def _probe_ids(self, words: str, reply: Message) -> None:
        whole = self._encode(self._render([Message("user", words), Message("assistant", words), reply], prompt=True))
        piece = self.reply_ids([reply], closed=False).tolist()
        if whole[-len(piece) :] != piece:
            raise TemplateError(
                f"a reply encoded by itself differs from the same text behind an assistant's {words!r}: "
                f"ids {piece} against {whole[-len(piece) :]}; let the template write its end-of-turn token directly "
                "behind the assistant's words, so that nothing merges across that place"
            )

    def _known_words(self) -> list[str]:
        """A few texts that this tokenizer can write without unknown tokens."""
        common = [text for text in ("yes", "Go on.", "42") if self._is_known(text)]
        if len(common) > 1:
            return common
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        rare = [word for word, token_id in vocabulary[:64] if token_id not in self._special and self._is_known(word)]
        return [*common, *rare][:3]

    def _is_known(self, text: str) -> bool:
        try:
            ids = self._encode(text)
        except Exception:  # noqa: BLE001 - word-level tokenizers without an unknown token raise a bare Exception
            return False
        return bool(ids) and self._tokenizer.unk_token_id not in ids


def load_renderer(path: str | Path) -> Renderer:
    """The probed renderer of a transformers folder.

    Raises PolicyError when the folder has no usable tokenizer, TemplateError when its template is refused.
    """
    from transformers import AutoTokenizer  # here, because importing it takes seconds that tests and tools need not pay

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(
            f"{path}: no tokenizer could be loaded ({error}); policy.path must be a folder written by "
            "transformers' save_pretrained, with tokenizer.json and a chat template"
        ) from error
    renderer = Renderer(tokenizer)
    renderer.probe()
    return renderer


def _find_end(fits: Callable[[int], bool], *, guess: int, length: int) -> int:
    """A number that `fits` while the next does not: from `guess` in growing steps, then by halving.

    0 fits and `length` does not, both without being asked; 0 < guess < length, or length is 1.
    """
    low, high, step = 0, length, 1
    if guess < length and fits(guess):
        low = guess
        while low + step < high and fits(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
    else:
        high = min(guess, length)
        while high - step > low and not fits(high - step):
            high, step = high - step, 2 * step
        low = max(low, high - step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _difference(expected: str, got: str) -> str:
    """Both texts around the first place where they differ."""
    pairs = zip(expected, got, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    around = slice(max(0, place - 20), place + 40)
    return f"expected {expected[around]!r}, got {got[around]!r} at character {place}"


def _read_only(ids: list[int]) -> IntArray:
    array = np.asarray(ids, dtype=np.int32)
    array.setflags(write=False)
    return array
