"""Seconds from an optimizer step to its weights confirmed by N actor processes, against a plain file copy.

    python -m benchmarks.publication [--policies tiny lora large] [--actors 1 4 8] [--rounds 5] [--json]

Real processes with the real store, server and stager; the engine's load is the least that one does: reading the whole
file into memory of its own. Notice and confirmation go over pipes. All sides of one policy and number of actors are
timed in turns, each round beginning with another; medians.

    link    published and staged on one disk: hard links
    shm     published and staged in /dev/shm, which is memory: hard links
    copy    published on the disk, staged in /dev/shm: links do not go there, so every actor copies the file
    stream  published on the disk, which the actors do not see: ZeroMQ over loopback, staged in /dev/shm
    plain   no publication at all: the weights are written to the disk and shutil.copyfile copies them to N places in
            /dev/shm, one after the other, with no fsync, no digest and nobody who reads them
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trace_async.core.types import Canary, VersionNotice
from trace_async.publication.manifest import describe_file
from trace_async.publication.staging import Stager
from trace_async.publication.staging_folder import StagingFolder
from trace_async.publication.store import VersionStore
from trace_async.publication.stream_client import StreamSource
from trace_async.publication.stream_server import WeightServer

SIDES = ("link", "shm", "copy", "stream", "plain")
POLICIES = ("tiny", "lora", "large")
SHM = "/dev/shm"
NO_CANARY = Canary(prompts=(), logprobs=())
Tensors = dict[str, Any]


class Timing(NamedTuple):
    """Seconds of one publication."""

    total: float  # until the last confirmation
    write: float  # of which the trainer's save_weights
    publish: float  # of which the store's publish, save_weights included
    fetch: float  # of which the slowest actor's fetch
    load: float  # of which the slowest actor's load
    moved_bytes: int  # copied for the actors, or sent to them


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A side's folders."""

    published: Path
    staging: Path
    hidden: bool  # the actors are not told where the files are


# ---- an actor's process ----------------------------------------------------------------------------------------------


def act(actor_id: str, roots: Sequence[str]) -> None:
    """Fetch and load each notice that comes in, and say how long that took."""
    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        folders = [stack.enter_context(StagingFolder(actor_id, root=Path(root))) for root in roots]
        stagers = {
            root: stack.enter_context(Stager(folder, make_stream=StreamSource))
            for root, folder in zip(roots, folders, strict=True)
        }
        _say("ready")
        memory = bytearray()
        for line in sys.stdin:
            told = json.loads(line)
            begin_s = time.perf_counter()
            fetched = runner.run(stagers[told["staging"]].fetch(VersionNotice(**told["notice"])))
            fetched_s = time.perf_counter()
            if len(memory) != fetched.manifest.weights.num_bytes:
                memory = bytearray(fetched.manifest.weights.num_bytes)
            with fetched.weights.open("rb") as file:
                assert file.readinto(memory) == len(memory)
            _say([fetched_s - begin_s, time.perf_counter() - fetched_s])


def _say(word: object) -> None:
    print(json.dumps(word), flush=True)  # noqa: T201


class Actors:
    """The processes of `act`, and the pipes to them."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        for process in processes:
            assert self._heard(process) == "ready"

    def load(self, notice: VersionNotice, *, staging: Path, number: int) -> list[tuple[float, float]]:
        """Seconds of fetch and load of the first `number` actors; returns when the last has confirmed."""
        for process in self._processes[:number]:
            assert process.stdin is not None
            process.stdin.write(json.dumps({"notice": asdict(notice), "staging": str(staging)}) + "\n")
            process.stdin.flush()
        return [tuple(self._heard(process)) for process in self._processes[:number]]

    def _heard(self, process: subprocess.Popen[str]) -> Any:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"actor process {process.pid} ended with {process.wait()}")
        return json.loads(line)


@contextmanager
def actor_processes(number: int, roots: Sequence[Path]) -> Iterator[Actors]:
    """Ended at the end of the block."""
    words = [sys.executable, "-m", "benchmarks.publication", "--act"]
    processes = [
        subprocess.Popen(
            [*words, f"actor-{index}", *map(str, roots)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for index in range(number)
    ]
    try:
        yield Actors(processes)
    finally:
        for process in processes:
            process.communicate()


# ---- the learner's side ----------------------------------------------------------------------------------------------


def make_tensors(policy: str) -> Tensors:
    """The weights of one policy, float32."""
    import torch
    from safetensors.torch import load_file

    draw = torch.Generator().manual_seed(0)
    if policy == "tiny":
        return dict(load_file(Path(__file__).parent.parent / "trace_async/policies/frozenlake-tiny/model.safetensors"))
    if policy == "lora":  # rank 4, all linear layers of a 135 million parameter model
        shapes = {f"layer.{index}.{side}": (4, 576) for index in range(210) for side in "AB"}
    else:
        shapes = {"embed": (49152, 576), **{f"layer.{index}": (1024, 1024) for index in range(38)}}
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


class Learner:
    """Publishes one policy's weights, again and again."""

    def __init__(
        self, tensors: Tensors, *, actors: Actors, places: dict[str, Place], source: Path, copies: Path
    ) -> None:
        self._tensors = tensors
        self._actors = actors
        self._places = places
        self._source = source
        self._copies = copies
        self._version = 0
        self._write_s = 0.0

    def time(self, side: str, *, number: int) -> Timing:
        """One publication."""
        return self._plain(number) if side == "plain" else self._publication(self._places[side], number)

    def _publication(self, place: Place, number: int) -> Timing:
        self._version += 1
        with WeightServer(place.published, address="tcp://127.0.0.1:0") as server:
            with VersionStore(place.published, address=server.address) as store:
                begin_s = time.perf_counter()
                notice, num_bytes = store.publish(
                    version=self._version, epoch=0, write=self._write, predictor={}, canary=NO_CANARY, adapter=None
                )
                published_s = time.perf_counter()
                if place.hidden:
                    notice = replace(notice, directory="/nowhere")
                seconds = self._actors.load(notice, staging=place.staging, number=number)
                total_s = time.perf_counter() - begin_s
                store.retire(keep=1, needed_since=self._version)
            streamed = int(server.counters()["stream_bytes"])
        copied = num_bytes * number if place.staging.parent != place.published.parent else 0
        fetch_s, load_s = (max(column) for column in zip(*seconds, strict=True))
        return Timing(total_s, self._write_s, published_s - begin_s, fetch_s, load_s, streamed or copied)

    def _plain(self, number: int) -> Timing:
        begin_s = time.perf_counter()
        self._write(self._source)
        for index in range(number):
            shutil.copyfile(self._source, self._copies / f"copy-{index}")
        total_s = time.perf_counter() - begin_s
        return Timing(
            total_s, self._write_s, self._write_s, total_s - self._write_s, 0.0, number * self._source.stat().st_size
        )

    def _write(self, path: Path) -> None:
        from safetensors.torch import save_file

        begin_s = time.perf_counter()
        save_file(self._tensors, path)
        self._write_s = time.perf_counter() - begin_s


def measure(policies: Sequence[str], numbers: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each policy, number of actors and side."""
    rows = []
    with ExitStack() as stack:
        disk, memory = (Path(stack.enter_context(tempfile.TemporaryDirectory(dir=root))) for root in (None, SHM))
        places = {
            "link": Place(published=disk / "link", staging=disk / "staging", hidden=False),
            "shm": Place(published=memory / "shm", staging=memory / "staging", hidden=False),
            "copy": Place(published=disk / "copy", staging=memory / "staging", hidden=False),
            "stream": Place(published=disk / "stream", staging=memory / "staging", hidden=True),
        }
        for place in places.values():
            place.published.mkdir()
        actors = stack.enter_context(actor_processes(max(numbers), [disk / "staging", memory / "staging"]))
        for policy in policies:
            tensors = make_tensors(policy)
            learner = Learner(tensors, actors=actors, places=places, source=disk / "weights", copies=memory)
            for number in numbers:
                timings = _in_turns(partial(learner.time, number=number), rounds)
                rows += [_row(policy, number, side, timings) for side in SIDES]
                _tell(rows[-len(SIDES) :])
    return rows


def _in_turns(work: Callable[[str], Timing], rounds: int) -> dict[str, list[Timing]]:
    """Timings by side; one more round before them warms up."""
    timings: dict[str, list[Timing]] = {side: [] for side in SIDES}
    for turn in range(-1, rounds):
        for shift in range(len(SIDES)):
            side = SIDES[(turn + shift) % len(SIDES)]
            timing = work(side)
            if turn >= 0:
                timings[side].append(timing)
    return timings


def _row(policy: str, number: int, side: str, timings: dict[str, list[Timing]]) -> dict[str, Any]:
    median = Timing(*(statistics.median(column) for column in zip(*timings[side], strict=True)))
    ratios = [ours.total / plain.total for ours, plain in zip(timings[side], timings["plain"], strict=True)]
    named = {f"{name}_s": value for name, value in median._asdict().items() if name != "moved_bytes"}
    return {
        "policy": policy,
        "actors": number,
        "side": side,
        **named,
        "moved_bytes": int(median.moved_bytes),
        "against_plain": statistics.median(ratios),
    }


def _tell(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        print(  # noqa: T201
            f"{row['policy']:6} {row['actors']} actors {row['side']:7} {row['total_s']:8.3f} s   "
            f"(write {row['write_s']:.3f}, publish {row['publish_s']:.3f}, fetch {row['fetch_s']:.3f}, "
            f"load {row['load_s']:.3f})  {row['moved_bytes'] / 1e6:8.1f} MB   x{row['against_plain']:.2f} of plain",
            flush=True,
        )


def digest_speed() -> float:
    """MB/s of `describe_file`, from the page cache."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(128 << 20))
        file.flush()
        begin_s = time.perf_counter()
        describe_file(Path(file.name), name="e000_v000000.safetensors")
        return (128 << 20) / 1e6 / (time.perf_counter() - begin_s)


def main() -> None:
    """Parse, measure, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    parser.add_argument("--actors", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--act", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.act:
        act(arguments.act[0], arguments.act[1:])
        return
    speed = digest_speed()
    print(f"digests of a file: {speed:.0f} MB/s", flush=True)  # noqa: T201
    rows = measure(arguments.policies, arguments.actors, arguments.rounds)
    if arguments.json:
        print(json.dumps({"digest_mb_per_s": speed, "rows": rows}))  # noqa: T201


if __name__ == "__main__":
    main()
