"""What a learner is made of: the Protocols of the things it calls, and the sections of the configuration it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trace_async.config import CoordinatorConfig, LearnerConfig, TreeConfig
from trace_async.coordination.rounds import RoundPlanner
from trace_async.core.packing import Minibatch
from trace_async.core.types import Adapter, Canary, Group, IntArray, Json, Prefix, VersionNotice
from trace_async.learning.batching import BatchRule
from trace_async.learning.intake import Outbox
from trace_async.learning.resume import LoadablePredictor
from trace_async.ledger import Ledger
from trace_async.metrics import Row
from trace_async.publication.store import Published
from trace_async.transport.channel_learner import ChannelHandler


class Trainer(Protocol):
    """What the learner asks of a trainer; blocking, called from one thread at a time."""

    @property
    def version(self) -> int:
        """Training steps the weights have had; a step without rows counts too."""
        ...

    @property
    def adapter(self) -> Adapter | None:
        """What `save_weights` writes: low-rank additions of this kind; None: the whole weights."""
        ...

    def canary(self, prompts: Sequence[IntArray]) -> Canary:
        """What the weights say of these prompts, each int32 [L], L >= 2."""
        ...

    def step(self, minibatches: Sequence[Minibatch]) -> Mapping[str, float]:
        """One training step, an optimizer update for each minibatch; returns metrics under their final keys."""
        ...

    def save_weights(self, path: Path) -> None:
        """The weights that are trained, as one safetensors file."""
        ...

    def save(self, directory: Path) -> None:
        """Everything a resumed run needs, into an existing folder."""
        ...

    def load(self, directory: Path) -> None:
        """Continue exactly where `save` stood."""
        ...

    def export(self, directory: Path) -> None:
        """A folder that others can load."""
        ...


class Predictor(LoadablePredictor, Protocol):
    """What the learner asks of the predictor that learns; blocking, called from one thread at a time."""

    def observe(self, groups: Sequence[Group]) -> None:
        """Learn from the finished trees of one step, once, when they are consumed."""
        ...

    def parameters(self) -> Json:
        """What predictions need, as JSON; published with each version."""
        ...

    def state(self) -> Json:
        """Everything `load` needs, as JSON."""
        ...


class Beliefs(LoadablePredictor, Protocol):
    """What the learner asks of the predictor that its planner looks at."""

    @property
    def quick_batch(self) -> int:
        """0: scoring prompts is slow unless they were prepared."""
        ...

    def prepare(self, prefixes: Sequence[Prefix]) -> None:
        """Do what is slow about scoring these prompts; blocking, in any thread."""
        ...


class VersionStore(Protocol):
    """What `publication.store.VersionStore` does with files; blocking, called from one thread at a time."""

    @property
    def num_versions(self) -> int:
        """Complete versions on disk."""
        ...

    def publish(
        self,
        *,
        version: int,
        epoch: int,
        write: Callable[[Path], None],
        predictor: Json,
        canary: Canary,
        adapter: Adapter | None,
    ) -> Published:
        """Write one version, and return its notice."""
        ...

    def retire(self, *, keep: int, needed_since: int) -> None:
        """Delete what is older than version `needed_since`, and all but the `keep` newest."""
        ...


class WeightServer(Protocol):
    """What `publication.stream_server.WeightServer` does; serves from its making on, in a thread of its own."""

    async def watch(self) -> None:
        """Return when it is closed; raises what ended its thread."""
        ...

    def counters(self) -> Mapping[str, float]:
        """Since the start: `stream_bytes` sent, and others."""
        ...


class MetricsSink(Protocol):
    """Takes rows of metrics."""

    def write(self, row: Row) -> None:
        """One row."""
        ...


class Channel(Outbox, Protocol):
    """What `channel_learner.LearnerChannel` does."""

    @property
    def address(self) -> str: ...

    async def run(self) -> None: ...

    async def ready(self) -> None: ...

    def announce(self, notice: VersionNotice) -> None: ...

    async def stop(self, reason: str, *, deadline_s: float) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """The things a learner owns or calls."""

    trainer: Trainer
    predictor: Predictor  # learns; asked for nothing but what to publish
    beliefs: Beliefs  # the planner's, of the same kind: predicts as published, like those of the actors
    planner: RoundPlanner  # with `beliefs`
    store: VersionStore
    server: WeightServer | None  # offers the store's files to actors elsewhere
    ledger: Ledger
    metrics: MetricsSink
    make_channel: Callable[[ChannelHandler, str], Channel]  # handler, and where an earlier start listened or ""
    worker: Executor  # one thread


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSetup:
    """The sections of the configuration that a learner reads."""

    run_name: str
    seed: int
    learner: LearnerConfig
    coordinator: CoordinatorConfig
    tree: TreeConfig
    rule: BatchRule
    vocabulary_size: int  # rows of the policy's embedding
    canary_prompts: tuple[IntArray, ...]  # what engines prove a version with; each [L], L >= 2
    keep_versions: int  # at most, see publication.keep_versions
    drain_s: float  # what a stopping actor may take for its live trees
    told_to_actors: Json  # resolved configuration
