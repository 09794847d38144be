"""How honest the predictor is: its predictions against outcomes that nobody knew when they were made.

A prompt's prediction is stamped on the lease when that is issued, a prefix's when the prefix was scored; both travel
with the group. Which outcomes test which prediction is said in `methods/forecasts.py`. Owns what must be remembered
between steps: how often each kind has succeeded (for the constant that a predictor has to beat), and which prompts had
been seen. A checkpoint carries that, so a resumed run measures what the killed one would have. Measures only: nothing
here changes what is trained on.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np

from trace_async.core.types import Group, Json
from trace_async.methods.calibration import brier, ece, log_loss, reliability, spearman
from trace_async.methods.forecasts import (
    Forecasts,
    Promise,
    prefix_forecasts,
    promised_flips,
    promised_mixed,
    prompt_forecasts,
)

Measure: TypeAlias = float | list[list[float]]

KINDS = ("prompts", "new_prompts", "prefixes")
"""Whose predictions are measured: all prompts, those of which no group had been consumed before the step, prefixes."""

RELIABILITY_BINS = 20
"""Equally wide bins of a row's reliability table."""


class Honesty:
    """Measures steps in their order."""

    def __init__(self, state: Json | None = None) -> None:
        """`state`: what `state` of the run's last checkpoint returned; None for a new run."""
        self._past = dict.fromkeys(KINDS, (0, 0))  # successes and draws before this step
        self._known = KnownPrompts()
        if state is not None:
            self._past = {kind: (int(state[kind][0]), int(state[kind][1])) for kind in KINDS}
            self._known = KnownPrompts(state["known_prompts"])

    def state(self) -> Json:
        """What the constructor needs, as JSON."""
        return {**{kind: list(self._past[kind]) for kind in KINDS}, "known_prompts": self._known.state()}

    def measure(self, groups: Sequence[Group]) -> dict[str, Measure]:
        """The figures of a step that consumed these groups; call once per step, in order."""
        new = [group for group in groups if group.prompt_id not in self._known]
        forecasts = (prompt_forecasts(groups), prompt_forecasts(new), prefix_forecasts(groups))
        row: dict[str, Measure] = {}
        for kind, of_kind in zip(KINDS, forecasts, strict=True):
            successes, draws = self._past[kind]
            # As if one success and one failure had come before: one half where nothing is known.
            row |= _figures(kind, of_kind, constant=(successes + 1) / (draws + 2))
            self._past[kind] = (successes + int(of_kind.successes.sum()), draws + int(of_kind.draws.sum()))
        self._known.add(group.prompt_id for group in groups)
        return {**row, **_kept("mixed", promised_mixed(groups)), **_kept("flips", promised_flips(groups))}


class KnownPrompts:
    """A set of prompt ids in 128 KiB, whatever their number: one bit for all ids with the same hash.

    It never takes a prompt that was added for a new one. After n others it takes a new prompt for a known one with
    probability 1 - exp(-n / 2^20): one in ten after 110,000.
    """

    _BITS = 1 << 20

    def __init__(self, state: str = "") -> None:
        """`state`: what `state` returned. Raises ValueError when it is not of this size."""
        self._bits = np.zeros(self._BITS // 8, np.uint8)
        if state:
            self._bits = np.frombuffer(zlib.decompress(base64.b64decode(state)), np.uint8).copy()
            if self._bits.size != self._BITS // 8:
                raise ValueError(f"known prompts: {self._bits.size} bytes, expected {self._BITS // 8}")

    def __contains__(self, prompt_id: str) -> bool:
        place = self._place(prompt_id)
        return bool(self._bits[place >> 3] >> (place & 7) & 1)

    def add(self, prompt_ids: Iterable[str]) -> None:
        """These are known from now on."""
        for place in map(self._place, prompt_ids):
            self._bits[place >> 3] |= np.uint8(1 << (place & 7))

    def state(self) -> str:
        """The bits, compressed, as text."""
        return base64.b64encode(zlib.compress(self._bits.tobytes())).decode("ascii")

    def _place(self, prompt_id: str) -> int:
        return int.from_bytes(blake2b(prompt_id.encode(), digest_size=8).digest()) % self._BITS


def _figures(kind: str, forecasts: Forecasts, *, constant: float) -> dict[str, Measure]:
    predicted, happened = forecasts.per_draw()
    table = reliability(predicted, happened, bins=RELIABILITY_BINS)
    return {
        f"predictor/{kind}/outcomes": float(predicted.size),
        f"predictor/{kind}/brier": brier(predicted, happened),
        f"predictor/{kind}/constant_brier": brier(np.full_like(predicted, constant), happened),
        f"predictor/{kind}/log_loss": log_loss(predicted, happened),
        f"predictor/{kind}/ece": ece(predicted, happened),
        f"predictor/{kind}/spearman": spearman(forecasts.predicted, forecasts.rates),
        f"predictor/{kind}/bins": [[number, *row] for number, row in enumerate(table.round(4).tolist()) if row[0]],
    }


def _kept(what: str, promise: Promise) -> dict[str, Any]:
    return {
        f"allocation/{what}_places": float(promise.places),
        f"allocation/{what}_expected": promise.expected,
        f"allocation/{what}_realised": float(promise.realised),
    }
