"""Grows one tree: a coroutine per node, one TaskGroup per tree, no barrier.

Owns: the tasks of a tree and its environments. A node plays its turn, is scored, and its children start at once; no
node waits for a sibling. Declares what it needs of a scorer.
Invariants: a node's `Recoverable` error is caught here and nowhere else and makes it FAILED; every other error crosses
the TaskGroup. Reading the budget, spending it and starting the tasks has no `await` in between. A turn's seeds depend
on the node's path only. However a tree ends, each of its environments is closed.

Which of two concurrent turns ends first is up to timing, and an allocator may ask about the tree in between. With
`in_order` a tree plays one node at a time, in the order of their granting, so that the same turns give the same tree.

Environments by the branching they declare: with FORK and STATELESS every node below the prompt's children plays in a
fork of its parent's episode. With REPLAY and NONE a rollout hands one episode on from turn to turn; a continuation
(REPLAY only) replays its past in a fresh one. Each child of the prompt resets its own, and the first takes over the one
that was reset to read the prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from trace_async.acting.story import TreeStory, node_name
from trace_async.acting.turns import TurnPlayer, answered
from trace_async.core.nodes import Node
from trace_async.core.seeds import env_seed, node_seed
from trace_async.core.tree import TurnTree
from trace_async.core.types import (
    ROOT,
    SUCCESS_ABOVE,
    Failure,
    Grant,
    GrownBy,
    IntArray,
    Lease,
    NodeState,
    Prefix,
    Score,
    Turn,
)
from trace_async.environment import Branching, Environment, EnvironmentFactory
from trace_async.errors import (
    EnvironmentFailure,
    EnvironmentTimeout,
    InvariantError,
    PredictorError,
    Recoverable,
    TraceAsyncError,
)
from trace_async.methods.allocators import Allocator

log = logging.getLogger(__name__)

CLOSE_DEADLINE_S = 10.0
"""For the closing of one environment: a sandbox that does not go must not hold a finished tree back."""

MAX_FAILURE_CHARS = 500
"""Of an error's text that travel with a failed node."""


class Scorer(Protocol):
    """Predicts success at prefixes."""

    async def score(self, prefix: Prefix) -> Score:
        """Raises PredictorError when no score can be had."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthParts:
    """What trees are grown with; one per actor, shared by its trees."""

    player: TurnPlayer
    make_environment: EnvironmentFactory
    make_allocator: Callable[[Lease], Allocator]  # a fresh one for each tree
    scorer: Scorer
    score_deadline_s: float
    max_turns: int  # per rollout; the player's own
    in_order: bool = False  # one node of a tree at a time
    success_above: float = SUCCESS_ABOVE  # an outcome above it is a success


async def grow_tree(lease: Lease, *, parts: GrowthParts, story: TreeStory) -> TurnTree:
    """Open the lease's prompt and grow its tree to the end.

    Raises: EnvironmentFailure when the prompt cannot be opened, so that there is no tree; in an ExceptionGroup every
    error of a node that is not Recoverable; InvariantError when the tree is not complete.
    """
    opening = parts.make_environment()
    environments = {ROOT: opening}
    try:
        prompt_ids = await parts.player.open(
            opening, lease.task, seed=_environment_seed(lease, (0,)), what=f"{lease.lease_id} prompt"
        )
        tree = TurnTree(
            tree_id=lease.lease_id,
            prompt_id=lease.prompt_id,
            prompt_ids=prompt_ids,
            budget=lease.budget,
            can_branch=opening.branching is not Branching.NONE,
            max_turns=parts.max_turns,
            success_above=parts.success_above,
        )
        async with asyncio.TaskGroup() as group:
            growth = _Growth(tree, lease=lease, parts=parts, story=story, environments=environments, group=group)
            growth.spawn(growth.allocator.start(tree))
            story.leave(ROOT)
    finally:
        story.enter(ROOT, "environment")
        await close_environments(environments.values(), what=lease.lease_id)
    _finish(tree)
    return tree


def _finish(tree: TurnTree) -> None:
    for node in tree.nodes[1:]:
        if node.state is NodeState.EXPANDED and not node.children:
            tree.close(node.node_id)
    if not tree.is_complete:
        waiting = [n.node_id for n in tree.nodes if n.state in (NodeState.GROWING, NodeState.UNSCORED)]
        raise InvariantError(f"tree {tree.tree_id}: every task ended and nodes {waiting} still wait")


class _Growth:
    """One growing tree: the coroutine of a node, and what the nodes share."""

    def __init__(
        self,
        tree: TurnTree,
        *,
        lease: Lease,
        parts: GrowthParts,
        story: TreeStory,
        environments: dict[int, Environment],
        group: asyncio.TaskGroup,
    ) -> None:
        self.allocator = parts.make_allocator(lease)
        self._tree = tree
        self._lease = lease
        self._parts = parts
        self._story = story
        self._environments = environments  # by the node whose turn they have played; ROOT: the opening one
        self._group = group
        self._branching = environments[ROOT].branching
        # a node waits for the one granted before it, whose own waits all have deadlines
        self._in_turn = asyncio.Lock() if parts.in_order else nullcontext()
        self._rewards = {ROOT: 0.0}  # along the path, by node
        self._prefixes: dict[int, IntArray] = {}  # of scored nodes whose rollout is about to go on

    def spawn(self, grants: Iterable[Grant]) -> None:
        """Spend the budget and start one task per child; no await, so no other node comes in between."""
        for grant in grants:
            for node_id in self._tree.grant(grant):
                name = node_name(self._tree.tree_id, node_id)
                self._story.enter(node_id, "environment")
                self._group.create_task(self._grow(node_id, name), name=name)

    async def _grow(self, node_id: int, name: str) -> None:
        """One node: play, score, spawn; then let go of what it holds."""
        async with self._in_turn:
            await self._grow_now(node_id, name)
        if self._tree.nodes[node_id].state is not NodeState.EXPANDED and node_id in self._environments:
            # Nothing grows below an end, and a sandbox is not held longer than it is needed.
            self._story.enter(node_id, "environment")
            await close_environments([self._environments[node_id]], what=name)
            del self._environments[node_id]
        self._story.leave(node_id)

    async def _grow_now(self, node_id: int, name: str) -> None:
        """Waits for environment, engine and scorer, all with deadlines."""
        tree, story = self._tree, self._story
        try:
            turn = await self._play(tree.nodes[node_id], name)
            story.played(turn)
            if tree.record_turn(node_id, turn) is NodeState.LEAF:
                grants = self.allocator.on_rollout_end(tree, node_id)
            else:
                story.enter(node_id, "score")
                tree.record_score(node_id, await self._score(node_id, name))
                grants = self.allocator.on_turn(tree, node_id)
        except Recoverable as error:
            tree.fail(node_id, _failure(node_id, error))
            story.failed()
            grants = self.allocator.on_rollout_end(tree, node_id)
        self.spawn(grants)

    async def _play(self, node: Node, name: str) -> Turn:
        lease, node_id, path = self._lease, node.node_id, self._tree.path(node.node_id)
        environment = await self._environment(node, path, name)
        reward_so_far = self._rewards[node.parent]
        prefix_ids = self._prefixes.pop(node.parent, None)
        turn = await self._parts.player.play(
            env=environment,
            prefix_ids=self._tree.prefix_ids(node.parent) if prefix_ids is None else prefix_ids,
            depth=node.depth,
            reward_so_far=reward_so_far,
            seed=node_seed(lease.seed, lease.prompt_id, lease.round_index, path),
            request_id=name,
            on_phase=partial(self._story.enter, node_id),
        )
        self._rewards[node_id] = reward_so_far + turn.reward
        return turn

    async def _environment(self, node: Node, path: tuple[int, ...], name: str) -> Environment:
        """The episode in the state before the node's turn, booked under the node so that it is closed in any case."""
        held, node_id = self._environments, node.node_id
        if node.parent == ROOT:
            if node.child_number == 0:
                held[node_id] = held.pop(ROOT)
            else:
                await self._reset(node_id, path, name)
        elif self._branching in (Branching.FORK, Branching.STATELESS):
            seed = _environment_seed(self._lease, path)
            held[node_id] = await self._parts.player.fork(held[node.parent], seed=seed, what=name)
        elif node.grown_by is GrownBy.CHAIN:
            held[node_id] = held.pop(node.parent)
        else:
            await self._replay(node_id, path, name)
        return held[node_id]

    async def _reset(self, node_id: int, path: tuple[int, ...], name: str) -> None:
        """A fresh episode with the randomness of the prompt's child on `path`, which must open as the prompt did."""
        environment = self._environments[node_id] = self._parts.make_environment()
        seed = _environment_seed(self._lease, path[:1])
        prompt_ids = await self._parts.player.open(environment, self._lease.task, seed=seed, what=name)
        if not np.array_equal(prompt_ids, self._tree.prompt_ids):
            raise EnvironmentFailure(
                f"{name}: task {self._lease.task.task_id} opened with {prompt_ids.size} tokens that differ from the "
                f"prompt's {self._tree.prompt_ids.size}; an opening may depend on the task only, not on the seed"
            )

    async def _replay(self, node_id: int, path: tuple[int, ...], name: str) -> None:
        """A fresh episode that has played every turn above the node."""
        await self._reset(node_id, path, name)
        for above in reversed(self._tree.ancestors(node_id)):
            turn = self._tree.nodes[above].turn
            if turn is not None:  # the prompt has none
                await self._parts.player.replay(self._environments[node_id], turn, what=name)

    async def _score(self, node_id: int, name: str) -> Score:
        tree, parts = self._tree, self._parts
        prefix_ids = self._prefixes[node_id] = tree.prefix_ids(node_id)
        prefix = Prefix(prompt_id=tree.prompt_id, turn_index=tree.nodes[node_id].depth, token_ids=prefix_ids)
        return await answered(
            parts.scorer.score(prefix),
            deadline_s=parts.score_deadline_s,
            failure=PredictorError,
            late=PredictorError,
            what=f"{name}: score",
        )


async def close_environments(environments: Iterable[Environment], *, what: str) -> None:
    """Close each; one that fails or is late is logged and left, since a turn that is recorded cannot fail any more.

    Cancellation, and an error that is not Recoverable, wait until all were asked to close.
    """
    interrupted: asyncio.CancelledError | TraceAsyncError | None = None
    for environment in list(environments):
        try:
            await answered(
                environment.close(),
                deadline_s=CLOSE_DEADLINE_S,
                failure=EnvironmentFailure,
                late=EnvironmentTimeout,
                what=f"{what}: close",
            )
        except Recoverable as error:
            log.warning("environment %s was left open: %s", environment.name, error)
        except (asyncio.CancelledError, TraceAsyncError) as error:
            interrupted = error
    if interrupted is not None:
        raise interrupted


def _environment_seed(lease: Lease, path: tuple[int, ...]) -> int:
    return env_seed(lease.seed, lease.prompt_id, lease.round_index, path)


def _failure(node_id: int, error: Recoverable) -> Failure:
    return Failure(node_id=node_id, kind=type(error).__name__, message=str(error)[:MAX_FAILURE_CHARS])
