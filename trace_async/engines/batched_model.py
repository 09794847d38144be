"""One forward pass over ragged requests, each with key/values of its own, on any transformers decoder.

Key/values live with their request, so who shares a batch may change from token to token. A pass pads the known
key/values on the left and the new tokens on the right, so that each row's tokens stand side by side: then distances
between their places are true, also for sliding windows, and masks and positions make padding invisible. `probe` checks
against a plain forward pass that a model is content with that.

Never: asyncio, versions, or which request comes when.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load
from transformers import AutoModelForCausalLM, DynamicCache

from trace_async.errors import PolicyError
from trace_async.model_probe import attention_window, logits_agree, probe_tokens


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
        self.token_bytes = 0  # key/values of one token; set by `probe`
        self.max_positions = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        # transformers renamed the argument in 5.24; earlier releases know only the old name.
        takes = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"

    def read(self, weights: bytes) -> dict[str, torch.Tensor]:
        """The tensors of a safetensors file's bytes; PolicyError when they do not fit. Safe beside `advance`."""
        return read_weights(self._model, weights)

    def take_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors from `read` into the model; whatever is raised leaves it half copied."""
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                tensor.copy_(tensors[name])

    @torch.inference_mode()
    def probe(self, *, max_tokens: int) -> None:
        """Compare ragged rows, with and without known key/values, with plain forward passes; sets `token_bytes`.

        Goes past the model's attention window where contexts of `max_tokens` do. Raises PolicyError when they differ.
        """
        tokens = probe_tokens(self._model.config, limit=min(max_tokens, self.max_positions))
        long, short = _probe_row(tokens[:-2]), _probe_row(tokens[: len(tokens) // 2])
        name = type(self._model).__name__
        try:
            same = self._agrees([long, short])
            assert long.keys_values is not None
            self.token_bytes = long.keys_values[:, :, :, :1].numel() * long.keys_values.element_size()
            for row in (long, short):
                row.sampled.append(tokens[-2])
            same &= self._agrees([long, short])
            half = len(tokens) // 2
            reusing = _probe_row(tokens[:-1], known=long.keys_values[:, :, :, :half])
            for row in (long, short):
                row.sampled.append(tokens[-1])
            same &= self._agrees([short, reusing, long])
        except Exception as error:  # models that keep another kind of state fail in ways of their own
            raise PolicyError(f"{name} cannot be batched with key/values per request: {error!r}") from error
        if not same:
            window = attention_window(self._model.config)
            cure = f", or lower tree.max_context_tokens to its attention window, {window}" if window else ""
            raise PolicyError(
                f"{name}: in a padded batch with reused key/values, logits differ from a plain forward pass over "
                f"{len(tokens)} tokens, so recorded log-probabilities would be wrong; choose a policy whose attention "
                f"depends on mask and positions only{cure}"
            )

    def _agrees(self, rows: Sequence[Row]) -> bool:
        logits = self._forward(rows)
        plain = [self._model(input_ids=torch.tensor([row.tokens], device=logits.device)).logits[0, -1] for row in rows]
        return all(logits_agree(found, expected) for found, expected in zip(logits, plain, strict=True))

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
            ids[b, :pending] = row.tokens[row.computed :]
            positions[b, :pending] = np.arange(row.computed, row.computed + pending)
            mask[b, num_past - row.computed : num_past + pending] = 1
        ends, end_of_row = np.unique([row.num_pending - 1 for row in rows], return_inverse=True)
        cache = _gather(rows, num_past)
        output = self._model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            position_ids=torch.from_numpy(positions).to(device),
            use_cache=True,
            logits_to_keep=torch.from_numpy(ends).to(device),
            **{self._cache_argument: cache},
        )
        _keep(rows, cache, num_past=num_past)
        logits: torch.Tensor = output.logits[torch.arange(len(rows)), torch.from_numpy(end_of_row)].float()
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


def _probe_row(tokens: list[int], known: torch.Tensor | None = None) -> Row:
    computed = 0 if known is None else known.shape[3]
    return Row(prefix=list(tokens), seed=0, greedy=True, keys_values=known, computed=computed)


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
        fresh = new[:, :, b, :, : row.num_pending]
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


def read_weights(model: torch.nn.Module, data: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file. Raises PolicyError unless names and shapes are the model's own."""
    try:
        tensors = load(data)
    except Exception as error:  # safetensors raises errors of its own that it does not export
        raise PolicyError(f"{len(data)} bytes cannot be read as safetensors: {error}") from error
    own = model.state_dict(keep_vars=True)
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    wrong = [n for n in own.keys() & tensors.keys() if own[n].shape != tensors[n].shape]
    if missing or extra or wrong:
        raise PolicyError(
            f"the weights do not fit the model: missing {missing[:3]}, unexpected {extra[:3]}, other shapes {wrong[:3]}"
        )
    return tensors
