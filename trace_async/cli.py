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

from trace_async.app import commands, plan
from trace_async.app.eval_plan import HELDOUT, MODES, Request
from trace_async.app.supervise import INTERRUPTED, USER_ERROR, ChildFailed, Interrupted
from trace_async.app.warm_start import warm_start
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
    named = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_train(named.add_parser("train", help="a whole run: evaluate, train, evaluate, report"))
    _add_learner(named.add_parser("learner", help="only the learner; goes on from what the run folder holds"))
    _add_actor(named.add_parser("actor", help="one more actor for a run; may join and leave at any time"))
    _add_eval(named.add_parser("eval", help="play tasks with a policy: success, metrics, every episode to read"))
    _add_plan(named.add_parser("plan", help="what a run would need: devices, memory, tokens, ages; starts nothing"))
    _add_warm_start(named.add_parser("warm-start", help="imitate the environment's scripted play, before training"))
    _add_recipe(named.add_parser("make-policy", help="remake a small policy that ships with the package"))
    _add_world(named.add_parser("make-world", help="pages and multi-hop questions that nobody knows by heart"))
    _add_get_policy(named.add_parser("get-policy", help="a real small language model as a transformers folder"))
    _add_export(named.add_parser("export", help="what a run has trained, as a folder for transformers and vLLM"))
    _add_server(named.add_parser("vllm-server", help="become the vLLM server that one actor of a run samples with"))
    _add_where(named.add_parser("where", help="every live lease and tree of a run: phase, age, host"))
    return parser


def run_command(arguments: argparse.Namespace) -> int:
    """Does what the parsed arguments say: each command's parser names its own function of them."""
    code: int = arguments.call(arguments)
    return code


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--resume", action="store_true", help="go on with the run in the configured run folder")
    parser.set_defaults(call=lambda given: commands.train(given.config, given.overrides, resume=given.resume))


def _add_learner(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.set_defaults(call=lambda given: commands.learner(given.run, supervised=given.supervised))


def _add_actor(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--id", default=None, metavar="NAME", help="name in logs and leases; default: host and pid")
    parser.add_argument("--connect", default=None, metavar="ADDRESS", help="default: what RUN/address says")
    parser.add_argument("--server", default=None, metavar="URL", help="its own vLLM server; default: engine.server_url")
    parser.set_defaults(
        call=lambda given: commands.actor(
            given.run, name=given.id, address=given.connect, server=given.server, supervised=given.supervised
        )
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    plan.add_options(parser)
    parser.set_defaults(call=lambda given: plan.plan(given.config, given.overrides, plan.request_of(given)))


def _add_get_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="smollm2-135m")
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.set_defaults(call=lambda given: commands.get_policy(given.name, given.out))


def _add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_run_folder, metavar="RUN", help="a run folder")
    parser.set_defaults(call=lambda given: commands.where(given.run))


def _add_eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="RUN_OR_CONFIG", help="a run folder or a TOML file")
    _add_overrides(parser)
    parser.add_argument("--policy", default=None, metavar="FOLDER", help="default: what RUN trained, or policy.path")
    parser.add_argument("--split", default=HELDOUT, metavar="NAME", help=f"which tasks; default: {HELDOUT}")
    parser.add_argument(
        "--num", type=int, default=None, metavar="N", help="how many of them; default: evaluation.num_prompts, or all"
    )
    parser.add_argument(
        "--mode",
        dest="modes",
        action="append",
        choices=MODES,
        default=[],
        help="repeatable; default: what [evaluation] says",
    )
    parser.add_argument("--out", type=Path, default=None, metavar="FOLDER", help="keep every episode there; goes on")
    parser.add_argument(
        "--label", choices=("before", "after"), help="save as RUN/evaluation/LABEL.json; before: the start policy"
    )
    _add_supervised(parser)
    parser.set_defaults(call=lambda given: commands.evaluate(_eval_request(given)))


def _eval_request(arguments: argparse.Namespace) -> Request:
    if arguments.num is not None and arguments.num < 1:
        raise UserError(f"--num {arguments.num}: expected at least 1")
    return Request(
        source=arguments.source,
        overrides=tuple(arguments.overrides),
        policy=arguments.policy,
        split=arguments.split,
        num=arguments.num,
        modes=tuple(arguments.modes),
        out=arguments.out,
        label=arguments.label,
        supervised=arguments.supervised,
    )


def _add_recipe(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--name", default="frozenlake-tiny", help="frozenlake-tiny (default) or multihop-tiny")
    parser.add_argument("--steps", type=int, default=None, help="steps of supervised warm start; default: the recipe's")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(
        call=lambda given: commands.make_policy(given.out, name=given.name, steps=given.steps, seed=given.seed)
    )


def _add_warm_start(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument("--steps", type=int, default=100, help="default: 100")
    parser.add_argument(
        "--mistakes", type=float, default=0.1, metavar="RATE", help="of the script, per turn; default: 0.1"
    )
    parser.add_argument("--batch", type=int, default=16, help="demonstrations a step; default: 16")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="default: 3e-4")
    parser.add_argument("--seed", type=int, default=0)
    parser.set_defaults(
        call=lambda given: warm_start(
            given.config,
            given.overrides,
            given.out,
            steps=given.steps,
            mistakes=given.mistakes,
            seed=given.seed,
            batch=given.batch,
            learning_rate=given.learning_rate,
        )
    )


def _add_world(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="FOLDER", help="a new folder")
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="seed=3, pages=500, ...; repeatable",
    )
    parser.add_argument(
        "--no-new-world", dest="new_world", action="store_false", help="leave the second world, for evaluation, out"
    )
    parser.set_defaults(
        call=lambda given: commands.make_world(given.out, given.settings, with_new_world=given.new_world)
    )


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
    parser.set_defaults(
        call=lambda given: commands.export(
            given.source, given.out, best=given.best, adapter_only=given.adapter, dtype=given.dtype
        )
    )


def _add_server(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--host", default=None, help="default: 127.0.0.1; who reaches the port controls the process")
    parser.add_argument("--port", type=int, default=None, help="default: that of engine.server_url, or 8000")
    parser.add_argument("--print", dest="only_print", action="store_true", help="only say the command, for job scripts")
    parser.set_defaults(
        call=lambda given: commands.vllm_server(
            given.config, given.overrides, host=given.host, port=given.port, only_print=given.only_print
        )
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file, see docs/configuration.md")
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help="override one key; repeatable"
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_run_folder, metavar="RUN", help="a run folder")
    _add_supervised(parser)


def _add_supervised(parser: argparse.ArgumentParser) -> None:
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
