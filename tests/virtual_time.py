"""An asyncio event loop whose clock jumps: a wait of an hour costs nothing, and a wait for nothing is an error.

Owns: `VirtualTimeLoop` and `run`. The loop's selector never blocks: when no callback is ready it moves `loop.time()` to
the next timer, so `asyncio.sleep`, `asyncio.timeout` and `loop.call_later` keep their meaning exactly. When no timer
is left either, nothing can ever happen again: `Stuck` is raised and names every pending task and the line it waits at.
Functions given to `run_in_executor` (hence `asyncio.to_thread`) run at once on the loop.
Never: hosts sockets, threads, signals or subprocesses; those need the ordinary loops.
"""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from types import CoroutineType, FrameType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DEFAULT_LIMIT_S = 1e6
"""Virtual seconds after which a run counts as stuck: a heartbeat ticks for ever even when its test waits on nothing."""


class Stuck(AssertionError):
    """Every task waits on something that nobody will bring."""


class _JumpingSelector(selectors.BaseSelector):
    """Knows the loop's own wake-up pipe and nothing else; `select` asks `jump` to move the clock."""

    def __init__(self, jump: Callable[[float | None], None]) -> None:
        self._jump = jump
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._keys[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._jump(timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop with its own clock, which starts at 0 and moves only when nothing else can happen."""

    def __init__(self, *, limit_s: float = DEFAULT_LIMIT_S) -> None:
        self._virtual_s = 0.0
        self._limit_s = limit_s
        super().__init__(_JumpingSelector(self._jump))

    def time(self) -> float:
        return self._virtual_s

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run `func` at once; its result or exception arrives like that of a thread."""
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - carried to whoever awaits, as a thread pool does
            future.set_exception(error)
        return future

    def lift_limit(self) -> None:
        """Let what is cancelled clean up, however late it is."""
        self._limit_s = math.inf

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Stuck(f"at {self._virtual_s:g} s every task waits on nothing:\n{describe(self)}")
        self._virtual_s += max(0.0, timeout)
        if self._virtual_s > self._limit_s:
            raise Stuck(f"not finished after {self._limit_s:g} virtual seconds:\n{describe(self)}")


def describe(loop: asyncio.AbstractEventLoop) -> str:
    """One line per pending task: its name and the innermost line it waits at."""
    lines = sorted(f"  {task.get_name()}: {_where(task)}" for task in asyncio.all_tasks(loop))
    return "\n".join(lines) or "  (no task at all)"


def _where(task: asyncio.Task[Any]) -> str:
    frame: FrameType | None = None
    awaited: Any = task.get_coro()
    while isinstance(awaited, CoroutineType):
        frame = awaited.cr_frame or frame
        awaited = awaited.cr_await
    if frame is None:
        return "not started"
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


def run(main: Coroutine[Any, Any, T], *, limit_s: float = DEFAULT_LIMIT_S) -> T:
    """Run `main` in virtual time; a task that it leaves behind is an error.

    Raises: Stuck, naming the tasks, when everything waits on nothing or `limit_s` virtual seconds have passed;
    AssertionError when `main` ended and other tasks had not; whatever `main` raises.
    """
    loop = VirtualTimeLoop(limit_s=limit_s)
    try:
        asyncio.set_event_loop(loop)
        result = loop.run_until_complete(main)
        left = asyncio.all_tasks(loop)
        assert not left, f"{len(left)} tasks left behind:\n{describe(loop)}"
        return result
    finally:
        try:
            _unwind(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _unwind(loop: VirtualTimeLoop) -> None:
    """Cancel what a failed run left, so that no coroutine is destroyed pending."""
    loop.lift_limit()
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    if left:
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
