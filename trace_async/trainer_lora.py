"""Low-rank additions to a model that is trained: put in by peft, stored in peft's naming.

Invariants
    - Every linear layer but the output head has a pair A [rank, in], B [out, rank]; only pairs are trained. B starts at
      0, so the first policy is the start policy.
    - The model's own tensors never change: what actors add the pairs to is what stands in the policy's folder, and
      `check_folder` makes sure of it once.

Never: files of its own format, optimizers, versions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trace_async.core.types import Adapter
from trace_async.errors import ConfigError, PolicyError
from trace_async.weights import HIGH, LOW, PREFIX, check_names, find_aliases, read_folder, with_aliases

_NAME = "default"


def add_pairs(model: Any, *, adapter: Adapter) -> None:
    """Put a pair beside every linear layer but the head, and freeze everything else; draws from torch's generator.

    Raises ConfigError where peft is not installed or the model has no such layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            f"learner.lora_rank = {adapter.rank} needs peft, which is not installed: pip install 'trace-async[lora]', "
            "or set learner.lora_rank = 0"
        ) from error
    head = model.get_output_embeddings()
    layers = [name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head]
    if not layers:
        raise ConfigError(
            f"learner.lora_rank = {adapter.rank}: {type(model).__name__} has no linear layers (torch.nn.Linear) beside "
            "its head to add to; set learner.lora_rank = 0"
        )
    config = LoraConfig(r=adapter.rank, lora_alpha=adapter.alpha, target_modules=layers, lora_dropout=0.0, bias="none")
    inject_adapter_in_model(config, model, adapter_name=_NAME)


def pairs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The trained tensors under the names that peft gives them in files; not copies."""
    found = {}
    for name, layer in _layers(model):
        found[f"{PREFIX}{name}{LOW}"] = layer.lora_A[_NAME].weight
        found[f"{PREFIX}{name}{HIGH}"] = layer.lora_B[_NAME].weight
    return found


def check_folder(model: torch.nn.Module, folder: Path) -> None:
    """Raises PolicyError unless the folder's files hold the tensors of `model`, which has no pairs yet."""
    tensors = with_aliases(read_folder(folder), find_aliases(model.state_dict()))
    cure = "if saving the folder anew with this release of transformers does not help, set learner.lora_rank = 0"
    try:
        check_names(tensors, model)
    except PolicyError as error:
        raise PolicyError(f"{folder}: actors cannot add low-rank pairs to its files: {error}; {cure}") from error
    other = [name for name, own in model.state_dict().items() if not torch.equal(tensors[name].to(own), own)]
    if other:
        raise PolicyError(f"{folder}: the model does not use what its files hold as {', '.join(other[:3])}; {cure}")


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in model.named_modules() if hasattr(layer, "lora_A"))
