"""The learner's processes: which one this is, and how they find each other.

Owns the meaning of torchrun's environment (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), which says how many
processes there are, whoever has set it: torchrun or `trace-async train`. Rank 0 is the learner; the others hold a share
of its trainer, and end when it ends. Importable without torch. Never trains.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from trace_async.app.wiring import hide_progress_bars, policy_path
from trace_async.config import Config
from trace_async.errors import ConfigError, RankError

if TYPE_CHECKING:
    import torch

    from trace_async.trainer import Trainer
    from trace_async.trainer_ranks import Ranks
    from trace_async.trainer_remote import LeadingTrainer

_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This process among those of the learner."""

    rank: int = 0
    local_rank: int = 0  # on this machine
    size: int = 1
    master: str = "127.0.0.1"  # where rank 0 runs


def own_place(environment: Mapping[str, str], *, processes: int) -> Place:
    """What the environment says; alone without a word. `processes` is what the configuration says.

    Raises ConfigError when part of the environment is missing, or several processes are configured and this one was
    started alone.
    """
    size = int(environment.get("WORLD_SIZE", "1"))
    if size == 1 and processes > 1:
        raise ConfigError(
            f"learner.processes = {processes}, but this learner was started alone: start it with `torchrun "
            f"--nproc-per-node {processes} -m trace_async learner RUN`, or let `trace-async train` start all of them"
        )
    if size == 1:
        return Place()
    if missing := [name for name in _NAMES if name not in environment]:
        raise ConfigError(f"WORLD_SIZE = {size}, but {', '.join(missing)} is not set; start the learner with torchrun")
    return Place(
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        size=size,
        master=environment["MASTER_ADDR"],
    )


def environments(inherited: Mapping[str, str], *, processes: int) -> list[dict[str, str]]:
    """One for each process of a learner on this machine, rank 0 first; nothing of an outer torchrun stays in them."""
    plain = {name: value for name, value in inherited.items() if name not in _NAMES}
    if processes == 1:
        return [plain]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    meeting = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**plain, **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


@contextmanager
def open_trainer(config: Config, *, on_loss: Callable[[RankError], None]) -> Iterator[Trainer | LeadingTrainer]:
    """The trainer of rank 0, with those of the other ranks behind it if there are any. Imports torch.

    `on_loss` is called from another thread when a rank is lost.
    """
    place = own_place(os.environ, processes=config.learner.processes)
    if place.size == 1:
        from trace_async.trainer_ranks import ALONE

        yield _build_trainer(config, ALONE)
        return
    from trace_async.trainer_lifeline import open_leader, this_member
    from trace_async.trainer_ranks import joined
    from trace_async.trainer_remote import LeadingTrainer

    deadline_s = config.learner.rank_deadline_s
    with (
        _listener(place.master) as listener,
        joined(rank=0, size=place.size, device=_own_device(config, place), deadline_s=deadline_s) as ranks,
    ):
        ranks.agree({"port": listener.getsockname()[1], "leader": asdict(this_member(0))})
        with open_leader(listener, others=place.size - 1, deadline_s=deadline_s, on_loss=on_loss) as lifeline:
            trainer = LeadingTrainer(_build_trainer(config, ranks), ranks=ranks, lifeline=lifeline)
            yield trainer
            trainer.stop()


def follow_leader(config: Config, place: Place, *, on_loss: Callable[[RankError], None]) -> None:
    """The whole life of every other rank. Woken by the leader's calls and its end. Imports torch.

    Signals to stop are the leader's to answer, who still needs this process for the last checkpoint.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    from trace_async.trainer_lifeline import Member, open_follower
    from trace_async.trainer_ranks import joined
    from trace_async.trainer_remote import follow

    deadline_s = config.learner.rank_deadline_s
    device = _own_device(config, place)
    with joined(rank=place.rank, size=place.size, device=device, deadline_s=deadline_s) as ranks:
        found = ranks.agree(None)
        address = (place.master, int(found["port"]))
        with open_follower(
            address, rank=place.rank, leader=Member(**found["leader"]), deadline_s=deadline_s, on_loss=on_loss
        ) as lifeline:
            follow(_build_trainer(config, ranks), ranks=ranks, lifeline=lifeline)


def record_failure(error: BaseException) -> None:
    """Into the file that torchrun reports failures from, where there is one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        with suppress(OSError):
            get_error_handler().record_exception(error)


def _build_trainer(config: Config, ranks: Ranks) -> Trainer:
    from trace_async.trainer import Trainer

    hide_progress_bars()
    return Trainer(
        policy_path(config.policy.path),
        learner=config.learner,
        objective=config.objective,
        temperature=config.engine.temperature,
        seed=config.run.seed,
        publish_dtype=config.engine.dtype,
        max_path_tokens=config.tree.max_context_tokens,
        ranks=ranks,
    )


def _own_device(config: Config, place: Place) -> torch.device:
    """The machine's device of this rank's number, or its CPU."""
    import torch

    name = config.learner.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device("cpu")
    if place.local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {place.rank} is number {place.local_rank} of its machine, which has {torch.cuda.device_count()} "
            "CUDA devices; start fewer processes, or set learner.device = 'cpu'"
        )
    return torch.device("cuda", place.local_rank)


def _listener(host: str) -> socket.socket:
    try:
        return socket.create_server((host, 0))
    except OSError:  # a name that other machines know this one by, and it does not
        return socket.create_server(("", 0))
