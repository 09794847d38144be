"""The processes that train one policy together, and what they say to each other about tensors.

Owns the process group. Ranks are numbered from 0, which leads: it alone reads and writes files. One process alone is
the group of size 1, for which every method returns at once and nothing is communicated.

Invariants
    - Every rank calls the same methods in the same order; a call that communicates ends on all of them or on none.
    - Nothing is pickled: what travels is tensors, and JSON in bytes.
    - A call waits for the other ranks for `deadline_s` at most, except `Ranks.receive`, which waits for the leader's
      next word or its end.

Never: models, losses, or what a message means.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from trace_async.core.types import Json

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

LEADER: Final = 0

_NEXT_WORD: Final = timedelta(days=365)
"""For a rank that waits for the leader's next word, which comes with the next full batch, or never: a leader that ends
closes its connections, which ends the wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process's place among those that train together."""

    rank: int = LEADER
    size: int = 1
    mesh: DeviceMesh | None = None  # of all ranks; None when alone
    words: dist.ProcessGroup | None = None  # for messages of the leader; None when alone

    @property
    def leads(self) -> bool:
        """Whether this process reads and writes files."""
        return self.rank == LEADER

    @property
    def alone(self) -> bool:
        """Whether there is nobody else."""
        return self.size == 1

    # ---- tensors of equal shape on every rank ------------------------------------------------------------------------

    def total(self, values: Tensor) -> Tensor:
        """The sum over ranks, on every rank."""
        if self.alone:
            return values
        summed = values.clone()
        dist.all_reduce(summed)
        return summed

    def every(self, values: Tensor) -> list[Tensor]:
        """Each rank's tensor, in the order of ranks, on every rank."""
        if self.alone:
            return [values]
        found = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(found, values.contiguous())
        return found

    # ---- parameters and what an optimizer keeps beside them ----------------------------------------------------------

    def gather(self, shares: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors on the leader, on the CPU unless it is alone; an empty mapping elsewhere."""
        if self.alone:
            return dict(shares)
        found = {}
        for name, share in shares.items():  # one at a time, so that no device ever holds all of them
            whole = whole_tensor(share.detach())
            if self.leads:
                found[name] = whole.cpu()
        return found

    def scatter(self, whole: Mapping[str, Tensor], shares: Mapping[str, Tensor]) -> None:
        """The opposite: copies what the leader has into everybody's `shares`; `whole` is not read elsewhere."""
        for name, share in shares.items():
            if self.alone:
                share.copy_(whole[name])
                continue
            sent = torch.empty(share.shape, dtype=share.dtype)
            if self.leads:
                sent.copy_(whole[name])
            dist.broadcast(sent, LEADER, group=self.words)
            _own(share).copy_(self._part(sent, share))

    def _part(self, whole: Tensor, share: Tensor) -> Tensor:
        if _own(share) is share:
            return whole
        parts = whole.chunk(self.size, dim=0)
        return parts[self.rank] if self.rank < len(parts) else whole[:0]

    # ---- messages of the leader --------------------------------------------------------------------------------------

    def send(self, header: Json, payload: Tensor) -> None:
        """The leader's word to everybody: a JSON object and bytes, uint8 [n]."""
        text = torch.frombuffer(bytearray(json.dumps(header, allow_nan=False).encode()), dtype=torch.uint8)
        dist.broadcast(torch.tensor([text.numel(), payload.numel()]), LEADER, group=self.words)
        dist.broadcast(text, LEADER, group=self.words)
        if payload.numel():
            dist.broadcast(payload, LEADER, group=self.words)

    def agree(self, value: Any) -> Any:
        """The leader's value, made of JSON, on every rank; what others give is not read."""
        if self.alone:
            return value
        if self.leads:
            self.send({"value": value}, torch.empty(0, dtype=torch.uint8))
            return value
        return self.receive()[0]["value"]

    def receive(self) -> tuple[Any, Tensor]:
        """What the leader sent. Woken by it, or by its end: then RuntimeError."""
        sizes = torch.zeros(2, dtype=torch.int64)
        dist.broadcast(sizes, LEADER, group=self.words)
        text, payload = (torch.empty(int(size), dtype=torch.uint8) for size in sizes)
        dist.broadcast(text, LEADER, group=self.words)
        if payload.numel():
            dist.broadcast(payload, LEADER, group=self.words)
        return json.loads(text.numpy().tobytes()), payload


ALONE: Final = Ranks()


@contextmanager
def joined(*, rank: int, size: int, device: torch.device, deadline_s: float) -> Iterator[Ranks]:
    """The process group that the environment names (MASTER_ADDR, MASTER_PORT), for the length of the block.

    NCCL moves what is on CUDA devices, gloo what is on the CPU. Waits `deadline_s` for the other ranks to come. After
    an error the group is left to the end of the process, since leaving it in order may wait for ranks that are gone.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=deadline_s))
    words = dist.new_group(backend="gloo", timeout=_NEXT_WORD)
    mesh = dist.device_mesh.init_device_mesh(device.type, (size,))
    yield Ranks(rank=rank, size=size, mesh=mesh, words=words)
    dist.destroy_process_group()


def share_out(costs: Sequence[int], size: int) -> list[list[int]]:
    """Which of the pieces each of `size` ranks takes: heaviest first, to whoever has least so far.

    Every rank computes the same. No rank's sum is more than 4/3 of what is best (R. Graham, 1969).
    """
    shares: list[list[int]] = [[] for _ in range(size)]
    loads = [0] * size
    for piece in sorted(range(len(costs)), key=lambda index: -costs[index]):
        lightest = loads.index(min(loads))
        shares[lightest].append(piece)
        loads[lightest] += costs[piece]
    return shares


def whole_tensor(tensor: Tensor) -> Tensor:
    """Of a sharded tensor all of it, which every rank must ask for; any other tensor as it is."""
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def _own(share: Tensor) -> Tensor:
    """The part of a sharded tensor that is here; any other tensor itself."""
    local = getattr(share, "to_local", None)
    return share if local is None else local()
