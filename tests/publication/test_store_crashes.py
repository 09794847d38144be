"""A publisher that dies at any byte or between any two of its steps: nobody ever loads half a version."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.publication.version_kit import listing, memory_folder, publish, weights_bytes
from trace_async.core.types import VersionNotice
from trace_async.publication import manifest as manifests
from trace_async.publication import store as stores
from trace_async.publication.manifest import describe_file, from_bytes, names_of
from trace_async.publication.store import VersionStore

REPO = Path(__file__).parents[2]
STEPS = {stores.__file__, manifests.__file__}


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder


def dies(work: Callable[[], None]) -> bool:
    """Run `work` in a process of its own; whether a signal killed it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def publish_and_retire(folder: Path) -> None:
    with VersionStore(folder) as store:
        publish(store, 2)
        store.retire(keep=1, needed_since=2)


def after_steps(number: int, work: Callable[[], None]) -> None:
    """`work`, killed before the line of the publisher's code after so many."""

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal number
        if frame.f_code.co_filename not in STEPS:
            return None
        if event == "line":
            number -= 1
            if number < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return look

    sys.settrace(look)
    work()


def with_room(num_bytes: int, work: Callable[[], None]) -> None:
    """`work`, killed by the kernel when a file of it would grow beyond so many bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    work()


def check_all_that_can_be_seen_is_whole(folder: Path) -> set[str]:
    """The versions that have a manifest; each must be whole."""
    seen = {base for name in listing(folder) if name.endswith(".manifest.json") and (base := manifests.base_of(name))}
    for base in seen:
        manifest = from_bytes((folder / names_of(base).manifest).read_bytes())
        for entry in (manifest.weights, manifest.predictor):
            assert entry == describe_file(folder / entry.name, name=entry.name)
    return seen


def check_the_next_publisher_finds_order(folder: Path) -> None:
    with VersionStore(folder) as store:
        assert {name.partition(".")[0] for name in listing(folder)} == check_all_that_can_be_seen_is_whole(folder)
        publish(store, 3)
        store.retire(keep=1, needed_since=3)
    assert check_all_that_can_be_seen_is_whole(folder) == {"e001_v000003"}
    assert listing(folder) == sorted(names_of("e001_v000003"))


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_between_any_two_lines_of_its_code(memory: Path, stride: int) -> None:
    outcomes = set()
    step, alive = 0, False
    while not alive:
        folder = memory / str(step)
        with VersionStore(folder) as store:
            publish(store, 1)
        alive = not dies(partial(after_steps, step, partial(publish_and_retire, folder)))
        outcomes.add(frozenset(check_all_that_can_be_seen_is_whole(folder)))
        check_the_next_publisher_finds_order(folder)
        step += stride
    one, two = "e001_v000001", "e001_v000002"
    assert outcomes == {frozenset({one}), frozenset({one, two}), frozenset({two})}
    assert step > 100


@pytest.mark.parametrize("stride", [37, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_at_any_byte_of_any_file(memory: Path, stride: int) -> None:
    rooms = range(0, len(weights_bytes(2)) + 1000, stride)  # the manifest is the longest, and shorter than that
    deaths = 0
    for room in rooms:
        folder = memory / str(room)
        with VersionStore(folder) as store:
            publish(store, 1)
        deaths += dies(partial(with_room, room, partial(publish_and_retire, folder)))
        assert check_all_that_can_be_seen_is_whole(folder) <= {"e001_v000001", "e001_v000002"}
        check_the_next_publisher_finds_order(folder)
    assert 10 < deaths < len(rooms), "the limits reach from the first byte of a file to the last"


PUBLISHER = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from tests.publication.version_kit import publish
from trace_async.publication.store import VersionStore
with VersionStore(Path(sys.argv[1])) as store:
    for version in range(int(sys.argv[2]), 10**6):
        print(json.dumps(asdict(publish(store, version, floats=1_500_000).notice)), flush=True)
        store.retire(keep=2, needed_since=0)
"""


@pytest.mark.timeout(60)
def test_killed_at_any_moment_while_it_publishes_one_version_after_the_other(memory: Path) -> None:
    draw = random.Random(7)
    version = 0
    for _ in range(4):
        command = [sys.executable, "-c", PUBLISHER, str(memory), str(version)]
        with subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            first = child.stdout.readline()
            time.sleep(draw.uniform(0.0, 0.3))
            child.send_signal(signal.SIGKILL)
            told = [first, *(line for line in child.stdout if line.endswith(b"\n"))]
        newest = VersionNotice(**json.loads(told[-1]))
        seen = check_all_that_can_be_seen_is_whole(memory)
        assert f"e001_v{newest.version:06d}" in seen  # what was announced last is there, or a newer one is too
        version = newest.version + 2
    with VersionStore(memory):
        assert {name.partition(".")[0] for name in listing(memory)} == check_all_that_can_be_seen_is_whole(memory)
