"""Draws one token per row from logits: all rows in one pass on the device, each with a number of its own.

Inverse transform sampling: the token at which the cumulative distribution passes the row's number. So a result is a
function of logits and number only. For large vocabularies the sums are taken over blocks first and then inside the one
block that matters, because a cumulative sum over everything costs more than all the rest of the drawing.

Never: the numbers themselves, stop tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK = 256  # tokens; the square root of a large vocabulary, which makes both sums short


class Drawn(list[tuple[int, float]]):
    """(token, log-probability in nats of the distribution after temperature) for each row."""


def draw(logits: torch.Tensor, *, temperature: float, numbers: Sequence[float], greedy: Sequence[bool]) -> Drawn:
    """One token for each row of `logits` [B, vocabulary], which is overwritten; `numbers` [B] lie in [0, 1).

    A greedy row takes its most likely token; its log-probability is that of the distribution all the same.
    """
    scores = logits.float()
    likeliest = scores.argmax(-1) if any(greedy) else None
    if temperature != 1.0:
        scores = scores.div_(temperature)
    weights = scores.sub_(scores.amax(-1, keepdim=True)).exp_()  # the largest is 1
    targets = torch.tensor(numbers, dtype=torch.float64).to(logits.device)
    chosen, total = _invert(weights, targets)
    if likeliest is not None:
        chosen = torch.where(torch.tensor(greedy).to(logits.device), likeliest, chosen)
    logprobs = (weights.gather(-1, chosen[:, None])[:, 0].double() / total).log()
    both = torch.stack((chosen.double(), logprobs)).tolist()  # one transfer; a token id is exact in float64
    return Drawn(zip(map(int, both[0]), both[1], strict=True))


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token [B], sum of weights float64 [B]): where the cumulative weights pass `numbers` times their sum."""
    rows, size = weights.shape
    if size <= 2 * _BLOCK:
        cumulative = weights.double().cumsum(-1)
        return _passing(cumulative, numbers * cumulative[:, -1]), cumulative[:, -1]
    if size % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -size % _BLOCK))
    blocks = weights.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double()
    cumulative = sums.cumsum(-1)
    targets = numbers * cumulative[:, -1]
    block = _passing(cumulative, targets)
    every = torch.arange(rows, device=weights.device)
    before = cumulative[every, block] - sums[every, block]
    inside = _passing(blocks[every, block].double().cumsum(-1), targets - before)
    return block * _BLOCK + inside, cumulative[:, -1]


def _passing(cumulative: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The first place [B] where each row of `cumulative` exceeds its target.

    Rounding may lift a target to the row's end; it is kept below, so that no place of weight zero is ever returned.
    """
    end = cumulative[:, -1]
    below = torch.minimum(targets, torch.nextafter(end, torch.zeros_like(end)))
    return torch.searchsorted(cumulative, below[:, None].clamp_(min=0), right=True)[:, 0]
