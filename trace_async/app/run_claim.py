"""Taking a run folder into use: one supervisor and one learner at a time, an earlier run kept, a resumed one known.

Invariants: two runs never write into one folder; nothing of an earlier run is deleted or overwritten; a resumed run has
the tasks, the start policy and the seed it began with, or is refused.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trace_async.config import Config
from trace_async.config_load import load_saved_config, save_config, to_json
from trace_async.config_resume import complain, find_changes
from trace_async.errors import ConfigError, UserError
from trace_async.run_folder import RunFolder

LEARNER_PATIENCE_S = 60.0
"""A learner whose supervisor was killed finishes its step, waits for its actors to drain, and writes a checkpoint."""

_LOOK_S = 0.2


@contextmanager
def claim(config: Config, *, resume: bool, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """The configured run folder, locked for the length of the block, with the resolved configuration in it.

    Without `resume` an earlier run there is moved to the first free `DIR.1`, `DIR.2`, ... and `say` is told where.
    Raises UserError when another process has the folder, or it holds something that is no run; ConfigError when there
    is nothing to resume or what was begun cannot be gone on with.
    """
    folder = RunFolder(Path(config.run.dir))
    with _locked(folder):
        if resume:
            _check_resume(config, folder, say)
        elif folder.config.exists():
            free = _free_name(folder.root)
            folder.root.rename(free)
            say(f"the earlier run in {folder.root} is now {free} (--resume would have gone on with it)")
        elif others := sorted(path.name for path in folder.root.iterdir() if path != folder.lock):
            raise UserError(
                f"{folder.root} holds {', '.join(others[:3])} and is no run folder; "
                "choose another with --set run.dir=..."
            )
    with _locked(folder):  # anew, because the folder may have moved and taken its lock along
        save_config(config, folder.config)
        yield folder


@contextmanager
def sole_learner(folder: RunFolder, *, patience_s: float = LEARNER_PATIENCE_S) -> Iterator[None]:
    """For the length of the block no other process is this run's learner.

    Blocks while one is: a supervisor that was killed leaves a learner that still finishes its step. Raises UserError
    after `patience_s`.
    """
    descriptor = os.open(folder.learner_lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        until_s = time.monotonic() + patience_s
        while not _try_lock(descriptor):
            if time.monotonic() >= until_s:
                raise UserError(f"another learner has worked on {folder.root} for {patience_s:g} s; stop it first")
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _locked(folder: RunFolder) -> Iterator[None]:
    try:
        folder.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder.lock, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(f"run.dir = {str(folder.root)!r} cannot be written: {error.strerror}") from error
    try:
        if not _try_lock(descriptor):
            holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
            raise UserError(
                f"{folder.root} is in use by another run (pid {holder}); stop it, or choose another folder with "
                "--set run.dir=..."
            )
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(descriptor)


def _free_name(root: Path) -> Path:
    names = (root.with_name(f"{root.name}.{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def _check_resume(config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
    if not folder.config.exists():
        raise ConfigError(f"nothing to resume: {folder.root} holds no run; start one without --resume")
    begun = to_json(load_saved_config(folder.config))
    fixed, free = find_changes(begun, to_json(config))
    if fixed:
        raise ConfigError(complain(fixed, where=str(folder.root)))
    for key, before, now in free:
        say(f"{key} is {now!r} from here on, it was {before!r}")
