"""Rollouts in this process for the staleness study: trees and held-out chains, every rollout of a round in one batch.

The same environment, renderer, trees, allocators, predictor and forward passes as an actor's, without its tasks: each
pass gives every running turn a token, and a rollout keeps its row, with its key/values, from turn to turn. Which turn
ends first depends on tokens only, so what grows where depends on seeds and weights only.

Never: trains, or decides with which weights.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from benchmarks.staleness_decoder import PaddedDecoder
from trace_async.acting.turns import Started
from trace_async.app import wiring
from trace_async.config import Config
from trace_async.core.group import cut_group
from trace_async.core.outcomes import is_success
from trace_async.core.seeds import env_seed, node_seed
from trace_async.core.tree import TurnTree
from trace_async.core.types import (
    Grant,
    Group,
    IntArray,
    Lease,
    NodeState,
    Prefix,
    Score,
    StopReason,
    Task,
    TreeBudget,
    Turn,
)
from trace_async.engines import llama_weights
from trace_async.engines.batched_model import BatchedModel, load_model
from trace_async.engines.rows import Row
from trace_async.environment import Environment
from trace_async.methods.allocators import Allocator, UniformAllocator
from trace_async.predictors.protocol import Predictor
from trace_async.rendering import load_renderer

T = TypeVar("T")

MAX_ROWS = 512
"""Rollouts of a round, and held-out tasks of one call, at most."""

MAX_TOKENS = 72
"""Of a path: 17 of a 4 x 4 map, and 8 turns of 4 sampled tokens and 2 of a reply."""

EVALUATION_SEED = 20_261_130
_NO_IDS: IntArray = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class _Live:
    """One tree that grows."""

    lease: Lease
    tree: TurnTree
    allocator: Allocator
    greedy: bool
    opening: Environment
    environments: dict[int, Environment] = field(default_factory=dict)  # after the node's turn
    rows: dict[int, Row] = field(default_factory=dict)  # of nodes that may go on
    waiting: list[int] = field(default_factory=list)  # nodes whose turn comes next


class _Playing(NamedTuple):
    """One turn that is being sampled."""

    live: _Live
    node_id: int
    row: Row


class Rollouts:
    """Plays with one set of weights at a time."""

    def __init__(self, config: Config, *, predictor: Predictor) -> None:
        folder = wiring.policy_path(config.policy.path)
        self.kit = wiring.build_kit(config)
        self.renderer = load_renderer(folder)
        self.version = 0
        self._config = config
        self._predictor = predictor
        self._stops = frozenset(self.renderer.stop_ids)
        model = load_model(folder, threads=1, device=torch.device("cpu"), dtype=config.engine.dtype)
        self._model = BatchedModel(
            model,
            pad_id=self.renderer.pad_id,
            temperature=config.engine.temperature,
            dtype=config.engine.dtype,
            max_rows=MAX_ROWS,
            max_tokens=MAX_TOKENS,
            prefix_cache_bytes=0,
        )
        self._model.decoder = PaddedDecoder(llama_weights.join(model), max_rows=MAX_ROWS, max_tokens=MAX_TOKENS)

    def take_over(self, tensors: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Sample with these weights from now on."""
        self._model.take_over(tensors)
        self.version = version

    def grow(self, leases: Sequence[Lease]) -> list[Group]:
        """The leases' trees, grown by the configured allocator."""
        self._model.decoder.clear()
        live = [self._open(lease, wiring.build_allocator(self._config, lease), greedy=False) for lease in leases]
        self._play(live)
        return [
            cut_group(one.tree, lease=one.lease, actor_id="study", environment="frozenlake", epoch=1) for one in live
        ]

    def success(self, tasks: Sequence[Task], *, greedy: bool) -> float:
        """Share of the tasks whose chain succeeds; the same draws whenever it is asked."""
        self._model.decoder.clear()
        live = [self._open(_chain_lease(task), UniformAllocator(), greedy=greedy) for task in tasks]
        self._play(live)
        self._model.decoder.clear()
        outcomes = [node.turn.outcome for one in live for node in one.tree.nodes[1:] if node.turn is not None]
        return float(is_success(outcomes, self._config.environment.success_above).sum()) / len(live)

    # ---- one wave after the other --------------------------------------------------------------------------------

    def _open(self, lease: Lease, allocator: Allocator, *, greedy: bool) -> _Live:
        opening = self.kit.make_environment()
        messages = now(opening.reset(lease.task, seed=_environment_seed(lease, (0,))))
        tree = TurnTree(
            tree_id=lease.lease_id,
            prompt_id=lease.prompt_id,
            prompt_ids=self.renderer.opening_ids(messages),
            budget=lease.budget,
            can_branch=True,
            max_turns=self._config.tree.max_turns,
            success_above=self._config.environment.success_above,
        )
        live = _Live(lease=lease, tree=tree, allocator=allocator, greedy=greedy, opening=opening)
        _spend(live, allocator.start(tree))
        return live

    def _play(self, trees: Sequence[_Live]) -> None:
        playing: list[_Playing] = []
        while True:
            playing += [self._start(live, node_id) for live in trees for node_id in _take(live.waiting)]
            if not playing:
                break
            self._model.advance([one.row for one in playing])
            ended = [one for one in playing if self._turn_ended(one.row)]
            playing = [one for one in playing if not self._turn_ended(one.row)]
            for one in ended:
                if self._record(one) is NodeState.LEAF:
                    self._model.leave(one.row)
                    _spend(one.live, one.live.allocator.on_rollout_end(one.live.tree, one.node_id))
            self._score([one for one in ended if one.live.tree.nodes[one.node_id].state is NodeState.UNSCORED])

    def _start(self, live: _Live, node_id: int) -> _Playing:
        """The node's turn is to be sampled: its parent's row goes on where it is a chain, else a new one starts."""
        node, lease = live.tree.nodes[node_id], live.lease
        seed = node_seed(lease.seed, lease.prompt_id, lease.round_index, live.tree.path(node_id))
        row = live.rows.pop(node.parent, None)
        if row is None:
            tokens = live.tree.prefix_ids(node.parent).tolist()
            row = Row(tokens=tokens, num_prefix=len(tokens), seed=seed, greedy=live.greedy)
        else:
            row.seed, row.num_prefix, row.logprobs = seed, len(row.tokens), []
        return _Playing(live, node_id, row)

    def _turn_ended(self, row: Row) -> bool:
        return row.tokens[-1] in self._stops or len(row.logprobs) >= self._config.engine.max_turn_tokens

    def _record(self, one: _Playing) -> NodeState:
        live, node_id, row = one
        node, lease = live.tree.nodes[node_id], live.lease
        path = live.tree.path(node_id)
        before = live.environments.get(node.parent)
        if before is None:
            environment = self.kit.make_environment()
            now(environment.reset(lease.task, seed=_environment_seed(lease, path[:1])))
        else:
            environment = now(before.fork(seed=_environment_seed(lease, path)))
        sampled = np.asarray(row.sampled, np.int32)
        result = now(environment.step(self.renderer.text(sampled)))
        closed = row.tokens[-1] in self._stops
        ended = result.terminated or result.truncated
        reply = _NO_IDS if ended else self.renderer.reply_ids(result.messages, closed=closed)
        turn = Turn(
            action_ids=sampled,
            action_logprobs=np.asarray(row.logprobs, np.float32),
            observation_ids=reply,
            version_min=self.version,
            version_max=self.version,
            kv_version_min=self.version,
            stop=StopReason.STOP if closed else StopReason.LENGTH,
            valid=result.valid,
            reward=result.reward,
            outcome=result.reward if ended else math.nan,  # FrozenLake pays at the end only
        )
        live.environments[node_id] = environment
        state = live.tree.record_turn(node_id, turn)
        if state is not NodeState.LEAF:
            row.tokens += reply.tolist()
            live.rows[node_id] = row
        return state

    def _score(self, scored: Sequence[_Playing]) -> None:
        prefixes = [
            Prefix(
                prompt_id=live.tree.prompt_id,
                turn_index=live.tree.nodes[node_id].depth,
                token_ids=np.asarray(row.tokens, np.int32),
            )
            for live, node_id, row in scored
        ]
        success = self._predictor.predict(prefixes).tolist() if prefixes else []
        for (live, node_id, _), found in zip(scored, success, strict=True):
            live.tree.record_score(node_id, Score(success=found, predictor_version=self.version))
            _spend(live, live.allocator.on_turn(live.tree, node_id))


def now(call: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as those of FrozenLake do not."""
    started = Started(call)
    if not started.is_over:
        raise RuntimeError("an environment of this study waits; play it with an actor instead")
    return started.result


def _take(waiting: list[int]) -> list[int]:
    taken, waiting[:] = list(waiting), []
    return taken


def _spend(live: _Live, grants: Sequence[Grant]) -> None:
    for grant in grants:
        live.waiting += live.tree.grant(grant)


def _chain_lease(task: Task) -> Lease:
    return Lease(
        lease_id=f"heldout-{task.task_id}",
        prompt_id=task.task_id,
        task=task,
        budget=TreeBudget(roots=1, continuations=0),
        seed=EVALUATION_SEED,
        round_index=0,
        attempt=0,
        issued_version=0,
        deadline_s=math.inf,
        root_score=Score(success=math.nan, predictor_version=0),
    )


def _environment_seed(lease: Lease, path: tuple[int, ...]) -> int:
    return env_seed(lease.seed, lease.prompt_id, lease.round_index, path)
