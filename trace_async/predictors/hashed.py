"""`hashed`: a learned predictor that reads hashed n-grams of token ids. NumPy alone; cheap enough for every turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trace_async.core.types import Prefix
from trace_async.errors import ConfigError
from trace_async.methods.registry import read_options
from trace_async.predictors.hashing import HashedBags, clip_row
from trace_async.predictors.learned import LearnedOptions, LearnedPredictor
from trace_async.predictors.protocol import OPTIONS_KEY
from trace_async.predictors.rows import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedOptions(LearnedOptions):
    """Options of `hashed`."""

    buckets: int = 4096  # of hashed n-grams
    dims: int = 8  # numbers per bucket

    def __post_init__(self) -> None:
        LearnedOptions.__post_init__(self)
        for name in ("buckets", "dims"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{OPTIONS_KEY}.{name} must be at least 1, got {getattr(self, name)}")


class HashedRows:
    """Token ids as they are; the layer hashes them."""

    dtype = "int32"
    quick_batch = 16

    def __init__(self, *, buckets: int, dims: int) -> None:
        self.layer = HashedBags(buckets=buckets, dims=dims)

    def make(self, prefixes: Sequence[Prefix]) -> list[Row]:
        """int32 [tokens that are read]."""
        return [clip_row(prefix.token_ids) for prefix in prefixes]


def make_hashed(options: Mapping[str, Any], seed: int) -> LearnedPredictor:
    """An untrained one. Raises ConfigError."""
    read = read_options(HashedOptions, options, where=OPTIONS_KEY)
    rows = HashedRows(buckets=read.buckets, dims=read.dims)
    return LearnedPredictor(read, kind="hashed", rows=rows, seed=seed)
