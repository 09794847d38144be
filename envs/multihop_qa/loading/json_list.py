"""Reads a JSON list element by element, so that a file of any length needs the memory of its longest element.

Never: opens files, knows what the elements mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple, Protocol

CHUNK_CHARS = 1 << 16
MAX_ELEMENT_CHARS = 1 << 24
"""No question is longer; a list that seems to hold one has a bracket or quote missing and is not read to its end."""

_CUT_MARGIN = 16
"""A cut through an escape or literal is reported at most this many characters before the end of what was read."""

_SPACE = " \t\r\n"


class Readable(Protocol):
    """A text stream."""

    def read(self, size: int, /) -> str: ...


class Element(NamedTuple):
    """One element of the list."""

    number: int  # from 1
    line: int  # where it starts, from 1
    value: object


class ListError(ValueError):
    """The text is not a JSON list; the message says where and why."""


class _Window:
    """The part of the text that is held: what is not yet consumed, and the line it starts on."""

    def __init__(self, stream: Readable) -> None:
        self._stream = stream
        self.text = ""
        self.start = 0  # the consumed part of `text` ends here
        self.line = 1
        self.ended = False

    def grow(self) -> None:
        """Drop what is consumed; read as much again as is left, at least one chunk."""
        self.text = self.text[self.start :]
        self.start = 0
        more = self._stream.read(max(CHUNK_CHARS, len(self.text)))
        self.ended = not more
        self.text += more

    def consume(self, end: int) -> None:
        self.line += self.text.count("\n", self.start, end)
        self.start = end

    def next_char(self) -> str:
        """The next character that is no white space, not consumed; "" at the end of the text."""
        while True:
            end = self.start
            while end < len(self.text) and self.text[end] in _SPACE:
                end += 1
            self.consume(end)
            if end < len(self.text):
                return self.text[end]
            if self.ended:
                return ""
            self.grow()


def read_list(stream: Readable) -> Iterator[Element]:
    """The elements in order. Raises ListError at the first place where the text is not a JSON list, or at an element
    longer than MAX_ELEMENT_CHARS."""
    window = _Window(stream)
    if window.next_char() != "[":
        raise ListError(f"line {window.line}: no [ at the start of a JSON list")
    window.consume(window.start + 1)
    decoder = json.JSONDecoder()
    number = 0
    while (char := window.next_char()) != "]":
        if number:
            if char != ",":
                raise ListError(f"line {window.line}: {_found(char)} after element {number} instead of , or ]")
            window.consume(window.start + 1)
            window.next_char()
        number += 1
        line = window.line
        yield Element(number, line, _decode(window, decoder, number))
    window.consume(window.start + 1)
    if rest := window.next_char():
        raise ListError(f"line {window.line}: {_found(rest)} after the ] that ends the list")


def _decode(window: _Window, decoder: json.JSONDecoder, number: int) -> object:
    """Consume one element, reading on as long as it may only be cut off."""
    while True:
        try:
            value, end = decoder.raw_decode(window.text, window.start)
        except json.JSONDecodeError as error:
            cut = error.pos >= len(window.text) - _CUT_MARGIN or error.msg.startswith("Unterminated string")
            if window.ended or not cut:
                line = window.line + window.text.count("\n", window.start, error.pos)
                raise ListError(f"line {line}, element {number}: {error.msg}") from None
            if len(window.text) - window.start > MAX_ELEMENT_CHARS:
                raise ListError(
                    f"line {window.line}, element {number}: longer than {MAX_ELEMENT_CHARS:,} characters"
                ) from None
            window.grow()
        except (ValueError, RecursionError) as error:  # an endless number, brackets nested without end
            raise ListError(f"line {window.line}, element {number}: {error}") from None
        else:
            if isinstance(value, dict | list | str) or end < len(window.text) - _CUT_MARGIN or window.ended:
                window.consume(end)
                return value
            window.grow()  # a number may go on: 1 may become 1.5 or 1e+5


def _found(char: str) -> str:
    return repr(char) if char else "the end of the text"
