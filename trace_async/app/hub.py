"""A policy named by its id on a model hub, brought into the hub client's own cache.

The newest revision is asked for; where the hub cannot be reached, what the cache has is used. Never: any other kind of
name, or files that a transformers folder does not need.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from trace_async.errors import PolicyError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def is_hub_id(name: str) -> bool:
    """Whether `name` has the shape ORGANIZATION/NAME, as a relative path may have too."""
    return _HUB_ID.fullmatch(name) is not None


@cache
def hub_folder(name: str) -> Path:
    """The folder of a hub's model; asked for once in a process, so that one process sees one revision.

    Raises PolicyError when neither the hub nor the cache has it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:  # boundary: the client raises its own, requests', httpx' and the system's errors
        first_line = str(error).strip().partition("\n")[0]
        raise PolicyError(
            f"policy.path = {name!r} is no folder here, and no hub gave a model of that name "
            f"({type(error).__name__}: {first_line}); give the path of a transformers folder, or get one where no hub "
            "can be reached with: trace-async get-policy smollm2-135m FOLDER"
        ) from error
