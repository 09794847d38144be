"""Builds a learner from a configuration: what it owns, opened and closed together, and what it is told.

Importable without torch; what needs it is imported when it is built. Never starts anything but the weight server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from trace_async.app.learner_ranks import open_trainer
from trace_async.app.publication import canary_prompts, open_publisher
from trace_async.app.wiring import build_kit, build_planner, build_predictor, policy_path
from trace_async.config import Config
from trace_async.config_load import to_json
from trace_async.errors import RankError
from trace_async.learning.batching import BatchRule
from trace_async.learning.learner import Learner
from trace_async.learning.learner_parts import LearnerParts, LearnerSetup
from trace_async.ledger import Ledger
from trace_async.methods.credit import credit_rule
from trace_async.methods.objective_kinds import Scope, kind_of
from trace_async.metrics import MetricsWriter, open_tensorboard
from trace_async.rendering import Renderer, load_renderer
from trace_async.run_folder import RunFolder
from trace_async.transport.channel_learner import LearnerChannel


@contextmanager
def open_learner(config: Config, folder: RunFolder, *, on_loss: Callable[[RankError], None]) -> Iterator[Learner]:
    """A learner with its open ledger, metrics file and worker thread, ready to run. Imports torch.

    `on_loss` is called from another thread when another process of the learner is lost.
    """
    with (
        Ledger(folder.ledger) as ledger,
        MetricsWriter(folder.metrics, scalars=open_tensorboard(folder.tensorboard)) as metrics,
        open_publisher(config, folder) as publisher,
        open_trainer(config, on_loss=on_loss) as trainer,
        ThreadPoolExecutor(1, thread_name_prefix="trainer") as worker,  # ends before the trainer is let go
    ):
        renderer = load_renderer(policy_path(config.policy.path))
        predictor, beliefs = (build_predictor(config, text_of=renderer.text) for _ in range(2))
        parts = LearnerParts(
            trainer=trainer,
            predictor=predictor,
            beliefs=beliefs,
            planner=build_planner(config, beliefs=beliefs, renderer=renderer),
            store=publisher.store,
            server=publisher.server,
            ledger=ledger,
            metrics=metrics,
            make_channel=lambda handler, former_address: LearnerChannel(
                config.coordinator.address,
                handler=handler,
                former_address=former_address,
                heartbeat_s=config.coordinator.heartbeat_s,
                dead_after_s=config.coordinator.dead_after_s,
            ),
            worker=worker,
        )
        setup = _learner_setup(config, renderer=renderer, packs_trees=trainer.packs_trees)
        yield Learner(parts, setup=setup, folder=folder)


def _learner_setup(config: Config, *, renderer: Renderer, packs_trees: bool) -> LearnerSetup:
    from transformers import AutoConfig

    model_config = AutoConfig.from_pretrained(policy_path(config.policy.path))
    kind = kind_of(config.objective)
    return LearnerSetup(
        run_name=config.run.name,
        seed=config.run.seed,
        learner=config.learner,
        coordinator=config.coordinator,
        tree=config.tree,
        rule=BatchRule(
            credit=credit_rule(config.learner.credit),
            soft_age_steps=config.coordinator.soft_age_steps,
            max_age_steps=config.coordinator.max_age_steps,
            pad_id=renderer.pad_id,
            micro_batch_tokens=config.learner.micro_batch_tokens,
            packs_trees=packs_trees,
            signal=kind.signal,
            whole_trees=kind.scope is Scope.TREE,
            updates_per_step=config.learner.updates_per_step,
        ),
        vocabulary_size=int(model_config.get_text_config().vocab_size),
        canary_prompts=canary_prompts(
            build_kit(config, renderer), renderer, model_config, max_context_tokens=config.tree.max_context_tokens
        ),
        keep_versions=config.publication.keep_versions,
        drain_s=config.actor.drain_s,
        told_to_actors=to_json(config),
    )
