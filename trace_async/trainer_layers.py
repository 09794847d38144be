"""What is done to the decoder layers of a model before it is trained: dtype, activation checkpointing, sharding.

Invariants
    - Parameters stay float32, whatever the layers compute in: the optimizer moves float32 weights. Embeddings, the last
      norm and the output head compute in float32, and so does what flows between layers.
    - Names in `state_dict` and `named_modules` do not change.
    - A sharded model runs by calling it, never a part of it: the root's parameters are there during that call only.

One process computes in bfloat16 by running each layer on rounded copies of its weights, rather than under autocast:
that is what FSDP2 does with several processes and what engines in bfloat16 do, so all three round alike.
Never: losses, optimizers, communication of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache

from trace_async.errors import ConfigError


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The layers of a decoder: the outermost list of modules that has the most parameters.

    Raises ConfigError for a model without such a list.
    """
    found: list[tuple[int, torch.nn.ModuleList]] = []
    todo = [model]
    while todo:
        for child in todo.pop().children():
            if isinstance(child, torch.nn.ModuleList):
                found.append((sum(parameter.numel() for parameter in child.parameters()), child))
            else:
                todo.append(child)
    if not found:
        raise ConfigError(
            f"{type(model).__name__} keeps its layers in no torch.nn.ModuleList, so they cannot be told apart: set "
            "learner.compute_dtype = 'float32' and learner.activation_checkpointing = false, and train in one process"
        )
    return list(max(found, key=lambda sized: sized[0])[1])


def recompute_activations(model: torch.nn.Module) -> None:
    """Keep only the inputs of each layer for the backward pass, and compute what is inside once more there.

    Layers get no key/value cache from now on, which the second pass would fill a second time.
    """
    for layer in decoder_layers(model):
        _replace_forward(layer, partial(_recomputed, layer.forward))


def compute_in(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let each layer compute in `dtype`, on copies of its weights and inputs; what it returns is float32 again."""
    for layer in decoder_layers(model):
        _replace_forward(layer, partial(_rounded, _Holding(layer), dtype))


def shard(model: torch.nn.Module, *, mesh: Any, dtype: torch.dtype) -> None:
    """FSDP2: every layer and what is left at the root keep a share of each parameter in each process of `mesh`.

    Layers compute in `dtype` as with `compute_in`; gradients are averaged over processes in float32. The model must be
    the same in every process, and is moved to the mesh's devices.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rounded = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if dtype is torch.float32 else rounded
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)


def _replace_forward(module: Any, forward: Callable[..., Any]) -> None:
    module.forward = forward  # in place of the class's, so that no wrapper changes the names of parameters


def _recomputed(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    args, options = _without_cache(args), _without_cache(options)
    # there is no dropout, so no generator needs to be put back before the second pass
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **options)


class _Holding(torch.nn.Module):
    """Runs a layer's own forward, while `functional_call` has other weights in the layer's place."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._own = layer.forward

    def forward(self, *args: Any, **options: Any) -> Any:
        return self._own(*args, **options)


def _rounded(holding: _Holding, dtype: torch.dtype, *args: Any, **options: Any) -> Any:
    weights = {name: parameter.to(dtype) for name, parameter in holding.named_parameters()}
    found = torch.func.functional_call(holding, weights, _cast(args, dtype), _cast(options, dtype))
    return _cast(found, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors inside tuples, lists and dicts in another dtype; everything else as it is."""
    return _walk(value, lambda leaf: leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf)


def _without_cache(value: Any) -> Any:
    return _walk(value, lambda leaf: None if isinstance(leaf, Cache) else leaf)


def _walk(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in (tuple, list):
        return type(value)(_walk(inner, change) for inner in value)
    if type(value) is dict:
        return {name: _walk(inner, change) for name, inner in value.items()}
    return change(value)
