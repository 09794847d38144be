"""`trace-async eval`: what is asked, what is still to be played, and what is said and written of it.

Owns the order of things: configuration, tasks and folder are checked before a model is loaded; each episode is written
when it ends; reports are made from what is written. Invariants: an episode in the folder is not played again unless it
failed; the numbers of an interrupted evaluation that went on are those of one that was not. Never: a turn, a statistic.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from trace_async.app import wiring
from trace_async.app.display import format_share
from trace_async.app.eval_folder import EpisodeLog, EvalFolder, open_log
from trace_async.app.eval_page import write_page
from trace_async.app.eval_plan import Plan, Request, settings_of
from trace_async.app.eval_recorder import Episode
from trace_async.app.eval_records import Row
from trace_async.app.eval_summary import ModeSummary, summarize_mode
from trace_async.app.eval_text import evaluation_line, summary_json, tables
from trace_async.app.evaluate import Counts, Evaluation, Evaluator, summarize
from trace_async.app.stopping import listening
from trace_async.core.outcomes import is_success
from trace_async.errors import EnvironmentFailure, UserError
from trace_async.run_folder import RunFolder, read_json, write_json

_FIXED = ("environment", "split", "modes", "seed", "policy_sha256", "engine", "limits")
"""Settings that an evaluation goes on with or not at all."""

_PIPE_WIDTH = 160
"""Of tables that no terminal shows."""


@dataclass(frozen=True, slots=True)
class Session:
    """One evaluation on its way: what is to be played, and what was."""

    request: Request
    plan: Plan
    log: EpisodeLog

    def rows(self, mode: str) -> list[Row]:
        """What there is of a mode's tasks, by index."""
        found = (self.log.rows.get((mode, index)) for index in range(len(self.plan.tasks)))
        return [row for row in found if row is not None]

    def todo(self, mode: str) -> list[int]:
        """Indices of tasks that were not played or failed."""
        done = {row.task_index for row in self.rows(mode) if not row.failed}
        return [index for index in range(len(self.plan.tasks)) if index not in done]


@contextmanager
def open_session(request: Request, plan: Plan) -> Iterator[Session]:
    """The evaluation with what its folder already has. UserError when the folder is no place to go on."""
    if request.out is None:
        yield Session(request, plan, EpisodeLog(None, {}))
        return
    folder = EvalFolder(request.out)
    with open_log(folder, settings_of(request, plan), fixed=_FIXED) as log:
        for (mode, index), row in log.rows.items():
            if index < len(plan.tasks) and plan.tasks[index].task_id != row.task_id:
                raise UserError(
                    f"{folder.episodes}: task {index} was {row.task_id} there ({mode}) and is "
                    f"{plan.tasks[index].task_id} now: the environment's tasks have changed; choose another --out"
                )
        yield Session(request, plan, log)


async def play(session: Session) -> None:
    """Plays what is still to be played. Loads no model when that is nothing; a signal cancels it."""
    plan = session.plan
    try:
        if any(session.todo(mode) for mode in plan.modes):
            await _play(session)
    except asyncio.CancelledError:
        if session.request.out is not None:
            played = sum(len(session.rows(mode)) for mode in plan.modes)
            sys.stderr.write(
                f"stopped; {played} of {len(plan.modes) * len(plan.tasks)} episodes are in {session.request.out}: "
                "the same command goes on\n"
            )
        raise
    finally:
        await wiring.close_kit(plan.kit)


async def _play(session: Session) -> None:
    plan, config = session.plan, session.plan.config
    engine, renderer = wiring.build_engine(config, plan.policy, version=0)
    kit = wiring.bind_kit(plan.kit, renderer)
    try:
        async with listening(supervised=session.request.supervised, words=1), asyncio.TaskGroup() as group:
            await wiring.prepare_kit(kit, session.request.split)
            running = group.create_task(engine.run())
            for mode in plan.modes:
                evaluator = Evaluator(
                    player=wiring.build_player(config, engine=engine, renderer=renderer, greedy=mode == "greedy"),
                    make_environment=kit.make_environment,
                    seed=plan.seed,
                    max_parallel=2 * config.engine.max_batch,  # so that the batch is full while environments step
                    success_above=config.environment.success_above,
                )
                await play_mode(session, mode, evaluator)
            running.cancel()
    finally:
        await wiring.close_kit(kit)


async def play_mode(session: Session, mode: str, evaluator: Evaluator) -> None:
    """Plays what is still to be played of one mode. EnvironmentFailure when no task of it could be."""
    plan = session.plan
    with _progress(session, mode) as advance:

        def keep(episode: Episode) -> None:
            session.log.add(episode, mode=mode, labels=plan.labels[episode.index], seed=plan.seed)
            advance(episode)

        await evaluator.play(((index, plan.tasks[index]) for index in session.todo(mode)), on_end=keep)
    if all(row.failed for row in session.rows(mode)):
        raise EnvironmentFailure(
            f"none of {len(plan.tasks)} {plan.split} tasks could be played; the warnings above say why"
        )


@contextmanager
def _progress(session: Session, mode: str) -> Iterator[Callable[[Episode], None]]:
    """Shows how a mode goes where standard error is a terminal; what is yielded is told of each episode."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("success {task.fields[success]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    rows, total = session.rows(mode), len(session.plan.tasks)
    played = sum(not row.failed for row in rows)
    above = session.plan.config.environment.success_above
    wins = int(is_success([row.outcome for row in rows], above).sum())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task(mode, total=total, completed=played, success="-")

        def advance(episode: Episode) -> None:
            nonlocal played, wins
            played += not episode.failure
            wins += bool(is_success(episode.outcome, above))
            share = wins / played if played else math.nan
            progress.update(bar, advance=1, success=format_share(share))

        yield advance


def evaluation(session: Session, mode: str) -> Evaluation:
    """What a mode came to so far."""
    return summarize(
        [
            Counts(row.failed, row.outcome, row.num_turns, row.num_invalid, row.sampled_tokens)
            for row in session.rows(mode)
        ],
        success_above=session.plan.config.environment.success_above,
    )


def report(session: Session) -> None:
    """Writes the files that were asked for, then says what came of it: whoever reads may hang up."""
    request, plan = session.request, session.plan
    results = {mode: evaluation(session, mode) for mode in plan.modes}
    lines = "".join(evaluation_line(mode, result) for mode, result in results.items())
    if request.label is not None:
        saved = {"policy": str(plan.policy), **{mode: asdict(result) for mode, result in results.items()}}
        write_json(RunFolder(request.source).evaluation(request.label), saved)
        sys.stdout.write(lines)
        return
    above = plan.config.environment.success_above
    summaries = {mode: summarize_mode(session.rows(mode), success_above=above) for mode in plan.modes}
    written = "" if request.out is None else _write_reports(session, EvalFolder(request.out), summaries)
    sys.stdout.write(lines)
    if written or any(row.metrics or row.labels for mode in plan.modes for row in session.rows(mode)):
        _print_tables(summaries)
    sys.stdout.write(written)


def _print_tables(summaries: Mapping[str, ModeSummary]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPE_WIDTH)
    for table in tables(summaries):
        console.print()
        console.print(table)


def _write_reports(session: Session, folder: EvalFolder, summaries: Mapping[str, ModeSummary]) -> str:
    """Writes summary and page; what there is to say of them."""
    plan, settings = session.plan, read_json(folder.settings)
    assert settings is not None, f"{folder.settings} was written when the folder was opened"
    told = ("environment", "split", "num", "policy", "policy_sha256", "seed", "success_above")
    write_json(folder.summary, {**{key: settings[key] for key in told}, "modes": summary_json(summaries)})
    keys = [(row.mode, row.task_index) for mode in plan.modes for row in session.rows(mode)]
    write_page(folder, summaries, keys=keys, settings=settings)
    failed = sum(summary.overall.num_failed for summary in summaries.values())
    again = f"{failed} episodes could not be played; the same command tries them again\n" if failed else ""
    return f"\nepisodes  {folder.episodes}\nsummary   {folder.summary}\nreport    {folder.report}\n{again}"
