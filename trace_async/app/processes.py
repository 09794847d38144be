"""Child processes of one supervisor: start, signal, and make sure they are gone.

Invariants: each child leads its own process group, so that a signal to it reaches what it started and a terminal's
Ctrl-C does not; its output goes to its log file, appended; it holds the read end of a pipe whose write end lives here.
Never decides when to stop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_LOG = logging.getLogger(__name__)

_KILL_GRACE_S = 5.0
"""How long the kernel may take to deliver SIGKILL before we stop waiting for it."""


class ProcessTable:
    """Every process that was started and may still live."""

    def __init__(self, *, log_of: Callable[[str], Path]) -> None:
        self._log_of = log_of
        self._children: dict[str, asyncio.subprocess.Process] = {}

    async def start(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        """Starts `command` under `name`; an earlier process of that name must have ended. Default: our environment."""
        earlier = self._children.get(name)
        assert earlier is None or earlier.returncode is not None, f"{name} still runs as pid {earlier.pid}"
        path = self._log_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=environment,
            )
        self._children[name] = process
        _LOG.info("%s started as pid %d", name, process.pid)
        return process

    async def end_of(self, process: asyncio.subprocess.Process) -> int:
        """The exit code of a child; woken by its end. What it started and left behind is killed."""
        code = await process.wait()
        _signal_group(process, signal.SIGKILL)
        return code

    def signal_all(self, number: signal.Signals) -> None:
        """Sends a signal to the process group of every child that lives."""
        for process in self._living():
            _signal_group(process, number)

    async def stop_all(self, *, grace_s: float, ask_first: bool = True) -> None:
        """Returns when no child lives: SIGTERM (unless they were told otherwise), `grace_s` to obey, then SIGKILL.

        Woken by their ends and the deadline. Cancelling it kills at once and then passes the cancellation on.
        """
        if ask_first:
            self.signal_all(signal.SIGTERM)
        try:
            await self._wait_all(grace_s)
        finally:
            for name, process in self._children.items():
                if process.returncode is None:
                    _LOG.warning("%s (pid %d) did not end within %.0f s: killed", name, process.pid, grace_s)
                    _signal_group(process, signal.SIGKILL)
        await self._wait_all(_KILL_GRACE_S)

    async def _wait_all(self, deadline_s: float) -> None:
        async with asyncio.TaskGroup() as group:
            for process in self._living():
                group.create_task(_wait(process, deadline_s))

    def _living(self) -> list[asyncio.subprocess.Process]:
        return [process for process in self._children.values() if process.returncode is None]


async def _wait(process: asyncio.subprocess.Process, deadline_s: float) -> None:
    try:
        async with asyncio.timeout(deadline_s):
            await process.wait()
    except TimeoutError:
        return


def _signal_group(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return  # it ended in the meantime
