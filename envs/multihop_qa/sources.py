"""From options to splits and collections: which questions there are, and what each of them searches.

Everything is a function that is called at first use: no file is read and no world is made before. The training
questions, the held-out ones and all further sets search one collection; a new world is searched by itself. Corpus
files lie beside the pages of either. Never: indexes, tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple

from envs.multihop_qa.corpora import from_questions, merge, read_corpus
from envs.multihop_qa.loading import load_questions, parse_source
from envs.multihop_qa.options import FROM_QUESTIONS, NEW_WORLD, MultihopOptions
from envs.multihop_qa.records import Question
from envs.multihop_qa.tasks import HELDOUT, TRAIN, Split
from envs.multihop_qa.world import World, make_world, new_world_options, read_world
from envs.retrieval.protocol import Passage
from trace_async.errors import ConfigError

MAIN = "main"
"""The collection of everything but a new world."""


_LAYOUTS = ("", "flashrag", "r1_searcher")  # what loaders call a data set that they cannot tell
_SPLIT_NAMES = ("train", "dev", "test", "valid", "validation")


class Sources(NamedTuple):
    """What a kit's tasks and library are made of."""

    splits: Mapping[str, Split]
    collections: Mapping[str, Callable[[], Iterable[Passage]]]


def make_sources(options: MultihopOptions) -> Sources:
    """The splits and collections of these options; nothing is read yet. ConfigError for an unknown format."""
    files = _Files(options)
    splits: dict[str, Split] = {}
    collections: dict[str, Callable[[], Iterable[Passage]]] = {MAIN: files.passages}
    if options.has_world:
        worlds = _Worlds(options)
        splits[TRAIN] = Split(lambda: worlds.main.questions[TRAIN], MAIN)
        splits[HELDOUT] = Split(lambda: worlds.main.questions[HELDOUT], MAIN)
        collections[MAIN] = lambda: merge(worlds.main.pages, files.passages())
        splits[NEW_WORLD] = Split(lambda: worlds.new.questions[HELDOUT], NEW_WORLD)
        collections[NEW_WORLD] = lambda: merge(worlds.new.pages, files.corpus())
    else:
        splits[TRAIN] = Split(files.reader(options.train), MAIN)
        splits[HELDOUT] = Split(files.reader(options.heldout), MAIN)
    for name, sources in options.sets.items():
        splits[name] = Split(files.reader(sources), MAIN)
    return Sources(splits, collections)


class _Worlds:
    """The world that is trained on, and the one that shares no name with it; each made once."""

    def __init__(self, options: MultihopOptions) -> None:
        self._options = options

    @cached_property
    def main(self) -> World:
        return self._read(new_world=False) if self._options.world is None else make_world(self._options.world)

    @cached_property
    def new(self) -> World:
        options = self._options.world
        return self._read(new_world=True) if options is None else make_world(new_world_options(options))

    def _read(self, *, new_world: bool) -> World:
        folder = Path(self._options.data).expanduser() / Path(self._options.world_folder).expanduser()
        return read_world(folder, new_world=new_world)


class _Files:
    """Question and corpus files below the data folder."""

    def __init__(self, options: MultihopOptions) -> None:
        self._options = options
        self._folder = Path(options.data).expanduser()
        for source in self._sources():
            parse_source(source)

    def reader(self, sources: Sequence[str]) -> Callable[[], Iterator[Question]]:
        """The questions of these sources, read anew at each call. Sources take turns until they end: the first
        questions of a split are a mixture."""
        return lambda: in_turn(*map(self._questions, sources))

    def corpus(self) -> Iterator[Passage]:
        """The passages of the corpus files."""
        paths = [Path(name).expanduser() for name in self._options.corpus if name != FROM_QUESTIONS]
        return merge(*(read_corpus(self._folder / path) for path in paths))

    def passages(self) -> Iterator[Passage]:
        """The same, and the paragraphs of the questions where the options ask for them."""
        if FROM_QUESTIONS not in self._options.corpus:
            return self.corpus()
        return merge(self.corpus(), from_questions(self.reader(self._sources())()))

    def _sources(self) -> tuple[str, ...]:
        options = self._options
        return (*options.train, *options.heldout, *chain.from_iterable(options.sets.values()))

    def _questions(self, source: str) -> Iterator[Question]:
        format, path = parse_source(source)
        path = self._folder / path
        if not path.exists():
            raise ConfigError(
                f"{path}: no such file; question files are looked for in the folder environment.options.data, which is "
                f"{self._options.data!r}"
            )
        aliases = self._folder / Path(self._options.aliases).expanduser() if self._options.aliases else None
        found = load_questions(path, format=format, aliases=aliases)
        return (replace(one, dataset=dataset_of(path)) if one.dataset in _LAYOUTS else one for one in found)


def in_turn(*streams: Iterator[Question]) -> Iterator[Question]:
    """One question of each stream after the other; those that have ended are passed over."""
    for some in zip_longest(*streams):
        yield from (one for one in some if one is not None)


def dataset_of(path: Path) -> str:
    """The data set that a file holds, by its name without suffixes, or by its folder's where it is named after a split.

    For layouts that many data sets use: the name tells which rule judges the answers, and keeps equal ids apart.
    """
    stem = path.name.split(".")[0]
    return path.absolute().parent.name or stem if stem in _SPLIT_NAMES else stem
