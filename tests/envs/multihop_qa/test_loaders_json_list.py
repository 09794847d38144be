"""The incremental reader of JSON lists: what it yields, how little it reads, and where it stops."""

from __future__ import annotations

import io
import json
import random
from itertools import islice

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from envs.multihop_qa.loading.json_list import CHUNK_CHARS, ListError, read_list

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


class Drip:
    """Gives at most `most` characters at a time, whatever is asked for, and counts them."""

    def __init__(self, text: str, most: int) -> None:
        self.text = text
        self.most = most
        self.num_read = 0

    def read(self, size: int, /) -> str:
        size = min(size, self.most) if size >= 0 else self.most
        part = self.text[self.num_read : self.num_read + size]
        self.num_read += len(part)
        return part


class Endless:
    """A list that never ends; counts the characters it has given."""

    def __init__(self, element: str) -> None:
        self.element = element
        self.num_read = 0
        self.rest = "["

    def read(self, size: int, /) -> str:
        while len(self.rest) < size:
            self.rest += self.element + ","
        part, self.rest = self.rest[:size], self.rest[size:]
        self.num_read += size
        return part


def values(text: str, most: int = 1 << 30) -> list[object]:
    return [element.value for element in read_list(Drip(text, most))]


@settings(max_examples=60)
@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 1]), st.integers(1, 40))
@example([12345, -1.5e300, True, None, '\u20ac\\"\n', {}], None, 1)
def test_it_yields_what_json_does_however_the_text_is_cut(data: list[object], indent: int | None, most: int) -> None:
    assert values(json.dumps(data, indent=indent), most) == data
    assert values(f" \n{json.dumps(data, ensure_ascii=False, indent=indent)}\r\n ", most) == data


def test_elements_are_numbered_and_know_their_line() -> None:
    elements = list(read_list(io.StringIO('\n[\n{"a":\n1},\n\n "x"\n, 3]\n')))
    assert [(e.number, e.line) for e in elements] == [(1, 3), (2, 6), (3, 7)]


def test_the_first_element_comes_after_one_chunk_of_an_endless_list() -> None:
    stream = Endless(json.dumps({"text": "x" * 1000}))
    assert next(read_list(stream)).number == 1
    assert stream.num_read == CHUNK_CHARS


def test_what_is_held_does_not_grow_with_what_was_read() -> None:
    """Never further ahead of the elements than two chunks, over a hundred of them."""
    element = json.dumps({"text": "x" * 1000})
    stream = Endless(element)
    for number, _ in enumerate(islice(read_list(stream), 6500), 1):
        assert stream.num_read - number * (len(element) + 1) <= 2 * CHUNK_CHARS
    assert stream.num_read > 100 * CHUNK_CHARS


def test_an_element_longer_than_many_chunks_is_read_whole() -> None:
    long = {"text": "y" * (5 * CHUNK_CHARS), "n": 1}
    assert values(json.dumps([long, 2, long])) == [long, 2, long]


def test_a_damaged_element_is_told_without_reading_to_the_end() -> None:
    text = '[{"a": 1}, {"a" 2}, ' + '{"a": 3},' * 100_000
    stream = Drip(text, 1 << 30)
    with pytest.raises(ListError, match="line 1, element 2: Expecting ':' delimiter"):
        list(read_list(stream))
    assert stream.num_read == CHUNK_CHARS


def test_an_element_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envs.multihop_qa.loading.json_list.MAX_ELEMENT_CHARS", 4 * CHUNK_CHARS)
    stream = Drip('["' + "x" * (100 * CHUNK_CHARS), 1 << 30)
    with pytest.raises(ListError, match="element 1: longer than"):
        list(read_list(stream))
    assert stream.num_read <= 16 * CHUNK_CHARS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: no \\["),
        ('{"a": 1}', "line 1: no \\["),
        ("[", "line 1, element 1: Expecting value"),
        ("[1", "line 1: the end of the text after element 1"),
        ("[1,", "line 1, element 2: Expecting value"),
        ("[1,]", "line 1, element 2: Expecting value"),
        ("[,1]", "line 1, element 1: Expecting value"),
        ("[1 2]", "line 1: '2' after element 1"),
        ("[1]\n]", "line 2: '\\]' after the \\] that ends"),
        ('[\n1,\n"ab', "line 3, element 2: Unterminated string"),
        ('[{"a": 1}\n{"a": 2}]', "line 2: '{' after element 1"),
        ("[tru]", "element 1: Expecting value"),
        ('["\\u12"]', "element 1: Invalid"),
        ("[" * 200_000, "element 1: .*recursion"),
        (f"[{'1' * 5000}]", "element 1: .*digits"),
    ],
)
def test_what_is_no_list_is_a_list_error_with_the_place(text: str, message: str) -> None:
    for most in (7, 1 << 30) if len(text) < 1000 else (1 << 30,):
        with pytest.raises(ListError, match=message):
            values(text, most)


def test_damaged_lists_give_a_list_error_or_what_json_gives() -> None:
    whole = json.dumps([{"a": [1, "b\\u00e9"], "c": None}, -2.5e3, "x"])
    rng = random.Random(0)
    for _ in range(1000):
        at, kind = rng.randrange(len(whole)), rng.randrange(3)
        new = rng.choice('[]{}",:\\ 1e-n')
        text = whole[:at] + ("" if kind == 0 else new) + whole[at + (kind != 1) :]
        try:
            expected = json.loads(text)
        except ValueError:
            expected = None
        if isinstance(expected, list):
            assert values(text, rng.randrange(1, 9)) == expected
        else:
            with pytest.raises(ListError):
                values(text, rng.randrange(1, 9))
