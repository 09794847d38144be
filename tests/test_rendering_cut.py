"""Texts cut to a number of tokens: never too long, never shorter than need be, for tokenizers of several kinds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.test_rendering import CHATML, byte_level
from trace_async.rendering import Renderer, _find_end

TOKENIZER = byte_level(CHATML)
RENDERER = Renderer(TOKENIZER)


def num_tokens(text: str) -> int:
    return len(TOKENIZER.encode(text, add_special_tokens=False))


@given(st.text(alphabet=st.sampled_from("left right.\n é漢🙂user"), max_size=80), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_a_cut_text_fits_and_one_more_character_does_not(text: str, most: int) -> None:
    cut = RENDERER.cut(text, most)
    assert text.startswith(cut)
    assert num_tokens(cut) <= most
    if cut != text:
        assert num_tokens(text[: len(cut) + 1]) > most


def test_by_hand() -> None:
    assert RENDERER.cut("left right left", num_tokens("left right")) == "left right"
    assert RENDERER.cut("left", 10) == "left"
    assert RENDERER.cut("left", 0) == ""
    assert RENDERER.cut("", 0) == ""


@given(st.integers(1, 300), st.data())
@settings(max_examples=200, deadline=None)
def test_the_end_is_found_from_any_guess_with_few_questions(length: int, data: Any) -> None:
    end: int = data.draw(st.integers(0, length - 1))
    guess: int = data.draw(st.integers(1, max(1, length - 1)))
    asked: list[int] = []

    def fits(place: int) -> bool:
        assert 0 < place < length
        asked.append(place)
        return place <= end

    assert _find_end(fits, guess=guess, length=length) == end
    assert len(asked) <= 2 + 2 * max(1, abs(guess - end)).bit_length() + 2


@pytest.mark.parametrize("most", [1, 5, 9])
def test_equal_calls_are_answered_from_memory(most: int) -> None:
    renderer = Renderer(TOKENIZER)
    text = "right left " * 20
    first = renderer.cut(text, most)
    assert renderer.cut(text, most) is first
