"""A decoder whose word can be relied on: chosen for its model and compared with plain forward passes before use.

Owns the model, the choice of how it is computed, and the numbers rows are drawn with. The fast way is taken where it
knows the model and agrees with transformers' own forward pass; any other model takes the general way, and is refused
where that does not agree. Never: asyncio, versions, or which request comes when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from trace_async.core.types import FloatArray, IntArray
from trace_async.engines import llama_weights
from trace_async.engines.drawing import draw
from trace_async.engines.llama_decoder import LlamaDecoder
from trace_async.engines.rows import Decoder, Row, uniform
from trace_async.engines.transformers_decoder import TransformersDecoder
from trace_async.errors import PolicyError
from trace_async.model_probe import attention_window, logits_agree, probe_tokens
from trace_async.weights import check_names

_BFLOAT16_GAP = 0.1  # of the logits' spread, on average; the same model computed in two ways was seen to differ by 0.03


class BatchedModel:
    """A decoder and how to draw from it. Not thread-safe: one thread owns it and every row it is given."""

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        pad_id: int,
        temperature: float,
        dtype: str,
        max_rows: int,
        max_tokens: int,
        prefix_cache_bytes: int,
    ) -> None:
        """Probes the model up to `max_tokens`; PolicyError where no way of computing it in batches is right.

        `dtype`: what new weights are rounded to, also where the model computes with float32 (see `load_model`).
        """
        self._model = model.eval()
        self._dtype = getattr(torch, dtype)
        self._temperature = temperature
        positions = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens = min(max_tokens, int(positions or max_tokens))  # prefix and sampled ones of one row
        self.decoder: Decoder
        if llama_weights.fits(model):
            self.decoder = LlamaDecoder(
                llama_weights.join(model),
                max_rows=max_rows,
                max_tokens=self.max_tokens,
                prefix_cache_bytes=prefix_cache_bytes,
            )
            if self._probe() is None:
                return
        self.decoder = TransformersDecoder(model, pad_id=pad_id, prefix_cache_bytes=prefix_cache_bytes)
        problem = self._probe()
        if problem is not None:
            raise PolicyError(problem)

    def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raises PolicyError unless names and shapes are the model's own. Safe beside everything else."""
        check_names(tensors, self._model)

    def take_over(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy checked tensors into the model and forget all key/values; what is raised leaves it half copied."""
        self.decoder.clear()
        with torch.no_grad():
            for name, tensor in self._model.state_dict(keep_vars=True).items():
                new = tensors[name]
                tensor.copy_(new.to(self._dtype) if new.is_floating_point() else new)

    @torch.inference_mode()
    def advance(self, rows: Sequence[Row]) -> None:
        """Compute what is unknown of every row and draw one more token for each; `rows` are all that have not left."""
        drawn = draw(
            self.decoder.advance(rows),
            temperature=self._temperature,
            numbers=[uniform(row.seed, len(row.tokens) - row.num_prefix) for row in rows],
            greedy=[row.greedy for row in rows],
        )
        for row, (token, logprob) in zip(rows, drawn, strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)

    @torch.inference_mode()
    def leave(self, row: Row) -> None:
        """The row is done or given up; its key/values may serve others."""
        self.decoder.leave(row)

    @torch.inference_mode()
    def score(self, prompt: IntArray) -> FloatArray:
        """Log-probabilities float32 [L - 1], at temperature 1, of prompt[1:]."""
        tokens = prompt.tolist()
        logprobs = torch.log_softmax(self.decoder.score(tokens)[:-1].float(), dim=-1)
        found = logprobs.gather(-1, torch.tensor(tokens[1:], device=logprobs.device)[:, None])[:, 0]
        return np.asarray(found.tolist(), np.float32)

    @torch.inference_mode()
    def _probe(self) -> str | None:
        """What is wrong with the decoder: its logits for ragged rows that branch, grow and reuse, against plain ones.

        Goes past the model's attention window where contexts do.
        """
        tokens = probe_tokens(self._model.config, limit=self.max_tokens)
        half = len(tokens) // 2
        long, short = _probe_row(tokens[:-2]), _probe_row(tokens[:half])
        reusing, branch = _probe_row(tokens[:-1]), _probe_row([*tokens[:half], tokens[0]])
        name = type(self._model).__name__
        try:
            same = self._agrees([long, short])
            for row in (long, short):
                row.tokens.append(tokens[-2])
            same &= self._agrees([long, short])
            for row in (long, short):
                row.tokens.append(tokens[-1])
            same &= self._agrees([short, reusing, branch, long])
            for row in (long, short, reusing, branch):
                self.decoder.leave(row)
            self.decoder.clear()
            self.decoder.computed_tokens = self.decoder.reused_tokens = 0
        except Exception as error:  # noqa: BLE001  models that keep another kind of state fail in ways of their own
            return f"{name} cannot be batched with key/values per request: {error!r}"
        window = attention_window(self._model.config)
        cure = f", or lower tree.max_context_tokens to its attention window, {window}" if window else ""
        return (
            None
            if same
            else (
                f"{name}: in a padded batch with reused key/values, logits differ from a plain forward pass over "
                f"{len(tokens)} tokens, so recorded log-probabilities would be wrong; choose a policy whose attention "
                f"depends on mask and positions only{cure}"
            )
        )

    def _agrees(self, rows: Sequence[Row]) -> bool:
        logits = self.decoder.advance(rows)
        plain = [self._model(input_ids=torch.tensor([row.tokens]).to(logits.device)).logits[0, -1] for row in rows]
        agree = _nearly if logits.dtype == torch.bfloat16 else logits_agree
        return all(agree(found, expected) for found, expected in zip(logits, plain, strict=True))


def _nearly(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether logits agree as far as bfloat16 goes; tokens or places mixed up move them by as much as they spread."""
    gap = (found.float() - expected.float()).abs().mean()
    return bool(gap <= _BFLOAT16_GAP * expected.float().std())


def _probe_row(tokens: list[int]) -> Row:
    return Row(tokens=list(tokens), num_prefix=len(tokens), seed=0, greedy=True)


def load_model(path: Path, *, threads: int, device: torch.device, dtype: str) -> torch.nn.Module:
    """A transformers decoder from a local folder, on `device`; sets this process's torch threads.

    "bfloat16" on a processor without such arithmetic: the weights are rounded to it and computed with in float32, which
    is several times faster there. Raises PolicyError when the folder holds no model.
    """
    torch.set_num_threads(threads)
    wanted = getattr(torch, dtype)
    held = wanted if device.type != "cpu" or _cpu_knows(wanted) else torch.float32
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=held, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} holds no transformers model: {error}") from error
    if held != wanted:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(wanted))
    return model.to(device)


def _cpu_knows(dtype: torch.dtype) -> bool:
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
