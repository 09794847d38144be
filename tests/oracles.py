"""Slow and obvious answers that the fast code must agree with: one turn at a time, no shared helper, no vectors."""

from __future__ import annotations

from typing import NamedTuple

from trace_async.core.packing import PackItem
from trace_async.core.tree import TurnTree
from trace_async.core.types import Group, NodeState, Verdict


class TurnTokens(NamedTuple):
    """The tokens of one turn of a group."""

    action: tuple[int, ...]
    observation: tuple[int, ...]
    logprobs: tuple[float, ...]


class TrainedTurn(NamedTuple):
    """What training one turn needs."""

    context: tuple[int, ...]  # every token before the turn
    action: tuple[int, ...]
    logprobs: tuple[float, ...]
    advantage: float
    mass: float
    age: int
    verdict: int
    depth: int


def turn_tokens(group: Group, turn: int) -> TurnTokens:
    """Tokens of `turn`, found by walking over all turns before it."""
    token, logprob = 0, 0
    for before in range(turn):
        token += int(group.action_lengths[before]) + int(group.observation_lengths[before])
        logprob += int(group.action_lengths[before])
    actions, observations = int(group.action_lengths[turn]), int(group.observation_lengths[turn])
    return TurnTokens(
        tuple(int(group.token_ids[token + i]) for i in range(actions)),
        tuple(int(group.token_ids[token + actions + i]) for i in range(observations)),
        tuple(float(group.logprobs[logprob + i]) for i in range(actions)),
    )


def context_of(group: Group, turn: int) -> tuple[int, ...]:
    """Every token before `turn`, by recursion over its ancestors."""
    parent = int(group.parent[turn])
    if parent < 0:
        return tuple(int(token) for token in group.prompt_ids)
    above = turn_tokens(group, parent)
    return context_of(group, parent) + above.action + above.observation


def depth_of(group: Group, turn: int) -> int:
    """Turns from the prompt to `turn`, itself included."""
    parent = int(group.parent[turn])
    return 1 if parent < 0 else 1 + depth_of(group, parent)


def is_trainable(item: PackItem, turn: int) -> bool:
    """Whether the learner may put loss on a turn."""
    return bool(
        item.group.state[turn] != NodeState.FAILED
        and item.verdicts[turn] != Verdict.CONTEXT
        and item.credit.advantage[turn] != 0
        and item.credit.mass[turn] > 0
    )


def trained_turns(item: PackItem) -> list[TrainedTurn]:
    """Everything that must be trained of `item`, in order of turns."""
    found = []
    for turn in range(item.group.num_turns):
        if is_trainable(item, turn):
            tokens = turn_tokens(item.group, turn)
            found.append(
                TrainedTurn(
                    context_of(item.group, turn),
                    tokens.action,
                    tokens.logprobs,
                    float(item.credit.advantage[turn]),
                    float(item.credit.mass[turn]),
                    int(item.ages[turn]),
                    int(item.verdicts[turn]),
                    depth_of(item.group, turn),
                )
            )
    return found


def num_tips(item: PackItem) -> int:
    """Trainable turns with no trainable turn below them: no packing into path rows can do with fewer rows."""
    turns = [turn for turn in range(item.group.num_turns) if is_trainable(item, turn)]
    return sum(not any(_is_below(item.group, other, turn) for other in turns) for turn in turns)


def tree_paths(tree: TurnTree) -> set[tuple[int, ...]]:
    """Node ids of every path from a first turn to a node without children."""

    def below(node_id: int, path: tuple[int, ...]) -> set[tuple[int, ...]]:
        children = tree.nodes[node_id].children
        if not children:
            return {path}
        return {found for child in children for found in below(child, (*path, child))}

    return below(0, ())


def _is_below(group: Group, turn: int, ancestor: int) -> bool:
    parent = int(group.parent[turn])
    return parent >= 0 and (parent == ancestor or _is_below(group, parent, ancestor))
