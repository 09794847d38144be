"""Published weights as tensors: reads what `trainer.save_weights` wrote, whole or as low-rank additions to a folder.

Owns the naming inside such files: a whole version holds the model's tensors under their own names; an adapter holds
pairs as peft names them, `base_model.model.MODULE.lora_A.weight` [rank, in] and `lora_B.weight` [out, rank]. Tensors
that are one tensor in the model (a tied output head) stand in the file once; its metadata has {other name: name} under
"aliases", and `read_weights` gives them both names back. One entry of metadata, because safetensors writes several in
any order, and equal weights shall be equal bytes.

Invariants
    - What is returned has every name that the model has, or PolicyError is raised.
    - Files are mapped, not read into memory; tensors that need no arithmetic are views of the mapping.
    - Merged tensors are float32, whatever the folder's dtype: the trainer computes with float32 copies of the start
      policy, and only an engine knows to which dtype it must round.

Never: peft (engines need not have it), models, versions or digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trace_async.core.types import Adapter
from trace_async.errors import PolicyError

PREFIX, LOW, HIGH = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_ALIASES = "aliases"
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


class HasState(Protocol):
    """A torch module, as far as its tensors go."""

    def state_dict(self, *, keep_vars: bool = ...) -> Mapping[str, torch.Tensor]: ...


class _Stored(NamedTuple):
    """What a safetensors file holds."""

    tensors: dict[str, torch.Tensor]
    aliases: dict[str, str]  # further name -> name


def read_weights(path: Path, *, adapter: Adapter | None, base: Path) -> dict[str, torch.Tensor]:
    """The tensors of a published version under the model's own names, on the CPU; tied ones under each of their names.

    With `adapter` the file holds low-rank pairs, and the rest comes from `base`, the start policy's folder. The file
    must not be written to while the tensors are in use. Raises PolicyError when a file cannot be read or does not fit.
    """
    stored = _read(path)
    tensors = stored.tensors
    if adapter is not None:
        tensors = merge_pairs(read_folder(base), pairs=tensors, adapter=adapter, path=path)
    elif any(name.endswith(LOW) for name in tensors):
        raise PolicyError(f"{path} holds low-rank additions, but its version was not announced as an adapter")
    return with_aliases(tensors, stored.aliases)


def read_stored(path: Path) -> dict[str, torch.Tensor]:
    """What `write_weights` was given, without further names. Raises PolicyError when the file cannot be read."""
    return _read(path).tensors


def write_weights(path: Path, tensors: Mapping[str, torch.Tensor], *, aliases: Mapping[str, str]) -> None:
    """One safetensors file for `read_weights`; `aliases` are further names, {other name: name}."""
    whole = {name: _alone(tensor.detach()) for name, tensor in tensors.items()}
    save_file(whole, path, metadata={_ALIASES: json.dumps(dict(aliases), sort_keys=True)})


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a transformers folder under the names its files give them. Raises PolicyError without any."""
    tensors: dict[str, torch.Tensor] = {}
    for name in _file_names(folder):
        stored = _read(folder / name)
        tensors |= with_aliases(stored.tensors, stored.aliases)
    return tensors


def find_aliases(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """{other name: first name} of tensors that are one and the same in memory, in the mapping's order."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        kept = first.setdefault((tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if kept != name and tensor.numel():
            aliases[name] = kept
    return aliases


def merge_pairs(
    tensors: dict[str, torch.Tensor], *, pairs: Mapping[str, torch.Tensor], adapter: Adapter, path: Path
) -> dict[str, torch.Tensor]:
    """W + alpha / rank B A for every pair, in float32; the other tensors as they are.

    `tensors` are a policy folder's, `path` is where the pairs are from. Raises PolicyError where they do not fit.
    """
    modules = {name.removeprefix(PREFIX).removesuffix(LOW) for name in pairs if name.endswith(LOW)}
    expected = {f"{PREFIX}{module}{part}" for module in modules for part in (LOW, HIGH)}
    if not modules or expected != pairs.keys():
        raise PolicyError(
            f"{path} does not hold pairs of {LOW[1:]} and {HIGH[1:]}: {sorted(expected ^ pairs.keys())[:3]}"
        )
    for module in sorted(modules):
        low, high = pairs[f"{PREFIX}{module}{LOW}"], pairs[f"{PREFIX}{module}{HIGH}"]
        name = f"{module}.weight"
        weight = tensors.get(name)
        fits = weight is not None and weight.shape == (high.shape[0], low.shape[-1])
        if weight is None or not fits or low.shape[0] != adapter.rank or high.shape[1:] != (adapter.rank,):
            raise PolicyError(
                f"{path}: {[*high.shape]} x {[*low.shape]} of rank {adapter.rank} cannot be added to {name} "
                f"{'(not there)' if weight is None else [*weight.shape]} of the start policy; "
                "actors must have the same policy.path as the learner"
            )
        tensors[name] = torch.addmm(weight.float(), high.float(), low.float(), alpha=adapter.alpha / adapter.rank)
    return tensors


def with_aliases(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Every tensor that has two names under both; which of them was stored is the writer's choice."""
    found = dict(tensors)
    for name, kept in aliases.items():
        if kept in found:
            found[name] = found[kept]
        elif name in found:
            found[kept] = found[name]
    return found


def check_names(tensors: Mapping[str, torch.Tensor], model: HasState) -> None:
    """Raises PolicyError unless names and shapes are those of the model's state."""
    check_fit(tensors, model.state_dict(keep_vars=True))


def check_fit(found: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> None:
    """Raises PolicyError unless both have the same names and shapes; dtypes may differ."""
    missing, extra = sorted(own.keys() - found.keys()), sorted(found.keys() - own.keys())
    wrong = [
        f"{name} {[*found[name].shape]} instead of {[*own[name].shape]}"
        for name in sorted(own.keys() & found.keys())
        if own[name].shape != found[name].shape
    ]
    if missing or extra or wrong:
        raise PolicyError(
            f"the weights do not fit the model: missing {missing[:3]}, unexpected {extra[:3]}, other shapes {wrong[:3]}"
        )


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU and in a storage that nothing else is in, without a copy where it is already."""
    own = tensor.cpu().contiguous()
    return own.clone() if own.untyped_storage().nbytes() != own.nbytes else own


def _file_names(folder: Path) -> list[str]:
    """One file, or those that the folder's index names."""
    index = folder / _INDEX
    if not index.is_file():
        return [_WEIGHTS]
    try:
        names: set[str] = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PolicyError(f"{index} does not say which file holds which tensor: {error!r}") from error
    return sorted(names)


def _read(path: Path) -> _Stored:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            aliases = json.loads((file.metadata() or {}).get(_ALIASES, "{}"))
    except Exception as error:  # safetensors raises errors of its own, and OSError for what is no file
        raise PolicyError(f"{path} cannot be read as safetensors: {error}") from error
    return _Stored(tensors, aliases)
