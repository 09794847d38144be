"""Seeds of a tree: a pure function of where a node stands, never of when it was played.

Owns the canonical encoding of (domain, run seed, prompt id, visit, path of child numbers) and its hash. Two nodes of a
run share a seed only if they are the same node of the same visit, so a turn does not depend on scheduling, on the actor
that plays it, or on how often its lease was issued (the attempt is left out on purpose). It never draws numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

_SAMPLING = b"sampling"
_ENVIRONMENT = b"environment"
_MASK_63 = (1 << 63) - 1  # engines and generators take a non-negative signed 64-bit seed


def node_seed(run_seed: int, prompt_id: str, round_index: int, path: Sequence[int]) -> int:
    """Sampling seed of the node reached by `path` (child numbers from the prompt); in [0, 2**63)."""
    return _hash(_SAMPLING, run_seed, prompt_id, round_index, path)


def env_seed(run_seed: int, prompt_id: str, round_index: int, path: Sequence[int]) -> int:
    """Environment seed of the same node; independent of its sampling seed; in [0, 2**63)."""
    return _hash(_ENVIRONMENT, run_seed, prompt_id, round_index, path)


def _hash(domain: bytes, run_seed: int, prompt_id: str, round_index: int, path: Sequence[int]) -> int:
    state = _visit(domain, run_seed, prompt_id, round_index).copy()
    state.update(",".join([str(int(number)) for number in path]).encode())
    return int.from_bytes(state.digest(), "big") & _MASK_63


@lru_cache(maxsize=1024)
def _visit(domain: bytes, run_seed: int, prompt_id: str, round_index: int) -> blake2b:
    """The hash of everything in front of the path; the same for every node of a tree."""
    # The id is preceded by its length in bytes, so no id can imitate the fields around it.
    name = prompt_id.encode()
    return blake2b(b"%d|%d:%s|%d|" % (run_seed, len(name), name, round_index), digest_size=8, person=domain)
