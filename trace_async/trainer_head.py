"""Log-probabilities of chosen tokens straight from hidden states, without ever holding all logits.

Only states that predict a wanted token meet the output matrix, a chunk at a time, in float32 whatever the body computed
in; the backward pass computes each chunk's logits again. Peak memory is one chunk of logits.

The model is called as ever; for the time of the call its output layer answers with log-probabilities. What some models
do to logits after that layer is only known for a soft cap; `agrees` finds the others out.

Never: attention, losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK_LOGITS = 2**23  # 32 MiB in float32
_MIN_CHUNK = 64  # tokens; fewer would read the output matrix too often


class Wanted(NamedTuple):
    """What is asked of one forward pass."""

    places: Tensor  # i64 [n] positions whose hidden states predict, in the flattened rows
    targets: Tensor  # i64 [n] tokens


class ChunkedHead:
    """The output layer of one model."""

    def __init__(self, model: Any, *, temperature: float, chunk_logits: int = _CHUNK_LOGITS) -> None:
        self._head = model.get_output_embeddings()
        self._config = model.config.get_text_config()
        self._temperature = temperature
        self._chunk_logits = chunk_logits

    @property
    def usable(self) -> bool:
        """Whether the output layer is a plain matrix."""
        return isinstance(self._head, torch.nn.Linear)

    @contextmanager
    def answering(self, wanted: Wanted) -> Iterator[None]:
        """While it lasts, the model's `logits` are the log-probabilities of what is wanted, float32 [n]."""
        cap = getattr(self._config, "final_logit_softcapping", None)

        def forward(hidden: Tensor) -> Tensor:
            bias = self._head.bias
            chunk = max(_MIN_CHUNK, self._chunk_logits // self._head.weight.shape[0])
            shape = Shape(1.0 / self._temperature, cap, chunk)
            states = hidden.flatten(0, -2)[wanted.places]
            return _chosen(states, self._head.weight, bias, wanted.targets, shape)

        self._head.forward = forward
        if cap is not None:
            self._config.final_logit_softcapping = None  # the model would cap what is no logit
        try:
            yield
        finally:
            del self._head.forward
            if cap is not None:
                self._config.final_logit_softcapping = cap


class Shape(NamedTuple):
    """How hidden states become logits, and how many at a time."""

    scale: float  # 1 / temperature
    cap: float | None
    chunk: int


class _Chosen(torch.autograd.Function):
    """log softmax(scale * cap(states @ weight.T + bias)) at the targets."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, shape: Shape) -> Tensor:
        chosen, sums = states.new_empty(len(states), dtype=torch.float32), []
        with torch.autocast(states.device.type, enabled=False):
            matrix = weight.float()
            for part in range(0, len(states), shape.chunk):
                here = slice(part, part + shape.chunk)
                logits = _logits(states[here], matrix, bias, shape)
                sums.append(torch.logsumexp(logits, dim=-1))
                chosen[here] = logits.gather(-1, targets[here, None])[:, 0] - sums[-1]
        ctx.save_for_backward(states, weight, bias, targets, torch.cat(sums))
        ctx.shape = shape
        return chosen

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, targets, sums = ctx.saved_tensors
        to_states, to_weight, to_bias = ctx.needs_input_grad[:3]
        matrix = weight.float()
        d_states = torch.empty_like(states) if to_states else None
        d_matrix = torch.zeros_like(matrix) if to_weight else None
        d_bias = torch.zeros(len(matrix), dtype=torch.float32, device=matrix.device) if to_bias else None
        for part in range(0, len(states), ctx.shape.chunk):
            here = slice(part, part + ctx.shape.chunk)
            d_logits = _logit_slopes(states[here], matrix, bias, ctx.shape, targets[here], sums[here], slope[here])
            if d_states is not None:
                d_states[here] = d_logits @ matrix
            if d_matrix is not None:
                d_matrix.addmm_(d_logits.T, states[here].float())
            if d_bias is not None:
                d_bias += d_logits.sum(0)
        return d_states, _like(d_matrix, weight), _like(d_bias, bias), None, None


_chosen: Callable[..., Tensor] = _Chosen.apply


def _logits(states: Tensor, matrix: Tensor, bias: Tensor | None, shape: Shape) -> Tensor:
    logits = states.float() @ matrix.T
    if bias is not None:
        logits += bias
    if shape.cap is not None:
        logits.div_(shape.cap).tanh_().mul_(shape.cap)
    return logits.mul_(shape.scale)


def _logit_slopes(
    states: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    shape: Shape,
    targets: Tensor,
    sums: Tensor,
    slope: Tensor,
) -> Tensor:
    """Of states @ matrix.T + bias, [m, vocabulary]: (target - softmax) times what follows."""
    logits = _logits(states, matrix, bias, shape)
    bend = 1.0 - (logits / (shape.scale * shape.cap)).square_() if shape.cap is not None else None
    slopes = logits.sub_(sums[:, None]).exp_().mul_(-slope[:, None])
    slopes.scatter_add_(-1, targets[:, None], slope[:, None])
    if bend is not None:
        slopes.mul_(bend)
    return slopes.mul_(shape.scale)


def _like(slope: Tensor | None, parameter: Tensor | None) -> Tensor | None:
    return None if slope is None or parameter is None else slope.to(parameter.dtype)
