"""Low-rank training: the same loss on fewer parameters, and everybody else sees a plain policy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.trainer_kit import COMMON, OPEN_OBJECTIVE, Layout, items, minibatch, slow_loss
from trace_async.config import LearnerConfig
from trace_async.core.packing import denominators, pack
from trace_async.core.tree_packing import pack_trees
from trace_async.core.types import Adapter
from trace_async.errors import ConfigError, PolicyError
from trace_async.policies.tiny import save_policy, tiny_model, tiny_tokenizer
from trace_async.trainer import Trainer
from trace_async.trainer_lora import check_folder
from trace_async.weights import read_weights

RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="module", params=["tied", "untied"])
def policy_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = tiny_tokenizer([f"w{index}" for index in range(200)])
    torch.manual_seed(5)
    model: Any = tiny_model(tokenizer, seed=3, hidden_size=32, num_layers=2)
    if request.param == "tied":
        model = LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True, initializer_range=0.2))
    save_policy(model, tokenizer, path)
    return path


def make_trainer(policy_path: Path, *, rank: int = RANK, seed: int = 0) -> Trainer:
    learner = LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9, lora_rank=rank, lora_alpha=ALPHA)
    return Trainer(policy_path, learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=seed)


def train(trainer: Trainer, *, seed: int, layout: Layout = pack_trees) -> None:
    batch = items(seed)
    trainer.step([minibatch(batch, layout=layout, micro_batch_tokens=128)])


def stored(trainer: Trainer, path: Path) -> dict[str, torch.Tensor]:
    trainer.save_weights(path)
    return load_file(path)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(3, 40)[None]).logits
    return found


def test_the_first_policy_is_the_start_policy_and_the_start_depends_on_the_seed_alone(
    policy_path: Path, tmp_path: Path
) -> None:
    first = make_trainer(policy_path)
    torch.rand(7)
    again, other = make_trainer(policy_path), make_trainer(policy_path, seed=1)
    plain = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    assert torch.equal(logits(first.model), logits(plain))
    assert first.packs_trees
    files = [(tmp_path / name, trainer) for name, trainer in [("a", first), ("b", again), ("c", other)]]
    for path, trainer in files:
        trainer.save_weights(path)
    a, b, c = (path.read_bytes() for path, _ in files)
    assert a == b != c


def test_only_the_pairs_of_all_linear_layers_but_the_head_are_trained_and_published(
    policy_path: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(policy_path)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    train(trainer, seed=1)
    train(trainer, seed=2)
    changed = {n for n, tensor in trainer.model.state_dict().items() if not torch.equal(tensor, before[n])}
    linear = [f"self_attn.{kind}_proj" for kind in "qkvo"] + [f"mlp.{kind}_proj" for kind in ("gate", "up", "down")]
    modules = [f"model.layers.{layer}.{name}" for layer in (0, 1) for name in linear]
    assert changed == {f"{module}.lora_{part}.default.weight" for module in modules for part in "AB"}
    published = stored(trainer, tmp_path / "w")
    assert published.keys() == {f"base_model.model.{module}.lora_{part}.weight" for module in modules for part in "AB"}
    assert trainer.adapter == Adapter(rank=RANK, alpha=ALPHA)


@pytest.mark.parametrize("layout", [pack, pack_trees])
def test_the_pairs_get_the_gradient_of_every_turn_taken_alone(policy_path: Path, layout: Layout) -> None:
    trainer = make_trainer(policy_path)
    train(trainer, seed=3)  # off the start, where the gradient of every A is 0
    plain = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    pairs = {n: p.detach().clone().requires_grad_() for n, p in trainer.model.named_parameters() if "lora_" in n}
    added = {
        name.replace(".lora_A.default", ""): ALPHA / RANK * pairs[name.replace("lora_A", "lora_B")] @ low
        for name, low in pairs.items()
        if "lora_A" in name
    }
    merged = {name: parameter.detach() + added.get(name, 0.0) for name, parameter in plain.named_parameters()}

    def oracle(ids: torch.Tensor) -> Any:
        return torch.func.functional_call(plain, merged, (ids,))

    batch = items(1)
    expected_loss = torch.stack([slow_loss(oracle, item, 1.0) for item in batch]).sum() / denominators(batch).tokens
    expected_loss.backward()  # type: ignore[no-untyped-call]
    trainer.step([minibatch(batch, layout=layout, micro_batch_tokens=128)])
    found = {name: parameter.grad for name, parameter in trainer.model.named_parameters() if "lora_" in name}
    for name, pair in pairs.items():
        assert pair.grad is not None
        scale = float(pair.grad.abs().max())
        torch.testing.assert_close(found[name], pair.grad, rtol=1e-3, atol=1e-4 * scale + 1e-7)


def test_a_resumed_trainer_goes_on_to_the_bit_from_pairs_alone(policy_path: Path, tmp_path: Path) -> None:
    whole = make_trainer(policy_path)
    for seed in range(4):
        train(whole, seed=seed)
        if seed == 1:
            whole.save(tmp_path)
    resumed = make_trainer(policy_path, seed=9)
    resumed.load(tmp_path)
    assert resumed.version == 2
    for seed in (2, 3):
        train(resumed, seed=seed)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert all("lora_" in name for name in load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("saved", "loading"), [(4, 0), (0, 4), (4, 2)])
def test_a_checkpoint_of_another_rank_is_refused(policy_path: Path, saved: int, loading: int, tmp_path: Path) -> None:
    make_trainer(policy_path, rank=saved).save(tmp_path)
    with pytest.raises(PolicyError, match=r"another model or learner\.lora_rank"):
        make_trainer(policy_path, rank=loading).load(tmp_path)


def test_actors_and_the_exported_folder_have_the_policy_that_is_trained(policy_path: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_path)
    train(trainer, seed=1)
    train(trainer, seed=2)
    expected = logits(trainer.model)
    trainer.export(tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    acting = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    assert float((logits(acting) - expected).abs().max()) > 0.1
    trainer.save_weights(tmp_path / "w")
    acting.load_state_dict(read_weights(tmp_path / "w", adapter=trainer.adapter, base=policy_path))
    for model in (exported, acting):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-5)
    train(trainer, seed=3)  # exporting has not ended the training
    assert not torch.equal(logits(trainer.model), expected)


def test_a_start_policy_in_bfloat16_is_trained_and_merged_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**COMMON, initializer_range=0.2)
    LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path)
    train(trainer, seed=1)
    trainer.save_weights(tmp_path / "w")
    acting = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    acting.load_state_dict(read_weights(tmp_path / "w", adapter=trainer.adapter, base=tmp_path))
    torch.testing.assert_close(logits(acting), logits(trainer.model), rtol=0, atol=1e-5)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=220, n_positions=64, n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers"):
        make_trainer(tmp_path)


def test_a_folder_whose_files_have_other_names_than_the_model_is_refused_at_the_start(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=True))
    model.model.save_pretrained(tmp_path)  # without the head's wrapper, as some hub folders are
    make_trainer(tmp_path, rank=0)
    with pytest.raises(PolicyError, match=r"cannot add low-rank pairs to its files.*missing .*'lm_head\.weight'"):
        make_trainer(tmp_path)


def test_a_folder_whose_files_hold_other_numbers_than_the_model_is_refused(policy_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    check_folder(model, policy_path)
    with torch.no_grad():
        model.model.norm.weight[3] += 1e-6
    with pytest.raises(PolicyError, match=r"does not use what its files hold as model\.norm\.weight"):
        check_folder(model, policy_path)


def test_without_peft_the_cure_is_named() -> None:
    program = (
        "import sys; sys.modules['peft'] = None\n"  # what an import finds where nothing is installed
        "from trace_async.core.types import Adapter\n"
        "from trace_async.trainer_lora import add_pairs\n"
        "add_pairs(None, adapter=Adapter(rank=8, alpha=16.0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ConfigError: learner.lora_rank = 8 needs peft" in done.stderr
    assert "pip install 'trace-async[lora]'" in done.stderr
