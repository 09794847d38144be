"""From an optimizer step to the engine that samples with it: every part is the real one, whatever is published."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.trainer_kit import OPEN_OBJECTIVE, decoder, items, minibatch, plain_logprobs
from trace_async.config import EngineConfig, LearnerConfig
from trace_async.core.packing import pack
from trace_async.core.types import Canary, GenerateRequest, Generation
from trace_async.engines.batched_model import load_model
from trace_async.engines.local import LocalEngine
from trace_async.errors import PolicyError
from trace_async.publication.staging import FetchedVersion, Source, Stager
from trace_async.publication.staging_folder import StagingFolder
from trace_async.publication.store import VersionStore
from trace_async.trainer import Trainer

PROMPTS = [np.arange(3, 3 + length, dtype=np.int32) for length in (9, 33)]
REQUEST = GenerateRequest(request_id="r", prefix_ids=np.arange(5, 25, dtype=np.int32), max_tokens=12, seed=7)


class Kind(NamedTuple):
    """What is trained, and what samples."""

    rank: int
    dtype: str
    start_bfloat16: bool = False


KINDS = [
    Kind(0, "float32"),
    Kind(4, "float32"),
    Kind(4, "float32", True),
    Kind(0, "bfloat16"),
    Kind(4, "bfloat16"),
]


def make_trainer(folder: Path, kind: Kind) -> Trainer:
    start = decoder("qwen3 with tied embeddings")
    (start.bfloat16() if kind.start_bfloat16 else start).save_pretrained(folder)
    learner = LearnerConfig(learning_rate=1e-2, lora_rank=kind.rank, lora_alpha=8.0)
    return Trainer(folder, learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=0, publish_dtype=kind.dtype)


def make_engine(folder: Path, kind: Kind) -> LocalEngine:
    model = load_model(folder, threads=1, device=torch.device("cpu"), dtype=kind.dtype)
    config = EngineConfig(dtype=kind.dtype, device="cpu")
    return LocalEngine(model, base=folder, config=config, stop_ids=[999], pad_id=0, max_tokens=64)


def no_stream() -> Source:
    raise PolicyError("there is no weight server here")


def publish_and_fetch(trainer: Trainer, folder: Path, *, stager: Stager, store: VersionStore) -> FetchedVersion:
    published = store.publish(
        version=trainer.version,
        epoch=1,
        write=trainer.save_weights,
        predictor={},
        canary=trainer.canary(PROMPTS),
        adapter=trainer.adapter,
    )
    return asyncio.run(stager.fetch(published.notice))


async def load_and_sample(engine: LocalEngine, fetched: FetchedVersion, canary: Canary | None = None) -> Generation:
    manifest = fetched.manifest
    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        running = group.create_task(engine.run())
        try:
            await engine.load(
                version=manifest.version,
                epoch=manifest.epoch,
                weights=fetched.weights,
                canary=canary or manifest.canary,
                adapter=manifest.adapter,
            )
            answer = await engine.generate(REQUEST)
        finally:
            running.cancel()
    return answer


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_version_is_published_fetched_proven_and_sampled_with(kind: Kind, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "start", kind)
    stale = trainer.canary(PROMPTS)
    batch = items(1)
    for _ in range(3):
        trainer.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    with (
        StagingFolder("actor", root=tmp_path / "staging") as staging,
        Stager(staging, make_stream=no_stream) as stager,
        VersionStore(tmp_path / "published") as store,
    ):
        fetched = publish_and_fetch(trainer, tmp_path / "published", stager=stager, store=store)
        answer = asyncio.run(load_and_sample(make_engine(tmp_path / "start", kind), fetched))
        assert (answer.version_min, answer.version_max, answer.kv_version_min) == (3, 3, 3)
        said = plain_logprobs(trainer.model, np.r_[REQUEST.prefix_ids, answer.token_ids])[-len(answer.token_ids) :]
        exact = kind.dtype == "float32"
        assert np.abs(answer.logprobs - said).mean() < (1e-5 if exact else 0.15)
        with pytest.raises(ExceptionGroup) as refused:
            asyncio.run(load_and_sample(make_engine(tmp_path / "start", kind), fetched, canary=stale))
        assert refused.group_contains(PolicyError, match="version 3 does not act")
