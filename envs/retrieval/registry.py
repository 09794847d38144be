"""Options of retrieval, and the one place that turns them into a retriever.

Owns the names of the kinds. Never: an index of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from envs.retrieval.protocol import Passage, Retriever
from trace_async.errors import ConfigError

KINDS = ("bm25", "fts5", "http", "dense")

_WHERE = "environment.options.retriever"
_ONLY_FOR = {
    "url": ("http",),
    "deadline_s": ("http",),
    "path": ("fts5", "dense"),
    "encoder": ("dense",),
    "k1": ("bm25",),
    "b": ("bm25",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrieverOptions:
    """What `[environment.options.retriever]` may say; ConfigError when a value or a combination is refused."""

    kind: str = "bm25"  # one of KINDS
    cache_entries: int = 20_000  # answers kept; 0: none
    k1: float = 0.9  # bm25: how much repetition of a word counts
    b: float = 0.4  # bm25: how much length counts against a passage
    path: str = ""  # fts5: file of the index; dense: file of the vectors; "": in memory
    encoder: str = ""  # dense: folder of a transformers encoder
    url: str = ""  # http: the whole address, such as "http://127.0.0.1:8000/retrieve"
    deadline_s: float = 30.0  # http: for one request, retries included

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"{_WHERE}.kind: need one of {', '.join(KINDS)}, got {self.kind!r}")
        for name, kinds in _ONLY_FOR.items():
            default = type(self).__dataclass_fields__[name].default
            if self.kind not in kinds and getattr(self, name) != default:
                raise ConfigError(f"{_WHERE}.{name}: kind {self.kind!r} does not read it; it is for {', '.join(kinds)}")
        if self.kind == "http" and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"{_WHERE}.url: kind 'http' needs an address http://HOST:PORT/retrieve, got {self.url!r}")
        if self.kind == "dense" and not self.encoder:
            raise ConfigError(f"{_WHERE}.encoder: kind 'dense' needs the folder of an encoder")
        if self.cache_entries < 0:
            raise ConfigError(f"{_WHERE}.cache_entries: need >= 0, got {self.cache_entries}")
        if not self.deadline_s > 0.0:
            raise ConfigError(f"{_WHERE}.deadline_s: need > 0, got {self.deadline_s}")
        if not (self.k1 >= 0.0 and 0.0 <= self.b <= 1.0):
            raise ConfigError(f"{_WHERE}: need k1 >= 0 and 0 <= b <= 1, got k1={self.k1}, b={self.b}")


def make_retriever(options: RetrieverOptions, passages: Callable[[], Iterable[Passage]]) -> Retriever:
    """A retriever over `passages`, with a cache in front; it is the caller's to close.

    `passages` may be called twice, and not at all by "http", whose server has a corpus of its own. Builds the index:
    seconds, for the corpus of a benchmark.
    Raises ConfigError for packages or files that are missing, or a corpus that is empty.
    """
    retriever = _make(options, passages)
    if not options.cache_entries:
        return retriever
    from envs.retrieval.cache import CachedRetriever

    return CachedRetriever(retriever, max_entries=options.cache_entries)


def _make(options: RetrieverOptions, passages: Callable[[], Iterable[Passage]]) -> Retriever:
    if options.kind == "http":
        from envs.retrieval.http import HttpRetriever

        return HttpRetriever(options.url, deadline_s=options.deadline_s)
    if options.kind == "dense":
        from envs.retrieval.dense import DenseRetriever, TransformersEncoder

        encoder = TransformersEncoder(Path(options.encoder))
        return DenseRetriever(passages(), encoder, path=Path(options.path) if options.path else None)
    if options.kind == "fts5":
        return _make_fts5(options, passages)
    from envs.retrieval.bm25 import Bm25Retriever

    return Bm25Retriever(passages(), k1=options.k1, b=options.b)


def _make_fts5(options: RetrieverOptions, passages: Callable[[], Iterable[Passage]]) -> Retriever:
    """In memory, or from the file, which is written anew when its corpus is another one."""
    from envs.retrieval.fts5 import Fts5Retriever, read_meta
    from envs.retrieval.local import CorpusDigest

    if not options.path:
        return Fts5Retriever(passages())
    path = Path(options.path)
    if path.exists():
        digest = CorpusDigest()
        for passage in passages():
            digest.add(passage)
        if read_meta(path)[0] == digest.hexdigest():
            return Fts5Retriever.open(path)
    return Fts5Retriever(passages(), path=path)
