"""Which torch device a name in the configuration stands for. Importable without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trace_async.errors import ConfigError

if TYPE_CHECKING:
    import torch


def pick_device(name: str, *, key: str) -> torch.device:
    """`auto`: the first CUDA device where there is one, the CPU elsewhere; any other name is torch's own.

    Raises ConfigError, naming the configuration key, for a device that this machine does not have.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA asserts
        first = str(error).splitlines()[0]
        raise ConfigError(f"{key} = {name!r}: this machine has no such device ({first}); use auto or cpu") from error
    return device
