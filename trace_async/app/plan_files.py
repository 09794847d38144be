"""How many bytes a run's files take: published versions, checkpoints, the exported policy. Pure arithmetic.

A safetensors file is 8 bytes of length, a compact JSON header padded to 8 bytes, and the tensors without gaps, sorted
by dtype (widest first) and name; so its size follows from names, dtypes and shapes to the byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from trace_async.app.plan_sizes import ModelShape, Tensor
from trace_async.config import Config

_NUMBER_BYTES = {"F32": 4, "BF16": 2}
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}
_PAIRS_PREFIX = "base_model.model."
_IN_MEMORY = "/dev/shm"
_TIED = {"lm_head.weight": "model.embed_tokens.weight"}


class Stored(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: str  # as safetensors spells it
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSizes:
    """Bytes of what a run writes."""

    version: int  # the weights of one published version
    checkpoint: int  # the trainer's two files of one checkpoint
    policy: int  # the exported folder's weights, float32
    versions_kept: int  # at most at a time, one being written
    checkpoints_kept: int  # likewise
    in_memory: bool  # versions are published to a file system in memory

    @property
    def versions(self) -> int:
        """All versions that are kept."""
        return self.version * self.versions_kept

    @property
    def disk(self) -> int:
        """All that is on a disk, at its largest."""
        return self.checkpoint * self.checkpoints_kept + self.policy + (0 if self.in_memory else self.versions)


def file_sizes(config: Config, shape: ModelShape) -> FileSizes:
    """What the run of a configuration writes; predictor, ledger and logs are small beside it."""
    learner = config.learner
    everything = shape.tensors()
    trained = _named_pairs(shape, learner.lora_rank) if learner.lora_rank else everything
    published = "float32" if learner.lora_rank else config.engine.dtype  # pairs stay as they are
    kept = learner.keep_checkpoints + learner.keep_best + 1
    return FileSizes(
        version=file_bytes(_published(trained, published), _aliases(shape)),
        checkpoint=file_bytes(_published(trained, "float32"), _aliases(shape))
        + file_bytes(list(_moments(trained)), {}),
        policy=file_bytes(_published(everything, "float32"), _aliases(shape)),
        versions_kept=config.publication.keep_versions + 1,
        in_memory=config.publication.directory.startswith(_IN_MEMORY),
        checkpoints_kept=min(kept, 1 + learner.max_steps // learner.checkpoint_every_steps + 1),
    )


def file_bytes(tensors: Sequence[Stored], aliases: Mapping[str, str]) -> int:
    """Bytes of the safetensors file that `weights.write_weights` makes of these tensors."""
    header: dict[str, object] = {"__metadata__": {"aliases": json.dumps(dict(aliases), sort_keys=True)}}
    place = 0
    for name, dtype, shape in sorted(tensors, key=lambda tensor: (-_NUMBER_BYTES[tensor.dtype], tensor.name)):
        end = place + _NUMBER_BYTES[dtype] * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, end]}
        place = end
    length = len(json.dumps(header, separators=(",", ":")).encode())
    return 8 + length + -length % 8 + place


def _published(tensors: Sequence[Tensor], dtype: str) -> list[Stored]:
    """Matrices in `dtype`, the rest in float32, as `trainer.save_weights` rounds them."""
    return [Stored(name, _DTYPES[dtype] if len(shape) > 1 else "F32", shape) for name, shape in tensors]


def _named_pairs(shape: ModelShape, rank: int) -> list[Tensor]:
    return [Tensor(_PAIRS_PREFIX + name, sizes) for name, sizes in shape.pairs(rank)]


def _moments(trained: Sequence[Tensor]) -> Iterator[Stored]:
    """What AdamW keeps, as `trainer_files.moments_of` names it."""
    for index, tensor in enumerate(trained):
        yield Stored(f"{index}.step", "F32", ())
        for name in ("exp_avg", "exp_avg_sq"):
            yield Stored(f"{index}.{name}", "F32", tensor.shape)


def _aliases(shape: ModelShape) -> dict[str, str]:
    return _TIED if shape.tied else {}
