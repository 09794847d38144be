"""Trees to train on, made from nothing: how much of their paths is shared is what differs.

    single    one rollout per prompt: nothing is shared
    roots     independent rollouts of one prompt: only the prompt is shared
    trace     rollouts, and continuations from random turns along them, as growing trees have
    deep      one long stem, from which many short branches go out
    comb      a long path with a branch at each turn

Turns have 4 to 36 sampled tokens and replies of 4 to 24. Every turn is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trace_async.core.rows import PackItem, plan_rows
from trace_async.core.tree_pieces import cut_tree
from trace_async.core.types import Group, GrownBy, IntArray, NodeState, Score, TreeBudget, TurnCredit, Verdict

_SAMPLED, _REPLY = (4, 37), (4, 25)  # tokens of a turn, from and up to but not including


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One kind of tree."""

    name: str
    prompt: int  # tokens
    parents: Callable[[np.random.Generator], list[int]]  # of each turn; -1 for the prompt


class Sizes(NamedTuple):
    """Tokens of some trees in both layouts, padding not counted."""

    rows: int
    unique: int

    @property
    def sharing(self) -> float:
        """Tokens of path rows for each token of packed trees."""
        return self.rows / self.unique


def _rollouts(count: int, turns: int) -> list[int]:
    return [-1 if turn == 0 else root * turns + turn - 1 for root in range(count) for turn in range(turns)]


def _trace(roots: int, turns: int, continuations: int) -> Callable[[np.random.Generator], list[int]]:
    def parents(rng: np.random.Generator) -> list[int]:
        found = _rollouts(roots, turns)
        depth = [turn % turns + 1 for turn in range(roots * turns)]
        for _ in range(continuations):
            anchor = int(rng.choice([turn for turn, at in enumerate(depth) if at < turns]))
            for level in range(depth[anchor] + 1, turns + 1):
                found.append(anchor)
                depth.append(level)
                anchor = len(found) - 1
        return found

    return parents


def _deep(stem: int, branches: int, turns: int) -> Callable[[np.random.Generator], list[int]]:
    def parents(_: np.random.Generator) -> list[int]:
        found = _rollouts(1, stem)
        for _branch in range(branches):
            found += [stem - 1, *range(len(found), len(found) + turns - 1)]
        return found

    return parents


def _comb(turns: int) -> Callable[[np.random.Generator], list[int]]:
    def parents(_: np.random.Generator) -> list[int]:
        return [*_rollouts(1, turns), *range(turns - 1)]

    return parents


SHAPES = (
    Shape(name="single", prompt=80, parents=lambda rng: _rollouts(1, 6)),
    Shape(name="roots", prompt=120, parents=lambda rng: _rollouts(8, 4)),
    Shape(name="trace", prompt=120, parents=_trace(6, 5, 10)),
    Shape(name="trace wide", prompt=160, parents=_trace(4, 6, 28)),
    Shape(name="deep", prompt=160, parents=_deep(8, 8, 2)),
    Shape(name="deep wide", prompt=200, parents=_deep(12, 16, 2)),
    Shape(name="comb", prompt=120, parents=_comb(16)),
)


def make_items(shape: Shape, *, tokens: int, vocabulary: int, seed: int) -> list[PackItem]:
    """Trees of this shape until they have at least `tokens` unique tokens."""
    rng = np.random.default_rng(seed)
    items: list[PackItem] = []
    while not items or sizes(items).unique < tokens:
        items.append(_item(f"group-{len(items)}", shape, vocabulary, rng))
    return items


def sizes(items: Sequence[PackItem]) -> Sizes:
    """Of both layouts."""
    rows = sum(row.length for index, item in enumerate(items) for row in plan_rows(item, index))
    unbounded = 1 << 40
    unique = sum(piece.length for index, item in enumerate(items) for piece in cut_tree(item, index, bound=unbounded))
    return Sizes(rows, unique)


def _item(name: str, shape: Shape, vocabulary: int, rng: np.random.Generator) -> PackItem:
    parent = np.array(shape.parents(rng), np.int32)
    turns = parent.size
    inner = np.isin(np.arange(turns), parent)
    actions = rng.integers(*_SAMPLED, turns).astype(np.int32)
    replies = np.where(inner, rng.integers(*_REPLY, turns), 0).astype(np.int32)
    group = Group(
        group_id=name,
        lease_id=name,
        actor_id="benchmark",
        epoch=1,
        prompt_id=name,
        environment="benchmark",
        budget=TreeBudget(roots=int((parent < 0).sum()), continuations=0),
        root_score=Score(success=0.5, predictor_version=0),
        prompt_ids=_tokens(rng, shape.prompt, vocabulary),
        parent=parent,
        action_lengths=actions,
        observation_lengths=replies,
        token_ids=_tokens(rng, int((actions + replies).sum()), vocabulary),
        logprobs=np.full(int(actions.sum()), -1.0, np.float32),
        **_constants(turns, inner, rng),
    )
    credit = TurnCredit(
        value=np.full(turns, 0.5, np.float32),
        advantage=rng.choice(np.array([-1.0, 1.0], np.float32), turns),
        mass=np.ones(turns, np.float32),
    )
    verdicts = np.full(turns, Verdict.TRAIN, np.uint8)
    return PackItem(group=group, credit=credit, verdicts=verdicts, ages=np.zeros(turns, np.int32))


def _tokens(rng: np.random.Generator, count: int, vocabulary: int) -> IntArray:
    return rng.integers(0, vocabulary, count).astype(np.int32)


def _constants(turns: int, inner: NDArray[np.bool_], rng: np.random.Generator) -> dict[str, Any]:
    integers = ("version_min", "version_max", "kv_version_min", "score_version")
    floats = ("score", "reward", "process_score", "generate_s", "environment_s")
    return {
        **{name: np.zeros(turns, np.int32) for name in integers},
        **{name: np.zeros(turns, np.float32) for name in floats},
        "outcome": np.where(inner, np.nan, rng.integers(0, 2, turns)).astype(np.float32),
        "state": np.where(inner, NodeState.EXPANDED, NodeState.LEAF).astype(np.uint8),
        "grown_by": np.full(turns, GrownBy.CHAIN, np.uint8),
        "stop": np.zeros(turns, np.uint8),
        "valid": np.ones(turns, np.uint8),
    }
