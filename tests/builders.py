"""Hand-made and random trees and groups for everybody's tests, grown through the tree's own doors.

Three ways, from explicit to random:
    group_from_spec((spec(spec(outcome=1.0), spec(outcome=0.0)), spec(outcome=0.0)))   one tree, turn by turn
    chain_group((1.0, 0.0), turns=3)                                                 independent chains
    random_group(np.random.default_rng(0))                                           any legal tree

Turns of a spec are numbered in pre-order, as they are written down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trace_async.core.group import cut_group
from trace_async.core.tree import TurnTree
from trace_async.core.types import (
    ROOT,
    SUCCESS_ABOVE,
    Failure,
    Grant,
    Group,
    GrownBy,
    IntArray,
    Lease,
    NodeState,
    Score,
    StopReason,
    Task,
    TreeBudget,
    Turn,
)

NAN = float("nan")
PROMPT_IDS: IntArray = np.array([101, 102, 103], np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpec:
    """One turn as a test writes it down, with the turns below it.

    A turn with neither outcome nor children is CLOSED. `grown_by` None: ROOT below the prompt, CHAIN for the first
    child of a turn, CONTINUATION for the others.
    """

    children: tuple[TurnSpec, ...] = ()
    outcome: float = NAN
    failed: bool = False
    grown_by: GrownBy | None = None
    actions: int = 2  # sampled tokens
    observations: int = 1  # reply tokens; none at an end
    version: int = 0  # oldest version
    version_max: int | None = None
    success: float = 0.5


def spec(*children: TurnSpec, outcome: float = NAN, **fields: object) -> TurnSpec:
    """A turn above `children`; the other fields are those of TurnSpec."""
    return replace(TurnSpec(children=children, outcome=outcome), **fields)  # type: ignore[arg-type]


def make_turn(
    *,
    action_ids: Sequence[int] = (11, 12),
    logprobs: Sequence[float] | None = None,
    observation_ids: Sequence[int] = (21,),
    outcome: float = NAN,
    version_min: int = 0,
    version_max: int | None = None,
) -> Turn:
    """A played turn; a turn with an outcome has no observation and that outcome as its reward."""
    at_end = not math.isnan(outcome)
    return Turn(
        action_ids=np.array(action_ids, np.int32),
        action_logprobs=np.array(logprobs if logprobs is not None else [-0.5] * len(action_ids), np.float32),
        observation_ids=np.array([] if at_end else observation_ids, np.int32),
        version_min=version_min,
        version_max=version_min if version_max is None else version_max,
        kv_version_min=version_min,
        stop=StopReason.STOP,
        valid=True,
        reward=outcome if at_end else 0.0,
        outcome=outcome,
        generate_s=0.25,
        environment_s=0.125,
    )


def make_lease(
    *,
    lease_id: str = "lease-0",
    prompt_id: str = "prompt-0",
    roots: int = 2,
    continuations: int = 0,
    issued_version: int = 0,
) -> Lease:
    """A lease of a nameless task."""
    return Lease(
        lease_id=lease_id,
        prompt_id=prompt_id,
        task=Task(prompt_id, {}),
        budget=TreeBudget(roots=roots, continuations=continuations),
        seed=7,
        round_index=0,
        attempt=0,
        issued_version=issued_version,
        deadline_s=60.0,
        root_score=Score(success=0.5, predictor_version=0, strength=2.0),
    )


def make_tree(
    lease: Lease, *, can_branch: bool = True, max_turns: int = 8, success_above: float = SUCCESS_ABOVE
) -> TurnTree:
    """The ungrown tree of a lease."""
    return TurnTree(
        tree_id=lease.lease_id,
        prompt_id=lease.prompt_id,
        prompt_ids=PROMPT_IDS,
        budget=lease.budget,
        can_branch=can_branch,
        max_turns=max_turns,
        success_above=success_above,
    )


def cut(tree: TurnTree, lease: Lease, *, actor_id: str = "actor-0", epoch: int = 1) -> Group:
    """The group of a complete tree."""
    return cut_group(tree, lease=lease, actor_id=actor_id, environment="toy", epoch=epoch)


def grant(tree: TurnTree, node_id: int, grown_by: GrownBy, count: int = 1) -> tuple[int, ...]:
    """Grant children."""
    return tree.grant(Grant(node_id=node_id, count=count, grown_by=grown_by))


def failure_of(node_id: int, kind: str = "EnvironmentTimeout") -> Failure:
    """A failure of `node_id`."""
    return Failure(node_id=node_id, kind=kind, message=f"node {node_id} missed its deadline")


def group_from_spec(
    roots: Sequence[TurnSpec],
    *,
    lease_id: str = "lease-0",
    prompt_id: str = "prompt-0",
    epoch: int = 1,
    seed: int = 0,
) -> Group:
    """The group of a hand-made tree; token ids and log-probabilities are drawn from `seed`."""
    reasons = [_reason(turn, ROOT, number) for number, turn in enumerate(roots)] + [
        reason for turn in roots for reason in _reasons_below(turn)
    ]
    lease = make_lease(
        lease_id=lease_id,
        prompt_id=prompt_id,
        roots=reasons.count(GrownBy.ROOT),
        continuations=reasons.count(GrownBy.CONTINUATION) + reasons.count(GrownBy.SELECTED),
    )
    tree = make_tree(lease, max_turns=64)
    rng = np.random.default_rng(seed)
    for number, turn in enumerate(roots):
        _grow(tree, ROOT, turn, number, rng)
    return cut(tree, lease, epoch=epoch)


def chain_group(
    outcomes: Sequence[float] = (1.0, 0.0),
    *,
    turns: int = 2,
    version: int = 0,
    lease_id: str = "lease-0",
    prompt_id: str = "prompt-0",
    epoch: int = 1,
    seed: int = 0,
) -> Group:
    """Independent root rollouts of `turns` turns each, one per outcome."""
    chains = []
    for outcome in outcomes:
        chain = spec(outcome=outcome, version=version)
        for _ in range(turns - 1):
            chain = spec(chain, version=version)
        chains.append(chain)
    return group_from_spec(chains, lease_id=lease_id, prompt_id=prompt_id, epoch=epoch, seed=seed)


def random_tree(
    rng: np.random.Generator,
    lease: Lease,
    *,
    max_turns: int = 4,
    failures: float = 0.1,
    selected: bool = True,
) -> TurnTree:
    """A complete tree grown by random legal moves in random order; it may leave budget unspent, never all roots."""
    tree = make_tree(lease, max_turns=max_turns)
    grant(tree, ROOT, GrownBy.ROOT, int(rng.integers(1, lease.budget.roots + 1)))
    while moves := [node.node_id for node in tree.nodes if _wants_a_move(tree, node.node_id)]:
        _random_move(tree, int(rng.choice(moves)), rng, failures=failures, selected=selected)
    return tree


def random_group(
    rng: np.random.Generator,
    *,
    roots: int = 3,
    continuations: int = 4,
    max_turns: int = 4,
    failures: float = 0.1,
    selected: bool = True,
    lease_id: str = "lease-0",
    prompt_id: str = "prompt-0",
) -> Group:
    """Any legal group: branches, ends, closed and failed nodes, versions 0 to 4."""
    lease = make_lease(lease_id=lease_id, prompt_id=prompt_id, roots=roots, continuations=continuations)
    tree = random_tree(rng, lease, max_turns=max_turns, failures=failures, selected=selected)
    return cut(tree, lease)


def random_turn(rng: np.random.Generator, *, at_end: bool) -> Turn:
    """A turn of 1 to 4 sampled tokens with random ids and log-probabilities."""
    tokens, version = int(rng.integers(1, 5)), int(rng.integers(0, 4))
    return make_turn(
        action_ids=rng.integers(3, 90, tokens).tolist(),
        logprobs=(-rng.exponential(1.0, tokens)).tolist(),
        observation_ids=rng.integers(3, 90, int(rng.integers(0, 4))).tolist(),
        outcome=float(rng.integers(0, 2)) if at_end else NAN,
        version_min=version,
        version_max=version + int(rng.integers(0, 2)),
    )


def _reason(turn: TurnSpec, parent: int, number: int) -> GrownBy:
    if turn.grown_by is not None:
        return turn.grown_by
    if parent == ROOT:
        return GrownBy.ROOT
    return GrownBy.CHAIN if number == 0 else GrownBy.CONTINUATION


def _reasons_below(turn: TurnSpec) -> list[GrownBy]:
    own = [_reason(child, ROOT + 1, number) for number, child in enumerate(turn.children)]
    return own + [reason for child in turn.children for reason in _reasons_below(child)]


def _grow(tree: TurnTree, parent: int, turn: TurnSpec, number: int, rng: np.random.Generator) -> None:
    (node_id,) = grant(tree, parent, _reason(turn, parent, number))
    if turn.failed:
        tree.fail(node_id, failure_of(node_id))
        return
    state = tree.record_turn(
        node_id,
        make_turn(
            action_ids=rng.integers(3, 90, turn.actions).tolist(),
            logprobs=(-rng.exponential(1.0, turn.actions)).tolist(),
            observation_ids=rng.integers(3, 90, turn.observations).tolist(),
            outcome=turn.outcome,
            version_min=turn.version,
            version_max=turn.version_max,
        ),
    )
    if state is NodeState.LEAF:
        return
    tree.record_score(node_id, Score(success=turn.success, predictor_version=turn.version))
    for child_number, child in enumerate(turn.children):
        _grow(tree, node_id, child, child_number, rng)
    if not turn.children:
        tree.close(node_id)


def _wants_a_move(tree: TurnTree, node_id: int) -> bool:
    node = tree.nodes[node_id]
    if node.state in (NodeState.GROWING, NodeState.UNSCORED):
        return True
    return node_id != ROOT and node.state is NodeState.EXPANDED and not node.children


def _random_move(tree: TurnTree, node_id: int, rng: np.random.Generator, *, failures: float, selected: bool) -> None:
    node = tree.nodes[node_id]
    if node.state is NodeState.EXPANDED:
        if rng.random() < 0.15:
            tree.close(node_id)
            return
        grant(tree, node_id, GrownBy.CHAIN)
        _random_continuations(tree, rng, selected=selected)
    elif rng.random() < failures:
        tree.fail(node_id, failure_of(node_id))
    elif node.state is NodeState.UNSCORED:
        tree.record_score(node_id, Score(success=float(rng.random()), predictor_version=int(rng.integers(0, 4))))
    else:
        tree.record_turn(node_id, random_turn(rng, at_end=node.depth == tree.max_turns or rng.random() < 0.3))


def _random_continuations(tree: TurnTree, rng: np.random.Generator, *, selected: bool) -> None:
    if tree.continuations_left and rng.random() < 0.6:
        reason = GrownBy.SELECTED if selected and rng.random() < 0.2 else GrownBy.CONTINUATION
        anchor = int(rng.choice([ROOT, *tree.anchors()]))
        grant(tree, anchor, reason, int(rng.integers(1, tree.continuations_left + 1)))
