"""`trace-async train`: one run from evaluation to evaluation, its processes and their end.

Owns: the learner's and the actors' processes (each in its own process group, output to RUN/logs/NAME.log), restarts of
dead actors within a bound, and the two ways to stop.
Invariants: when `run` has ended no process it started lives; the first SIGINT or SIGTERM stops in order (learner:
finish the step and checkpoint; actors: drain), the second at once; a supervisor that is killed takes its processes
along, because each of them watches the pipe it was given as standard input.
Never: touches weights, groups or metrics; restarts a learner.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from trace_async.app.learner_ranks import environments
from trace_async.app.processes import ProcessTable
from trace_async.config import Config
from trace_async.errors import TraceAsyncError
from trace_async.run_folder import RunFolder

_LOG = logging.getLogger(__name__)

_MAX_RESTARTS = 5
_RESTART_WINDOW_S = 600.0
"""An actor that dies more often than that within this time has a fault of its set-up, not an accident."""

USER_ERROR = 2
"""Exit code of a process that refuses its input; starting it again cannot help."""

INTERRUPTED = 130
"""Exit code of a process that a signal stopped in order."""

_ACTOR_GRACE_S = 5.0
"""How long actors may take to leave after the learner has ended and told them so."""

_RANK_GRACE_S = 15.0
"""How long the learner may take to end after another of its processes has."""

_TAIL_LINES = 15


class Interrupted(TraceAsyncError):
    """The run was stopped by a signal, in order."""


class ChildFailed(TraceAsyncError):
    """A process of the run died; carries its exit code and last log lines."""

    def __init__(self, name: str, code: int, tail: str) -> None:
        died = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        super().__init__(f"{name} {died}; its last log lines:\n{tail}")
        self.code = code


class Screen(Protocol):
    """Shows how the run goes."""

    def say_phase(self, phase: str) -> None:
        """What the run does from now on."""
        ...

    async def run(self) -> None:
        """Draws until cancelled."""
        ...


class Supervisor:
    """Drives one run; build one per run."""

    def __init__(self, config: Config, *, folder: RunFolder, screen: Screen, command: Sequence[str] = ()) -> None:
        self._config = config
        self._folder = folder
        self._screen = screen
        self._command = tuple(command) or (sys.executable, "-m", "trace_async")
        self._processes = ProcessTable(log_of=folder.log)
        self._stop = asyncio.Event()
        self._learner_ended = False

    async def run(self, *, resume: bool = False) -> None:
        """Evaluate, train, evaluate. Raises Interrupted after an orderly stop, ChildFailed when a process died."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            async with asyncio.TaskGroup() as group:
                drawing = group.create_task(self._screen.run())
                await self._run_phases(resume=resume)
                drawing.cancel()
        except* TraceAsyncError as errors:
            raise _first(errors) from None
        finally:
            # the handlers stay until no process is left, so that a second signal still finds someone
            await self._processes.stop_all(grace_s=self._config.actor.drain_s)
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _run_phases(self, *, resume: bool) -> None:
        evaluates = self._config.evaluation.num_prompts > 0
        if evaluates and not (resume and self._folder.evaluation("before").exists()):
            self._screen.say_phase("playing the held-out tasks before training")
            await self._run_to_end("eval-before", "eval", str(self._folder.root), "--label", "before")
        self._screen.say_phase("training (first, learner and actors load the model)")
        await self._train()
        if evaluates:
            self._screen.say_phase("playing the held-out tasks after training")
            await self._run_to_end("eval-after", "eval", str(self._folder.root), "--label", "after")

    async def _run_to_end(self, name: str, *arguments: str) -> None:
        """Waits for one process; woken by its end."""
        process = await self._start(name, *arguments)
        self._judge(name, await self._processes.end_of(process))

    async def _train(self) -> None:
        """Waits for the learner; woken by its end, by a signal through it, or by an actor that is beyond help."""
        self._folder.address.unlink(missing_ok=True)
        places = environments(os.environ, processes=self._config.learner.processes)
        learner = await self._start("learner", "learner", str(self._folder.root), environment=places[0])
        async with asyncio.TaskGroup() as actors:
            for rank, place in enumerate(places[1:], start=1):
                actors.create_task(self._keep_rank(f"learner-{rank}", place, learner))
            for slot in range(self._config.actor.count):
                actors.create_task(self._keep_actor(f"actor-{slot}"))
            code = await self._processes.end_of(learner)
            self._learner_ended = True
            if code:
                self._processes.signal_all(signal.SIGTERM)
            grace_s = self._config.actor.drain_s if self._stop.is_set() else _ACTOR_GRACE_S
            actors.create_task(self._processes.stop_all(grace_s=grace_s, ask_first=False))
        self._judge("learner", code)

    async def _keep_rank(self, name: str, place: Mapping[str, str], learner: asyncio.subprocess.Process) -> None:
        """Another process of the learner; woken by its end. The learner notices a death and says more of it than we."""
        process = await self._start(name, "learner", str(self._folder.root), environment=place)
        code = await self._processes.end_of(process)
        if not code or self._stop.is_set() or self._learner_ended:
            return
        try:
            async with asyncio.timeout(_RANK_GRACE_S):
                await learner.wait()
        except TimeoutError:
            raise ChildFailed(name, code, self._tail(name)) from None

    async def _keep_actor(self, name: str) -> None:
        """Starts an actor, and again after each death; woken by its end."""
        deaths_s: deque[float] = deque()
        while True:
            process = await self._start(name, "actor", str(self._folder.root), "--id", name)
            code = await self._processes.end_of(process)
            if self._stop.is_set() or self._learner_ended or code == 0:
                return
            now_s = time.monotonic()
            while deaths_s and deaths_s[0] < now_s - _RESTART_WINDOW_S:
                deaths_s.popleft()
            deaths_s.append(now_s)
            if code == USER_ERROR or len(deaths_s) > _MAX_RESTARTS:
                raise ChildFailed(name, code, self._tail(name))
            _LOG.warning("%s ended with code %d; restart %d of %d", name, code, len(deaths_s), _MAX_RESTARTS)
            self._screen.say_phase(
                f"training; {name} died (code {code}) and starts again, {len(deaths_s)} of {_MAX_RESTARTS} times"
            )

    async def _start(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> asyncio.subprocess.Process:
        if self._stop.is_set():
            raise Interrupted("stopped by a signal")
        command = [*self._command, *arguments, "--supervised"]
        process = await self._processes.start(name, command, environment=environment)
        if self._stop.is_set():  # the signal came while the process was being made, so nobody has told it yet
            self._processes.signal_all(signal.SIGTERM)
        return process

    def _judge(self, name: str, code: int) -> None:
        if self._stop.is_set() and (code < 0 or code in (0, INTERRUPTED)):
            raise Interrupted("stopped by a signal")
        if code:
            raise ChildFailed(name, code, self._tail(name))

    def _tail(self, name: str) -> str:
        text = self._folder.log(name).read_text(encoding="utf-8", errors="replace")
        return "\n".join(f"  {line}" for line in text.splitlines()[-_TAIL_LINES:]) or "  (nothing)"

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._screen.say_phase("stopping at once")
            self._processes.signal_all(signal.SIGKILL)
        else:
            self._stop.set()
            self._screen.say_phase("stopping in order; once more to stop at once")
            self._processes.signal_all(signal.SIGTERM)


def _first(errors: BaseExceptionGroup[TraceAsyncError]) -> TraceAsyncError:
    """The error that tells most: a process that died before a stop that followed from it."""
    flat: list[TraceAsyncError] = []
    todo: list[BaseException] = [errors]
    while todo:
        error = todo.pop(0)
        if isinstance(error, BaseExceptionGroup):
            todo.extend(error.exceptions)
        elif isinstance(error, TraceAsyncError):
            flat.append(error)
    return min(flat, key=lambda error: isinstance(error, Interrupted))
