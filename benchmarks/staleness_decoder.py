"""Forward passes of a small Llama for many short rows at once, padded: what the staleness study samples with.

An actor's decoder (`engines/llama_decoder.py`) pads nothing and holds any mix of lengths; for some dozens of rows of
fifty tokens what it spends per row is several times the arithmetic. Here all rows of a pass are one padded batch, and a
new row starts from the longest prefix that any row has had since the weights changed. Same weights, same numbers: the
study's measured ratios at age 0 are 1.

Legend: B rows of a pass · k unknown tokens of the longest · S slots · L places read.
Never: drawing, versions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from trace_async.engines.llama_weights import LlamaWeights
from trace_async.engines.rows import Row

_FEW = 6
"""Unknown tokens up to which rows share a pass; those with more are new and take one of their own."""


class PaddedDecoder:
    """See `engines.rows.Decoder`. Rows keep their slots when they leave, until `clear`."""

    row_bytes = stored_bytes = 0

    def __init__(self, weights: LlamaWeights, *, max_rows: int, max_tokens: int) -> None:
        self.computed_tokens = self.reused_tokens = 0
        self._weights = weights
        shape = (len(weights.layers), 2, max_rows, max_tokens + _FEW, weights.num_kv_heads, weights.head_dim)
        self._kept = torch.zeros(shape)  # keys and values [layers, 2, S, places, heads, D]
        self.token_bytes = 8 * len(weights.layers) * weights.num_kv_heads * weights.head_dim
        cosines, sines = weights.rotation(self._kept, torch.arange(shape[3])[None])
        self._cosines, self._sines = cosines[0], sines[0]  # [places, D]
        self._slots: dict[Row, int] = {}
        self._by_start: dict[int, list[Row]] = {}  # rows by their first token

    def advance(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `engines.rows.Decoder`."""
        for row in rows:
            if row not in self._slots:
                self._seat(row)
        few = [place for place, row in enumerate(rows) if len(row.tokens) - row.computed <= _FEW]
        many = [place for place, row in enumerate(rows) if len(row.tokens) - row.computed > _FEW]
        logits = torch.empty(len(rows), len(self._weights.head))
        for places in (few, many):
            if places:
                logits[places] = self._pass([rows[place] for place in places])
        return logits

    def leave(self, row: Row) -> None:
        """Nothing to do: the row's key/values may serve others."""

    def clear(self) -> None:
        """See `engines.rows.Decoder`."""
        self._slots.clear()
        self._by_start.clear()

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """Not used here."""
        raise NotImplementedError

    def _seat(self, row: Row) -> None:
        """A slot, with what the row that agrees longest knows; the last token is always computed, for its logits."""
        slot = self._slots[row] = len(self._slots)
        others = self._by_start.setdefault(row.tokens[0], [])
        agree, best = max(
            ((min(_common(row.tokens, other.tokens), other.computed), self._slots[other]) for other in others),
            default=(0, slot),
        )
        row.computed = min(agree, len(row.tokens) - 1)
        if row.computed:
            self._kept[:, :, slot, : row.computed] = self._kept[:, :, best, : row.computed]
        self.reused_tokens += row.computed
        others.append(row)

    def _pass(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, vocabulary] behind each row's last token. Only attention sees padding."""
        weights = self._weights
        known = torch.tensor([row.computed for row in rows])
        counts = torch.tensor([len(row.tokens) - row.computed for row in rows])
        slots = torch.tensor([self._slots[row] for row in rows])
        ids = torch.tensor([token for row in rows for token in row.tokens[row.computed :]])
        place = torch.arange(len(ids)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        owner = torch.repeat_interleave(torch.arange(len(rows)), counts)
        positions, owners = known[owner] + place, slots[owner]
        size, length = int(counts.max()), int((known + counts).max())
        visible = torch.arange(length) <= (known[:, None] + torch.arange(size))[..., None]  # [B, k, L]
        bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)[:, None]
        cosines, sines = self._cosines[positions][:, None], self._sines[positions][:, None]
        queries = torch.zeros(len(rows), size, weights.num_heads, weights.head_dim)
        x = functional.embedding(ids, weights.embedding)
        for layer, kept in zip(weights.layers, self._kept, strict=True):
            h = functional.rms_norm(x, x.shape[-1:], layer.attention_norm, weights.epsilon)
            qkv = functional.linear(h, layer.qkv).view(len(x), -1, weights.head_dim)
            low, high = qkv[:, : -weights.num_kv_heads].chunk(2, dim=-1)
            turned = qkv[:, : -weights.num_kv_heads] * cosines + torch.cat((-high, low), dim=-1) * sines
            queries[owner, place] = turned[:, : weights.num_heads]
            kept[0][owners, positions] = turned[:, weights.num_heads :]
            kept[1][owners, positions] = qkv[:, -weights.num_kv_heads :]
            keys, values = (kept[part, slots, :length].transpose(1, 2) for part in (0, 1))
            attended = functional.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, attn_mask=bias)
            x = x + functional.linear(attended.transpose(1, 2)[owner, place].flatten(1), layer.output)
            h = functional.rms_norm(x, x.shape[-1:], layer.mlp_norm, weights.epsilon)
            gate, up = functional.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, layer.down)
        self.computed_tokens += len(ids)
        for row in rows:
            row.computed = len(row.tokens)
        hidden = functional.rms_norm(x[counts.cumsum(0) - 1], x.shape[-1:], weights.norm, weights.epsilon)
        return functional.linear(hidden, weights.head)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
