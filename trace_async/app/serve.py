"""The command that starts a vLLM server which an actor of a configuration can sample with.

Owns what stands on that command line beside what vLLM in an actor's own process is started with: the endpoints. With
them whoever reaches the port controls the process, so it binds loopback unless told otherwise. Never imports vllm: the
command can be made where vLLM is not installed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from trace_async.app.wiring import policy_path
from trace_async.config import Config
from trace_async.devices import pick_device
from trace_async.engines.vllm_common import check_options
from trace_async.engines.vllm_process import Launch, child_environment, engine_arguments
from trace_async.errors import UserError

DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8000

_NOT_FOR_A_SERVER = ("skip_tokenizer_init", "disable_log_stats")
_PACKAGE_PARENT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """What to run, and in which environment on top of the caller's."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """One line for a shell or a job script."""
        return shlex.join(["env", *(f"{name}={value}" for name, value in self.environment.items()), *self.argv])

    def execute(self) -> NoReturn:
        """Become the server."""
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvpe(self.argv[0], self.argv, {**os.environ, **self.environment})


def server_command(config: Config, *, host: str | None, port: int | None) -> ServerCommand:
    """The server for `config`; by default at loopback, at the port of engine.server_url.

    Raises UserError for a configuration that wants another engine, ConfigError for engine options that are refused.
    """
    if config.engine.kind != "vllm_server":
        raise UserError(f"engine.kind is {config.engine.kind!r}: only 'vllm_server' samples with a server")
    check_options(config.engine.options)
    folder = policy_path(config.policy.path).absolute()
    port = port or urlsplit(config.engine.server_url).port or DEFAULT_PORT
    launch = Launch(folder=folder, config=config.engine, max_tokens=config.tree.max_context_tokens)
    arguments = engine_arguments(launch, on_cpu=_runs_on_cpu(config.engine.device))
    flags = [flag for name, value in arguments.items() if name not in _NOT_FOR_A_SERVER for flag in _flags(name, value)]
    return ServerCommand(
        argv=(
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", host or DEFAULT_HOST, "--port", str(port)),
            *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *flags,
        ),
        environment=dict(_environment(config.engine.threads)),
    )


def _environment(threads: int) -> Iterator[tuple[str, str]]:
    yield "VLLM_SERVER_DEV_MODE", "1"  # the endpoints for new weights
    yield "PYTHONPATH", os.pathsep.join(filter(None, (str(_PACKAGE_PARENT), os.environ.get("PYTHONPATH"))))
    for name, value in child_environment(threads).items():
        if name not in os.environ and name != "VLLM_LOGGING_LEVEL":
            yield name, value


def _runs_on_cpu(device: str) -> bool:
    """A named device need not be one of this machine: the command may be for another."""
    return pick_device(device, key="engine.device").type == "cpu" if device == "auto" else device == "cpu"


def _flags(name: str, value: Any) -> list[str]:
    """As vLLM's own command line spells an engine argument."""
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
