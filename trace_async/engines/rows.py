"""One request as the worker thread sees it, and what a way of computing such requests must offer.

Owns the record of a request's tokens and the numbers that they are drawn with. Never: a model, versions, waiting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


@dataclass(slots=True, eq=False)
class Row:
    """One request's tokens and how many of them have key/values; a decoder keeps those."""

    tokens: list[int]  # prefix and sampled ones
    num_prefix: int
    seed: int
    greedy: bool
    logprobs: list[float] = field(default_factory=list)  # nats, of the sampled tokens
    computed: int = 0  # leading tokens whose key/values are known

    @property
    def sampled(self) -> list[int]:
        """The tokens behind the prefix."""
        return self.tokens[self.num_prefix :]


class Decoder(Protocol):
    """Logits of ragged requests that come and go, with key/values kept from pass to pass. One thread owns it."""

    token_bytes: int  # key/values of one token
    computed_tokens: int  # that went through the model since the start
    reused_tokens: int  # prefix tokens whose key/values were there already, since the start

    @property
    def stored_bytes(self) -> int:
        """Key/values of prefixes that no running row holds, now."""
        ...

    @property
    def row_bytes(self) -> int:
        """Memory held for the running rows' key/values, now."""
        ...

    def advance(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, vocabulary] behind each row's last token; afterwards every token of `rows` is computed.

        The tensor is the caller's to write to. A row that was not here before joins.
        """
        ...

    def leave(self, row: Row) -> None:
        """The row is done or given up; its key/values may serve others. A row that never joined is fine."""
        ...

    def clear(self) -> None:
        """Forget every key/value, also those of rows that stay: the weights have changed."""
        ...

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits [L, vocabulary] behind each of these tokens, computed anew; touches no row."""
        ...


def uniform(seed: int, index: int) -> float:
    """The `index`-th number in [0, 1) of a request's stream; a function of nothing else."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=(seed % (1 << 64)).to_bytes(8, "little"), digest_size=8)
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)
