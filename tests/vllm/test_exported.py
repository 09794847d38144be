"""vLLM loads what `trace-async export` writes, pairs merged, and samples with the weights that were trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.vllm.kit import START_S, EngineHost, gap, hosted_engine, request
from trace_async.app.export import export_checkpoint
from trace_async.app.wiring import policy_path
from trace_async.config import Config, EngineConfig, LearnerConfig
from trace_async.config_load import to_json
from trace_async.learning.checkpoint import write_checkpoint
from trace_async.weights import HIGH, LOW, PREFIX, read_folder, write_weights

START, RANK = "builtin:frozenlake-tiny", 4


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped policy with pairs that move it, as a checkpoint has them."""
    root = tmp_path_factory.mktemp("exported")
    config = replace(Config(), learner=LearnerConfig(lora_rank=RANK, lora_alpha=8.0))
    assert config.policy.path == START
    draw = torch.Generator().manual_seed(0)
    pairs = {}
    for name, weight in read_folder(policy_path(START)).items():
        if ".layers." in name and weight.ndim == 2:
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            pairs[f"{module}{LOW}"] = 0.1 * torch.randn(RANK, weight.shape[1], generator=draw)
            pairs[f"{module}{HIGH}"] = 0.1 * torch.randn(weight.shape[0], RANK, generator=draw)

    def fill(directory: Path) -> None:
        (directory / "trainer").mkdir()
        write_weights(directory / "trainer" / "model.safetensors", pairs, aliases={})

    state: Any = {"config": to_json(config)}
    write_checkpoint(root, step=3, state=state, fill=fill)
    export_checkpoint(root / "step_000003", root / "policy", adapter_only=False, dtype="float32")
    return root / "policy"


@pytest.fixture(scope="module")
def host(exported: Path) -> Iterator[EngineHost]:
    with hosted_engine(exported, EngineConfig(max_batch=8), version=0) as host:
        first = request("first", [5, 6, 7], max_tokens=1)
        host.do(lambda engine: engine.generate(first), deadline_s=START_S)
        yield host


def test_an_exported_policy_is_sampled_with_the_weights_that_were_trained(host: EngineHost, exported: Path) -> None:
    trained: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    start: Any = AutoModelForCausalLM.from_pretrained(policy_path(START), dtype=torch.float32)
    prompt = [int(token) for token in np.random.default_rng(0).integers(3, 200, size=40)]
    ask = request("a", prompt, max_tokens=12)
    answer = host.do(lambda engine: engine.generate(ask))
    assert gap(trained.eval(), ask, answer).max() < 1e-3
    assert gap(start.eval(), ask, answer).max() > 1e-2
