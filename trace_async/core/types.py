"""Every record that more than one file uses, and the words of this project.

Glossary
    prompt       one task as the policy sees it; the root (node 0) of its tree
    turn         one act of the policy (sampled tokens) and the environment's reply (observation tokens)
    node         a place in the tree: the prompt, or one turn below its parent
    prefix       everything from the prompt up to and including a node's turn
    rollout      a chain of turns from the prompt, or from a prefix, to an end
    anchor       a node that may receive further rollouts: the prompt, or a prefix that goes on
    root rollout a rollout that starts at the prompt
    continuation a further rollout granted at an anchor
    grant        the allocator's word that children may be grown at an anchor
    lease        the coordinator's word that an actor may grow one tree with a given budget
    permit       the right to have one root rollout issued and not yet consumed; paces the fleet
    group        one finished tree, as it travels and is trained
    mass         the share of a prompt's learning signal that a turn carries; siblings' masses sum to their parent's
    version      number of training steps the weights have had; version 0 are the start weights
    age          trainer version minus the oldest version that sampled a turn, in training steps
    epoch        number of times the learner has started in this run; a restart may take versions back

Axes: P prompt tokens · A sampled tokens of a turn · O observation tokens of a turn · K turns of a group ·
M sampled tokens of a group · N all turn tokens of a group. Log-probabilities are in nats, durations in seconds (`_s`).
Unknown is None or NaN, never 0. Arrays inside records are read-only by convention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float32]
ByteArray: TypeAlias = NDArray[np.uint8]
Json: TypeAlias = Mapping[str, Any]

ROOT = 0
"""Node id of the prompt."""

SUCCESS_ABOVE = 0.5
"""Of environments that say nothing else, an outcome above this is a success; `outcomes.is_success` compares."""


class NodeState(IntEnum):
    """Where a node stands. The prompt is born EXPANDED; every other node is born GROWING."""

    GROWING = 0
    UNSCORED = 1  # its turn is known and the episode goes on; the predictor has not answered yet
    EXPANDED = 2  # scored; has children or may still get some
    CLOSED = 3  # scored; the allocator let it end here without an outcome
    LEAF = 4  # its turn ended the episode; the outcome is known
    FAILED = 5  # could not be played; has no turn and takes no part in credit


class GrownBy(IntEnum):
    """Why a node exists; decides which budget paid for it and whether siblings are i.i.d."""

    ROOT = 0  # first turn of a root rollout; pays one root
    CHAIN = 1  # next turn of a running rollout; free
    CONTINUATION = 2  # first turn of a further rollout, i.i.d. from its anchor; pays one continuation
    SELECTED = 3  # chosen after seeing something of it; not i.i.d.; pays one continuation


class StopReason(IntEnum):
    """Why a turn's sampling or its episode stopped."""

    STOP = 0  # the policy said a stop token
    LENGTH = 1  # the turn's token limit
    ABORT = 2  # the engine gave up the request half-way; tokens so far are kept
    CONTEXT = 3  # no room in the context for another turn; the episode ended there
    TURN_LIMIT = 4  # the episode's turn limit


class Task(NamedTuple):
    """One task of an environment; `data` is opaque to everyone but that environment and must be JSON."""

    task_id: str
    data: Json


class Message(NamedTuple):
    """One chat message; role is system, user, assistant or tool."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What the predictor said about a prefix."""

    success: float  # predicted probability of success in [0, 1]; NaN when it could not be had
    predictor_version: int  # policy version with which these parameters were published
    strength: float = float("nan")  # alpha + beta of a Beta belief, in rollouts; NaN where only the mean is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """What the predictor may look at: the past of a node and nothing below it."""

    prompt_id: str
    turn_index: int  # turns played so far; 0 is the prompt itself
    token_ids: IntArray  # [prefix tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One played turn; facts only, stamped by whoever sampled and whoever stepped."""

    action_ids: IntArray  # [A] sampled tokens, the stop token included when it was sampled
    action_logprobs: FloatArray  # [A] nats, of the distribution actually sampled
    observation_ids: IntArray  # [O] rendered reply, up to where the next turn starts; empty at an end
    version_min: int  # oldest and newest policy version that sampled a token of this turn
    version_max: int
    kv_version_min: int  # oldest version that computed key/values this turn attended to
    stop: StopReason
    valid: bool  # the environment could read the action
    reward: float  # environment reward of this turn
    outcome: float  # sum of rewards along the path when the episode ended here; NaN otherwise
    process_score: float = float("nan")  # environment's judgement of the turn itself, when it has one
    generate_s: float = 0.0
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a node has no turn."""

    node_id: int
    kind: str  # class name of the error, e.g. EnvironmentTimeout
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """`count` children may be grown at `node_id`."""

    node_id: int
    count: int
    grown_by: GrownBy


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeBudget:
    """What one lease may spend."""

    roots: int
    continuations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to grow one tree."""

    lease_id: str  # unique in the run; a re-lease gets a new id
    prompt_id: str
    task: Task
    budget: TreeBudget
    seed: int  # run seed; with prompt_id, round_index and the path it fixes every sampling seed
    round_index: int  # visit number of this prompt, so that a prompt seen again is sampled anew
    attempt: int  # 0 on first issue, +1 on each re-lease
    issued_version: int  # trainer version when the lease was issued
    deadline_s: float  # seconds the actor may take before the lease is given to another
    root_score: Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One finished tree: tokens once, facts only. Turn k's tokens are action then observation, turns in order of k.

    Turn k is node k+1 of the tree; `parent[k]` is the parent's turn index, -1 for the prompt; parents come first.
    A FAILED node keeps its place with zero tokens.
    """

    group_id: str
    lease_id: str
    actor_id: str
    epoch: int
    prompt_id: str
    environment: str
    budget: TreeBudget
    root_score: Score
    success_above: float = SUCCESS_ABOVE  # outcomes above are successes; for all but credit and loss
    prompt_ids: IntArray  # [P]
    parent: IntArray  # [K]
    action_lengths: IntArray  # [K] tokens
    observation_lengths: IntArray  # [K] tokens
    token_ids: IntArray  # [N]
    logprobs: FloatArray  # [M]
    version_min: IntArray  # [K]
    version_max: IntArray  # [K]
    kv_version_min: IntArray  # [K]
    score: FloatArray  # [K] NaN = unscored
    score_version: IntArray  # [K] -1 = unscored
    reward: FloatArray  # [K]
    outcome: FloatArray  # [K] NaN = not an end
    process_score: FloatArray  # [K] NaN = none
    state: ByteArray  # [K] NodeState
    grown_by: ByteArray  # [K] GrownBy
    stop: ByteArray  # [K] StopReason
    valid: ByteArray  # [K] 0 or 1
    generate_s: FloatArray  # [K]
    environment_s: FloatArray  # [K]
    failures: tuple[Failure, ...] = ()

    @property
    def num_turns(self) -> int:
        """K."""
        return int(self.parent.shape[0])

    @property
    def num_sampled_tokens(self) -> int:
        """M: tokens the policy sampled, each shared prefix once."""
        return int(self.logprobs.shape[0])


class Verdict(IntEnum):
    """What the learner does with one turn, by its age at consumption."""

    TRAIN = 0  # age <= soft bound
    TIGHT = 1  # soft bound < age <= hard bound: trained under a tighter cap
    CONTEXT = 2  # older: no loss on it, but it stays as context and its leaves still give values


class GroupVerdict(IntEnum):
    """What became of a whole group."""

    TRAINED = 0
    FLAT = 1  # consumed, but every outcome was equal: no gradient
    STALE = 2  # consumed, but every turn was over the hard bound
    BROKEN = 3  # no outcome at all (every rollout failed)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCredit:
    """Credit of each turn of a group; arrays [K]. A turn with NaN value has no leaf below it and mass 0."""

    value: FloatArray  # mean outcome below the turn, children weighted equally
    advantage: FloatArray  # 0 where there is no baseline
    mass: FloatArray  # Omega: siblings sum to their parent's mass, turns at the prompt sum to 1
    leaf_advantage: FloatArray | None = None  # where advantages are means over leaves: the leaves' own, NaN elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionNotice:
    """Repeated state, newest wins: which version an actor should sample with, and where its files are to be had."""

    version: int
    epoch: int
    manifest_digest: str  # sha256 of the manifest's bytes, hex; the manifest has the digests of everything else
    directory: str  # absolute path of the published files, for actors that see it
    address: str  # tcp://HOST:PORT of the learner's weight server, for all others; "" = none runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """Prompts and what the learner's weights say of them, so that an engine can prove that it samples with these."""

    prompts: tuple[IntArray, ...]  # each [L], L >= 2
    logprobs: tuple[FloatArray, ...]  # each [L - 1], nats: of prompts[i][1:], at temperature 1, nothing truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """A published file that holds low-rank additions to the start policy's weights: W + (alpha / rank) B A."""

    rank: int
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample."""

    request_id: str
    prefix_ids: IntArray  # [L] everything before the turn
    max_tokens: int
    seed: int
    greedy: bool = False  # take the most likely token; log-probabilities stay those of the sampled distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What an engine answers; versions are the engine's own word about what sampled these tokens."""

    token_ids: IntArray  # [A], A >= 1
    logprobs: FloatArray  # [A] nats
    version_min: int
    version_max: int
    kv_version_min: int
    stop: StopReason
    generate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TreePhase:
    """Where one live tree stands, as an actor reports it."""

    lease_id: str
    prompt_id: str
    phase: str  # what its longest-waiting node is doing: generate, environment, score, ship
    node_id: int
    age_s: float  # since the lease was taken
    waiting_s: float  # since that node entered the phase
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorStatus:
    """What an actor tells with each heartbeat."""

    actor_id: str
    host: str
    pid: int
    version: int  # of the weights its engine has proven; -1 before the first and while the actor takes no leases
    live_roots: int
    counters: Mapping[str, float]  # monotone since start: turns, sampled_tokens, engine_busy_s, wall_s, ...
    trees: tuple[TreePhase, ...]
    epoch: int = -1  # in which `version` was published; a version of another epoch is not the one of that number
