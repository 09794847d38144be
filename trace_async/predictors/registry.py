"""Predictors by name; the configuration names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from trace_async.methods.registry import pick, read_options
from trace_async.predictors.beta import BetaPredictor
from trace_async.predictors.counts import CountOptions
from trace_async.predictors.embedding import make_embedding
from trace_async.predictors.hashed import make_hashed
from trace_async.predictors.protocol import OPTIONS_KEY, Predictor, TextOf

Maker: TypeAlias = Callable[[Mapping[str, Any], int, TextOf], Predictor]


def _make_beta(options: Mapping[str, Any], seed: int, text_of: TextOf) -> Predictor:
    return BetaPredictor(read_options(CountOptions, options, where=OPTIONS_KEY))


def _make_hashed(options: Mapping[str, Any], seed: int, text_of: TextOf) -> Predictor:
    return make_hashed(options, seed)


PREDICTORS: dict[str, Maker] = {"beta": _make_beta, "hashed": _make_hashed, "embedding": make_embedding}


def make_predictor(kind: str, options: Mapping[str, Any], *, seed: int, text_of: TextOf) -> Predictor:
    """An untrained predictor, as the configuration names it; `text_of` reads a prefix for those that look at words.

    Raises ConfigError for a kind, option or value it does not know.
    """
    return pick(PREDICTORS, kind, where="predictor.kind")(options, seed, text_of)
