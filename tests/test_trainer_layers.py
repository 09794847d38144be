"""Layers in bfloat16 and with recomputed activations: the same names, the same gradients, float32 where it matters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_kit import OPEN_OBJECTIVE, decoder, items, minibatch
from trace_async.config import Config, EngineConfig, LearnerConfig
from trace_async.config_check import find_problems
from trace_async.core.packing import pack
from trace_async.core.tree_packing import pack_trees
from trace_async.errors import ConfigError
from trace_async.trainer import Trainer
from trace_async.trainer_layers import decoder_layers

KINDS = ["gpt2 with dropout", "qwen3 with tied embeddings", "mistral"]
LEARNER = LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9, device="cpu")


def trainer_of(kind: str, folder: Path, learner: LearnerConfig) -> Trainer:
    if not (folder / "config.json").exists():
        decoder(kind).save_pretrained(folder)
    return Trainer(folder, learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=0)


def step(trainer: Trainer, seed: int = 1) -> dict[str, float]:
    layout = pack_trees if trainer.packs_trees else pack
    return dict(trainer.step([minibatch(items(seed), layout=layout, micro_batch_tokens=128)]))


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_found_and_names_stay(kind: str, tmp_path: Path) -> None:
    plain = trainer_of(kind, tmp_path, LEARNER)
    dressed = trainer_of(
        kind, tmp_path, replace(LEARNER, compute_dtype="bfloat16", activation_checkpointing=True, lora_rank=0)
    )
    assert len(decoder_layers(plain.model)) == 2
    assert list(dressed.model.state_dict()) == list(plain.model.state_dict())
    assert [name for name, _ in dressed.model.named_modules()] == [name for name, _ in plain.model.named_modules()]


@pytest.mark.parametrize("lora_rank", [0, 4])
@pytest.mark.parametrize("kind", ["qwen3 with tied embeddings", "mistral"])
def test_recomputed_activations_give_the_same_step_to_the_bit(kind: str, lora_rank: int, tmp_path: Path) -> None:
    learner = replace(LEARNER, lora_rank=lora_rank)
    kept = trainer_of(kind, tmp_path, learner)
    recomputed = trainer_of(kind, tmp_path, replace(learner, activation_checkpointing=True))
    assert step(recomputed) == pytest.approx(step(kept), abs=0.0, rel=0.0, nan_ok=True)
    for name, tensor in kept.model.state_dict().items():
        assert torch.equal(tensor, recomputed.model.state_dict()[name]), name


def test_less_is_kept_for_the_backward_pass(tmp_path: Path) -> None:
    sizes = {}
    for recomputes in (False, True):
        trainer = trainer_of("mistral", tmp_path, replace(LEARNER, activation_checkpointing=recomputes))
        kept: list[int] = []

        def count(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            trainer.model(input_ids=torch.arange(64)[None], use_cache=False).logits.sum()
        sizes[recomputes] = sum(kept)
    assert sizes[True] < sizes[False] / 3


@pytest.mark.parametrize("kind", KINDS)
def test_layers_compute_in_bfloat16_and_everything_else_in_float32(kind: str, tmp_path: Path) -> None:
    trainer = trainer_of(kind, tmp_path, replace(LEARNER, compute_dtype="bfloat16"))
    seen: dict[str, set[torch.dtype]] = {"linear": set(), "layer out": set(), "head in": set()}

    def look(where: str, place: int) -> Any:
        def hook(module: torch.nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            found = (inputs[0], output)[place]
            seen[where].add((found[0] if isinstance(found, tuple) else found).dtype)

        return hook

    head: Any = trainer.model
    head.get_output_embeddings().register_forward_hook(look("head in", 0))
    for layer in decoder_layers(trainer.model):
        layer.register_forward_hook(look("layer out", 1))
        for name, module in layer.named_modules():
            if name.endswith(("down_proj", "c_proj")):
                module.register_forward_hook(look("linear", 1))
    logits = trainer.model(input_ids=torch.arange(8)[None], use_cache=False).logits
    assert seen == {"linear": {torch.bfloat16}, "layer out": {torch.float32}, "head in": {torch.float32}}
    assert logits.dtype is torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_trains_float32_weights_near_those_of_float32(kind: str, tmp_path: Path) -> None:
    exact = trainer_of(kind, tmp_path, LEARNER)
    rounded = trainer_of(kind, tmp_path, replace(LEARNER, compute_dtype="bfloat16"))
    norms = [step(trainer)["actor/grad_norm"] for trainer in (exact, rounded)]
    assert norms[1] == pytest.approx(norms[0], rel=0.1)
    assert norms[1] != norms[0]
    grads = [
        torch.cat([p.grad.flatten() for p in t.model.parameters() if p.grad is not None]) for t in (exact, rounded)
    ]
    assert float(grads[0] @ grads[1] / (grads[0].norm() * grads[1].norm())) > 0.98
    assert {parameter.dtype for parameter in rounded.model.parameters()} == {torch.float32}
    fine = [
        tensor for tensor in rounded.model.state_dict().values() if not torch.equal(tensor, tensor.bfloat16().float())
    ]
    assert fine  # updates smaller than bfloat16 can hold have arrived


def test_a_model_without_a_list_of_layers_says_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"no torch\.nn\.ModuleList"):
        decoder_layers(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_layers_are_the_outermost_list_with_most_parameters() -> None:
    experts = torch.nn.ModuleList([torch.nn.Linear(9, 9) for _ in range(5)])
    layers = torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts}), torch.nn.Linear(3, 3)])
    model = torch.nn.ModuleDict({"heads": torch.nn.ModuleList([torch.nn.Linear(1, 1)] * 9), "body": layers})
    assert decoder_layers(model) == list(layers)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (Config(learner=LearnerConfig(compute_dtype="bfloat16")), "learner.compute_dtype"),
        (Config(learner=LearnerConfig(schedule="constant", decay_to=0.5)), "learner.decay_to"),
        (Config(learner=LearnerConfig(processes=2, device="cuda:1")), "learner.device"),
    ],
)
def test_combinations_without_sense_are_refused(config: Config, key: str) -> None:
    assert [found for found, _ in find_problems(config)] == [key]


def test_bfloat16_on_both_sides_is_fine() -> None:
    both = Config(engine=EngineConfig(dtype="bfloat16"), learner=LearnerConfig(compute_dtype="bfloat16"))
    assert not find_problems(both)
