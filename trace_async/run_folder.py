"""Where the files of one run lie, and how a small JSON file is replaced in one piece.

    RUN/config.json       resolved configuration
    RUN/address           where actors dial the learner; absent until it listens
    RUN/former_address    where the learner listened last, so that a restart can listen there again
    RUN/metrics.jsonl     one row per optimizer step
    RUN/status.json       live leases and trees, newest state
    RUN/ledger.sqlite     states of leases and groups
    RUN/versions/         published policy versions, unless publication.directory is another folder
    RUN/checkpoints/      what a resumed run starts from
    RUN/lock              held by the one supervisor; learner.lock by the one learner
    RUN/policy/           the trained policy, a transformers folder
    RUN/evaluation/       before.json, after.json
    RUN/logs/             learner.log, actor-0.log, ...
    RUN/summary.json, RUN/curve.png, RUN/reliability.png

Never decides what is in the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.json"

    @property
    def address(self) -> Path:
        return self.root / "address"

    @property
    def former_address(self) -> Path:
        return self.root / "former_address"

    @property
    def lock(self) -> Path:
        return self.root / "lock"

    @property
    def learner_lock(self) -> Path:
        return self.root / "learner.lock"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def ledger(self) -> Path:
        return self.root / "ledger.sqlite"

    @property
    def versions(self) -> Path:
        return self.root / "versions"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def policy(self) -> Path:
        return self.root / "policy"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def curve(self) -> Path:
        return self.root / "curve.png"

    @property
    def reliability(self) -> Path:
        return self.root / "reliability.png"

    def evaluation(self, label: str) -> Path:
        """The result of one evaluation; `label` is "before" or "after"."""
        return self.root / "evaluation" / f"{label}.json"

    def log(self, process: str) -> Path:
        """The log file of one process."""
        return self.root / "logs" / f"{process}.log"


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one piece: a reader sees the old content or the new, never half."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_text(path: Path) -> str:
    """What `write_text` wrote, without white space around it; empty when the file does not exist."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""


def write_json(path: Path, data: Mapping[str, object]) -> None:
    """`write_text` of JSON; ValueError when it holds NaN."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, object] | None:
    """The object in a JSON file; None when the file does not exist."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data
