"""`embedding`: a learned predictor that reads prefixes through a frozen sentence encoder.

Owns the cache of vectors. Invariants: a prefix's vector depends on its words only; `make` may be called in any thread,
and one call waits for another. Encoding takes milliseconds a prefix, so nobody calls it on an event loop unprepared.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from trace_async.core.types import FloatArray, IntArray, Prefix
from trace_async.errors import ConfigError
from trace_async.methods.registry import read_options
from trace_async.predictors.encoder import SentenceEncoder
from trace_async.predictors.learned import LearnedOptions, LearnedPredictor
from trace_async.predictors.protocol import OPTIONS_KEY, TextOf
from trace_async.predictors.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOptions(LearnedOptions):
    """Options of `embedding`."""

    path: str = ""  # folder of a sentence-transformers or transformers model on this machine; must be given
    cache: int = 8192  # vectors kept, the last used

    def __post_init__(self) -> None:
        LearnedOptions.__post_init__(self)
        if not self.path:
            raise ConfigError(
                f"{OPTIONS_KEY}.path must be given for predictor.kind = 'embedding': the folder of a "
                "sentence-transformers or transformers model on this machine"
            )
        if self.cache < 1:
            raise ConfigError(f"{OPTIONS_KEY}.cache must be at least 1, got {self.cache}")


class VectorLayer:
    """Reads vectors of length 1 as `width` numbers of variance about 1; has no table."""

    table_shape = None

    def __init__(self, width: int) -> None:
        self.width = width

    def read(self, rows: Sequence[Row]) -> FloatArray:
        """float32 [rows, width]."""
        stacked = np.stack(rows) if rows else np.empty((0, self.width), np.float16)
        return stacked.astype(np.float32) * np.float32(math.sqrt(self.width))

    def forward(self, inputs: FloatArray, table: FloatArray | None) -> FloatArray:
        """The same."""
        return inputs

    def backward(self, inputs: FloatArray, gradient: FloatArray) -> None:
        """Nothing to learn here."""


class VectorRows:
    """Encodes a prefix's words, each prefix once."""

    dtype = "float16"
    quick_batch = 0

    def __init__(self, encoder: SentenceEncoder, *, text_of: TextOf, cache: int) -> None:
        self.layer = VectorLayer(encoder.width)
        self._encoder = encoder
        self._text_of = text_of
        self._size = cache
        self._lock = Lock()
        self._cache: OrderedDict[bytes, Row] = OrderedDict()  # last used last

    def make(self, prefixes: Sequence[Prefix]) -> list[Row]:
        """float16 [width]."""
        return [self._vector(prefix.token_ids) for prefix in prefixes]

    def _vector(self, token_ids: IntArray) -> Row:
        key = blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=16).digest()
        with self._lock:
            vector = self._cache.pop(key, None)
            if vector is None:
                vector = self._encoder.encode(self._text_of(token_ids)).astype(np.float16)
            self._cache[key] = vector
            if len(self._cache) > self._size:
                self._cache.popitem(last=False)
            return vector


def make_embedding(options: Mapping[str, Any], seed: int, text_of: TextOf) -> LearnedPredictor:
    """An untrained one. Raises ConfigError."""
    read = read_options(EmbeddingOptions, options, where=OPTIONS_KEY)
    encoder = SentenceEncoder(Path(read.path), where=f"{OPTIONS_KEY}.path")
    rows = VectorRows(encoder, text_of=text_of, cache=read.cache)
    return LearnedPredictor(read, kind="embedding", rows=rows, seed=seed)
