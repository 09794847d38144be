"""What each command does: reads the run folder, builds the parts, opens the root TaskGroup, returns the exit code.

One event loop and one root TaskGroup per process; whatever is started here ends here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from trace_async.app import checks, eval_command, wiring
from trace_async.app.display import Display, View
from trace_async.app.eval_plan import Request, make_plan
from trace_async.app.learner_ranks import follow_leader, own_place, record_failure
from trace_async.app.report import summary_lines, write_report
from trace_async.app.run_claim import claim, sole_learner
from trace_async.app.stopping import StopRequest, listening
from trace_async.app.supervise import INTERRUPTED, Interrupted, Supervisor
from trace_async.app.where import describe
from trace_async.app.wiring_learner import open_learner
from trace_async.config import Config
from trace_async.config_load import from_json, load_config, load_saved_config, to_json
from trace_async.errors import RankError, UserError
from trace_async.run_folder import RunFolder, read_json

T = TypeVar("T")
_LOG = logging.getLogger(__name__)

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

EVALUATION_SEED = 0
"""Every policy of every run is asked with the same draws, so that differences are the policies' own."""

_ADDRESS_DEADLINE_S = 1800.0
"""For a learner to load its model, publish its first version and listen: minutes for a large one."""

_ADDRESS_LOOK_S = 0.1


def train(config_path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """A whole run, with its processes, display and report."""
    config = load_config(config_path, overrides)
    checks.check_parts(config)
    console = Console()
    started_s = time.monotonic()
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    with claim(config, resume=resume, say=say) as folder:
        _log_to(folder.log("train"))  # the terminal belongs to the display
        view = View(config.run.name, config.learner.max_steps)
        display = Display(view, folder=folder, console=console, clock=time.monotonic)
        supervisor = Supervisor(config, folder=folder, screen=display)
        try:
            _run(supervisor.run(resume=resume))
        except Interrupted:
            again = [
                "trace-async",
                "train",
                str(config_path),
                *(f"--set={override}" for override in overrides),
                "--resume",
            ]
            console.print(f"stopped; go on with: {shlex.join(again)}", highlight=False, markup=False, soft_wrap=True)
            return INTERRUPTED
        summary = write_report(folder, name=config.run.name, wall_s=time.monotonic() - started_s)
        for line in summary_lines(summary, folder):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


def learner(folder: RunFolder, *, supervised: bool) -> int:
    """The learner, or the rank of it that torchrun's environment names, until its last step or a signal."""
    config = load_saved_config(folder.config)
    place = own_place(os.environ, processes=config.learner.processes)
    try:
        if place.rank == 0:
            with sole_learner(folder):
                return _run(_learn(config, folder, supervised=supervised))
        follow_leader(config, place, on_loss=record_failure)
    except Exception as error:
        record_failure(error)
        raise
    return 0


def _log_to(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, filename=path, encoding="utf-8", force=True)


async def _learn(config: Config, folder: RunFolder, *, supervised: bool) -> int:
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()

    def on_loss(error: RankError) -> None:
        record_failure(error)
        with suppress(RuntimeError):  # the loop has ended, and so has the learner
            loop.call_soon_threadsafe(_fail, lost, error)

    with open_learner(config, folder, on_loss=on_loss) as learner:
        async with listening(supervised=supervised) as stop, asyncio.TaskGroup() as group:
            asking = group.create_task(_when(stop, lambda: learner.request_stop("a signal")))
            watching = group.create_task(_raise_of(lost))
            await learner.run()
            asking.cancel()
            watching.cancel()
    return INTERRUPTED if stop.made else 0


def _fail(future: asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


async def _raise_of(lost: asyncio.Future[None]) -> None:
    """Woken by the loss of a rank, which it raises."""
    await lost


def actor(
    folder: RunFolder, *, name: str | None, address: str | None, server: str | None = None, supervised: bool
) -> int:
    """One actor, until the learner says stop or a signal does; `server`: in place of engine.server_url."""
    config = load_saved_config(folder.config)
    if server is not None:
        config = replace(config, engine=replace(config.engine, server_url=server))
        config = from_json(to_json(config), source="--server")  # checks it again
    name = name or f"{socket.gethostname()}-{os.getpid()}"
    return _run(_act(config, folder, name=name, address=address, supervised=supervised))


async def _act(config: Config, folder: RunFolder, *, name: str, address: str | None, supervised: bool) -> int:
    if address is None:
        async with listening(supervised=supervised, words=1):  # nothing is held yet, so there is nothing to drain
            address = await _read_address(folder)
    async with (
        listening(supervised=supervised) as stop,
        asyncio.TaskGroup() as group,
        wiring.open_actor(config, name=name, address=address) as actor,
    ):
        draining = group.create_task(_when(stop, actor.drain))
        await actor.run()
        draining.cancel()
    return INTERRUPTED if stop.made else 0


async def _read_address(folder: RunFolder) -> str:
    """Where the learner listens; waits for it to say so in the run folder."""
    _LOG.info("looking for the learner's address in %s", folder.address)
    try:
        async with asyncio.timeout(_ADDRESS_DEADLINE_S):
            while not folder.address.exists():  # noqa: ASYNC110 - a file that another process writes wakes nobody
                await asyncio.sleep(_ADDRESS_LOOK_S)
    except TimeoutError as error:
        raise UserError(
            f"{folder.address} did not appear within {_ADDRESS_DEADLINE_S:g} s; is the run's learner running?"
        ) from error
    return folder.address.read_text(encoding="utf-8").strip()


async def _when(stop: StopRequest, then: Callable[[], None]) -> None:
    """Woken by the first word to stop."""
    await stop.wait()
    then()


def evaluate(request: Request) -> int:
    """Plays tasks with a policy; says what came of it, and saves what was asked for."""
    plan = make_plan(request, seed=EVALUATION_SEED)
    with eval_command.open_session(request, plan) as session:
        _run(eval_command.play(session))
        eval_command.report(session)
    return 0


def make_policy(out: Path, *, name: str, steps: int | None, seed: int) -> int:
    """Remakes a shipped policy in a new folder."""
    if out.exists():
        raise UserError(f"{out} exists; give the name of a new folder")
    from trace_async.app.make_policy import RECIPES, make_policy

    if name not in RECIPES:
        raise UserError(f"no policy {name!r} ships with the package; there are: {', '.join(RECIPES)}")
    recipe = RECIPES[name](seed=seed)
    if steps is not None:
        recipe = recipe.shortened(steps)
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("warm start", total=recipe.num_steps)
        digest = make_policy(
            out,
            recipe,
            on_step=lambda _, loss: progress.update(bar, advance=1, description=f"warm start, loss {loss:.3f}"),
        )
    sys.stdout.write(f"{out}: weights sha256 {digest}\n")
    return 0


def make_world(out: Path, settings: Sequence[str], *, with_new_world: bool) -> int:
    """Writes a generated world, and a new one without a name in common, into a new folder."""
    from trace_async.app.make_world import describe, make_world_folder

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting")
        world = make_world_folder(
            out, settings, with_new_world=with_new_world, say=lambda stage: progress.update(bar, description=stage)
        )
    told = ", ".join(f"{name} {value}" for name, value in describe(world).items())
    sys.stdout.write(f"{out}: {told}\n")
    return 0


def get_policy(name: str, out: Path) -> int:
    """Downloads, converts and checks a known small language model, or takes it from the cache."""
    from trace_async.app.get_policy import STAGES, get_policy

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=STAGES)
        digest = get_policy(name, out, say=lambda stage: progress.update(bar, description=stage, advance=1))
    sys.stdout.write(f"{out}: weights sha256 {digest}\n")
    return 0


def export(source: Path, out: Path, *, best: bool, adapter_only: bool, dtype: str) -> int:
    """Writes what a checkpoint has trained into a new folder."""
    from trace_async.app.export import export_checkpoint, pick_checkpoint

    checkpoint = pick_checkpoint(source, best=best)
    wiring.hide_progress_bars()
    export_checkpoint(checkpoint, out, adapter_only=adapter_only, dtype=dtype)
    sys.stdout.write(f"{out}: {'the adapter' if adapter_only else 'the policy'} of {checkpoint} in {dtype}\n")
    return 0


def vllm_server(
    config_path: Path, overrides: Sequence[str], *, host: str | None, port: int | None, only_print: bool
) -> int:
    """Becomes the vLLM server for a configuration, or says the command."""
    from trace_async.app.serve import server_command

    command = server_command(load_config(config_path, overrides), host=host, port=port)
    if only_print:
        sys.stdout.write(command.shell() + "\n")
        return 0
    command.execute()


def where(folder: RunFolder) -> int:
    """Says where every lease and tree of a run stands."""
    if not folder.config.exists():
        raise UserError(f"{folder.root} is no run folder: it has no {folder.config.name}")
    status = read_json(folder.status)
    if status is None:
        raise UserError(f"{folder.status} does not exist (yet): the run's learner has not written it")
    sys.stdout.write("\n".join(describe(status, now_unix_s=time.time())) + "\n")
    return 0


def _run(main: Coroutine[object, object, T]) -> T:
    """Runs `main` on uvloop where there is one."""
    factory = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
