"""Key/values of prefixes that were computed before, for one set of weights, each token once, bounded in bytes.

A tree of token stretches: a node holds the key/values of its own tokens, its ancestors hold those before, so siblings
share what they have in common. A node that is left by a new branch half-way is cut in two there. Keys are exact token
ids, so a hit can never be wrong about what it stands for. The owner clears the tree whenever the weights change:
key/values of old weights under new ones give tokens that match neither policy.

What goes first when room is needed: the least recently used *leaf*. An inner node serves every continuation below it
and none of them is of use without it, so it stays as long as any of them does; and since a lookup or a store touches
its whole path, the inner nodes of trees that still grow are younger than the leaves of trees that do not. A token costs
as much to compute again as its key/values take room, wherever it stands, so length decides nothing.

Never: a lock (the engine's one worker thread owns it), key/values of rows that run.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch


@dataclass(slots=True, eq=False)
class _Node:
    tokens: tuple[int, ...]
    keys_values: torch.Tensor  # [layers, 2, heads, tokens, head_dim]
    parent: _Node | None
    used: int  # time of the last use, in uses
    children: dict[int, _Node] = field(default_factory=dict)  # by first token


class PrefixCache:
    """Longest-prefix lookup over stored key/values, to the token."""

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clock = count(1)
        self.clear()

    def __len__(self) -> int:
        """Tokens stored."""
        return sum(len(node.tokens) for node in _below(self._root))

    def longest(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Key/values of the longest stored prefix of `tokens`, piece by piece: [layers, 2, heads, piece, head_dim]."""
        now, pieces, known = next(self._clock), [], 0
        node = self._root
        while (child := node.children.get(tokens[known]) if known < len(tokens) else None) is not None:
            shared = _shared(child.tokens, tokens, known)
            child.used = now
            pieces.append(child.keys_values[:, :, :, :shared])
            known += shared
            if shared < len(child.tokens):
                break
            node = child
        return pieces

    def store(self, tokens: Sequence[int], keys_values: torch.Tensor) -> None:
        """Keep a copy of what is not known yet of these tokens' key/values [layers, 2, heads, tokens, head_dim].

        Evicts until the bound holds again. Of tokens that are too many for the bound none are kept.
        """
        if not tokens or keys_values.numel() * keys_values.element_size() > self.max_bytes:
            return
        now, known = next(self._clock), 0
        node = self._root
        while known < len(tokens):
            child = node.children.get(tokens[known])
            if child is None:
                self._grow(node, tuple(tokens[known:]), keys_values[:, :, :, known : len(tokens)].clone(), now)
                break
            shared = _shared(child.tokens, tokens, known)
            known += shared
            if shared < len(child.tokens) and known < len(tokens):
                child = self._cut(child, shared)  # the lower part is not used here and stays as old as it is
            child.used = now
            node = child
        self._evict()

    def clear(self) -> None:
        """Forget everything; the weights have changed."""
        self.num_bytes = 0
        self._root = _Node((), torch.empty(0), None, 0)
        self._leaves: list[tuple[int, int, _Node]] = []  # heap; by time of use as it was when the entry was made

    def _grow(self, parent: _Node, tokens: tuple[int, ...], keys_values: torch.Tensor, now: int) -> _Node:
        node = _Node(tokens, keys_values, parent, now)
        parent.children[tokens[0]] = node
        self.num_bytes += _num_bytes(keys_values)
        self._note(node)
        return node

    def _cut(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; the upper part, of `length` tokens. Both are copies, or neither could be freed alone."""
        assert node.parent is not None
        upper = _Node(node.tokens[:length], node.keys_values[:, :, :, :length].clone(), node.parent, node.used)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.keys_values = node.tokens[length:], node.keys_values[:, :, :, length:].clone()
        node.parent = upper
        upper.children[node.tokens[0]] = node
        return upper

    def _note(self, leaf: _Node) -> None:
        heapq.heappush(self._leaves, (leaf.used, next(self._clock), leaf))

    def _evict(self) -> None:
        while self.num_bytes > self.max_bytes:
            noted, _, leaf = heapq.heappop(self._leaves)
            parent, first = leaf.parent, leaf.tokens[0]
            assert parent is not None
            if leaf.children or parent.children.get(first) is not leaf:
                continue  # inner: noted again when its last child goes; or gone already
            if leaf.used != noted:  # used since
                self._note(leaf)
                continue
            self.num_bytes -= _num_bytes(leaf.keys_values)
            del parent.children[first]
            if not parent.children and parent is not self._root:
                self._note(parent)


def _below(node: _Node) -> Iterator[_Node]:
    todo = [*node.children.values()]
    while todo:
        found = todo.pop()
        todo.extend(found.children.values())
        yield found


def _shared(own: tuple[int, ...], tokens: Sequence[int], start: int) -> int:
    """How many of a node's own tokens `tokens` goes along with from `start` on; at least one."""
    ahead = tuple(tokens[start : start + len(own)])
    if ahead == own[: len(ahead)]:
        return len(ahead)
    return next(place for place, (one, other) in enumerate(zip(own, ahead, strict=False)) if one != other)


def _num_bytes(keys_values: torch.Tensor) -> int:
    return keys_values.numel() * keys_values.element_size()
