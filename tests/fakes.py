"""Fakes at the interfaces: engine, environments, renderer, scorer, allocator, channel and learner, clock.

They script, they never patch. What a fake answers is a pure function of the seeds and tokens it is given; when it
answers, and whether it fails, is the test's choice. `unit` draws such choices, so that a scenario does not depend on
the order in which tasks run.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar, TypeAlias
from zlib import crc32

import numpy as np

from trace_async.core.tree import TurnTree
from trace_async.core.types import (
    ROOT,
    ActorStatus,
    Adapter,
    Canary,
    FloatArray,
    GenerateRequest,
    Generation,
    Grant,
    Group,
    GrownBy,
    IntArray,
    Lease,
    Message,
    Prefix,
    Score,
    StopReason,
    Task,
    VersionNotice,
)
from trace_async.environment import Branching, StepResult
from trace_async.errors import EngineError, PolicyError
from trace_async.publication.manifest import FileEntry, Manifest, notice_names
from trace_async.publication.staging import FetchedVersion
from trace_async.transport.wire import Ack, decode_group, encode_group

STOP_ID = 1
"""The token with which `ScriptedEngine` ends a turn."""


def unit(*words: object) -> float:
    """A number in [0, 1) that depends on `words` only: the same whenever and in whatever order it is asked."""
    digest = blake2b(repr(words).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2.0**56


class FakeClock:
    """Seconds that move when told."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


def loop_clock() -> float:
    """The running loop's clock, virtual when the loop is."""
    return asyncio.get_running_loop().time()


class WordRenderer:
    """One token a word, by a hash of the word; a sampled token reads as its number."""

    stop_ids: tuple[int, ...] = (STOP_ID,)

    def opening_ids(self, messages: Sequence[Message]) -> IntArray:
        return self.reply_ids(messages, closed=True)

    def reply_ids(self, messages: Sequence[Message], *, closed: bool) -> IntArray:
        ids = [] if closed else [STOP_ID]
        ids += [2 + crc32(word.encode()) % 30000 for message in messages for word in message.content.split()]
        return np.array(ids, dtype=np.int32)

    def text(self, action_ids: IntArray) -> str:
        return " ".join(str(token) for token in action_ids.tolist() if token != STOP_ID)


Latency: TypeAlias = Callable[[str], float]
"""Seconds that a call named by a string takes; `math.inf` never answers."""
Fault: TypeAlias = Callable[[str], Exception | None]
"""The error with which a call named by a string ends, or None."""


def at_once(call: str) -> float:
    del call
    return 0.0


def no_fault(call: str) -> Exception | None:
    del call
    return None


async def answer_after(call: str, *, latency: Latency, fault: Fault) -> None:
    """Wait as scripted, then fail as scripted. Even an answer at once yields to the loop."""
    seconds = latency(call)
    if math.isinf(seconds):
        await asyncio.Event().wait()
    await asyncio.sleep(seconds)
    error = fault(call)
    if error is not None:
        raise error


@dataclass(slots=True, kw_only=True)
class ScriptedEngine:
    """Samples by hashing seed and prefix; also an actor's engine, whose weights are a version number.

    A call is named by its request id. `requests` and `samples` tell what was asked and answered, in order.
    """

    latency: Latency = at_once
    fault: Fault = no_fault
    load_s: float = 0.0
    unusable: frozenset[int] = frozenset()  # versions that do not fit: the weights before them stay in use
    unproven: frozenset[int] = frozenset()  # versions whose canary does not agree: nothing is in use after them
    version: int = 0
    requests: list[GenerateRequest] = field(default_factory=list)
    loads: list[tuple[int, int, str]] = field(default_factory=list)  # version, epoch, name of the file
    in_flight: int = 0
    max_in_flight: int = 0
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    proven: asyncio.Event = field(default_factory=asyncio.Event)

    def lose(self) -> None:
        """The process behind the engine starts again: its weights are gone."""
        self.version = -1
        self.proven.clear()
        self.lost.set()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        while self.version < 0:
            await self.proven.wait()
        version = self.version
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        started_s = loop_clock()
        try:
            await answer_after(request.request_id, latency=self.latency, fault=self.fault)
        finally:
            self.in_flight -= 1
        if self.version < 0:
            raise EngineError(f"{request.request_id}: the weights are gone")
        token_ids, logprobs = sample(request)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            version_min=min(version, self.version),
            version_max=max(version, self.version),
            kv_version_min=min(version, self.version),
            stop=StopReason.STOP if token_ids[-1] == STOP_ID else StopReason.LENGTH,
            generate_s=loop_clock() - started_s,
        )

    async def load(self, *, version: int, epoch: int, weights: Path, canary: Canary, adapter: Adapter | None) -> None:
        await asyncio.sleep(self.load_s)
        if version in self.unusable:
            raise PolicyError(f"v{version} cannot be used")
        if version in self.unproven:
            self.version = -1
            self.proven.clear()
            raise PolicyError(f"v{version} does not act")
        self.version = version
        self.proven.set()
        self.loads.append((version, epoch, weights.name))

    def counters(self) -> Mapping[str, float]:
        return {"engine_busy_s": 1.5, "engine_idle_s": 0.5}

    async def run(self) -> None:
        """The owner loop of a real engine; waits for cancellation."""
        await asyncio.Event().wait()


@dataclass(slots=True, kw_only=True)
class ScriptedFetcher:
    """Brings whatever is announced. A call is named `fetch:VERSION`; `asked` tells the versions, in order."""

    latency: Latency = at_once
    fault: Fault = no_fault
    asked: list[int] = field(default_factory=list)

    async def fetch(self, notice: VersionNotice) -> FetchedVersion:
        self.asked.append(notice.version)
        await answer_after(f"fetch:{notice.version}", latency=self.latency, fault=self.fault)
        weights, predictor, _ = notice_names(notice)
        manifest = Manifest(
            version=notice.version,
            epoch=notice.epoch,
            weights=FileEntry(name=weights, num_bytes=0, chunk_digests=()),
            predictor=FileEntry(name=predictor, num_bytes=0, chunk_digests=()),
            tensors=(),
            canary=Canary(prompts=(), logprobs=()),
            adapter=None,
        )
        return FetchedVersion(manifest, Path(weights), {"of": notice.version})


def sample(request: GenerateRequest) -> tuple[IntArray, FloatArray]:
    """What `ScriptedEngine` answers: depends on the request's seed, prefix and token limit only."""
    origin = (request.seed, crc32(request.prefix_ids.tobytes()))
    draws = [unit(origin, place) for place in range(min(3, request.max_tokens))]
    ids = [2 + int(8 * draw) for draw in draws[: 1 + int(unit(origin, "count") * len(draws))]]
    if unit(origin, "stop") < 0.7:
        ids[-1] = STOP_ID
    return np.array(ids, dtype=np.int32), np.array([-draw for draw in draws[: len(ids)]], dtype=np.float32)


@dataclass(slots=True, kw_only=True)
class World:
    """What all environments of a test share: the script, and the book of episodes opened and closed."""

    latency: Latency = at_once
    fault: Fault = no_fault
    end_probability: float = 0.3
    open_episodes: set[int] = field(default_factory=set)
    opened: int = 0
    seeds: list[int] = field(default_factory=list)  # of every reset and fork, in order
    forgetful: bool = False  # a replayed action is answered otherwise than the first time

    def enrol(self) -> int:
        self.opened += 1
        self.open_episodes.add(self.opened)
        return self.opened

    async def answer(self, call: str) -> None:
        await answer_after(call, latency=self.latency, fault=self.fault)


class CoinEnvironment:
    """Each turn tosses coins from the episode's seed: does it end, and with reward 1 or 0. Any action is readable.

    The reply tells the toss and every action so far. Calls are named `reset`, `step`, `fork` or `close`, a colon, and
    the actions so far.
    """

    name: ClassVar[str] = "coin"
    branching: ClassVar[Branching] = Branching.FORK

    def __init__(self, world: World) -> None:
        self.world = world
        self.actions: list[str] = []
        self._seed = 0
        self._number = world.enrol()

    async def reset(self, task: Task, *, seed: int) -> tuple[Message, ...]:
        await self._call("reset")
        self._start_from(seed)
        return (Message("user", f"toss {task.task_id} please"),)

    async def step(self, action: str) -> StepResult:
        await self._call("step")
        self.actions.append(action)
        toss = int(2 * unit(self._seed, len(self.actions), "toss"))
        end = unit(self._seed, len(self.actions), "end") < self.world.end_probability
        if self.world.forgetful:
            toss = self._number
        return StepResult(
            messages=() if end else (Message("user", f"coin {toss} after {' '.join(self.actions)}"),),
            reward=float(toss) if end else 0.0,
            terminated=end,
        )

    async def fork(self, *, seed: int) -> CoinEnvironment:
        await self._call("fork")
        copy = type(self)(self.world)
        copy.actions = list(self.actions)
        copy._start_from(seed)
        return copy

    def snapshot(self) -> bytes:
        raise NotImplementedError

    def restore(self, state: bytes) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.world.open_episodes.discard(self._number)
        await self.world.answer(f"close:{'/'.join(self.actions)}")

    def _start_from(self, seed: int) -> None:
        self.world.seeds.append(seed)
        self._seed = seed

    async def _call(self, kind: str) -> None:
        assert self._number in self.world.open_episodes, f"{kind} on episode {self._number}, which is closed"
        await self.world.answer(f"{kind}:{'/'.join(self.actions)}")


class ReplayCoin(CoinEnvironment):
    """Cannot copy its state; an equal seed and equal actions bring it back."""

    branching: ClassVar[Branching] = Branching.REPLAY

    async def fork(self, *, seed: int) -> CoinEnvironment:
        raise AssertionError("a replay environment must not be forked")


class OneWayCoin(ReplayCoin):
    """Cannot go back at all."""

    branching: ClassVar[Branching] = Branching.NONE


@dataclass(slots=True, kw_only=True)
class TableScorer:
    """A predictor's table by turn index, behind the scorer's face. A call is named `score:` and the prefix length."""

    table: Mapping[int, float] = field(default_factory=dict)
    latency: Latency = at_once
    fault: Fault = no_fault
    version: int = 0
    asked: list[Prefix] = field(default_factory=list)

    async def score(self, prefix: Prefix) -> Score:
        self.asked.append(prefix)
        await answer_after(f"score:{prefix.token_ids.size}", latency=self.latency, fault=self.fault)
        return Score(success=self.table.get(prefix.turn_index, 0.5), predictor_version=self.version)


class ScatterAllocator:
    """Grants each rollout that ends some continuations at random anchors, the prompt among them."""

    def __init__(self, seed: object) -> None:
        self._draw = random.Random(repr(seed))

    def start(self, tree: TurnTree) -> list[Grant]:
        return [Grant(node_id=ROOT, count=tree.roots_left, grown_by=GrownBy.ROOT)]

    def on_turn(self, tree: TurnTree, node_id: int) -> list[Grant]:
        del tree
        return [Grant(node_id=node_id, count=1, grown_by=GrownBy.CHAIN)]

    def on_rollout_end(self, tree: TurnTree, node_id: int) -> list[Grant]:
        del node_id
        count = min(self._draw.randint(0, 3), tree.continuations_left)
        places = [self._draw.choice([ROOT, *tree.anchors()]) for _ in range(count)]
        return [Grant(node_id=place, count=1, grown_by=GrownBy.CONTINUATION) for place in places]


def pareto(seed: object, *, scale_s: float = 1.0, shape: float = 1.2, longest_s: float = math.inf) -> Latency:
    """Long-tailed latencies: most calls take about `scale_s`, a few a hundred times as long."""
    return lambda call: min(longest_s, scale_s * (1.0 - unit(seed, call)) ** (-1.0 / shape))


def now_and_then(seed: object, errors: Sequence[Callable[[], Exception]], *, probability: float) -> Fault:
    """One of `errors` with `probability`, fixed by the call's name; a prompt can always be opened."""

    def fault(call: str) -> Exception | None:
        place = unit(seed, "fault", call) / probability
        return errors[int(place * len(errors))]() if place < 1.0 and not call.startswith("reset:") else None

    return fault


class LoopLearner:
    """The learner's side of a road in memory: issues, announces, acknowledges, and keeps the books.

    `lose_ack(group_id, attempt)` says which acknowledgements never arrive; a group is kept once, however often it
    comes.
    """

    def __init__(self, *, lose_ack: Callable[[str, int], bool] = lambda group_id, attempt: False) -> None:
        self.channel = LoopChannel(self)
        self.issued: list[str] = []
        self.groups: dict[str, Group] = {}
        self.unwanted: set[str] = set()
        self.released: list[str] = []
        self.returned: dict[str, str] = {}  # lease id -> reason
        self.confirmed: list[tuple[float, int, int]] = []  # when, version, epoch
        self.statuses: list[ActorStatus] = []
        self.deliveries: Counter[str] = Counter()
        self.byes = 0
        self._lose_ack = lose_ack

    def issue(self, lease: Lease) -> None:
        self.issued.append(lease.lease_id)
        self.channel.leases.put_nowait(lease)

    def announce(self, version: int, *, epoch: int = 1) -> None:
        self.channel.announced.append(
            VersionNotice(version=version, epoch=epoch, manifest_digest="", directory="", address="")
        )
        self.channel.wake()

    def release(self, lease_id: str, reason: str = "leased again") -> None:
        self.released.append(lease_id)
        self.channel.on_release((lease_id,), reason)

    def stop(self) -> None:
        self.channel.stopped.set()

    def receive(self, group: Group) -> Ack | None:
        """The acknowledgement, or None when it gets lost."""
        self.deliveries[group.group_id] += 1
        wanted = group.group_id not in self.unwanted
        if wanted:
            self.groups[group.group_id] = group
        if self._lose_ack(group.group_id, self.deliveries[group.group_id]):
            return None
        return Ack(group_id=group.group_id, accepted=wanted, reason="" if wanted else "nobody asked")


class LoopChannel:
    """The actor's side of that road. Groups pass through the wire's frames; each way takes `latency_s`."""

    latency_s = 0.25
    resend_s = 5.0
    heartbeat_s = 1.0

    def __init__(self, learner: LoopLearner) -> None:
        self.stopped = asyncio.Event()
        self.leases: asyncio.Queue[Lease] = asyncio.Queue(maxsize=1000)
        self.announced: list[VersionNotice] = []
        self.status: Callable[[], ActorStatus] | None = None
        self.on_release: Callable[[tuple[str, ...], str], None] = lambda lease_ids, reason: None
        self._learner = learner
        self._news = asyncio.Event()

    async def run(self) -> None:
        for _ in range(1_000_000):
            await asyncio.sleep(self.heartbeat_s)
            if self.status is not None:
                self._learner.statuses.append(self.status())

    async def next_lease(self) -> Lease:
        return await self.leases.get()

    async def wait_newer(self, version: int, epoch: int) -> VersionNotice:
        while True:
            newest = max(self.announced, key=lambda notice: (notice.epoch, notice.version), default=None)
            if newest is not None and (newest.epoch, newest.version) > (epoch, version):
                return newest
            await self._news.wait()

    async def ship(self, group: Group) -> Ack:
        frames = encode_group(group)
        while True:
            await asyncio.sleep(self.latency_s)
            ack = self._learner.receive(decode_group(frames))
            if ack is not None:
                await asyncio.sleep(self.latency_s)
                return ack
            await asyncio.sleep(self.resend_s)

    def confirm(self, version: int, epoch: int) -> None:
        self._learner.confirmed.append((loop_clock(), version, epoch))

    def return_leases(self, lease_ids: Sequence[str], reason: str) -> None:
        for lease_id in lease_ids:
            assert lease_id not in self._learner.returned, f"{lease_id} returned twice"
            self._learner.returned[lease_id] = reason

    async def say_bye(self) -> bool:
        await asyncio.sleep(self.latency_s)
        self._learner.byes += 1
        return True

    def wake(self) -> None:
        """There is a newer notice."""
        self._news.set()
        self._news = asyncio.Event()
