"""`trace-async warm-start`: a policy that has imitated its environment's script, as a transformers folder.

Works for any environment whose kit has `demonstrate`. Demonstrations are played on the training tasks of the
configuration, in the order of its prompt stream, each anew with mistakes of its own. Those that rollouts could not
have sampled, because they are longer than `tree.max_context_tokens` or have a turn longer than
`engine.max_turn_tokens`, are left out and counted.

Deterministic for a seed on one kind of machine with one number of threads. The folder has its name only when all of it
is there. Importable without torch.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress

from trace_async.app import wiring
from trace_async.app.warm_start_script import Played, Script, load_encoder
from trace_async.config import Config
from trace_async.config_load import load_config
from trace_async.errors import ConfigError, UserError
from trace_async.publication.manifest import file_digest

if TYPE_CHECKING:
    import torch

    from trace_async.policies.warm_start import WarmStartConfig

BATCH = 16
LEARNING_RATE = 3e-4

_LOSS_LINES = 10
"""How often the loss is told beside the progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What the result depends on, besides the configuration, the environment's data and the machine."""

    steps: int
    mistakes: float  # rate per turn
    seed: int
    batch: int = BATCH  # demonstrations a step
    learning_rate: float = LEARNING_RATE  # AdamW, all weights; rises over a tenth of the steps, then falls to 0

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("batch", self.batch)):
            if value < 1:
                raise ConfigError(f"--{name}: need >= 1, got {value}")
        if not 0.0 <= self.mistakes <= 1.0:
            raise ConfigError(f"--mistakes: need a rate within 0..1, got {self.mistakes}")
        if self.seed < 0:
            raise ConfigError(f"--seed: need >= 0, got {self.seed}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0.0):
            raise ConfigError(f"--learning-rate: need > 0, got {self.learning_rate}")

    def training(self) -> WarmStartConfig:
        """The same in the words of the training loop."""
        from trace_async.policies.warm_start import WarmStartConfig

        return WarmStartConfig(
            steps=self.steps,
            conversations_per_step=self.batch,
            learning_rate=self.learning_rate,
            warmup_steps=max(1, self.steps // 10),
        )


def warm_start(
    config_path: Path,
    overrides: Sequence[str],
    out: Path,
    *,
    steps: int,
    mistakes: float,
    seed: int,
    batch: int = BATCH,
    learning_rate: float = LEARNING_RATE,
) -> int:
    """Trains `policy.path` of a configuration on scripted play, all weights, and writes it to `out` with its recipe.

    Raises UserError when `out` exists, ConfigError for an environment without a script, limits that no demonstration
    keeps, or settings out of range; PolicyError for a policy that cannot be used.
    """
    recipe = Recipe(steps=steps, mistakes=mistakes, seed=seed, batch=batch, learning_rate=learning_rate)
    config = load_config(config_path, overrides)
    if out.exists():
        raise UserError(f"{out} exists; give the name of a new folder")
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("warm start", total=steps)

        def on_step(step: int, loss: float) -> None:
            progress.update(bar, completed=step, description=f"warm start, loss {loss:.3f}")
            if step % max(1, steps // _LOSS_LINES) == 0:
                progress.console.print(f"step {step}: loss {loss:.4f}", highlight=False)

        digest, played = train_on_script(config, out, recipe, on_step=on_step)
    told = ", ".join(f"{name} {value}" for name, value in played.told().items() if name != "sha256")
    sys.stdout.write(f"{told}\n{out}: weights sha256 {digest}\n")
    return 0


def train_on_script(
    config: Config, out: Path, recipe: Recipe, *, on_step: Callable[[int, float], None]
) -> tuple[str, Played]:
    """Fills `out`; returns the sha256 of its weights and what was played. Imports torch.

    Raises ConfigError and PolicyError as `warm_start` does.
    """
    import torch

    from trace_async.devices import pick_device
    from trace_async.policies.warm_start import warm_start_packed
    from trace_async.trainer_files import load_model

    path = wiring.policy_path(config.policy.path)
    encoder = load_encoder(path)
    kit = wiring.build_kit(config, encoder.renderer)
    script = Script(kit, encoder, config, batch=recipe.batch, mistakes=recipe.mistakes, seed=recipe.seed)
    torch.set_num_threads(config.learner.threads)
    torch.manual_seed(recipe.seed)
    model = load_model(path).to(pick_device(config.learner.device, key="learner.device"))
    losses: list[float] = []

    def keep(step: int, loss: float) -> None:
        losses.append(loss)
        on_step(step, loss)

    with asyncio.Runner() as runner:
        try:
            warm_start_packed(
                model,
                (runner.run(script.batch()) for _ in range(recipe.steps)),
                pad_id=encoder.renderer.pad_id,
                micro_batch_tokens=config.learner.micro_batch_tokens,
                max_path_tokens=config.tree.max_context_tokens,
                config=recipe.training(),
                on_step=keep,
            )
        finally:
            runner.run(wiring.close_kit(kit))
    told = _tell(config, path, recipe, script.played, losses)
    return _save(model, out, policy_path=path, told=told), script.played


def _save(model: torch.nn.Module, out: Path, *, policy_path: Path, told: dict[str, object]) -> str:
    """A transformers folder with the recipe in it; the sha256 of its weights."""
    from trace_async.trainer_files import export_policy
    from trace_async.weights import find_aliases

    aliases = find_aliases(model.state_dict())
    stored = {name: tensor.cpu() for name, tensor in model.state_dict().items() if name not in aliases}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as aside:
        made = Path(aside) / "policy"
        export_policy(made, policy_path=policy_path, stored=stored)
        digest = file_digest(made / "model.safetensors")
        recipe = json.dumps({**told, "sha256": digest}, indent=2, allow_nan=False)
        (made / "recipe.json").write_text(recipe + "\n", encoding="utf-8")
        made.rename(out)
    return digest


def _tell(config: Config, path: Path, recipe: Recipe, played: Played, losses: Sequence[float]) -> dict[str, object]:
    return {
        "start": config.policy.path,
        "start_sha256": {file.name: file_digest(file) for file in sorted(path.glob("*.safetensors"))},
        "environment": asdict(config.environment),
        "num_train": config.prompts.num_train,
        "max_context_tokens": config.tree.max_context_tokens,
        "max_turn_tokens": config.engine.max_turn_tokens,
        "threads": config.learner.threads,
        **asdict(recipe),
        "played": played.told(),
        "losses": [round(loss, 5) for loss in losses],
    }
