"""What a trainer writes and reads: weights for actors, checkpoints of its own, folders that others can load.

Nothing on disk is a pickle: weights and optimizer state are safetensors, the rest JSON. Never decides when.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trace_async.core.types import Adapter, Json
from trace_async.errors import PolicyError
from trace_async.weights import (
    LOW,
    PREFIX,
    check_fit,
    check_names,
    find_aliases,
    merge_pairs,
    read_folder,
    read_stored,
    with_aliases,
    write_weights,
)

_MODEL, _OPTIMIZER, _STATE = "model.safetensors", "optimizer.safetensors", "trainer.json"


def load_model(policy_path: Path) -> torch.nn.Module:
    """The policy in float32. Raises PolicyError when the folder holds no model."""
    try:
        model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
            policy_path,
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="sdpa",  # takes a mask per pair of tokens, which packed trees need
        )
    except (OSError, ValueError) as error:
        raise PolicyError(f"{policy_path} holds no transformers model: {error}") from error
    return model


def save_trainer(
    directory: Path,
    *,
    tensors: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    moments: Mapping[str, torch.Tensor],
    state: Json,
) -> None:
    """Three files into an existing folder."""
    write_weights(directory / _MODEL, dict(tensors), aliases=dict(aliases))
    write_weights(directory / _OPTIMIZER, dict(moments), aliases={})
    (directory / _STATE).write_text(json.dumps(state, allow_nan=False))


def read_tensors(directory: Path, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `save_trainer`. Raises PolicyError when they are not of the names and shapes of `own`."""
    found = stored_tensors(directory)
    try:
        check_fit(found, dict(own))
    except PolicyError as error:
        raise PolicyError(f"checkpoint {directory} belongs to another model or learner.lora_rank: {error}") from error
    return found


def tell_generator() -> str:
    """Where torch's generator on the CPU stands, as text. Models without dropout draw nothing after the start."""
    return base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode("ascii")


def set_generator(told: str) -> None:
    """Go on where `tell_generator` stood."""
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(told)), dtype=torch.uint8))


def stored_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of `save_trainer`, whatever they are of."""
    return read_stored(directory / _MODEL)


def read_moments(directory: Path) -> dict[str, torch.Tensor]:
    """The moments of `save_trainer`."""
    return read_stored(directory / _OPTIMIZER)


def read_trainer_state(directory: Path) -> dict[str, Any]:
    """The state of `save_trainer`."""
    state = json.loads((directory / _STATE).read_text())
    assert isinstance(state, dict)
    return state


def moments_of(optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The optimizer's tensors, as INDEX.NAME of the parameter they belong to."""
    return {
        f"{index}.{name}": value
        for index, parameter in enumerate(trained)
        for name, value in optimizer.state.get(parameter, {}).items()
    }


def empty_moments(
    optimizer: torch.optim.Optimizer, trained: Sequence[torch.Tensor], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Makes the optimizer's tensors anew, all 0, under the names that `moments_of` gave; the caller fills them."""
    optimizer.state.clear()
    for name in names:
        index, kind = name.split(".", 1)
        parameter = trained[int(index)]  # AdamW keeps the moments beside the parameter and its step count on the CPU
        optimizer.state[parameter][kind] = torch.zeros(()) if kind == "step" else torch.zeros_like(parameter)
    return moments_of(optimizer, trained)


def export_policy(
    directory: Path,
    *,
    policy_path: Path,
    stored: Mapping[str, torch.Tensor],
    adapter: Adapter | None = None,
    dtype: str = "float32",
) -> None:
    """A standard transformers folder: config, weights in `dtype`, tokenizer with its template, generation config.

    `stored` are the tensors of `save_trainer`: all of the weights, or with `adapter` the pairs that are merged with
    those of the start policy. Raises PolicyError when they are not of that policy.
    """
    model: Any = load_model(policy_path)
    tensors = dict(stored)
    if adapter is not None:
        tensors = merge_pairs(read_folder(policy_path), pairs=stored, adapter=adapter, path=directory)
    tensors = with_aliases(tensors, find_aliases(model.state_dict()))
    check_names(tensors, model)
    model.load_state_dict(tensors)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    AutoTokenizer.from_pretrained(policy_path, local_files_only=True).save_pretrained(directory)


def export_adapter(
    directory: Path, *, policy: str, pairs: Mapping[str, torch.Tensor], adapter: Adapter, dtype: str = "float32"
) -> None:
    """Low-rank pairs alone, as peft writes and reads them, into an existing folder; they are added to `policy`."""
    modules = {name.removeprefix(PREFIX).removesuffix(LOW) for name in pairs if name.endswith(LOW)}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": policy,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[-1] for name in modules}),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    kept = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in pairs.items()}
    save_file(kept, directory / "adapter_model.safetensors", metadata={"format": "pt"})
