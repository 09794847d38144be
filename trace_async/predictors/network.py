"""A small multi-layer perceptron in NumPy: forward for predictions, backward and Adam for learning.

Invariants: float32 throughout; equal seeds and equal data give equal parameters; `forward` treats each row as if it
were alone, so a prediction does not depend on what else is in its batch. A fresh network answers 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trace_async.core.types import FloatArray, Json
from trace_async.predictors.arrays import array_from_json, array_to_json
from trace_async.predictors.rows import InputLayer, Row

Parameters: TypeAlias = dict[str, FloatArray]

_BETA1, _BETA2, _EPS = 0.9, 0.999, 1e-8
TABLE = "table"
"""The input layer's own parameters, when it has any."""


class _Pass(NamedTuple):
    read: Any  # what the input layer read
    inputs: FloatArray  # [rows, width + scalars]
    hidden: FloatArray  # [rows, hidden] after the tanh


class Network:
    """logit = w2 . tanh(W1 [layer(row), scalars] + b1) + b2."""

    def __init__(self, layer: InputLayer, *, num_scalars: int, hidden: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._layer = layer
        width = layer.width + num_scalars
        self.parameters: Parameters = {
            "w1": (rng.standard_normal((width, hidden)) / np.sqrt(width)).astype(np.float32),
            "b1": np.zeros(hidden, np.float32),
            "w2": np.zeros(hidden, np.float32),
            "b2": np.zeros(1, np.float32),
        }
        if layer.table_shape is not None:
            self.parameters[TABLE] = (0.3 * rng.standard_normal(layer.table_shape)).astype(np.float32)

    def forward(self, rows: Sequence[Row], scalars: FloatArray) -> FloatArray:
        """Logits float32 [rows], each computed as if alone; `scalars` float32 [rows, scalars]."""
        p = self.parameters
        inputs = np.concatenate([self._layer.forward(self._layer.read(rows), p.get(TABLE)), scalars], axis=1)
        # einsum sums every row by itself; a matrix product may add up in another order for another number of rows
        hidden = np.tanh(np.einsum("ri,ih->rh", inputs, p["w1"]) + p["b1"])
        return np.asarray(np.einsum("rh,h->r", hidden, p["w2"]) + p["b2"][0], np.float32)

    def pass_for_learning(self, rows: Sequence[Row], scalars: FloatArray) -> tuple[FloatArray, _Pass]:
        """Logits, and what `gradients` needs of the way to them."""
        p = self.parameters
        read = self._layer.read(rows)
        inputs = np.concatenate([self._layer.forward(read, p.get(TABLE)), scalars], axis=1)
        hidden = np.tanh(inputs @ p["w1"] + p["b1"])
        return hidden @ p["w2"] + p["b2"][0], _Pass(read, inputs, hidden)

    def gradients(self, passed: _Pass, outer: FloatArray) -> Parameters:
        """Of every parameter, for the gradient `outer` float32 [rows] of the logits."""
        p = self.parameters
        inner = outer[:, None] * p["w2"] * (1.0 - passed.hidden**2)  # [rows, hidden]
        found: Parameters = {
            "w1": passed.inputs.T @ inner,
            "b1": inner.sum(axis=0),
            "w2": passed.hidden.T @ outer,
            "b2": outer.sum(keepdims=True),
        }
        table = self._layer.backward(passed.read, (inner @ p["w1"].T)[:, : self._layer.width])
        if table is not None:
            found[TABLE] = table
        return found


class Adam:
    """Adam with decoupled weight decay on matrices (D. P. Kingma and J. Ba, arXiv 1412.6980; arXiv 1711.05101)."""

    def __init__(self, parameters: Parameters, *, learning_rate: float, weight_decay: float) -> None:
        self._learning_rate = learning_rate
        self._weight_decay = weight_decay
        self.steps = 0
        self.mean = {name: np.zeros_like(values) for name, values in parameters.items()}
        self.square = {name: np.zeros_like(values) for name, values in parameters.items()}

    def step(self, parameters: Parameters, gradients: Parameters) -> None:
        """Moves `parameters` in place."""
        self.steps += 1
        rate = self._learning_rate * np.sqrt(1.0 - _BETA2**self.steps) / (1.0 - _BETA1**self.steps)
        for name, values in parameters.items():
            gradient, mean, square = gradients[name], self.mean[name], self.square[name]
            mean += np.float32(1.0 - _BETA1) * (gradient - mean)
            square += np.float32(1.0 - _BETA2) * (gradient * gradient - square)
            if values.ndim > 1:
                values *= np.float32(1.0 - self._learning_rate * self._weight_decay)
            values -= np.float32(rate) * mean / (np.sqrt(square) + np.float32(_EPS))

    def state(self) -> dict[str, Any]:
        """As JSON."""
        return {"steps": self.steps, "mean": tell_arrays(self.mean), "square": tell_arrays(self.square)}

    def load(self, state: Any) -> None:
        """Continue from what `state` returned. Raises ValueError when it is of another network."""
        if not isinstance(state, dict) or set(state) != {"steps", "mean", "square"} or type(state["steps"]) is not int:
            raise ValueError("state of a predictor: its optimizer must have steps, mean and square")
        mean, square = (read_arrays(state[key], like=self.mean, what=key) for key in ("mean", "square"))
        self.steps, self.mean, self.square = state["steps"], mean, square


def tell_arrays(arrays: Mapping[str, FloatArray]) -> dict[str, Json]:
    """Named arrays as JSON."""
    return {name: array_to_json(values) for name, values in arrays.items()}


def read_arrays(told: Any, *, like: Mapping[str, FloatArray], what: str) -> Parameters:
    """The arrays that `tell_arrays` told, of the names and shapes of `like`. Raises ValueError when they are others."""
    if not isinstance(told, dict) or set(told) != set(like):
        raise ValueError(f"state of a predictor: {what} must have exactly {sorted(like)}")
    return {
        name: array_from_json(told[name], dtype="float32", shape=values.shape, what=f"{what}.{name}")
        for name, values in like.items()
    }
