"""A frozen sentence encoder from a local folder: text to one vector of length 1.

Reads folders of sentence-transformers (modules.json says how tokens are pooled) and plain transformers folders (their
mean). Invariant: each text is encoded by itself, so its vector depends on nothing else. Never reaches the network, and
imports torch and transformers at the first text only.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from trace_async.core.types import FloatArray
from trace_async.errors import ConfigError

POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
}
"""Flags of a pooling module's config.json that are understood."""

_TYPES = ("Transformer", "Pooling", "Normalize")
_WIDTH_KEYS = ("hidden_size", "d_model", "dim")
_LONGEST = 512
"""Tokens, where neither folder nor model says how many it takes."""


class SentenceEncoder:
    """Encodes on the CPU, one text at a time."""

    def __init__(self, folder: Path, *, where: str) -> None:
        """Looks at the folder's JSON only. Raises ConfigError, naming the key `where`, when it is no such folder."""
        self._folder = folder
        self._where = where
        config = self._read("config.json")
        if config is None:
            raise ConfigError(
                f"{where} = {str(folder)!r} is no sentence-transformers or transformers folder, it has no config.json; "
                "give the path of one on this machine"
            )
        text_config = config.get("text_config", config)
        widths = [text_config[key] for key in _WIDTH_KEYS if isinstance(text_config.get(key), int)]
        if not widths:
            raise ConfigError(f"{where}: {folder / 'config.json'} names no width ({', '.join(_WIDTH_KEYS)})")
        self.width: int = widths[0]
        self._pooling = self._find_pooling()
        told = (self._read("sentence_bert_config.json") or {}).get("max_seq_length")
        self._max_tokens = int(told or text_config.get("max_position_embeddings") or _LONGEST)
        self._model: Any = None
        self._tokenizer: Any = None

    def encode(self, text: str) -> FloatArray:
        """float32 [width], of length 1; zeros for a text without tokens. One that is too long is read at both ends."""
        import torch

        if self._model is None:
            self._load()
        ids = self._tokenizer(text, truncation=False, verbose=False)["input_ids"]
        if not ids:
            return np.zeros(self.width, np.float32)
        if len(ids) > self._max_tokens:
            head = self._max_tokens // 2
            ids = ids[:head] + ids[head - self._max_tokens :]
        with torch.inference_mode():
            states = self._model(input_ids=torch.tensor([ids])).last_hidden_state[0]
        vector = np.asarray(_pool(states, self._pooling).float().numpy(), np.float32)
        return vector / np.float32(max(math.sqrt(float(vector @ vector)), 1e-12))

    def _load(self) -> None:
        from transformers import AutoModel, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder), local_files_only=True)
        # a table of positions may be longer than what the model takes: RoBERTa's kind keeps two places for itself
        self._max_tokens = min(self._max_tokens, int(self._tokenizer.model_max_length))
        self._model = AutoModel.from_pretrained(str(self._folder), local_files_only=True).eval()

    def _find_pooling(self) -> str:
        modules: Any = self._read("modules.json")
        if modules is None:
            return "mean"
        types = [str(module["type"]).rpartition(".")[2] for module in modules]
        if unknown := sorted(set(types) - set(_TYPES)):
            raise ConfigError(
                f"{self._where}: {self._folder / 'modules.json'} has modules {', '.join(unknown)}, which are not "
                f"understood here; give a folder with {', '.join(_TYPES)} only"
            )
        if "Pooling" not in types:
            return "mean"
        config = self._read(f"{modules[types.index('Pooling')]['path']}/config.json") or {}
        chosen = [key for key, on in config.items() if key.startswith("pooling_mode") and on is True]
        if len(chosen) != 1 or chosen[0] not in POOLINGS:
            raise ConfigError(
                f"{self._where}: the pooling of {self._folder} is {', '.join(chosen) or 'none'}; "
                f"understood is exactly one of {', '.join(POOLINGS)}"
            )
        return POOLINGS[chosen[0]]

    def _read(self, name: str) -> Any:
        """A JSON file of the folder; None when it is not there."""
        file = self._folder / name
        try:
            return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        except ValueError as error:
            raise ConfigError(f"{self._where}: {file} is not JSON ({error})") from error


def _pool(states: Any, pooling: str) -> Any:
    """One vector of the token states [tokens, width]."""
    match pooling:
        case "first":
            return states[0]
        case "last":
            return states[-1]
        case "max":
            return states.max(dim=0).values
    return states.mean(dim=0)
