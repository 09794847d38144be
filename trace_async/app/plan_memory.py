"""GPU memory of a learner process and of an engine, from a model's sizes and the configuration. Pure arithmetic.

What is counted exactly follows from how `trainer*.py` keeps things: float32 weights, gradients and AdamW moments,
rounded copies of layers in bfloat16, FSDP2's shards, what a forward pass keeps for its backward pass, the chunked head.
What can only be estimated without the device is named so: `working`, `RESERVE_BYTES`, `VLLM_RESERVE_BYTES`.
docs/plan.md has every formula. Legend: H hidden, Q heads x head_dim, K kv_heads x head_dim, I inner size, c bytes of
a number in the layers, T tokens of a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from trace_async.app.plan_sizes import ModelShape, Tensor, count, share_of
from trace_async.config import EngineConfig, LearnerConfig

GIB = 1 << 30
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}

RESERVE_BYTES = 3 * GIB
"""Estimated, of a learner process: CUDA context, NCCL and cuBLAS buffers, gaps of the allocator."""

VLLM_RESERVE_BYTES = 4 * GIB
"""Estimated, of one GPU of a vLLM engine: its largest pass, CUDA graphs, logits, NCCL buffers."""

VLLM_UTILIZATION = 0.92
"""vLLM's own gpu_memory_utilization (0.32) where engine.options do not say it."""

_KV_BLOCK_TOKENS = 16
_CHUNK_LOGITS, _MIN_CHUNK = 2**23, 64  # as trainer_head.py


@dataclass(frozen=True, slots=True)
class Part:
    """Something that takes memory."""

    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerMemory:
    """One process of the learner. Parts are bytes on its device."""

    standing: tuple[Part, ...]  # there all the time
    passing: tuple[Part, ...]  # beside it while gradients are computed
    moments: tuple[Part, ...]  # totals at the moments that can be the largest
    peak: int
    kept_token_bytes: int  # a token of a pass that is kept for its backward pass, all layers

    @property
    def needed(self) -> int:
        """The peak and the reserve."""
        return self.peak + RESERVE_BYTES


def learner_memory(shape: ModelShape, learner: LearnerConfig, *, ranks: int, tokens: int) -> LearnerMemory:
    """Of each of `ranks` processes, for passes of `tokens` tokens."""
    numbers = _numbers(shape, learner, ranks)
    standing = (
        Part("weights, float32", 4 * numbers.own),
        Part("gradients, float32", 4 * numbers.trained),
        Part("AdamW's two moments, float32", 8 * numbers.trained),
    )
    passing = _passing(shape, learner, ranks=ranks, tokens=tokens)
    base = sum(part.num_bytes for part in standing)
    root = sum(part.num_bytes for part in passing if part.what == _ROOT)
    moments = [
        Part("forward and backward pass", base + sum(part.num_bytes for part in passing)),
        Part("optimizer update", base + 4 * numbers.trained),
        Part("rounding for publication", base + 2 * numbers.trained),
    ]
    if ranks > 1 and not learner.lora_rank:  # the root's gradients, and what is sent of them
        moments.append(Part("summing the root's gradients", base + root + 2 * 4 * count(shape.root())))
    return LearnerMemory(
        standing=standing,
        passing=passing,
        moments=tuple(moments),
        peak=max(moment.num_bytes for moment in moments),
        kept_token_bytes=kept_token_bytes(shape, learner, ranks=ranks),
    )


class _Numbers(NamedTuple):
    own: int  # that a process holds of all tensors
    trained: int  # of those that are trained


def _numbers(shape: ModelShape, learner: LearnerConfig, ranks: int) -> _Numbers:
    everything = shape.tensors()
    if not learner.lora_rank:
        own = share_of(everything, ranks)
        return _Numbers(own, own)
    trained = share_of(shape.pairs(learner.lora_rank), ranks)
    return _Numbers(share_of(everything, ranks) + trained, trained)


_ROOT = "embedding, last norm and head, gathered in float32"


def _passing(shape: ModelShape, learner: LearnerConfig, *, ranks: int, tokens: int) -> tuple[Part, ...]:
    head = 0 if learner.lora_rank else 4 * shape.vocabulary * shape.hidden
    chunk = max(_MIN_CHUNK, _CHUNK_LOGITS // shape.vocabulary)
    working = _working_token_bytes(shape, learner)
    parts = [
        *_copies(shape, learner, ranks),
        Part("activations kept for the backward pass", tokens * kept_token_bytes(shape, learner, ranks=ranks)),
        Part("hidden states at the head, and their gradients", tokens * 2 * (4 * shape.hidden + 20)),
        Part("two chunks of logits", 2 * 4 * chunk * shape.vocabulary),
        Part("the head's gradient before it is added", head),
        Part("working space of one layer (estimated)", tokens * working),
    ]
    return tuple(part for part in parts if part.num_bytes)


def _copies(shape: ModelShape, learner: LearnerConfig, ranks: int) -> list[Part]:
    """Weights beside the process's own: FSDP2's whole layers, or rounded copies in one process."""
    number = NUMBER_BYTES[learner.compute_dtype]
    layer = _with_pairs(shape, learner)
    trained = shape.layer_pairs(learner.lora_rank) if learner.lora_rank else layer
    if ranks > 1:
        gathered = 3 * number * count(layer)  # the one that computes, the next one, and what that is copied from
        gradients = number * count(trained) + 2 * 4 * count(trained)  # and what is sent of two layers
        return [
            Part(_ROOT, 4 * count(shape.root())),
            Part("whole layers gathered, and a layer's gradients", gathered + gradients),
        ]
    if number == 4:
        return []
    layers = 1 if learner.activation_checkpointing else shape.layers  # the backward pass needs them again
    return [Part("layers' weights rounded to bfloat16", number * count(layer) * layers)]


def _with_pairs(shape: ModelShape, learner: LearnerConfig) -> list[Tensor]:
    return shape.layer() + (shape.layer_pairs(learner.lora_rank) if learner.lora_rank else [])


def kept_token_bytes(shape: ModelShape, learner: LearnerConfig, *, ranks: int) -> int:
    """Bytes that a forward pass keeps of one token for its backward pass, without the head's."""
    rounded = learner.compute_dtype != "float32"
    root = 8 + 2 * 4 * shape.hidden + 4 + 2 * 4 * shape.head_dim  # token, last norm, angles
    layer = layer_token_bytes(shape, learner)
    if rounded:  # each layer has its own copy of the angles
        layer += 2 * 2 * shape.head_dim
    if learner.activation_checkpointing:
        layer = 4 * shape.hidden
        if rounded and ranks > 1:  # FSDP2 rounds what goes into a layer before it is kept
            layer = 2 * shape.hidden + 2 * 2 * shape.head_dim
    return root + shape.layers * layer


def layer_token_bytes(shape: ModelShape, learner: LearnerConfig) -> int:
    """Bytes that one layer keeps of a token, nothing recomputed: 4 (6H + 3Q + 2K + 4I) in float32 and some sums."""
    number = NUMBER_BYTES[learner.compute_dtype]
    whole = learner.lora_rank == 0  # a frozen norm does not need its normalised input again
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norm = 4 + (number if whole else 0)  # input in float32, normalised
    found = 2 * (norm + number) * shape.hidden + 2 * 4
    found += number * (3 * queries + 2 * keys + 4 * shape.inner) + 4 * shape.heads
    if shape.head_norms:
        found += norm * (queries + keys) + 4 * (shape.heads + shape.kv_heads)
    if learner.lora_rank:
        found += number * learner.lora_rank * len(shape.linear)
    return found


def _working_token_bytes(shape: ModelShape, learner: LearnerConfig) -> int:
    """Estimated: gradients inside one layer in the backward pass, and with checkpointing what it computes again."""
    number = NUMBER_BYTES[learner.compute_dtype]
    gradients = number * (3 * shape.inner + 2 * shape.heads * shape.head_dim) + 3 * 4 * shape.hidden
    return gradients + (layer_token_bytes(shape, learner) if learner.activation_checkpointing else 0)


# ---- engines -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """One GPU of an engine, or the memory of one on a CPU."""

    kind: str
    shards: int  # GPUs that share one engine
    weights: int
    reserve: int  # estimated
    kv_token_bytes: int  # on this GPU
    kv_bytes: int  # room for key/values on this GPU; less than 0: the weights alone do not fit
    taken: int  # in all

    def contexts(self, max_context_tokens: int) -> int:
        """Contexts of full length whose key/values fit at a time."""
        blocks = -(-max_context_tokens // _KV_BLOCK_TOKENS)
        return max(0, self.kv_bytes // (self.kv_token_bytes * blocks * _KV_BLOCK_TOKENS))

    @property
    def tokens(self) -> int:
        """Tokens whose key/values fit."""
        return max(0, self.kv_bytes // self.kv_token_bytes)


def vllm_memory(shape: ModelShape, engine: EngineConfig, *, shards: int, gpu_bytes: int) -> EngineMemory:
    """vLLM takes its share of a GPU whatever the model needs; what weights leave of it is for key/values."""
    number = NUMBER_BYTES[engine.dtype]
    taken = int(gpu_bytes * float(engine.options.get("gpu_memory_utilization", VLLM_UTILIZATION)))
    weights = number * shape.parameters // shards
    return EngineMemory(
        kind=engine.kind,
        shards=shards,
        weights=weights,
        reserve=VLLM_RESERVE_BYTES,
        kv_token_bytes=shape.kv_token_bytes(number, shards=shards),
        kv_bytes=taken - weights - VLLM_RESERVE_BYTES,
        taken=taken,
    )


def local_memory(shape: ModelShape, engine: EngineConfig, *, max_context_tokens: int) -> EngineMemory:
    """The local engine's bounds: running requests' key/values and the store of prefixes (docs/engines.md)."""
    number = NUMBER_BYTES[engine.dtype]
    token = shape.kv_token_bytes(number)
    running = 2 * (engine.max_batch + 1) * max_context_tokens * token
    weights = number * shape.parameters
    return EngineMemory(
        kind=engine.kind,
        shards=1,
        weights=weights,
        reserve=0,
        kv_token_bytes=token,
        kv_bytes=running + engine.prefix_cache_bytes,
        taken=weights + running + engine.prefix_cache_bytes,
    )
