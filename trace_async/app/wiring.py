"""Builds objects from a configuration: one function per part, so that every role puts the same parts together.

Importable without torch; what needs it is imported when it is built. Never starts anything.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from envs.registry import load_environment
from trace_async.acting.actor import Actor
from trace_async.acting.expansion import CLOSE_DEADLINE_S, GrowthParts
from trace_async.acting.turns import Engine, TurnPlayer, answered
from trace_async.acting.versions import VersionedEngine
from trace_async.app.engines import make_engine
from trace_async.app.hub import hub_folder, is_hub_id
from trace_async.app.publication import open_stager
from trace_async.config import Config
from trace_async.coordination.rounds import RoundPlanner
from trace_async.core.seeds import node_seed
from trace_async.core.types import Lease, Prefix, Task
from trace_async.environment import EnvironmentKit
from trace_async.errors import ConfigError, EnvironmentFailure, EnvironmentTimeout, PolicyError, Recoverable
from trace_async.methods.allocators import Allocator, make_allocator
from trace_async.methods.root_allocators import RootAllocator, make_root_allocator
from trace_async.predictors.protocol import Predictor, TextOf
from trace_async.predictors.registry import make_predictor
from trace_async.prefixes import make_prefix_of
from trace_async.prompts import PromptStream
from trace_async.publication.manifest import file_digest
from trace_async.publication.staging import Stager
from trace_async.rendering import Renderer, load_renderer
from trace_async.scoring import BatchScorer
from trace_async.transport.channel import ActorChannel

_LOG = logging.getLogger(__name__)

_BUILTIN = "builtin:"
_POLICIES = Path(__file__).parent.parent / "policies"


def policy_path(name: str) -> Path:
    """The folder of a policy: `builtin:NAME`, a path, or a hub id. Raises PolicyError when it holds no model."""
    path = _POLICIES / name.removeprefix(_BUILTIN) if name.startswith(_BUILTIN) else Path(name)
    if not path.exists() and is_hub_id(name):
        path = hub_folder(name)
    if not (path / "config.json").is_file():
        shipped = ", ".join(sorted(f"{_BUILTIN}{found.parent.name}" for found in _POLICIES.glob("*/config.json")))
        raise PolicyError(
            f"policy.path = {name!r}: {path} is no transformers folder (it has no config.json); "
            f"give a folder written by save_pretrained, or one that ships with the package: {shipped or 'none'}"
        )
    if name.startswith(_BUILTIN):
        _check_shipped(path)
    return path


def _check_shipped(folder: Path) -> None:
    """The weights must be those that the recipe beside them made."""
    expected = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["sha256"]
    found = file_digest(folder / "model.safetensors")
    if found != expected:
        raise PolicyError(
            f"{folder}/model.safetensors has sha256 {found[:12]}…, its recipe says {expected[:12]}…; install the "
            "package again, or remake the policy with: trace-async make-policy FOLDER"
        )


def build_kit(config: Config, renderer: Renderer | None = None) -> EnvironmentKit:
    """Episodes and tasks of the configured environment; with a policy's renderer, bound to that policy's tokens."""
    kit = load_environment(config.environment.name, config.environment.options)
    return kit if renderer is None else bind_kit(kit, renderer)


def bind_kit(kit: EnvironmentKit, renderer: Renderer) -> EnvironmentKit:
    """The same kit, counting in tokens of the renderer's policy where it counts tokens at all."""
    return kit if kit.bind is None else kit.bind(renderer.cut)


async def prepare_kit(kit: EnvironmentKit, split: str) -> None:
    """Let the kit make what the first episode of a split would wait for; no deadline runs. Raises as the kit."""
    if kit.prepare is not None:
        await kit.prepare(split)


async def close_kit(kit: EnvironmentKit) -> None:
    """Give back what the kit's episodes shared; what fails or is late is logged and left, for nobody uses it again."""
    try:
        await answered(
            _close(kit),
            deadline_s=CLOSE_DEADLINE_S,
            failure=EnvironmentFailure,
            late=EnvironmentTimeout,
            what="environment kit: close",
        )
    except Recoverable as error:
        _LOG.warning("%s", error)


async def _close(kit: EnvironmentKit) -> None:
    if kit.close is not None:
        await kit.close()


def build_prompts(config: Config, kit: EnvironmentKit) -> PromptStream:
    """The stream of training prompts, at its start."""
    return PromptStream(kit.tasks, num_train=config.prompts.num_train, seed=config.run.seed)


def heldout_tasks(config: Config, kit: EnvironmentKit) -> list[Task]:
    """The tasks that a run's evaluation plays: the first of the held-out pool, the same for every seed of the run."""
    available = kit.tasks.size("heldout")
    if available is not None and config.prompts.num_heldout > available:
        raise ConfigError(
            f"prompts.num_heldout is {config.prompts.num_heldout}, but environment {config.environment.name} has "
            f"{available} held-out tasks; lower it"
        )
    return [kit.tasks.task("heldout", index) for index in range(config.evaluation.num_prompts)]


def split_tasks(config: Config, kit: EnvironmentKit, *, split: str, num: int | None) -> list[Task]:
    """The first `num` tasks of a split; None: as a run's evaluation, or all of another split that has an end.

    ConfigError for a split that there is not and for more tasks than it has.
    """
    available = kit.tasks.size(split)
    if num is None and split == "heldout":
        return heldout_tasks(config, kit)
    if num is None:
        num = config.evaluation.num_prompts if available is None else available
    if available is not None and num > available:
        raise ConfigError(
            f"--num {num}: split {split!r} of environment {config.environment.name} has {available} tasks; lower it"
        )
    return [kit.tasks.task(split, index) for index in range(num)]


def build_predictor(config: Config, *, text_of: TextOf) -> Predictor:
    """An untrained predictor, which reads prefixes by `text_of` if it reads them at all."""
    return make_predictor(config.predictor.kind, config.predictor.options, seed=config.run.seed, text_of=text_of)


def build_planner(config: Config, *, beliefs: Predictor, renderer: Renderer) -> RoundPlanner:
    """Plans rounds by `beliefs`."""
    kit = build_kit(config, renderer)
    return RoundPlanner(
        build_prompts(config, kit),
        beliefs,
        build_root_allocator(config),
        prefix_of=make_prefix_of(kit.opening, renderer.opening_ids),
        tree=config.tree,
        candidates=config.prompts.candidates_per_round,
        seed=config.run.seed,
    )


def build_root_allocator(config: Config) -> RootAllocator:
    """Divides the roots of a round among prompts."""
    return make_root_allocator(config.tree.root_allocator, config.tree.root_options)


def build_allocator(config: Config, lease: Lease) -> Allocator:
    """A fresh allocator for one tree; what it draws depends on the lease's place in the run only."""
    seed = node_seed(lease.seed, lease.prompt_id, lease.round_index, ())
    return make_allocator(config.tree.allocator, config.tree.options, np.random.default_rng(seed))


def build_player(config: Config, *, engine: Engine, renderer: Renderer, greedy: bool = False) -> TurnPlayer:
    """Plays turns under the configured limits."""
    return TurnPlayer(
        engine,
        renderer,
        max_turn_tokens=config.engine.max_turn_tokens,
        max_context_tokens=config.tree.max_context_tokens,
        max_turns=config.tree.max_turns,
        request_deadline_s=config.engine.request_deadline_s,
        step_deadline_s=config.environment.step_deadline_s,
        clock=time.monotonic,
        greedy=greedy,
    )


@asynccontextmanager
async def open_actor(config: Config, *, name: str, address: str) -> AsyncIterator[Actor]:
    """An actor and everything it owns, ready to run. Imports torch."""
    with open_stager(config, name, dialled=address) as stager:
        kit = build_kit(config)
        try:
            engine, renderer = build_engine(config, policy_path(config.policy.path), version=-1)
            kit = bind_kit(kit, renderer)
            await prepare_kit(kit, "train")
            yield _build_actor(config, engine, renderer, name=name, address=address, kit=kit, stager=stager)
        finally:
            await close_kit(kit)


def _build_actor(
    config: Config,
    engine: VersionedEngine,
    renderer: Renderer,
    *,
    name: str,
    address: str,
    kit: EnvironmentKit,
    stager: Stager,
) -> Actor:
    predictor = build_predictor(config, text_of=renderer.text)
    if not predictor.quick_batch:  # loads its model now, not within the first score's deadline
        opening = np.array([renderer.pad_id], np.int32)
        predictor.prepare([Prefix(prompt_id="", turn_index=0, token_ids=opening)])
    road = config.coordinator
    # the two know each other: the channel asks the actor who it is, the actor sends through the channel
    channel = ActorChannel(
        address,
        hello=lambda: actor.hello(),
        status=lambda: actor.status(),
        heartbeat_s=road.heartbeat_s,
        dead_after_s=road.dead_after_s,
        on_release=lambda lease_ids, reason: actor.release(lease_ids, reason),
    )
    actor = Actor(
        actor_id=name,
        channel=channel,
        engine=engine,
        fetcher=stager,
        load_predictor=lambda state, version: predictor.load(state, version=version),
        parts=GrowthParts(
            player=build_player(config, engine=engine, renderer=renderer),
            make_environment=kit.make_environment,
            make_allocator=lambda lease: build_allocator(config, lease),
            scorer=BatchScorer(predictor, max_batch=config.predictor.max_batch),
            score_deadline_s=config.predictor.deadline_s,
            max_turns=config.tree.max_turns,
            in_order=config.tree.in_order,
            success_above=config.environment.success_above,
        ),
        environment=config.environment.name,
        clock=time.monotonic,
        drain_s=config.actor.drain_s,
        max_live_roots=config.actor.max_live_roots,
    )
    return actor


def build_engine(config: Config, folder: Path, *, version: int) -> tuple[VersionedEngine, Renderer]:
    """The engine that samples with a policy folder's weights, and the folder's renderer. Imports torch.

    `version` is what the engine says of these weights: -1 for an actor, which must load a published version first.
    """
    hide_progress_bars()
    renderer = load_renderer(folder)
    return make_engine(config, folder, renderer=renderer, version=version), renderer


def hide_progress_bars() -> None:
    """Those of transformers, which take longer to read than a small model to load."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
