"""`trace-async export`: what a checkpoint has trained, as a folder that transformers, vLLM and peft load.

Invariants: the run may go on meanwhile, nothing of it is touched; the folder has its name only when all of it is there.
Importable without torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trace_async.app.wiring import policy_path
from trace_async.config import Config
from trace_async.config_load import from_json
from trace_async.core.types import Adapter
from trace_async.errors import UserError
from trace_async.learning.checkpoint import STATE, find_checkpoint, find_fault, read_state
from trace_async.learning.resume import TRAINER
from trace_async.run_folder import RunFolder


def pick_checkpoint(source: Path, *, best: bool) -> Path:
    """The checkpoint that `source` is, or of the run that it is the folder of the newest or best.

    Raises UserError where there is none, or it is not whole.
    """
    if (source / STATE).is_file():
        if best:
            raise UserError(f"{source} is one checkpoint; give the run's folder to choose the best of it")
        if (fault := find_fault(source)) is not None:
            raise UserError(f"{source} is not whole: {fault}; take another checkpoint of the run")
        return source
    checkpoints = RunFolder(source).checkpoints
    found = find_checkpoint(checkpoints, best=best)
    if found is None:
        raise UserError(
            f"{source} is neither a checkpoint nor the folder of a run that has a whole one in {checkpoints} (yet): "
            "one is made every learner.checkpoint_every_steps steps and at the end of the run"
        )
    return found


def export_checkpoint(checkpoint: Path, out: Path, *, adapter_only: bool, dtype: str) -> None:
    """The policy of a whole checkpoint, or with `adapter_only` the low-rank pairs alone, in `out`. Imports torch.

    Raises UserError when `out` exists, or the run trained all weights and has no pairs; PolicyError when its start
    policy is not where it was.
    """
    if out.exists():
        raise UserError(f"{out} exists; give the name of a new folder")
    config = from_json(read_state(checkpoint)["config"], source=str(checkpoint / STATE))
    adapter = _adapter(config)
    if adapter_only and adapter is None:
        raise UserError(
            f"{checkpoint} has no adapter: the run trained all weights (learner.lora_rank = 0); leave --adapter out"
        )
    from trace_async.trainer_files import export_adapter, export_policy, stored_tensors

    stored = stored_tensors(checkpoint / TRAINER)
    policy = policy_path(config.policy.path)
    with _whole_folder(out) as aside:
        if adapter_only:
            assert adapter is not None
            export_adapter(aside, policy=str(policy), pairs=stored, adapter=adapter, dtype=dtype)
        else:
            export_policy(aside, policy_path=policy, stored=stored, adapter=adapter, dtype=dtype)


def _adapter(config: Config) -> Adapter | None:
    learner = config.learner
    return Adapter(rank=learner.lora_rank, alpha=learner.lora_alpha) if learner.lora_rank else None


@contextmanager
def _whole_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name at the end of the block, or is gone when that fails."""
    aside = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        aside.replace(out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
