"""Whether an engine's word about a few prompts is the learner's: the proof that a published version's weights act.

Faults this is for: a part of a model that keeps old weights after a reload, an adapter that is not applied, weights of
another run; they move log-probabilities by tenths of a nat and more. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trace_async.core.types import Canary, FloatArray
from trace_async.errors import PolicyError


class Tolerance(NamedTuple):
    """How far log-probabilities of the same weights may lie apart, in nats."""

    mean: float
    worst: float


TOLERANCES = {"float32": Tolerance(1e-3, 1e-2), "bfloat16": Tolerance(0.15, 4.0)}
"""By the engine's dtype; the learner's is float32. The same weights gave 5e-6 and 4e-5, in bfloat16 0.04 and 0.8, where
one rare word can be far off and a version that moves less than rounding does cannot be told from the one before it."""


def check_canary(canary: Canary, found: Sequence[FloatArray], *, dtype: str, version: int) -> None:
    """Compare `found`, each float32 [L - 1], with the learner's; PolicyError when they are not the same weights'.

    A canary without prompts proves nothing and refuses nothing; a published manifest always has one.
    """
    shapes, expected_shapes = [f.shape for f in found], [e.shape for e in canary.logprobs]
    if shapes != expected_shapes:
        raise PolicyError(
            f"version {version}: the engine scored {shapes} canary tokens, {expected_shapes} were asked for"
        )
    if not found:
        return
    gaps = np.abs(np.concatenate(found) - np.concatenate(canary.logprobs))
    mean, worst = float(gaps.mean()), float(gaps.max())
    allowed = TOLERANCES[dtype]
    if not (mean <= allowed.mean and worst <= allowed.worst):  # also for NaN
        raise PolicyError(
            f"version {version} does not act: the engine's log-probabilities of {len(gaps)} canary tokens are "
            f"{mean:.2g} nats from the learner's on average and {worst:.2g} at worst; {allowed.mean:g} and "
            f"{allowed.worst:g} are allowed in {dtype}. Part of the engine may hold older weights"
        )
