"""The command line: what `trace-async` and `python -m trace_async` understand, and with which code they end.

    0    done
    1    the run failed
    2    the caller's mistake: the message says what is wrong and the cure
    130  stopped by a signal, in order

Never does the work: commands.py does.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from trace_async.app import commands
from trace_async.app.supervise import INTERRUPTED, USER_ERROR, ChildFailed, Interrupted
from trace_async.errors import RankError, TraceAsyncError, UserError
from trace_async.run_folder import RunFolder

_FAILURE = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    arguments = build_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format=commands.LOG_FORMAT)
    try:
        return run_command(arguments)
    except (KeyboardInterrupt, asyncio.CancelledError, Interrupted):
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the outermost boundary: a message and the right code, then the end
        return _report(error)


def build_parser() -> argparse.ArgumentParser:
    """Every command and option."""
    parser = argparse.ArgumentParser(
        prog="trace-async", description="Asynchronous reinforcement learning of agents on tree-structured rollouts."
    )
    commands_ = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands_.add_parser("train", help="a whole run: evaluate, train, evaluate, report")
    train.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, see docs/configuration.md")
    _add_overrides(train)
    train.add_argument("--resume", action="store_true", help="go on with the run in the configured run folder")

    learner = commands_.add_parser("learner", help="only the learner; goes on from what the run folder holds")
    _add_run(learner)

    actor = commands_.add_parser("actor", help="one more actor for a run; may join and leave at any time")
    _add_run(actor)
    actor.add_argument("--id", default=None, metavar="NAME", help="name in logs and leases; default: host and pid")
    actor.add_argument("--connect", default=None, metavar="ADDRESS", help="default: what RUN/address says")
    actor.add_argument("--server", default=None, metavar="URL", help="its own vLLM server; default: engine.server_url")

    evaluation = commands_.add_parser("eval", help="play the held-out tasks of a run with a policy")
    _add_run(evaluation)
    evaluation.add_argument("--policy", default=None, metavar="FOLDER", help="default: the policy that RUN trained")
    evaluation.add_argument(
        "--label", choices=("before", "after"), help="save as RUN/evaluation/LABEL.json; before: the start policy"
    )

    _add_recipe(commands_.add_parser("make-policy", help="remake the small policy that ships with the package"))

    getting = commands_.add_parser("get-policy", help="a real small language model as a transformers folder")
    getting.add_argument("name", metavar="NAME", help="smollm2-135m")
    getting.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")

    _add_export(commands_.add_parser("export", help="what a run has trained, as a folder for transformers and vLLM"))

    _add_server(commands_.add_parser("vllm-server", help="become the vLLM server that one actor of a run samples with"))

    where = commands_.add_parser("where", help="every live lease and tree of a run: phase, age, host")
    where.add_argument("run", type=_run_folder, metavar="RUN", help="a run folder")
    return parser


def run_command(arguments: argparse.Namespace) -> int:
    """Dispatches parsed arguments."""
    match arguments.command:
        case "train":
            return commands.train(arguments.config, arguments.overrides, resume=arguments.resume)
        case "learner":
            return commands.learner(arguments.run, supervised=arguments.supervised)
        case "actor":
            return commands.actor(
                arguments.run,
                name=arguments.id,
                address=arguments.connect,
                server=arguments.server,
                supervised=arguments.supervised,
            )
        case "eval":
            return commands.evaluate(
                arguments.run, policy=arguments.policy, label=arguments.label, supervised=arguments.supervised
            )
        case "make-policy":
            return commands.make_policy(arguments.out, steps=arguments.steps, seed=arguments.seed)
        case "get-policy":
            return commands.get_policy(arguments.name, arguments.out)
        case "export":
            return commands.export(
                arguments.source,
                arguments.out,
                best=arguments.best,
                adapter_only=arguments.adapter,
                dtype=arguments.dtype,
            )
        case "vllm-server":
            return commands.vllm_server(
                arguments.config,
                arguments.overrides,
                host=arguments.host,
                port=arguments.port,
                only_print=arguments.only_print,
            )
        case _:
            return commands.where(arguments.run)


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--steps", type=int, default=None, help="steps of supervised warm start; default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)


def _add_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN", help="a run folder, or one of the checkpoints in it")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--best", action="store_true", help="the run's most successful checkpoint; default: the newest")
    parts = parser.add_mutually_exclusive_group()
    parts.add_argument("--merge", action="store_true", help="the whole policy, low-rank pairs added in; the default")
    parts.add_argument("--adapter", action="store_true", help="only the low-rank pairs, in the format of peft")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="of the weights; default: float32",
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, see docs/configuration.md")
    _add_overrides(parser)
    parser.add_argument("--host", default=None, help="default: 127.0.0.1; who reaches the port controls the process")
    parser.add_argument("--port", type=int, default=None, help="default: that of engine.server_url, or 8000")
    parser.add_argument("--print", dest="only_print", action="store_true", help="only say the command, for job scripts")


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_run_folder, metavar="RUN", help="a run folder")
    # for processes that `train` starts: end when standard input ends
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)


def _run_folder(text: str) -> RunFolder:
    return RunFolder(Path(text))


def _report(error: Exception) -> int:
    """Says what happened; the first user error inside a group wins, anything unexpected comes with its traceback."""
    leaves = list(_leaves(error))
    mistakes = [leaf for leaf in leaves if isinstance(leaf, UserError)]
    if mistakes:
        sys.stderr.write(f"trace-async: {mistakes[0]}\n")
        return USER_ERROR
    dead = [leaf for leaf in leaves if isinstance(leaf, ChildFailed)]
    if dead:
        sys.stderr.write(f"trace-async: {dead[0]}\n")
        return USER_ERROR if dead[0].code == USER_ERROR else _FAILURE
    if lost := [leaf for leaf in leaves if isinstance(leaf, RankError)]:  # everything else follows from it
        sys.stderr.write(f"trace-async: RankError: {lost[0]}\n")
        return _FAILURE
    if len(leaves) == 1 and isinstance(leaves[0], TraceAsyncError):
        sys.stderr.write(f"trace-async: {type(leaves[0]).__name__}: {leaves[0]}\n")
        return _FAILURE
    sys.stderr.write("".join(traceback.format_exception(error)))
    return _FAILURE


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
