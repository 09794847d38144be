"""`trace-async export`: folders that transformers and peft load, from runs and checkpoints, and clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.trainer_kit import OPEN_OBJECTIVE, items, minibatch
from trace_async.cli import main
from trace_async.config import Config, LearnerConfig, PolicyConfig
from trace_async.config_load import save_config, to_json
from trace_async.learning.checkpoint import write_checkpoint
from trace_async.policies.tiny import save_policy, tiny_model, tiny_tokenizer
from trace_async.run_folder import RunFolder
from trace_async.trainer import Trainer

IDS = torch.arange(3, 30)[None]


class Run:
    """A run folder with checkpoints of a few steps, the trainer that made them, and its logits at each."""

    def __init__(self, root: Path, *, lora_rank: int) -> None:
        tokenizer = tiny_tokenizer([f"w{index}" for index in range(200)])
        model = tiny_model(tokenizer, seed=3, hidden_size=32, num_layers=2)
        save_policy(model, tokenizer, root / "start")
        learner = LearnerConfig(
            learning_rate=3e-2, max_grad_norm=1e9, lora_rank=lora_rank, lora_alpha=8.0, device="cpu"
        )
        self.config = replace(Config(), policy=PolicyConfig(path=str(root / "start")), learner=learner)
        self.folder = RunFolder(root / "run")
        self.folder.root.mkdir()
        save_config(self.config, self.folder.config)
        self.trainer = Trainer(root / "start", learner=learner, objective=OPEN_OBJECTIVE, temperature=1.0, seed=0)
        self.logits: dict[int, torch.Tensor] = {}

    def step(self, *, success: float) -> None:
        self.trainer.step([minibatch(items(self.trainer.version), micro_batch_tokens=256)])

        def fill(directory: Path) -> None:
            (directory / "trainer").mkdir()
            self.trainer.save(directory / "trainer")

        state: Any = {"config": to_json(self.config)}
        write_checkpoint(self.folder.checkpoints, step=self.trainer.version, state=state, fill=fill, success=success)
        self.logits[self.trainer.version] = logits_of(self.trainer.model)


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@pytest.fixture(params=[0, 4], ids=["all weights", "pairs"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    made = Run(tmp_path, lora_rank=request.param)
    for success in (0.2, 0.6, 0.4):
        made.step(success=success)
    return made


def test_the_newest_checkpoint_of_a_run_becomes_a_standard_folder(run: Run, tmp_path: Path) -> None:
    assert main(["export", str(run.folder.root), str(tmp_path / "out")]) == 0
    model = load(tmp_path / "out")
    torch.testing.assert_close(logits_of(model), run.logits[3], rtol=0.0, atol=1e-5)
    assert model.dtype is torch.float32
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tmp_path / "start").chat_template
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }


def test_the_best_or_a_named_checkpoint_can_be_had(run: Run, tmp_path: Path) -> None:
    assert main(["export", "--best", str(run.folder.root), str(tmp_path / "best")]) == 0
    assert main(["export", str(run.folder.checkpoints / "step_000001"), str(tmp_path / "first"), "--merge"]) == 0
    torch.testing.assert_close(logits_of(load(tmp_path / "best")), run.logits[2], rtol=0.0, atol=1e-5)
    torch.testing.assert_close(logits_of(load(tmp_path / "first")), run.logits[1], rtol=0.0, atol=1e-5)


def test_a_checkpoint_that_is_being_written_or_damaged_is_passed_over_and_left_alone(run: Run, tmp_path: Path) -> None:
    (run.folder.checkpoints / "step_000004.tmp").mkdir()
    newest = run.folder.checkpoints / "step_000003"
    (newest / "learner.json").write_text("{}")
    before = sorted(path.name for path in run.folder.checkpoints.iterdir())
    assert main(["export", str(run.folder.root), str(tmp_path / "out")]) == 0
    torch.testing.assert_close(logits_of(load(tmp_path / "out")), run.logits[2], rtol=0.0, atol=1e-5)
    assert sorted(path.name for path in run.folder.checkpoints.iterdir()) == before
    assert main(["export", str(newest), str(tmp_path / "other")]) == 2


def test_another_dtype_rounds_once(run: Run, tmp_path: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        assert main(["export", str(run.folder.root), str(tmp_path / dtype), "--dtype", dtype]) == 0
    exact, rounded = (load_file(tmp_path / dtype / "model.safetensors") for dtype in ("float32", "bfloat16"))
    assert json.loads((tmp_path / "bfloat16" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.bfloat16())


def test_pairs_alone_are_what_peft_loads(tmp_path: Path) -> None:
    from peft import PeftModel

    run = Run(tmp_path, lora_rank=4)
    run.step(success=0.5)
    assert main(["export", str(run.folder.root), str(tmp_path / "pairs"), "--adapter"]) == 0
    base = load(tmp_path / "start")
    assert float((logits_of(base) - run.logits[1]).abs().max()) > 1e-2
    model = PeftModel.from_pretrained(base, tmp_path / "pairs")
    torch.testing.assert_close(logits_of(model), run.logits[1], rtol=0.0, atol=1e-5)
    merged = model.merge_and_unload()
    torch.testing.assert_close(logits_of(merged), run.logits[1], rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    ("prepare", "arguments", "complaint"),
    [
        ("run", ["RUN", "OUT", "--adapter"], "has no adapter: the run trained all weights"),
        ("run", ["RUN", "start"], "exists; give the name of a new folder"),
        ("run", ["start", "OUT"], "is neither a checkpoint nor the folder of a run"),
        ("run", ["RUN/checkpoints/step_000001", "OUT", "--best"], "give the run's folder"),
        ("config", ["RUN", "OUT"], "neither a checkpoint nor the folder of a run that has a whole one"),
        ("moved", ["RUN", "OUT"], "is no transformers folder"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_cure(
    prepare: str, arguments: list[str], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, lora_rank=0)
    if prepare != "config":
        run.step(success=0.5)
    if prepare == "moved":
        (tmp_path / "start").rename(tmp_path / "elsewhere")
    places = {"RUN": str(run.folder.root), "OUT": str(tmp_path / "out"), "start": str(tmp_path / "start")}
    given = [
        argument.replace("RUN", places["RUN"]) if "RUN" in argument else places.get(argument, argument)
        for argument in arguments
    ]
    assert main(["export", *given]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*.tmp"))
