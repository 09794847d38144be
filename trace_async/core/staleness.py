"""How old a turn is, what that means for its training, and how much may be under way.

Owns the age of a turn, the verdict on it, and the admission count. Ages are judged per turn at consumption and this is
the guarantee of bounded age; permits only keep ages small. A tree's first turns are its oldest, so a rule for whole
trees would throw fresh turns away with them. Nothing here drops a turn: a verdict says how it takes part.
"""

from __future__ import annotations

import numpy as np

from trace_async.core.types import ByteArray, Group, IntArray, NodeState, Verdict
from trace_async.errors import InvariantError


def ages(group: Group, *, trainer_version: int, trainer_epoch: int) -> IntArray:
    """Age of every turn in optimizer steps, int32 [K]; -1 for a FAILED node, which sampled nothing.

    The age is trainer version minus the oldest version that sampled the turn. A group of another epoch may carry
    versions that a restart took back: those weights are as many steps away as the version numbers are apart, hence
    the absolute difference. Within an epoch a turn from the future means false stamps: InvariantError.
    """
    played = group.state != NodeState.FAILED
    difference = trainer_version - group.version_min.astype(np.int64)
    if group.epoch != trainer_epoch:
        difference = np.abs(difference)
    future = played & (difference < 0)
    if future.any():
        turn = int(np.flatnonzero(future)[0])
        raise InvariantError(
            f"group {group.group_id} turn {turn} was sampled by version {group.version_min[turn]}, but the trainer of "
            f"epoch {trainer_epoch} is at version {trainer_version}; actor {group.actor_id} stamps wrong versions"
        )
    return np.where(played, difference, -1).astype(np.int32)


def judge_turns(ages: IntArray, *, soft: int, hard: int) -> ByteArray:
    """Verdict of every turn, uint8 [K]: TRAIN up to `soft` steps of age, TIGHT up to `hard`, CONTEXT beyond.

    A turn without an age (-1) is CONTEXT.
    """
    if not 0 <= soft <= hard:
        raise ValueError(f"age bounds must order 0 <= soft <= hard, got soft {soft} and hard {hard}")
    beyond = (ages > hard) | (ages < 0)
    return np.select([beyond, ages > soft], [Verdict.CONTEXT, Verdict.TIGHT], Verdict.TRAIN).astype(np.uint8)


def permits_left(issued_roots: int, max_permits: int) -> int:
    """Root rollouts that may still be issued when `issued_roots` are issued and not yet consumed; never negative.

    More may be out than allowed after a restart with a smaller bound; then nothing is issued until they are consumed.
    """
    return max(0, max_permits - issued_roots)
