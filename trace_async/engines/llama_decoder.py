"""Forward passes of Llama's kind of decoder over running rows, without transformers' overhead.

A pass computes the last token of every row, all at once, and before them, in the same matrix products, whatever else is
unknown, each stretch that rows share once. Nothing is padded but the places between a row's end and that of the longest
row in its arena. Keys and values are written where they stay.

Legend: N tokens of a pass, B rows, H heads, K key/value heads, G = H / K, D head_dim, L places read.
Never: drawing, versions, models of another kind (`llama_weights.fits`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from trace_async.engines.arenas import Arenas, Shape
from trace_async.engines.llama_pass import Pass, plan_pass
from trace_async.engines.llama_weights import Layer, LlamaWeights
from trace_async.engines.prefill import Segment, chunks, shared_segments
from trace_async.engines.prefix_cache import PrefixCache
from trace_async.engines.rows import Row

_MAX_PASS_TOKENS = 2048
"""Tokens of one pass beside the rows' last ones; bounds what a pass needs in memory."""


class LlamaDecoder:
    """See `rows.Decoder`."""

    def __init__(self, weights: LlamaWeights, *, max_rows: int, max_tokens: int, prefix_cache_bytes: int) -> None:
        embedding = weights.embedding
        shape = Shape(len(weights.layers), weights.num_kv_heads, weights.head_dim, embedding.dtype, embedding.device)
        self.token_bytes = shape.token_bytes
        self.computed_tokens = self.reused_tokens = 0
        self._weights = weights
        self._shape = shape
        self._max_tokens = max_tokens
        self._arenas = Arenas(shape, max_rows=max_rows, max_tokens=max_tokens)
        self._cache = PrefixCache(max_bytes=prefix_cache_bytes)
        positions = torch.arange(max_tokens, device=embedding.device)[None]
        cosines, sines = weights.rotation(embedding[:1], positions)
        half = weights.head_dim // 2
        self._cosines = cosines[0]  # [max_tokens, D]
        self._sines = torch.cat((-sines[0, :, :half], sines[0, :, half:]), dim=-1)  # of x with its halves swapped

    @property
    def stored_bytes(self) -> int:
        """Key/values of prefixes that no running row holds."""
        return self._cache.num_bytes

    @property
    def row_bytes(self) -> int:
        """Memory held for the running rows' key/values."""
        return self._arenas.num_bytes

    def advance(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `rows.Decoder`."""
        new = [row for row in rows if row.computed == 0]
        self._arenas.join([row for row in rows if row not in self._arenas])
        for row in rows:
            if len(row.tokens) > self._arenas.seat(row).arena.capacity:
                self._arenas.move_up(row)
        for row in new:
            self._reuse(row)
        *early, last = chunks(shared_segments(rows), max_tokens=_MAX_PASS_TOKENS)
        for segments in early:
            self._run([], segments)
        hidden = self._run(rows, last)
        for row in rows:
            row.computed = len(row.tokens)
        for row in new:  # at once, so that siblings which come while it runs need not compute it
            self._keep(row, len(row.tokens) - 1)
        return functional.linear(hidden, self._weights.head)

    def leave(self, row: Row) -> None:
        """See `rows.Decoder`."""
        if row in self._arenas:
            self._keep(row, row.computed)
            self._arenas.leave(row)

    def clear(self) -> None:
        """See `rows.Decoder`."""
        self._cache.clear()
        for row in self._arenas.rows():
            row.computed = 0

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `rows.Decoder`."""
        row = Row(tokens=[*tokens, 0], num_prefix=len(tokens), seed=0, greedy=True)
        arenas = Arenas(self._shape, max_rows=1, max_tokens=len(row.tokens))
        arenas.join([row])
        hidden = self._layers(plan_pass(arenas, rows=[], segments=[Segment(0, len(tokens), (row,))]))
        return functional.linear(hidden, self._weights.head)

    def _reuse(self, row: Row) -> None:
        """Copy what the cache knows into the row's slot; its last token is always computed, for its logits."""
        own = self._arenas.seat(row).keys_values
        for piece in self._cache.longest(row.tokens[:-1]):
            end = row.computed + piece.shape[3]
            own[:, :, :, row.computed : end] = piece
            row.computed = end
        self.reused_tokens += row.computed

    def _keep(self, row: Row, length: int) -> None:
        if length > 0:
            self._cache.store(row.tokens[:length], self._arenas.seat(row).keys_values[:, :, :, :length])

    def _run(self, rows: Sequence[Row], segments: Sequence[Segment]) -> torch.Tensor:
        """Hidden state [B, hidden] behind each row's last token, in the order of `rows`."""
        step = plan_pass(self._arenas, rows=rows, segments=segments)
        self.computed_tokens += len(step.ids)
        hidden = self._layers(step)[: len(rows)]
        return hidden if step.order is None else hidden[step.order]

    def _layers(self, step: Pass) -> torch.Tensor:
        """Hidden states [N, hidden] behind the last norm."""
        weights = self._weights
        ids, positions = step.on(weights.embedding.device)
        x = functional.embedding(ids, weights.embedding)
        cosines, sines = self._cosines[positions][:, None], self._sines[positions][:, None]
        for index, layer in enumerate(weights.layers):
            h = self._norm(x, layer.attention_norm)
            qkv = functional.linear(h, layer.qkv, layer.qkv_bias).view(len(x), -1, weights.head_dim)
            self._rotate(qkv, layer, cosines, sines)
            attended = step.attend(index, qkv, num_heads=weights.num_heads)
            x = x + functional.linear(attended, layer.output, layer.output_bias)
            h = self._norm(x, layer.mlp_norm)
            gate, up = functional.linear(h, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate).mul_(up), layer.down, layer.down_bias)
        return self._norm(x, weights.norm)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._weights.epsilon)

    def _rotate(self, qkv: torch.Tensor, layer: Layer, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Norm and turn queries and keys [N, H + K, D] in place."""
        weights = self._weights
        if layer.query_norm is not None and layer.key_norm is not None:
            queries, keys = qkv[:, : weights.num_heads], qkv[:, weights.num_heads : -weights.num_kv_heads]
            queries.copy_(self._norm(queries, layer.query_norm))
            keys.copy_(self._norm(keys, layer.key_norm))
        turned = qkv[:, : -weights.num_kv_heads]
        half = weights.head_dim // 2
        swapped = torch.cat((turned[..., half:], turned[..., :half]), dim=-1)
        turned.mul_(cosines).addcmul_(swapped, sines)
