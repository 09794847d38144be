"""Forward passes of any transformers decoder over ragged rows, each with key/values of its own.

A pass pads the known key/values on the left and the new tokens on the right, so that each row's tokens stand side by
side: then distances between their places are true, also for sliding windows, and masks and positions make padding
invisible. Rows whose new tokens differ much in number take passes of their own; of rows with the same tokens one is
computed for all. Slower than a decoder that knows the model, but asks nothing of the model.

Never: drawing, versions, whether a model is content with that (`batched_model` probes it).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from trace_async.engines.prefix_cache import PrefixCache
from trace_async.engines.rows import Row


class TransformersDecoder:
    """See `rows.Decoder`."""

    def __init__(self, model: torch.nn.Module, *, pad_id: int, prefix_cache_bytes: int) -> None:
        self.token_bytes = self.computed_tokens = self.reused_tokens = 0
        self._model = model
        self._pad_id = pad_id
        self._cache = PrefixCache(max_bytes=prefix_cache_bytes)
        self._keys_values: dict[Row, torch.Tensor] = {}  # [layers, 2, heads, computed, head_dim], never written to
        # transformers renamed the argument in 5.24; earlier releases know only the old name.
        takes = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"

    @property
    def stored_bytes(self) -> int:
        """Key/values of prefixes that no running row holds."""
        return self._cache.num_bytes

    @property
    def row_bytes(self) -> int:
        """Memory held for the running rows' key/values."""
        return sum(known.numel() * known.element_size() for known in self._keys_values.values())

    def advance(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `rows.Decoder`."""
        new = [row for row in rows if row.computed == 0]
        for row in new:
            self._reuse(row)
        found: dict[Row, torch.Tensor] = {}
        twins = _twins(rows)
        for batch in _alike([alike[0] for alike in twins]):
            found.update(zip(batch, self._forward(batch), strict=True))
        for first, *others in twins:
            for other in others:
                found[other] = found[first]
                self._keys_values[other], other.computed = self._keys_values[first], first.computed
        for row in new:
            self._cache.store(row.tokens[:-1], self._keys_values[row][:, :, :, :-1])
        return torch.stack([found[row] for row in rows])

    def leave(self, row: Row) -> None:
        """See `rows.Decoder`."""
        known = self._keys_values.pop(row, None)
        if known is not None and row.computed:
            self._cache.store(row.tokens[: row.computed], known)

    def clear(self) -> None:
        """See `rows.Decoder`."""
        self._cache.clear()
        for row in self._keys_values:
            row.computed = 0
        self._keys_values.clear()

    def score(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `rows.Decoder`."""
        logits: torch.Tensor = self._model(input_ids=torch.tensor([tokens]).to(self._device)).logits[0]
        return logits

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _reuse(self, row: Row) -> None:
        # The last token is always computed: its logits are what the next token is drawn from.
        pieces = self._cache.longest(row.tokens[:-1])
        if pieces:
            self._keys_values[row] = torch.cat(pieces, dim=3)
            row.computed = self._keys_values[row].shape[3]
            self.reused_tokens += row.computed

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, vocabulary] behind each row's last token; key/values of the new tokens are kept."""
        pending = [len(row.tokens) - row.computed for row in rows]
        num_past, num_new = max(row.computed for row in rows), max(pending)
        ids = np.full((len(rows), num_new), self._pad_id)
        mask = np.zeros((len(rows), num_past + num_new), np.int64)
        positions = np.zeros((len(rows), num_new), np.int64)
        for b, (row, count) in enumerate(zip(rows, pending, strict=True)):
            ids[b, :count] = row.tokens[row.computed :]
            positions[b, :count] = np.arange(row.computed, row.computed + count)
            mask[b, num_past - row.computed : num_past + count] = 1
        ends, end_of_row = np.unique(np.array(pending) - 1, return_inverse=True)
        cache = self._gather(rows, num_past)
        output = self._model(
            input_ids=torch.from_numpy(ids).to(self._device),
            attention_mask=torch.from_numpy(mask).to(self._device),
            position_ids=torch.from_numpy(positions).to(self._device),
            use_cache=True,
            logits_to_keep=torch.from_numpy(ends).to(self._device),
            **{self._cache_argument: cache},
        )
        self._take(rows, cache, num_past=num_past)
        self.computed_tokens += sum(pending)
        logits: torch.Tensor = output.logits[torch.arange(len(rows)), torch.from_numpy(end_of_row)]
        return logits

    def _gather(self, rows: Sequence[Row], num_past: int) -> DynamicCache:
        """Key/values of a batch, padded on the left to `num_past`."""
        known = next((self._keys_values[row] for row in rows if row.computed), None)
        if known is None:
            return DynamicCache()
        layers, _, heads, _, head_dim = known.shape
        past = known.new_zeros((layers, 2, len(rows), heads, num_past, head_dim))
        for b, row in enumerate(rows):
            if row.computed:
                past[:, :, b, :, num_past - row.computed :] = self._keys_values[row]
        return DynamicCache([(layer[0], layer[1]) for layer in past])

    def _take(self, rows: Sequence[Row], cache: DynamicCache, *, num_past: int) -> None:
        layers: list[Any] = cache.layers
        new = torch.stack(
            [torch.stack((layer.keys[:, :, num_past:], layer.values[:, :, num_past:])) for layer in layers]
        )  # [layers, 2, B, heads, new, head_dim]
        self.token_bytes = new[:, :, 0, :, 0].numel() * new.element_size()
        for b, row in enumerate(rows):
            fresh = new[:, :, b, :, : len(row.tokens) - row.computed]
            known = self._keys_values.get(row) if row.computed else None
            self._keys_values[row] = fresh.clone() if known is None else torch.cat((known, fresh), dim=3)
            row.computed += fresh.shape[3]


def _twins(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows by all their tokens, those with more than one unknown; the others alone."""
    groups: dict[object, list[Row]] = {}
    for row in rows:
        key = tuple(row.tokens) if len(row.tokens) - row.computed > 1 else row
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _alike(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows whose padded forward passes waste little: numbers of new tokens within a factor of two."""
    batches: dict[int, list[Row]] = {}
    for row in rows:
        batches.setdefault((len(row.tokens) - row.computed - 1).bit_length(), []).append(row)
    return list(batches.values())
