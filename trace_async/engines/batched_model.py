"""One forward pass over ragged requests, each with key/values of its own, on any transformers decoder.

Key/values live with their request, so who shares a batch may change from token to token. A pass pads the known
key/values and the new tokens on the left, and the mask and positions make padding invisible.

Never: asyncio, versions, or which request comes when.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from trace_async.errors import PolicyError


@dataclass(slots=True, eq=False)
class Row:
    """One request's tokens and what has been computed of them."""

    prefix: list[int]
    seed: int
    greedy: bool
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)  # nats, of `sampled`
    keys_values: torch.Tensor | None = None  # [layers, 2, heads, computed, head_dim]
    computed: int = 0  # tokens whose key/values are known

    @property
    def tokens(self) -> list[int]:
        """Prefix and sampled tokens."""
        return self.prefix + self.sampled

    @property
    def num_pending(self) -> int:
        """Tokens that the next pass must compute; at least 1."""
        return len(self.prefix) + len(self.sampled) - self.computed


class BatchedModel:
    """A decoder and how to draw from it. Not thread-safe: one thread owns it and every row it is given."""

    def __init__(self, model: torch.nn.Module, *, pad_id: int, temperature: float) -> None:
        self._model = model.eval()
        self._pad_id = pad_id
        self._temperature = temperature
        self.max_positions = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        # transformers renamed the argument in 5.24; earlier releases know only the old name.
        takes = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"

    def load(self, weights: Path) -> None:
        """Take over the tensors of a safetensors file; PolicyError, and no change, when they do not fit."""
        load_weights(self._model, weights)

    @torch.inference_mode()
    def advance(self, rows: Sequence[Row]) -> None:
        """Compute every row's pending tokens and draw one more token for each."""
        self._draw(rows, self._forward(rows))

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits float32 [B, vocabulary] after each row's last token; key/values of the new tokens are kept."""
        num_past = max(row.computed for row in rows)
        num_new = max(row.num_pending for row in rows)
        device = next(self._model.parameters()).device
        ids = np.full((len(rows), num_new), self._pad_id)
        mask = np.zeros((len(rows), num_past + num_new), np.int64)
        positions = np.zeros((len(rows), num_new), np.int64)
        for b, row in enumerate(rows):
            pending = row.num_pending
            ids[b, num_new - pending :] = row.tokens[row.computed :]
            positions[b, num_new - pending :] = np.arange(row.computed, row.computed + pending)
            mask[b, num_past - row.computed : num_past] = 1
            mask[b, num_past + num_new - pending :] = 1
        cache = _gather(rows, num_past)
        output = self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        _keep(rows, cache, num_past=num_past)
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _draw(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        logprobs = torch.log_softmax(logits / self._temperature, dim=-1)
        draws = torch.tensor([uniform(row.seed, len(row.sampled)) for row in rows], dtype=torch.float64)
        cumulative = logprobs.double().exp().cumsum(-1)
        # Scaling by the last entry keeps a draw near 1 inside the vocabulary in spite of rounding.
        chosen = torch.searchsorted(cumulative, (draws.to(logits.device) * cumulative[:, -1])[:, None], right=True)
        chosen = chosen.clamp_(max=logits.shape[-1] - 1)[:, 0]
        greedy = torch.tensor([row.greedy for row in rows], device=logits.device)
        chosen = torch.where(greedy, logits.argmax(-1), chosen)
        values = logprobs.gather(-1, chosen[:, None])[:, 0]
        for row, token, logprob in zip(rows, chosen.tolist(), values.tolist(), strict=True):
            row.sampled.append(token)
            row.logprobs.append(logprob)


def uniform(seed: int, index: int) -> float:
    """The `index`-th number in [0, 1) of a request's stream; a function of nothing else."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=(seed % (1 << 64)).to_bytes(8, "little"), digest_size=8)
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def _gather(rows: Sequence[Row], num_past: int) -> DynamicCache:
    """Key/values of a batch, padded on the left to `num_past`."""
    known = next((row.keys_values for row in rows if row.keys_values is not None), None)
    if known is None:
        return DynamicCache()
    layers, _, heads, _, head_dim = known.shape
    past = known.new_zeros((layers, 2, len(rows), heads, num_past, head_dim))
    for b, row in enumerate(rows):
        if row.keys_values is not None:
            past[:, :, b, :, num_past - row.computed :] = row.keys_values
    return DynamicCache([(layer[0], layer[1]) for layer in past])


def _keep(rows: Sequence[Row], cache: DynamicCache, *, num_past: int) -> None:
    layers: list[Any] = cache.layers
    new = torch.stack(
        [torch.stack((layer.keys[:, :, num_past:], layer.values[:, :, num_past:])) for layer in layers]
    )  # [layers, 2, B, heads, new, head_dim]
    for b, row in enumerate(rows):
        fresh = new[:, :, b, :, new.shape[4] - row.num_pending :]
        row.keys_values = fresh.clone() if row.keys_values is None else torch.cat((row.keys_values, fresh), dim=3)
        row.computed += fresh.shape[3]


def load_model(path: Path, *, threads: int, device: torch.device) -> torch.nn.Module:
    """A float32 transformers decoder from a local folder, on `device`; sets this process's torch threads.

    Raises PolicyError when the folder holds no model.
    """
    torch.set_num_threads(threads)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} holds no transformers model: {error}") from error
    return model.to(device)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Copy a safetensors file into `model` in place. Raises PolicyError unless names and shapes are the model's own."""
    try:
        tensors = load_file(path)
    except Exception as error:  # safetensors raises errors of its own that it does not export
        raise PolicyError(f"{path} cannot be read as safetensors: {error}") from error
    own = dict(model.state_dict(keep_vars=True))
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if missing or extra or wrong:
        raise PolicyError(
            f"{path} does not fit the model: missing {missing[:3]}, unexpected {extra[:3]}, other shapes {wrong[:3]}"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
