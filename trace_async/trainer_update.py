"""Gradients of one optimizer update: forward passes, the objective, and how much of a step it sees at once.

An objective that judges turns one by one is evaluated on each batch of rows as it comes. One that looks at whole trees
is too, while no tree is spread over several batches, and so is any where there is one batch only. Otherwise, and for
objectives that look at the whole step, all log-probabilities are computed first without gradient, the objective is
differentiated with respect to them, and each batch is passed once more with those coefficients. Both give the same
gradient, since a loss depends on the weights through log-probabilities only.

With several ranks each takes a share of the batches, balanced by tokens. What they find is summed: losses and sums of
what was seen, log-probabilities wherever all are needed, gradients by FSDP2, which averages, so each rank's loss is
multiplied by their number first. The denominator is the update's, never a rank's. A rank with fewer batches than others
passes a row of two tokens whose loss is zero, since a forward pass communicates.

Never: weights, optimizers, files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trace_async.core.packing import Minibatch, RowBatch
from trace_async.methods.objective_kinds import Scope
from trace_async.methods.objectives.measures import ObjectiveStats, from_vector, merge_stats, no_stats, to_vector
from trace_async.methods.objectives.registry import ChosenObjective
from trace_async.methods.objectives.turns import to_tensors
from trace_async.trainer_ranks import ALONE, Ranks, share_out
from trace_async.trainer_scoring import Scorer

_IDLE = RowBatch(
    token_ids=np.zeros((1, 2), np.int64),
    attention_mask=np.ones((1, 2), np.bool_),
    token_index=np.array([[-1, 0]]),
    num_trees=0,
    whole=True,
)
"""What a rank passes that has nothing left."""


class Seen(NamedTuple):
    """What an update found."""

    loss: float  # divided by the denominator
    stats: ObjectiveStats


def accumulate(
    minibatch: Minibatch, *, scorer: Scorer, objective: ChosenObjective, proximal: Tensor | None, ranks: Ranks = ALONE
) -> Seen:
    """Adds the gradient of the loss to the weights' `.grad`. `minibatch` has rows; `proximal` f32 [N] or None.

    Every rank is given the same minibatch, and finds the same.
    """
    denominator = objective.denominator(minibatch.denominators)
    at_once = len(minibatch.rows) > 1 and (
        objective.scope is Scope.STEP
        or (objective.scope is Scope.TREE and not all(batch.whole for batch in minibatch.rows))
    )
    weights = _coefficients(minibatch, scorer, objective, proximal, ranks) if at_once else None
    total = torch.zeros((), dtype=torch.float64, device=scorer.device)
    parts = [no_stats(scorer.device)]
    for batch in _passes(minibatch, ranks):
        logprobs = scorer.logprobs(_IDLE if batch is None else batch)
        if batch is None:
            loss = 0.0 * logprobs.sum()
        elif weights is not None:
            loss = (weights.per_token[_places(batch, scorer)] * logprobs).sum()
        else:
            loss, stats = _evaluate(minibatch, batch, logprobs, objective, proximal)
            total += loss.detach()
            parts.append(stats)
        (loss / (denominator / ranks.size)).backward()  # type: ignore[no-untyped-call]
    if weights is not None:
        return Seen(weights.loss / denominator, weights.stats)
    seen = merge_stats([from_vector(part) for part in ranks.every(to_vector(merge_stats(parts)))])
    return Seen(float(ranks.total(total)) / denominator, seen)


@torch.no_grad()
def score_all(minibatch: Minibatch, scorer: Scorer, ranks: Ranks = ALONE) -> Tensor:
    """Log-probabilities of all scored tokens under the weights of now, f32 [N]; 0 where a token is not scored."""
    found = torch.zeros(minibatch.turns.behaviour_logprobs.size, dtype=torch.float32, device=scorer.device)
    for batch in _passes(minibatch, ranks):
        logprobs = scorer.logprobs(_IDLE if batch is None else batch)
        if batch is not None:
            found[_places(batch, scorer)] = logprobs
    return ranks.total(found)


def _passes(minibatch: Minibatch, ranks: Ranks) -> list[RowBatch | None]:
    """This rank's share of the batches; None for each that the busiest rank has more."""
    if ranks.alone:
        return list(minibatch.rows)
    shares = share_out([batch.token_ids.size for batch in minibatch.rows], ranks.size)
    own = [minibatch.rows[index] for index in shares[ranks.rank]]
    return [*own, *[None] * (max(map(len, shares)) - len(own))]


class _Coefficients(NamedTuple):
    per_token: Tensor  # f32 [N] derivative of the summed loss
    loss: float  # summed
    stats: ObjectiveStats


def _coefficients(
    minibatch: Minibatch, scorer: Scorer, objective: ChosenObjective, proximal: Tensor | None, ranks: Ranks
) -> _Coefficients:
    every = score_all(minibatch, scorer, ranks)
    places = torch.cat([_places(batch, scorer) for batch in minibatch.rows])
    logprobs = every[places].requires_grad_()
    turns = to_tensors(
        minibatch.turns,
        tokens=places.cpu().numpy(),
        proximal_logprobs=None if proximal is None else proximal[places],
        device=scorer.device,
    )
    loss, stats = objective(logprobs, turns)
    (slopes,) = torch.autograd.grad(loss, logprobs)
    return _Coefficients(torch.zeros_like(every).index_copy(0, places, slopes), float(loss.detach()), stats)


def _evaluate(
    minibatch: Minibatch, batch: RowBatch, logprobs: Tensor, objective: ChosenObjective, proximal: Tensor | None
) -> tuple[Tensor, ObjectiveStats]:
    places = batch.token_index[batch.scored]
    turns = to_tensors(
        minibatch.turns,
        tokens=places,
        proximal_logprobs=None if proximal is None else proximal[torch.from_numpy(places).to(proximal.device)],
        device=logprobs.device,
    )
    return objective(logprobs, turns)


def _places(batch: RowBatch, scorer: Scorer) -> Tensor:
    """Where the batch's scored tokens stand in the table, i64 [n], row by row."""
    return torch.from_numpy(batch.token_index[batch.scored]).to(scorer.device)
