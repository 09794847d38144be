"""What travels between ranks arrives as it was, to the bit, and nothing else travels."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_kit import Layout, items, minibatch
from trace_async.config import LearnerConfig
from trace_async.core.packing import pack
from trace_async.core.tree_packing import pack_trees
from trace_async.trainer_wire import decode, encode


def travelled(value: object) -> object:
    header, payload = encode(value)
    return decode(json.loads(json.dumps(header, allow_nan=False)), payload)


def assert_same(found: object, expected: object) -> None:
    assert type(found) is (list if isinstance(expected, tuple) else type(expected))
    if isinstance(expected, np.ndarray):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif is_dataclass(expected):
        for field in fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    else:
        assert found == expected


@given(st.integers(0, 10_000), st.sampled_from([pack, pack_trees]))
def test_minibatches_arrive_as_they_were(seed: int, layout: Layout) -> None:
    sent = [minibatch(items(seed, 2), layout=layout, micro_batch_tokens=128)]
    assert_same(travelled(sent), sent)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "é",
        [1, -2.5, True, [np.arange(3, dtype=np.int32), np.zeros((2, 0)), np.array([True]), np.array([np.nan], "<f4")]],
    ],
)
def test_plain_values_and_arrays_arrive_as_they_were(value: object) -> None:
    assert_same(travelled(value), value)


@pytest.mark.parametrize("value", [object(), LearnerConfig(), {1, 2}, np.float32(1)])
def test_nothing_else_travels(value: object) -> None:
    with pytest.raises(TypeError, match="does not travel"):
        encode(value)
