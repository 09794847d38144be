"""Puts together both ends of publication from a configuration: the learner's store and server, an actor's stager.

Owns what the empty values of the `publication` section stand for. Never starts a loop; importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from trace_async.config import Config
from trace_async.core.types import IntArray
from trace_async.environment import EnvironmentKit
from trace_async.model_probe import probe_tokens
from trace_async.prefixes import make_prefix_of
from trace_async.publication.staging import Stager
from trace_async.publication.staging_folder import StagingFolder
from trace_async.publication.store import VersionStore
from trace_async.publication.stream_client import StreamSource
from trace_async.publication.stream_server import WeightServer
from trace_async.rendering import Renderer
from trace_async.run_folder import RunFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NO_SERVER = "none"
_STAGING = ".staging"

MAX_CANARY_PROMPTS = 4
MAX_CANARY_TOKENS = 64
"""Of each prompt: enough to move when any part of a model is wrong, and a moment's work for any engine."""


class Publisher(NamedTuple):
    """The learner's end."""

    store: VersionStore
    server: WeightServer | None


@contextmanager
def open_publisher(config: Config, folder: RunFolder) -> Iterator[Publisher]:
    """The store of a run's versions and the server that offers them; both end with the block.

    A folder outside the run's is left empty when the block ends in order: it may be in memory.
    """
    directory = Path(config.publication.directory) if config.publication.directory else folder.versions
    address = server_address(config)
    with ExitStack() as stack:
        server = None if address is None else stack.enter_context(WeightServer(directory, address=address))
        store = stack.enter_context(VersionStore(directory, address="" if server is None else server.address))
        yield Publisher(store, server)
        if config.publication.directory:
            store.clear()


def server_address(config: Config) -> str | None:
    """Where the weight server is to listen; None for nowhere."""
    if config.publication.address == NO_SERVER:
        return None
    if config.publication.address:
        return config.publication.address
    url = urlsplit(config.coordinator.address)
    host = url.netloc.rpartition(":")[0] if url.scheme == "tcp" else "127.0.0.1"
    return f"tcp://{host}:0"


@contextmanager
def open_stager(config: Config, actor_id: str, *, dialled: str) -> Iterator[Stager]:
    """What fetches versions for one actor; its folder is deleted at the end. `dialled`: the learner's address."""
    with (
        StagingFolder(actor_id, root=_staging_root(config)) as folder,
        Stager(folder, make_stream=StreamSource, dialled=dialled) as stager,
    ):
        yield stager


def _staging_root(config: Config) -> Path | None:
    """In the folder of the versions where this machine has one that was named: then nothing is copied, only linked.

    Not in a run folder, which may lie on a network's file system without locks.
    """
    named = config.publication.directory
    return Path(named) / _STAGING if named and Path(named).is_dir() else None


def canary_prompts(
    kit: EnvironmentKit, renderer: Renderer, model_config: PretrainedConfig, *, max_context_tokens: int
) -> tuple[IntArray, ...]:
    """How the first held-out tasks open, where the environment says it beforehand; else a fixed row of tokens.

    Each is different and one token shorter than a context, since engines ask for a token behind it.
    """
    limit = min(MAX_CANARY_TOKENS, max_context_tokens - 1)
    size = kit.tasks.size("heldout")
    prefix_of = make_prefix_of(kit.opening, renderer.opening_ids)  # without tokens where nothing is known
    number = MAX_CANARY_PROMPTS if size is None else min(size, MAX_CANARY_PROMPTS)
    openings = [prefix_of(kit.tasks.task("heldout", index)).token_ids[:limit] for index in range(number)]
    usable = {opening.tobytes(): opening for opening in openings if len(opening) > 1}
    return tuple(usable.values()) or (np.asarray(probe_tokens(model_config, limit=limit), dtype=np.int32),)
