"""Builds the engine that a configuration names: one function per kind. Imports what a kind needs when it is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trace_async.acting.versions import VersionedEngine
from trace_async.config import Config
from trace_async.core.types import Canary
from trace_async.devices import pick_device
from trace_async.errors import PolicyError
from trace_async.model_probe import probe_tokens
from trace_async.rendering import Renderer

if TYPE_CHECKING:
    from trace_async.engines.vllm_common import Load

_WEIGHTS = "model.safetensors"
_CANARY_TOKENS = 64


def make_engine(config: Config, folder: Path, *, renderer: Renderer, version: int) -> VersionedEngine:
    """The engine that samples with a policy folder's weights.

    `version` is what it says of these weights: -1 for an actor, whose engine must load a published version first.
    """
    makers = {"local": _local, "vllm": _vllm, "vllm_server": _vllm_server}
    return makers[config.engine.kind](config, folder, renderer=renderer, version=version)


def _local(config: Config, folder: Path, *, renderer: Renderer, version: int) -> VersionedEngine:
    from trace_async.engines.batched_model import load_model
    from trace_async.engines.local import LocalEngine

    model = load_model(
        folder,
        threads=config.engine.threads,
        device=pick_device(config.engine.device, key="engine.device"),
        dtype=config.engine.dtype,
    )
    return LocalEngine(
        model,
        config=config.engine,
        stop_ids=renderer.stop_ids,
        pad_id=renderer.pad_id,
        max_tokens=config.tree.max_context_tokens,
        version=version,
        base=folder,
    )


def _vllm(config: Config, folder: Path, *, renderer: Renderer, version: int) -> VersionedEngine:
    """Nothing is started here: `run` starts vLLM's processes, with the folder's weights in them."""
    from trace_async.engines.vllm_engine import VllmEngine
    from trace_async.engines.vllm_process import Launch

    launch = Launch(folder=folder.resolve(), config=config.engine, max_tokens=config.tree.max_context_tokens)
    return VllmEngine(launch, stop_ids=renderer.stop_ids, version=version)


def _vllm_server(config: Config, folder: Path, *, renderer: Renderer, version: int) -> VersionedEngine:
    """The server runs already, with whatever weights; `folder`'s are loaded unless a version will be published."""
    from transformers import AutoConfig

    from trace_async.engines.vllm_server import VllmServerEngine
    from trace_async.engines.vllm_server_checks import Expected

    vocabulary_size = int(AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
    return VllmServerEngine(
        config=config.engine,
        expected=Expected(
            vocabulary_size=vocabulary_size,
            unknown_id=max(vocabulary_size, renderer.num_token_ids),
            max_tokens=config.tree.max_context_tokens,
            dtype=config.engine.dtype,
            temperature=config.engine.temperature,
        ),
        stop_ids=renderer.stop_ids,
        base=folder,
        start=_start_load(folder, version=version) if version >= 0 else None,
    )


def _start_load(folder: Path, *, version: int) -> Load:
    """A folder's own weights as a version of epoch 0, with what transformers says of a fixed row of tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    from trace_async.engines.vllm_common import Load

    if not (folder / _WEIGHTS).is_file():
        raise PolicyError(
            f"{folder} has no {_WEIGHTS}, the one file that a vLLM server is given; write the model in one piece: "
            "save_pretrained(FOLDER, max_shard_size='1TB')"
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    prompt = np.asarray(probe_tokens(model.config, limit=_CANARY_TOKENS), dtype=np.int32)
    with torch.no_grad():
        ids = torch.from_numpy(prompt).long()
        logprobs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1], dim=-1).gather(-1, ids[1:, None])[:, 0]
    canary = Canary(prompts=(prompt,), logprobs=(logprobs.numpy(),))
    return Load(version=version, epoch=0, weights=folder / _WEIGHTS, canary=canary, adapter=None)
