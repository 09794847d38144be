"""How one process is told to stop: SIGINT and SIGTERM, and the end of its supervisor.

Invariants: the first word is a request that the role answers in its own order; the second cancels at once; with
`supervised`, the end of standard input counts as the first word, because its other end lives in the supervisor.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDIN = 0


class StopRequest:
    """Whether this process was told to stop; `wait` is woken by a signal or the supervisor's end."""

    def __init__(self, task: asyncio.Task[object], *, words: int) -> None:
        self._task = task
        self._words_left = words
        self._event = asyncio.Event()

    @property
    def made(self) -> bool:
        """True from the first word on."""
        return self._event.is_set()

    async def wait(self) -> None:
        """Until the first word."""
        await self._event.wait()

    def make(self) -> None:
        """One more word; the last one cancels the process's root task."""
        self._event.set()
        self._words_left -= 1
        if self._words_left <= 0:
            self._task.cancel()


@asynccontextmanager
async def listening(*, supervised: bool, words: int = 2) -> AsyncIterator[StopRequest]:
    """Listens for the length of the block, on behalf of the current task; `words=1`: the first word cancels it."""
    task = asyncio.current_task()
    assert task is not None
    request = StopRequest(task, words=words)
    loop = asyncio.get_running_loop()

    def read_stdin() -> None:
        if not os.read(_STDIN, 4096):
            loop.remove_reader(_STDIN)
            request.make()

    for number in _SIGNALS:
        loop.add_signal_handler(number, request.make)
    if supervised:
        loop.add_reader(_STDIN, read_stdin)
    try:
        yield request
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
        if supervised:
            loop.remove_reader(_STDIN)
