"""The proof that weights act: what it lets through, what it stops, and what it says."""

from __future__ import annotations

import numpy as np
import pytest

from trace_async.canary import TOLERANCES, check_canary
from trace_async.core.types import Canary, FloatArray
from trace_async.errors import PolicyError

CANARY = Canary(
    prompts=(np.arange(4, dtype=np.int32), np.arange(3, dtype=np.int32)),
    logprobs=(np.array([-1.0, -2.0, -3.0], np.float32), np.array([-0.5, -4.0], np.float32)),
)


def shifted(by: float, *, only_first: bool = False) -> list[FloatArray]:
    found = [logprobs.copy() for logprobs in CANARY.logprobs]
    if only_first:
        found[0][0] += by
    else:
        found = [(logprobs + by).astype(np.float32) for logprobs in found]
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_what_lies_within_both_tolerances_passes(dtype: str) -> None:
    check_canary(CANARY, shifted(0.9 * TOLERANCES[dtype].mean), dtype=dtype, version=3)
    worst = min(0.9 * TOLERANCES[dtype].worst, 4.5 * TOLERANCES[dtype].mean)  # of five tokens
    check_canary(CANARY, shifted(worst, only_first=True), dtype=dtype, version=3)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_a_gap_on_average_is_refused_with_its_size(dtype: str) -> None:
    with pytest.raises(PolicyError, match=f"version 7 does not act.*{dtype}"):
        check_canary(CANARY, shifted(-1.1 * TOLERANCES[dtype].mean), dtype=dtype, version=7)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_token_far_off_among_many_that_agree_is_refused(dtype: str) -> None:
    prompt, said = np.zeros(401, np.int32), np.full(400, -2.0, np.float32)
    found = said.copy()
    found[7] -= 1.1 * TOLERANCES[dtype].worst
    with pytest.raises(PolicyError, match="at worst"):
        check_canary(Canary(prompts=(prompt,), logprobs=(said,)), [found], dtype=dtype, version=0)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(PolicyError, match="nan"):
        check_canary(CANARY, shifted(float("nan"), only_first=True), dtype="float32", version=0)


def test_an_engine_that_scored_something_else_is_refused() -> None:
    with pytest.raises(PolicyError, match="were asked for"):
        check_canary(CANARY, shifted(0.0)[:1], dtype="float32", version=0)
