"""The trainer against slow oracles: the same log-probabilities, the same gradient, the same run after a restart."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tests.trainer_kit import OPEN_OBJECTIVE, Layout, decoder, items, minibatch, slow_loss
from trace_async.config import LearnerConfig, ObjectiveConfig
from trace_async.core.packing import denominators, pack
from trace_async.core.tree_packing import pack_trees
from trace_async.errors import PolicyError
from trace_async.policies.tiny import save_policy, tiny_model, tiny_tokenizer
from trace_async.trainer import Trainer


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    tokenizer = tiny_tokenizer([f"w{index}" for index in range(200)])
    save_policy(tiny_model(tokenizer, seed=3, hidden_size=32, num_layers=2), tokenizer, path)
    return path


def make_trainer(
    policy_path: Path, *, objective: ObjectiveConfig = OPEN_OBJECTIVE, temperature: float = 1.0
) -> Trainer:
    learner = LearnerConfig(learning_rate=1e-2, max_grad_norm=1e9)
    return Trainer(policy_path, learner=learner, objective=objective, temperature=temperature, seed=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("layout", "bound"), [(pack, 128), (pack_trees, 128), (pack_trees, 40)])
def test_one_step_moves_along_the_gradient_of_every_turn_taken_alone(
    policy_path: Path, temperature: float, layout: Layout, bound: int
) -> None:
    batch = items(1)
    trainer = make_trainer(policy_path, temperature=temperature)
    oracle = LlamaForCausalLM.from_pretrained(policy_path, dtype=torch.float32)
    torch.stack([slow_loss(oracle, item, temperature) for item in batch]).sum().div(
        denominators(batch).tokens
    ).backward()  # type: ignore[no-untyped-call]
    metrics = trainer.step([minibatch(batch, layout=layout, micro_batch_tokens=bound)])
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-6 * float(expected.abs().max()) + 1e-7)
    assert metrics["actor/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-3)
    assert trainer.version == 1


def test_the_size_of_micro_batches_changes_nothing(policy_path: Path) -> None:
    batch = items(2)
    results = []
    for micro_batch_tokens in (64, 100_000):
        trainer = make_trainer(policy_path, objective=ObjectiveConfig(veto_low=0, veto_high=1e9, veto_token=0))
        part = minibatch(batch, layout=pack_trees, micro_batch_tokens=micro_batch_tokens)
        results.append((len(part.rows), trainer.step([part])))
    (many, first), (few, second) = results
    assert many > few
    for key in ("actor/grad_norm", "actor/pg_loss", "objective/kl_k3", "objective/ess_ratio", "actor/loss_tokens"):
        assert first[key] == pytest.approx(second[key], rel=1e-4, abs=1e-7)
    assert first["actor/grad_norm"] > 0
    assert first["objective/held_back_share"] == second["objective/held_back_share"] > 0  # over the update, not a batch


def test_a_resumed_trainer_goes_on_to_the_bit(policy_path: Path, tmp_path: Path) -> None:
    whole = make_trainer(policy_path)
    for seed in range(4):
        batch = items(seed)
        whole.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
        if seed == 1:
            whole.save(tmp_path)
    resumed = make_trainer(policy_path)
    resumed.load(tmp_path)
    assert resumed.version == 2
    for seed in (2, 3):
        batch = items(seed)
        resumed.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(policy_path: Path) -> None:
    trainer = make_trainer(policy_path)
    with torch.no_grad():
        next(trainer.model.parameters())[:] = math.inf
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    batch = items(5)
    metrics = trainer.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    assert metrics["actor/skipped_steps"] == 1
    assert not math.isfinite(metrics["actor/grad_norm"])
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_the_learning_rate_falls_linearly_to_its_share_at_the_last_step(policy_path: Path) -> None:
    learner = LearnerConfig(learning_rate=1e-2, decay_to=0.2, max_steps=4, warmup_steps=2)
    trainer = Trainer(policy_path, learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=0)
    rates = [trainer.step([])["actor/lr"] for _ in range(6)]
    assert rates == pytest.approx([5e-3, 8e-3, 6e-3, 4e-3, 2e-3, 2e-3])


def test_a_step_without_rows_keeps_the_weights_and_counts_the_version(policy_path: Path) -> None:
    trainer = make_trainer(policy_path)
    before = next(trainer.model.parameters()).clone()
    metrics = trainer.step([])
    assert trainer.version == 1
    assert torch.equal(before, next(trainer.model.parameters()))
    assert "actor/grad_norm" not in metrics


def test_an_exported_policy_is_a_standard_transformers_folder(policy_path: Path, tmp_path: Path) -> None:
    trainer = make_trainer(policy_path)
    batch = items(6)
    trainer.step([minibatch(batch, layout=pack, micro_batch_tokens=256)])
    trainer.export(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.chat_template
    assert tokenizer.encode("w3 w5", add_special_tokens=False) == [7, 9]


def test_a_checkpoint_of_another_model_is_refused(policy_path: Path, tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(["other"])
    save_policy(tiny_model(tokenizer, seed=0, hidden_size=16, num_layers=1), tokenizer, tmp_path / "other")
    make_trainer(tmp_path / "other").save(tmp_path)
    with pytest.raises(PolicyError, match="another model"):
        make_trainer(policy_path).load(tmp_path)


@pytest.mark.parametrize(
    ("kind", "packs_trees"),
    [
        ("gpt2 with dropout", True),
        ("qwen3 with tied embeddings", True),
        ("mistral", True),
        ("window of 8", False),
        ("new window of 8", False),
    ],
)
def test_any_decoder_is_trained_on_the_distribution_that_a_plain_forward_pass_gives(
    kind: str, packs_trees: bool, tmp_path: Path
) -> None:
    decoder(kind).save_pretrained(tmp_path)
    trainer = make_trainer(tmp_path)
    assert trainer.packs_trees == packs_trees
    batch = items(1)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)  # in evaluation mode
    expected_loss = torch.stack([slow_loss(oracle, item, 1.0) for item in batch]).sum() / denominators(batch).tokens
    expected_loss.backward()  # type: ignore[no-untyped-call]
    layout = pack_trees if trainer.packs_trees else pack
    trainer.step([minibatch(batch, layout=layout, micro_batch_tokens=128)])
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    found = torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()) + 1e-7)


def test_a_window_longer_than_any_packed_tree_does_no_harm(tmp_path: Path) -> None:
    decoder("window of 8").save_pretrained(tmp_path)
    learner = LearnerConfig(micro_batch_tokens=8)
    trainer = Trainer(tmp_path, learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=0)
    assert trainer.packs_trees


def test_a_window_longer_than_any_path_does_no_harm_however_long_a_batch_is(tmp_path: Path) -> None:
    decoder("window of 8").save_pretrained(tmp_path)
    found = [
        Trainer(
            tmp_path,
            learner=LearnerConfig(),
            objective=OPEN_OBJECTIVE,
            temperature=1.0,
            seed=0,
            max_path_tokens=longest,
        ).packs_trees
        for longest in (8, 40)
    ]
    assert found == [True, False]
