"""A plan as tables for people. Never computes more than sums and shares of what stands in the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from trace_async.app.plan_memory import RESERVE_BYTES, Part
from trace_async.app.plan_problems import gib

if TYPE_CHECKING:
    from trace_async.app.plan import Plan


_HOST = "a policy in float32 for each learner process, or a checkpoint; versions in memory"


def show(plan: Plan) -> None:
    """Prints everything; what stops the run comes last, where it is seen."""
    console = Console()
    console.print(f"[bold]{plan.name}[/bold]: nothing was started", highlight=False)
    console.print(
        f"{plan.model}: {plan.parameters / 1e9:.3f} B parameters, {plan.trained_parameters / 1e9:.3f} B trained "
        f"({plan.model_source})",
        markup=False,
        highlight=False,
    )
    for table in (_places(plan), _learner(plan), _engine(plan), _step(plan), _ages(plan), _run(plan)):
        console.print(table)
    for title, lines, style in (
        ("not on this machine", plan.missing, "yellow"),
        ("remarks", plan.remarks, "cyan"),
        ("DOES NOT WORK", plan.problems, "bold red"),
    ):
        for line in lines:
            console.print(f"{title}: ", style=style, end="", highlight=False)
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not plan.problems:
        fits = f"{plan.num_gpus} GPUs of {gib(plan.gpu_bytes)}" if plan.num_gpus else "a node without GPUs"
        console.print(f"fits {fits}, as far as arithmetic can tell", style="green", highlight=False)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", show_edge=False, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index == 1 else "left", overflow="fold")
    return table


def _places(plan: Plan) -> Table:
    table = _table("\nwhat runs where", "GPU", "memory", "processes")
    for use in plan.gpus:
        share = f"{gib(use.num_bytes)} of {gib(plan.gpu_bytes)}" if use.names else "-"
        table.add_row(str(use.gpu), share, ", ".join(use.names) or "free")
    on_cpu = [process.name for process in plan.places.processes if not process.gpus]
    if on_cpu:
        table.add_row("CPU", "", ", ".join(on_cpu))
    for process in plan.places.processes:
        if process.command:
            table.add_row("", "by hand", f"{process.name}: {process.command}")
    table.add_row("host", f">= {gib(plan.host_bytes)}", _HOST)
    return table


def _learner(plan: Plan) -> Table:
    learner, ranks = plan.learner, plan.places.ranks
    each = f"each of {ranks} processes" if ranks > 1 else "one process"
    table = _table(f"\nlearner, {each}, passes of {plan.pass_tokens:,} tokens", "what", "memory", "")
    for part in (*learner.standing, *learner.passing):
        table.add_row(part.what, _bytes(part.num_bytes))
    table.add_section()
    for moment in learner.moments:
        table.add_row(f"in all: {moment.what}", _bytes(moment.num_bytes), "largest" if _is_peak(moment, plan) else "")
    table.add_row("reserve (estimated)", _bytes(RESERVE_BYTES), "CUDA context, NCCL, gaps; none on a CPU")
    table.add_row("kept of each token of a pass", f"{learner.kept_token_bytes / 1024:.1f} KiB")
    return table


def _is_peak(moment: Part, plan: Plan) -> bool:
    return moment.num_bytes == plan.learner.peak


def _engine(plan: Plan) -> Table:
    engine = plan.engine
    spread = f"on each of {engine.shards} GPUs" if engine.shards > 1 else "alone"
    table = _table(f"\none engine ({engine.kind}), {spread}", "what", "memory", "")
    table.add_row("weights", _bytes(engine.weights))
    if engine.reserve:
        table.add_row("reserve (estimated)", _bytes(engine.reserve), "largest pass, CUDA graphs, logits")
    table.add_row("key/values", _bytes(max(0, engine.kv_bytes)), f"{engine.kv_token_bytes:,} bytes a token")
    table.add_row("in all", _bytes(engine.taken))
    table.add_row("tokens that fit", f"{engine.tokens:,}", f"{plan.contexts:,} contexts of full length")
    return table


def _step(plan: Plan) -> Table:
    step, rollout, given = plan.step, plan.rollout, plan.given
    table = _table("\none optimizer step", "what", "expected", "")
    for name, value in (
        ("turns", rollout.turns),
        ("turn_tokens", rollout.turn_tokens),
        ("observation_tokens", rollout.observation_tokens),
        ("prompt_tokens", rollout.prompt_tokens),
    ):
        table.add_row(f"a rollout's {name.replace('_', ' ')}", f"{value:,.1f}", given[name])
    table.add_section()
    table.add_row(
        "prompts (trees)", f"{step.prompts:,}", f"of {step.prompts_looked_at:,} looked at, as long as all are unknown"
    )
    table.add_row("root rollouts", f"{step.roots:,}")
    table.add_row("continuations", f"{step.continuations:,}", f"at most; {step.leaves:,} ends of rollouts")
    table.add_row("turns", f"{step.turns:,.0f}")
    table.add_row(
        "tokens sampled",
        f"{step.sampled_tokens:,.0f}",
        f"each trained once; {step.sampled_tokens_least:,} to {step.sampled_tokens_most:,}",
    )
    table.add_row("tokens of observations", f"{step.observation_tokens:,.0f}", "not trained")
    table.add_row("tokens of prompts", f"{step.prompt_tokens:,.0f}", "once for each tree")
    table.add_row("tokens computed", f"{step.packed_tokens:,.0f}", "by the learner: all of these, packed as trees")
    passes = "passes" if step.passes_forward > 1 else "pass"
    table.add_row("micro-batches", f"{step.micro_batches:,}", f"at least; {step.passes_forward} forward {passes} each")
    table.add_row("operations of the learner", f"{step.operations:.2e}", "floating point, without attention")
    return table


def _ages(plan: Plan) -> Table:
    ages, load = plan.ages, plan.step
    low, high = ages.if_actors_are_slower
    table = _table("\nages, in optimizer steps", "what", "expected", "")
    table.add_row("oldest turn that is trained", f"{ages.most}", "coordinator.max_age_steps, judged turn by turn")
    table.add_row(
        "root rollouts permitted", f"{ages.max_permits:,}", f"planned or under way; {load.roots:,} make a step"
    )
    table.add_row(
        "held by actors at most", f"{ages.capacity:,}", f"{ages.live_roots:,.0f} under way when they never wait"
    )
    table.add_row("mean age, learner faster", f"{low:.1f} to {high:.1f}", "hardly busy to always busy")
    table.add_row("mean age, actors faster", f"{ages.if_learner_is_slower:.1f}", "permits are all that holds them back")
    if ages.expected is not None and ages.learner_busy is not None and ages.step_s is not None:
        table.add_section()
        table.add_row("mean age at these rates", f"{ages.expected:.1f}", f"waiting: {ages.waits}")
        table.add_row("seconds of a step", f"{ages.step_s:,.1f}", f"the learner trains {ages.learner_busy:.0%} of it")
    return table


def _run(plan: Plan) -> Table:
    run, files = plan.totals, plan.files
    table = _table("\nthe whole run", "what", "expected", "")
    table.add_row("steps", f"{run.steps:,}")
    table.add_row("root rollouts", f"{run.roots:,}")
    table.add_row("tokens sampled", f"{run.sampled_tokens:,.0f}")
    epochs = "" if run.epochs is None else f"{run.epochs:.2f} times the training pool"
    table.add_row(
        "prompts played", f"{run.trees:,}", f"at most; {run.prompts_looked_at:,} looked at, {epochs}".rstrip(", ")
    )
    if run.hours is not None:
        table.add_row("hours", f"{run.hours:,.1f}", "of training at these rates; no start, evaluation, checkpoints")
    table.add_section()
    where = "in memory" if files.in_memory else "on disk"
    table.add_row("one published version", _bytes(files.version), f"up to {files.versions_kept} {where}")
    table.add_row("one checkpoint", _bytes(files.checkpoint), f"up to {files.checkpoints_kept} on disk")
    table.add_row("the exported policy", _bytes(files.policy), "float32")
    table.add_row("disk", _bytes(files.disk), "at its largest")
    return table


def _bytes(number: float) -> str:
    return gib(number) if number >= 2**27 else f"{number / 2**20:.2f} MiB"
