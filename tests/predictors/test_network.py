"""The small network: gradients against differences, Adam by hand, rows that do not see each other, exact state."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from trace_async.core.types import FloatArray, IntArray
from trace_async.predictors.arrays import array_from_json, array_to_json
from trace_async.predictors.hashing import ENDS, LAST, PLACES, HashedBags, clip_row, hash_rows
from trace_async.predictors.network import Adam, Network, read_arrays, tell_arrays

LAYER = HashedBags(buckets=32, dims=3)


def some_rows(rng: np.random.Generator, count: int) -> list[IntArray]:
    return [rng.integers(0, 50, int(rng.integers(0, 12))).astype(np.int32) for _ in range(count)]


def trained(seed: int = 0) -> Network:
    """A network whose every parameter is something."""
    network = Network(LAYER, num_scalars=2, hidden=5, seed=seed)
    rng = np.random.default_rng(seed)
    network.parameters = {
        name: (values + 0.3 * rng.standard_normal(values.shape)).astype(np.float32)
        for name, values in network.parameters.items()
    }
    return network


def test_a_fresh_network_answers_nothing_but_zero() -> None:
    rng = np.random.default_rng(0)
    network = Network(LAYER, num_scalars=2, hidden=5, seed=0)
    assert network.forward(some_rows(rng, 6), rng.standard_normal((6, 2)).astype(np.float32)).tolist() == [0.0] * 6


def test_gradients_are_those_of_finite_differences() -> None:
    rng = np.random.default_rng(1)
    network, rows = trained(), some_rows(rng, 7)
    scalars, outer = rng.standard_normal((7, 2)).astype(np.float32), rng.standard_normal(7).astype(np.float32)
    _, passed = network.pass_for_learning(rows, scalars)
    found = network.gradients(passed, outer)
    assert set(found) == set(network.parameters) == {"table", "w1", "b1", "w2", "b2"}
    for name, gradient in found.items():
        values = network.parameters[name].astype(np.float64)
        for place in [tuple(rng.integers(0, values.shape)) for _ in range(25)]:
            sides = []
            for step in (1e-3, -1e-3):
                moved = values.copy()
                moved[place] += step
                network.parameters[name] = moved  # type: ignore[assignment]  # exact differences want float64
                sides.append(float(network.pass_for_learning(rows, scalars)[0].astype(np.float64) @ outer))
            network.parameters[name] = values.astype(np.float32)
            assert gradient[place] == pytest.approx((sides[0] - sides[1]) / 2e-3, abs=3e-3), (name, place)


def test_a_rows_answer_does_not_depend_on_its_batch_to_the_bit() -> None:
    rng = np.random.default_rng(2)
    network = trained()
    for count in (2, 3, 17, 64):
        rows, scalars = some_rows(rng, count), rng.standard_normal((count, 2)).astype(np.float32)
        together = network.forward(rows, scalars)
        alone = [network.forward([row], scalars[i : i + 1])[0] for i, row in enumerate(rows)]
        np.testing.assert_array_equal(together, np.array(alone, np.float32))


def test_learning_sees_what_predicting_sees() -> None:
    rng = np.random.default_rng(3)
    network, rows, scalars = trained(), some_rows(rng, 9), rng.standard_normal((9, 2)).astype(np.float32)
    np.testing.assert_allclose(network.pass_for_learning(rows, scalars)[0], network.forward(rows, scalars), atol=1e-5)


def test_two_steps_of_adam_by_hand() -> None:
    parameters = {"w": np.array([[1.0]], np.float32), "b": np.array([1.0], np.float32)}
    adam = Adam(parameters, learning_rate=0.1, weight_decay=0.5)
    gradients = {"w": np.array([[2.0]], np.float32), "b": np.array([2.0], np.float32)}
    adam.step(parameters, gradients)  # the first step is the learning rate, whatever the gradient
    assert parameters["b"][0] == pytest.approx(0.9)
    assert parameters["w"][0, 0] == pytest.approx(0.95 - 0.1)  # a matrix decays by 0.1 * 0.5 of itself first
    adam.step(parameters, {"w": np.zeros((1, 1), np.float32), "b": np.zeros(1, np.float32)})
    # mean .18 / .19, square .003996 / .001999: .1 * .947368 / 1.413860
    assert parameters["b"][0] == pytest.approx(0.9 - 0.0670059, abs=1e-6)


def test_arrays_and_optimizer_come_back_from_json_to_the_bit() -> None:
    network = trained()
    adam = Adam(network.parameters, learning_rate=0.01, weight_decay=0.0)
    adam.step(network.parameters, {name: values + 1 for name, values in network.parameters.items()})
    told = json.loads(json.dumps({"network": tell_arrays(network.parameters), "adam": adam.state()}))
    again = read_arrays(told["network"], like=network.parameters, what="network")
    other = Adam(network.parameters, learning_rate=0.01, weight_decay=0.0)
    other.load(told["adam"])
    for name, values in network.parameters.items():
        np.testing.assert_array_equal(again[name], values)
        np.testing.assert_array_equal(other.square[name], adam.square[name])
    assert other.steps == 1


GOOD: dict[str, Any] = array_to_json(np.array([1.5, 2.5], np.float32))


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        (None, "must be an array of float32"),
        ({**GOOD, "dtype": "int32"}, "must be an array of float32"),
        ({**GOOD, "shape": [3]}, "must be of shape"),
        ({**GOOD, "shape": [2, 1]}, "must be of shape"),
        ({**GOOD, "shape": "2"}, "has the shape"),
        ({**GOOD, "data": "AAAA"}, "is damaged"),
        ({**GOOD, "data": "?"}, "is damaged"),
        ({**GOOD, "data": None}, "is damaged"),
        (array_to_json(np.array([1.0, np.nan], np.float32)), "not finite"),
    ],
)
def test_an_array_that_is_not_what_it_should_be_is_refused_by_name(told: object, complaint: str) -> None:
    with pytest.raises(ValueError, match=f"state of a predictor: w1 {complaint}|holds numbers that are {complaint}"):
        array_from_json(told, dtype="float32", shape=(2,), what="w1")
    assert array_from_json(GOOD, dtype="float32", shape=(-1,), what="w1").tolist() == [1.5, 2.5]


# ---- hashing -----------------------------------------------------------------------------------------------------


def ids(*words: int) -> IntArray:
    return np.array(words, np.int32)


def test_every_word_gives_itself_and_its_pair_to_each_bag_that_knows_its_place() -> None:
    for length in (0, 1, LAST + 3, PLACES + 5):
        place, last, any_place = hash_rows([np.arange(length, dtype=np.int32)], 97)
        assert place.sizes.tolist() == [2 * min(length, PLACES)]
        assert last.sizes.tolist() == [2 * min(length, LAST)]
        assert any_place.sizes.tolist() == [2 * length]
        for bag in (place, last, any_place):
            assert bag.buckets.size == bag.sizes.sum()
            assert ((bag.buckets >= 0) & (bag.buckets < 97)).all()


def test_places_count_from_the_start_and_from_the_end() -> None:
    many = 1 << 40  # no collisions
    place, last, any_place = (
        [set(part.tolist()) for part in np.split(bag.buckets, np.cumsum(bag.sizes)[:-1])]
        for bag in hash_rows([ids(5, 6, 7), ids(9, 5, 6, 7), ids(5, 6, 7, 9)], many)
    )
    assert place[0] < place[2] and not place[0] & place[1]  # noqa: PT018 - both sides of one statement
    assert last[0] - last[1] and len(last[0] & last[1]) == 5  # noqa: PT018 - the first word has another before it
    assert not last[0] & last[2]
    assert any_place[0] < any_place[2]
    assert len(any_place[0] - any_place[1]) == 1  # the same


def test_rows_are_hashed_as_if_alone() -> None:
    rng = np.random.default_rng(0)
    rows = [*some_rows(rng, 12), ids()]
    together = hash_rows(rows, 1000)
    for number, bag in enumerate(together):
        alone = [hash_rows([row], 1000)[number].buckets for row in rows]
        np.testing.assert_array_equal(bag.buckets, np.concatenate(alone))
    assert hash_rows([], 1000)[0].sizes.size == 0


def test_of_a_very_long_prefix_both_ends_are_read() -> None:
    long = np.arange(5000, dtype=np.int32)
    assert clip_row(long).tolist() == [*range(ENDS), *range(5000 - ENDS, 5000)]
    short = np.arange(2 * ENDS, dtype=np.int32)
    assert clip_row(short) is short


def test_a_bag_is_the_sum_of_its_vectors_over_the_root_of_their_number() -> None:
    table: FloatArray = np.random.default_rng(0).standard_normal((32, 3)).astype(np.float32)
    rows = [ids(4, 8), ids(), ids(1)]
    bags = LAYER.read(rows)
    found = LAYER.forward(bags, table)
    assert found.shape == (3, LAYER.width)
    expected = table[bags[0].buckets[:4]].sum(axis=0) / 2.0
    np.testing.assert_allclose(found[0, :3], expected, rtol=1e-6)
    assert found[1].tolist() == [0.0] * 9
