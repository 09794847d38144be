"""Sampling with a transformers model in this process: token ids in; token ids, log-probabilities and versions out.

Invariants
    - One worker thread owns the model, the prefix cache and every request's key/values; the event loop never blocks.
    - Requests join and leave the batch at token granularity; a result does not depend on who else was in the batch
      (up to floating point), because each token is drawn with a number derived from the request's own seed.
    - Log-probabilities are those of the distribution that was sampled: after temperature, nothing truncated, float32.
    - Weights change only between two forward passes. `drain`: requests in flight finish on the old weights and new ones
      wait. `continue`: they go on under the new weights with key/values recomputed, and their stamps say so.
    - An answer is stamped with the versions that sampled it, never with what somebody believed at dispatch.

Never: text, a chat template, or a decision about which version should be used.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DynamicCache

from trace_async.config import EngineConfig
from trace_async.core.types import GenerateRequest, Generation, StopReason
from trace_async.engines.prefix_cache import PrefixCache
from trace_async.errors import EngineError, PolicyError

_LOG = logging.getLogger(__name__)
_MAX_FAILURES_IN_A_ROW = 3
_COUNTERS = (
    "busy_s",
    "idle_s",
    "forward_passes",
    "requests",
    "sampled_tokens",
    "computed_tokens",  # prefix and sampled tokens that went through the model
    "reused_tokens",  # prefix tokens whose key/values were found in the cache
)


@dataclass(slots=True, eq=False)
class _Running:
    """One request in the batch; touched by the worker thread only, except `answer`."""

    request: GenerateRequest
    answer: asyncio.Future[Generation]
    prefix: list[int]
    submitted_s: float
    keys_values: torch.Tensor | None = None  # [layers, 2, heads, computed, head_dim]
    computed: int = 0  # tokens of prefix + sampled whose key/values are known
    kv_version: int = 0  # oldest version that computed any of them
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_min: int = -1
    version_max: int = -1
    kv_version_min: int = -1
    stop: StopReason | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prefix + self.sampled

    @property
    def num_pending(self) -> int:
        return len(self.prefix) + len(self.sampled) - self.computed


@dataclass(slots=True, eq=False)
class _Load:
    """A version that waits to be taken over."""

    version: int
    weights: Path
    done: asyncio.Future[None]


class LocalEngine:
    """Continuous batching over one transformers model. `run` must be running for anything to be answered."""

    def __init__(
        self, model: torch.nn.Module, *, config: EngineConfig, stop_ids: Sequence[int], pad_id: int, version: int = -1
    ) -> None:
        self._model = model.eval()
        self._config = config
        self._stop_ids = frozenset(stop_ids)
        self._pad_id = pad_id
        self._max_positions = int(getattr(model.config, "max_position_embeddings", 1 << 30))
        # transformers renamed the argument in 5.24; earlier releases know only the old name.
        takes = inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if "cache" in takes else "past_key_values"
        self._version = version
        self._waiting: deque[_Running] = deque()
        self._active: list[_Running] = []
        self._loads: list[_Load] = []
        self._work = asyncio.Event()
        self._cache = PrefixCache(max_bytes=config.prefix_cache_bytes)
        self._closed = False
        self._counts = dict.fromkeys(
            ("busy_s", "idle_s", "forward_passes", "sampled_tokens", "computed_tokens", "reused_tokens", "requests"),
            0.0,
        )

    @property
    def version(self) -> int:
        """Version of the weights in use; -1 before the first `load`."""
        return self._version

    def counters(self) -> Mapping[str, float]:
        """Monotone counts since start, and the gauges `waiting` and `active` (requests)."""
        return {**self._counts, "waiting": float(len(self._waiting)), "active": float(len(self._active))}

    async def generate(self, request: GenerateRequest) -> Generation:
        """Sample one turn; waits for the batch. Raises EngineError when it cannot be answered."""
        if self._closed:
            raise EngineError(f"request {request.request_id}: the engine is closed")
        length = len(request.prefix_ids)
        if request.max_tokens < 1 or length < 1:
            raise EngineError(f"request {request.request_id}: {length} prefix tokens, max_tokens {request.max_tokens}")
        if length + request.max_tokens > self._max_positions:
            raise EngineError(
                f"request {request.request_id}: {length} prefix tokens + {request.max_tokens} new ones exceed the "
                f"model's {self._max_positions} positions; lower tree.max_context_tokens"
            )
        answer: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Running(request, answer, request.prefix_ids.tolist(), time.perf_counter()))
        self._work.set()
        return await answer  # woken by run(); a cancelled answer leaves the batch before the next forward pass

    async def load(self, *, version: int, epoch: int, weights: Path) -> None:
        """Take over a version's weights between two forward passes; returns when they are in use.

        Raises PolicyError when the file's tensors are not exactly the model's; then the old weights stay in use.
        """
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loads.append(_Load(version, weights, done))
        self._work.set()
        await done  # woken by run()
        _LOG.debug("engine holds version %d of epoch %d", version, epoch)

    async def run(self) -> None:
        """Consumes requests and loads; produces answers; waits for `_work`, woken by `generate` and `load`."""
        failures = 0
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="engine") as worker:
            try:
                idle_since = time.perf_counter()
                while True:
                    await self._work.wait()
                    loads = self._due_loads()
                    self._admit()
                    if not loads and not self._active:
                        self._work.clear()
                        continue
                    started = time.perf_counter()
                    self._counts["idle_s"] += started - idle_since
                    try:
                        if loads:
                            await loop.run_in_executor(worker, self._take_over, loads[-1])
                            _settle(loads)
                        await loop.run_in_executor(worker, self._advance)
                        failures = 0
                    except PolicyError as error:
                        _settle(loads, error)
                    except (RuntimeError, MemoryError) as error:  # torch reports every failed kernel as RuntimeError
                        failures += 1
                        self._fail_active(error)
                        if failures >= _MAX_FAILURES_IN_A_ROW:
                            raise
                    idle_since = time.perf_counter()
                    self._counts["busy_s"] += idle_since - started
                    self._answer_finished()
            finally:
                self._close()

    # -- on the event loop, between two forward passes

    def _due_loads(self) -> list[_Load]:
        """The versions to take over now. The newest stands for all that waited with it."""
        self._active = [r for r in self._active if not r.answer.done()]
        if self._active and self._config.on_update == "drain":
            return []
        due, self._loads = self._loads, []
        return due

    def _admit(self) -> None:
        """Fill the batch, unless it is being drained for a new version."""
        while self._waiting and len(self._active) < self._config.max_batch and not self._loads:
            running = self._waiting.popleft()
            if not running.answer.done():
                self._counts["requests"] += 1
                self._active.append(running)

    def _answer_finished(self) -> None:
        now_s = time.perf_counter()
        for running in self._active:
            if running.stop is not None and not running.answer.done():
                running.answer.set_result(
                    Generation(
                        token_ids=np.asarray(running.sampled, dtype=np.int32),
                        logprobs=np.asarray(running.logprobs, dtype=np.float32),
                        version_min=running.version_min,
                        version_max=running.version_max,
                        kv_version_min=running.kv_version_min,
                        stop=running.stop,
                        generate_s=now_s - running.submitted_s,
                    )
                )
        self._active = [r for r in self._active if r.stop is None]

    def _fail_active(self, error: BaseException) -> None:
        _LOG.warning("a forward pass over %d requests failed: %s", len(self._active), error)
        for running in self._active:
            if not running.answer.done():
                failure = EngineError(f"request {running.request.request_id}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                running.answer.set_exception(failure)
        self._active = []

    def _close(self) -> None:
        self._closed = True
        for running in (*self._active, *self._waiting):
            if not running.answer.done():
                running.answer.set_exception(EngineError(f"request {running.request.request_id}: the engine closed"))
        _settle(self._loads, EngineError("the engine closed before it took over this version"))
        self._active, self._loads = [], []
        self._waiting.clear()

    # -- on the worker thread

    def _take_over(self, load: _Load) -> None:
        load_weights(self._model, load.weights)
        self._version = load.version
        self._cache.clear()
        for running in self._active:
            running.keys_values, running.computed = None, 0

    @torch.inference_mode()
    def _advance(self) -> None:
        """One token for every active request: new ones are looked up, then alike ones share a forward pass."""
        for running in self._active:
            if running.keys_values is None:
                self._look_up(running)
        for batch in _alike(self._active):
            logits = self._forward(batch)
            self._sample(batch, logits)
        for running in self._active:
            if running.stop is not None and running.keys_values is not None:
                self._cache.store(np.asarray(running.tokens[: running.computed], np.int32), running.keys_values)

    def _look_up(self, running: _Running) -> None:
        tokens = np.asarray(running.tokens, np.int32)
        # The last token is always computed: its logits are what the next token is drawn from.
        hit = self._cache.longest(tokens, max_length=len(tokens) - 1)
        if hit is not None:
            running.keys_values, running.computed = hit.keys_values, hit.length
            self._counts["reused_tokens"] += hit.length
        running.kv_version = self._version

    def _forward(self, batch: list[_Running]) -> torch.Tensor:
        """Logits float32 [B, vocabulary] after each request's last token; key/values of the new tokens are kept."""
        num_past = max(r.computed for r in batch)
        num_new = max(r.num_pending for r in batch)
        device = next(self._model.parameters()).device
        ids = torch.full((len(batch), num_new), self._pad_id, dtype=torch.long)
        mask = torch.zeros((len(batch), num_past + num_new), dtype=torch.long)
        positions = torch.zeros((len(batch), num_new), dtype=torch.long)
        for row, running in enumerate(batch):
            pending = running.num_pending
            ids[row, num_new - pending :] = torch.tensor(running.tokens[running.computed :])
            positions[row, num_new - pending :] = torch.arange(running.computed, running.computed + pending)
            mask[row, num_past - running.computed : num_past] = 1
            mask[row, num_past + num_new - pending :] = 1
        cache = _gather(batch, num_past)
        output = self._model(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            position_ids=positions.to(device),
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        self._keep(batch, cache, num_past=num_past)
        self._counts["forward_passes"] += 1
        logits: torch.Tensor = output.logits[:, -1].float()
        return logits

    def _keep(self, batch: list[_Running], cache: DynamicCache, *, num_past: int) -> None:
        layers: list[Any] = cache.layers
        new = torch.stack(
            [torch.stack((layer.keys[:, :, num_past:], layer.values[:, :, num_past:])) for layer in layers]
        )  # [layers, 2, B, heads, new, head_dim]
        for row, running in enumerate(batch):
            pending = running.num_pending
            fresh = new[:, :, row, :, new.shape[4] - pending :]
            known = running.keys_values
            running.keys_values = fresh.clone() if known is None else torch.cat((known, fresh), dim=3)
            running.computed += pending
            self._counts["computed_tokens"] += pending

    def _sample(self, batch: list[_Running], logits: torch.Tensor) -> None:
        logprobs = torch.log_softmax(logits / self._config.temperature, dim=-1)
        draws = torch.tensor([uniform(r.request.seed, len(r.sampled)) for r in batch], dtype=torch.float64)
        cumulative = logprobs.double().exp().cumsum(-1)
        # Scaling by the last entry keeps a draw near 1 inside the vocabulary in spite of rounding.
        chosen = torch.searchsorted(cumulative, (draws.to(logits.device) * cumulative[:, -1])[:, None], right=True)
        chosen = chosen.clamp_(max=logits.shape[-1] - 1)[:, 0]
        greedy = torch.tensor([r.request.greedy for r in batch], device=logits.device)
        chosen = torch.where(greedy, logits.argmax(-1), chosen)
        values = logprobs.gather(-1, chosen[:, None])[:, 0]
        for running, token, logprob in zip(batch, chosen.tolist(), values.tolist(), strict=True):
            self._record(running, token, logprob)
        self._counts["sampled_tokens"] += len(batch)

    def _record(self, running: _Running, token: int, logprob: float) -> None:
        first = not running.sampled
        running.sampled.append(token)
        running.logprobs.append(logprob)
        running.version_min = self._version if first else min(running.version_min, self._version)
        running.version_max = max(running.version_max, self._version)
        running.kv_version_min = running.kv_version if first else min(running.kv_version_min, running.kv_version)
        if token in self._stop_ids:
            running.stop = StopReason.STOP
        elif len(running.sampled) >= running.request.max_tokens:
            running.stop = StopReason.LENGTH


def _settle(loads: list[_Load], error: Exception | None = None) -> None:
    for load in loads:
        if load.done.done():  # whoever asked was cancelled meanwhile
            continue
        if error is None:
            load.done.set_result(None)
        else:
            load.done.set_exception(error)


def uniform(seed: int, index: int) -> float:
    """The `index`-th number in [0, 1) of a request's stream; a function of nothing else."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), key=(seed % (1 << 64)).to_bytes(8, "little"), digest_size=8)
    return (int.from_bytes(digest.digest(), "little") >> 11) / (1 << 53)


def _alike(active: list[_Running]) -> list[list[_Running]]:
    """Requests whose padded forward passes waste little: pending counts within a factor of two."""
    batches: dict[int, list[_Running]] = {}
    for running in active:
        batches.setdefault((running.num_pending - 1).bit_length(), []).append(running)
    return list(batches.values())


def _gather(batch: list[_Running], num_past: int) -> DynamicCache:
    """Key/values of a batch, padded on the left to `num_past`."""
    known = next((r.keys_values for r in batch if r.keys_values is not None), None)
    if known is None:
        return DynamicCache()
    layers, _, heads, _, head_dim = known.shape
    past = known.new_zeros((layers, 2, len(batch), heads, num_past, head_dim))
    for row, running in enumerate(batch):
        if running.keys_values is not None:
            past[:, :, row, :, num_past - running.computed :] = running.keys_values
    return DynamicCache([(layer[0], layer[1]) for layer in past])


def load_model(path: Path, *, threads: int) -> torch.nn.Module:
    """A float32 transformers decoder from a local folder; sets this process's torch threads.

    Raises PolicyError when the folder holds no model.
    """
    torch.set_num_threads(threads)
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} holds no transformers model: {error}") from error
    return model


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
