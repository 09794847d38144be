"""Pseudo-names of syllables.

Every syllable is consonants and one vowel, and none begins another, so a word says which syllables it is made of.
The sum of their places modulo 16 is the family of the word: words of different families differ, always. Within one
world no two entities share a name, and no name is a word of another, but for the first names of persons.
"""

from __future__ import annotations

from envs.multihop_qa.world.options import FAMILIES
from envs.multihop_qa.world.stream import Stream

_ONSETS = (*"bdfghjklmnprstvwz", "br", "dr", "gr", "kr", "st", "tr", "pl")
_VOWELS = "aeiou"

SYLLABLES: tuple[str, ...] = tuple(onset + vowel for onset in _ONSETS for vowel in _VOWELS)
"""Every word of every name, in lower case, is two or three of these."""

_FIRST_NAMES = 80
"""Different first names in a world; persons share them."""

Word = tuple[int, ...]


class Namer:
    """Hands out the names of one world."""

    def __init__(self, seed: int, family: int) -> None:
        self._stream = Stream(seed, f"names/{family}")
        self._family = family
        self._used: set[Word] = set()
        self._words: dict[str, Word] = {}
        self._first_names = [self.word(2) for _ in range(_FIRST_NAMES)]

    def word(self, length: int = 3) -> str:
        """A word of so many syllables that was not handed out before."""
        while True:
            head = tuple(self._stream.below(len(SYLLABLES)) for _ in range(length - 1))
            last = self._completed(head)
            if last is not None and (*head, last) not in self._used:
                return self._take((*head, last))

    def first_name(self) -> str:
        """A first name, most of them met before."""
        return self._stream.pick_skewed(self._first_names)

    def near(self, word: str) -> str:
        """A new word that differs from this one by the vowels of two syllables; any new word when none is left."""
        for _ in range(24):
            parts = list(self._words[word])
            first, second = self._stream.sample(range(len(parts)), 2)
            step = self._stream.pick((-2, -1, 1, 2))
            if not (0 <= parts[first] % 5 + step < 5 and 0 <= parts[second] % 5 - step < 5):
                continue
            parts[first] += step
            parts[second] -= step
            if tuple(parts) not in self._used:
                return self._take(tuple(parts))
        return self.word()

    def _completed(self, head: Word) -> int | None:
        """A last syllable that puts the word into the family; None when the syllable drawn is out of range."""
        rest = (self._family - sum(head)) % FAMILIES
        last = rest + FAMILIES * self._stream.below(len(SYLLABLES) // FAMILIES + 1)
        return last if last < len(SYLLABLES) else None

    def _take(self, parts: Word) -> str:
        self._used.add(parts)
        text = "".join(SYLLABLES[part] for part in parts).capitalize()
        self._words[text] = parts
        return text
