"""Which weights of a server are proven, and whose answers may be passed on.

Owns the labels of canaried loads and the door in front of the server. Invariants: `acting` is the label of weights that
the server holds and that are proven, or None, and then the door stays closed; an answer is admitted only when every
token of it is of a proven label, and never when it was under way while the fence came down. Never: talks to a server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

from trace_async.engines.vllm_server_door import Door, Flight
from trace_async.errors import EngineError

_LOG = logging.getLogger(__name__)

_PROVEN_KEPT = 1024
"""Labels remembered: no request lives through so many loads."""


class Fence:
    """Up at first: nothing is proven."""

    def __init__(self, door: Door, *, on_lost: Callable[[], None]) -> None:
        self.door = door
        self._on_lost = on_lost
        self.lost = asyncio.Event()
        self.acting: str | None = None
        self.num_refused = 0
        self._proven: dict[str, int] = {}  # label -> version, oldest first
        self._candidate: str | None = None
        self._settled = asyncio.Event()

    @property
    def version(self) -> int:
        """Of the acting weights; -1 without any."""
        return -1 if self.acting is None else self._proven[self.acting]

    async def admit(self, labels: Set[str], flight: Flight) -> None:
        """Returns when weights of all `labels`, which sampled the answer of `flight`, are proven.

        Waits for a canary's verdict, woken by the end of `candidate`, which has deadlines. Raises EngineError when one
        is not proven; one that is not even being loaded brings the fence down for everybody.
        """
        while not flight.doomed:
            strangers = labels - self._proven.keys()
            if not strangers:
                return
            if strangers == {self._candidate}:
                await self._settled.wait()
            else:
                self.lose(f"an answer was sampled by weights {sorted(strangers)}, which were not proven here")
        self.num_refused += 1
        raise EngineError(f"request {flight.request_id}: the answer is refused: {flight.doomed}")

    @contextmanager
    def candidate(self, label: str) -> Iterator[None]:
        """Within it answers of `label` are held; at its end they are admitted if it was proven, else refused."""
        self._settled, self._candidate = asyncio.Event(), label
        try:
            yield
        finally:
            self._candidate = None
            self._settled.set()

    @contextmanager
    def down(self, label: str, *, unless: type[Exception]) -> Iterator[None]:
        """Within it the server's weights are replaced by those of `label`; from then on nothing acts until `prove`.

        `unless` this comes out of it: then nobody touched the former weights, and they act again.
        """
        former, version = self.acting, self.version
        self.acting = None
        self._proven.pop(label, None)
        try:
            yield
        except unless:
            if former is not None:
                self.prove(former, version)
            raise

    def prove(self, label: str, version: int) -> None:
        """The server holds weights of `label`, and its canary agrees."""
        self._proven[label] = version
        while len(self._proven) > _PROVEN_KEPT:
            del self._proven[next(iter(self._proven))]
        self.acting = label
        self.lost.clear()

    def forget(self, reason: str) -> None:
        """Nothing is proven any more; whoever is under way will be refused."""
        self.door.close()
        self.door.doom(reason)
        self.acting = None
        self._proven.clear()

    def lose(self, reason: str) -> None:
        """As `forget`; and whoever follows versions is to load again."""
        _LOG.warning("the vLLM server lost its weights: %s", reason)
        self.forget(reason)
        self.lost.set()
        self._on_lost()

    def compare(self, label: str) -> None:
        """Lose, unless `label`, the server's own word, is that of the acting weights or none were acting."""
        if self.acting is not None and label != self.acting:
            self.lose(f"it says that it holds {label!r}, not {self.acting!r}: it was restarted, or is shared")

    def close(self) -> None:
        """For good."""
        self.forget("the engine is closed")
        self.door.shut()
        self._settled.set()
