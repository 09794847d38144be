"""Attention over packed trees, as an attention function of transformers: each token sees its path and nothing else.

A model takes part when its attention goes through transformers' attention interface with `sdpa` and hands on keyword
arguments, as standard decoders do. It then runs with `NAME` instead: without a `tree` argument that is `sdpa` to the
bit; with one, chains (`core/tree_packing.py`) attend one after the other to the keys of their path. So the cost is that
of the pairs that see each other, whatever else is in the row, and no mask of all pairs is ever made. The backward pass
gathers and computes again per chain; only queries, keys, values and outputs are kept, each token's once.

On CUDA one FlexAttention call with a block mask does the same. FlexAttention has no backward pass on CPU, which is why
it is not used there. The CUDA path has not been run on any device yet.

Never: weights, positions (the model applies them), layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from trace_async.core.tree_packing import Chain, TreeBatch, find_chains, joined

NAME = "trace_async_trees"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_BLOCK_QUERIES = 128  # of a chain at a time: bounds the mask and the pairs that are computed and hidden


class Block(NamedTuple):
    """Some neighbours of a chain, and what the last of them sees: runs (start, end), from the prompt on."""

    start: int
    end: int
    runs: tuple[tuple[int, int], ...]
    length: int  # tokens in the runs


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePlan:
    """Who sees whom in one packed row."""

    blocks: tuple[Block, ...]
    longest: int  # tokens on a path
    subtree_end: Tensor  # i64 [T] on the model's device
    cached: dict[object, Any] = field(default_factory=dict)  # masks, for all layers


def make_plan(batch: TreeBatch, device: torch.device) -> TreePlan:
    """The plan of one batch."""
    return TreePlan(
        blocks=tuple(block for chain in find_chains(batch) for block in _blocks(chain)),
        longest=int(batch.positions.max()) + 1,
        subtree_end=torch.from_numpy(batch.subtree_end[0]).to(device),
    )


def use_tree_attention(model: Any) -> bool:
    """Make `model` understand the `tree` argument; False, and no change, when its attention is not `sdpa` (or this)."""
    if getattr(model.config, "_attn_implementation", None) not in ("sdpa", NAME):
        return False
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def leave_tree_attention(model: Any) -> None:
    """Undo `use_tree_attention`."""
    model.set_attn_implementation("sdpa")


def _blocks(chain: Chain) -> Iterator[Block]:
    for start in range(chain.start, chain.end, _BLOCK_QUERIES):
        end = min(start + _BLOCK_QUERIES, chain.end)
        runs = joined(chain.above, (chain.start, end))
        yield Block(start, end, runs, sum(last - first for first, last in runs))


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree: TreePlan | None = None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """[1, heads, T, width] each, fewer heads of keys and values; returns [1, T, heads, width].

    Raises ValueError for what packed trees cannot do.
    """
    if tree is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    refused = [name for name in ("softcap", "s_aux", "position_bias", "dropout") if options.get(name)]
    if refused or (options.get("sliding_window") or tree.longest) < tree.longest:
        raise ValueError(f"packed trees of paths of {tree.longest} tokens: attention with {refused or 'a window'}")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if query.is_cuda:
        return _flex(query, key, value, tree, scale).transpose(1, 2), None
    return _chain_attention(query, key, value, tree, scale).transpose(1, 2), None


class _ChainAttention(torch.autograd.Function):
    """The kernels are those of `scaled_dot_product_attention`, called by name for the sums that they need again."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, scale: float) -> Tensor:
        _, heads, tokens, _ = query.shape
        groups = heads // key.shape[1]
        query = _grouped(query, groups)
        out = query.new_empty(groups, tokens, key.shape[1], value.shape[-1]).transpose(1, 2)
        sums = []
        for block in tree.blocks:
            own = query[:, :, block.start : block.end]
            keys, values = _path(key, block, groups), _path(value, block, groups)
            mask = _path_mask(tree, query, block)
            out[:, :, block.start : block.end], part = _FORWARD(own, keys, values, attn_mask=mask, scale=scale)
            sums.append(part)
        ctx.save_for_backward(query, key, value, out, *sums)
        ctx.tree, ctx.scale = tree, scale
        return _ungrouped(out)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *sums = ctx.saved_tensors
        groups = query.shape[0]
        slope = _grouped(slope, groups)
        d_query, d_key, d_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for block, part in zip(ctx.tree.blocks, sums, strict=True):
            here = slice(block.start, block.end)
            d_query[:, :, here], d_keys, d_values = _BACKWARD(
                slope[:, :, here],
                query[:, :, here],
                _path(key, block, groups),
                _path(value, block, groups),
                out[:, :, here],
                part,
                0.0,
                False,
                attn_mask=_path_mask(ctx.tree, query, block),
                scale=ctx.scale,
            )
            _add_path(d_key, block, d_keys)
            _add_path(d_value, block, d_values)
        return _ungrouped(d_query), d_key, d_value, None, None


_chain_attention: Callable[..., Tensor] = _ChainAttention.apply


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[groups, heads of keys, T, width] from [1, heads, T, width]: as a batch, heads that share keys need no copies."""
    return tensor.reshape(-1, groups, *tensor.shape[2:]).transpose(0, 1)


def _ungrouped(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).flatten(0, 1)[None]


def _path_mask(tree: TreePlan, like: Tensor, block: Block) -> Tensor:
    """[n, path] of `like`'s type, additive: the last n tokens of a path see those before them and themselves.

    A view: all of them are parts of one staircase.
    """
    stairs = tree.cached.get((like.dtype, like.device))
    if stairs is None:
        shape = (_BLOCK_QUERIES, tree.longest + _BLOCK_QUERIES)
        stairs = torch.full(shape, -torch.inf, dtype=like.dtype, device=like.device).triu(tree.longest + 1)
        tree.cached[(like.dtype, like.device)] = stairs
    count = block.end - block.start
    start = tree.longest - (block.length - count)
    found: Tensor = stairs[:count, start : start + block.length]
    return found


def _path(tensor: Tensor, block: Block, groups: int) -> Tensor:
    """[groups, heads, path, width], the same for each group."""
    parts = [tensor[:, :, start:end] for start, end in block.runs]
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).expand(groups, -1, -1, -1)


def _add_path(total: Tensor, block: Block, part: Tensor) -> None:
    if part.shape[0] > 1:
        part = part.sum(0, keepdim=True)
    offset = 0
    for start, end in block.runs:
        total[:, :, start:end] += part[:, :, offset : offset + end - start]
        offset += end - start


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def _flex(query: Tensor, key: Tensor, value: Tensor, tree: TreePlan, scale: float) -> Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = tree.cached.get("flex")
    if mask is None:
        end, tokens = tree.subtree_end, query.shape[2]

        def visible(_batch: Tensor, _head: Tensor, to: Tensor, of: Tensor) -> Tensor:
            return (of <= to) & (to < end[of])

        mask = tree.cached["flex"] = create_block_mask(visible, None, None, tokens, tokens, device=query.device)
    return _compiled_flex()(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)  # type: ignore[no-any-return]
