"""What a trainer tells with each version, so that engines can prove to sample with it, and what they are given."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.trainer_kit import OPEN_OBJECTIVE, decoder, items, minibatch, plain_logprobs
from trace_async.canary import check_canary
from trace_async.config import LearnerConfig
from trace_async.core.packing import pack
from trace_async.errors import InvariantError, PolicyError
from trace_async.trainer import Trainer
from trace_async.weights import read_weights


def small_trainer(path: Path, *, tied: bool = False, publish_dtype: str = "float32") -> Trainer:
    """On a start policy that is written to `path`; samples at another temperature than the canary's."""
    decoder("qwen3 with tied embeddings" if tied else "mistral").save_pretrained(path)
    learner = LearnerConfig(learning_rate=1e-2)
    return Trainer(
        path, learner=learner, objective=OPEN_OBJECTIVE, temperature=0.5, seed=0, publish_dtype=publish_dtype
    )


@pytest.mark.parametrize("tied", [True, False])
def test_the_canary_is_what_a_plain_model_with_the_published_weights_says(tied: bool, tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, tied=tied)
    prompts = [np.arange(3, 3 + length, dtype=np.int32) for length in (2, 17, 64)]
    before = trainer.canary(prompts)
    batch = items(1)
    trainer.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    canary = trainer.canary(prompts)
    trainer.save_weights(tmp_path / "published")
    acting = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    acting.load_state_dict(read_weights(tmp_path / "published", adapter=None, base=tmp_path))
    found = [plain_logprobs(acting, prompt) for prompt in prompts]
    check_canary(canary, found, dtype="float32", version=1)
    with pytest.raises(PolicyError, match="does not act"):
        check_canary(before, found, dtype="float32", version=0)
    for told, expected in zip(canary.logprobs, found, strict=True):
        assert told.dtype == np.float32
        np.testing.assert_allclose(told, expected, rtol=0, atol=1e-5)


def test_a_canary_of_one_token_proves_nothing_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        small_trainer(tmp_path).canary([np.zeros(1, np.int32)])


def test_weights_that_have_diverged_are_not_published_as_proven(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path)
    with torch.no_grad():
        next(trainer.model.parameters())[:] = math.inf
    with pytest.raises(InvariantError, match=r"version 0.*canary prompts \[0\] are not finite"):
        trainer.canary([np.arange(8, dtype=np.int32)])


def test_what_engines_in_bfloat16_would_round_is_published_rounded(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, tied=True, publish_dtype="bfloat16")
    batch = items(1)
    trainer.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    trainer.save_weights(tmp_path / "rounded")
    found = read_weights(tmp_path / "rounded", adapter=None, base=tmp_path)
    for name, own in trainer.model.state_dict().items():
        assert found[name].dtype == (torch.bfloat16 if own.ndim > 1 else torch.float32)
        assert torch.equal(found[name].bfloat16(), own.bfloat16())
    acting = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    acting.load_state_dict(found)
    prompts = [np.arange(3, 40, dtype=np.int32)]
    canary = trainer.canary(prompts)
    check_canary(canary, [plain_logprobs(acting, prompt) for prompt in prompts], dtype="bfloat16", version=1)
    trainer.save(tmp_path)  # a checkpoint is never rounded
    assert all(tensor.dtype == torch.float32 for tensor in load_file(tmp_path / "model.safetensors").values())
