"""Joins calls that wait at the same moment into few bigger ones, without a task of its own.

Whoever asks waits for a turn. One of those who wait is appointed to send; it takes along what waits beside it, and
hands out the answers. Invariants: at most `max_calls` calls are under way, each with at most `max_queries` queries
(unless one caller brings more); at most one sender is appointed and has not begun; a sender that is cancelled leaves
the others waiting for the next; what fails together for its content is sent again one by one. Every wait ends by an
answer, a failure, or being appointed. Belongs to one event loop. Never: sockets, clocks, retries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from envs.retrieval.protocol import Hit
from trace_async.errors import EnvironmentFailure

Found: TypeAlias = list[list[Hit]]
Send: TypeAlias = Callable[[Sequence[str], int], Awaitable[Found]]


class Refused(EnvironmentFailure):
    """The other side works, but does not take these queries."""


@dataclass(slots=True, eq=False)
class _Ask:
    """One caller; `turn` becomes None (send), the answer, or the failure."""

    queries: Sequence[str]
    k: int
    turn: asyncio.Future[Found | EnvironmentFailure | None]
    alone: bool = False  # was refused in company


class Batcher:
    """Bounded calls of `send`, which may raise EnvironmentFailure."""

    def __init__(self, send: Send, *, max_calls: int, max_queries: int) -> None:
        self._send = send
        self._max_calls = max_calls
        self._max_queries = max_queries
        self._waiting: deque[_Ask] = deque()
        self._calls = 0  # under way, or about to be sent by the one appointed
        self._appointed: _Ask | None = None

    async def ask(self, queries: Sequence[str], k: int) -> Found:
        """The hits of each query. Raises what `send` raises."""
        ask = _Ask(queries, k, asyncio.get_running_loop().create_future())
        self._waiting.append(ask)
        self._appoint()
        try:
            outcome = await ask.turn
            if outcome is None:
                await asyncio.sleep(0)  # whoever asks in the same round of the loop comes along
        except asyncio.CancelledError:
            self._withdraw(ask)
            raise
        if outcome is None:
            return await self._lead(ask)
        if isinstance(outcome, EnvironmentFailure):
            raise type(outcome)(*outcome.args) from outcome
        return outcome

    def _appoint(self) -> None:
        while self._appointed is None and self._calls < self._max_calls and self._waiting:
            ask = self._waiting.popleft()
            if not ask.turn.done():  # cancelled, and not yet run to withdraw
                self._appointed = ask
                self._calls += 1
                ask.turn.set_result(None)

    def _withdraw(self, ask: _Ask) -> None:
        if ask is self._appointed:
            self._appointed = None
            self._calls -= 1
            self._appoint()
        elif ask in self._waiting:
            self._waiting.remove(ask)

    async def _lead(self, ask: _Ask) -> Found:
        self._appointed = None
        others = [] if ask.alone else self._take_along(ask)
        self._appoint()
        try:
            return await self._send_for(ask, others)
        finally:
            self._calls -= 1
            self._appoint()

    def _take_along(self, leader: _Ask) -> list[_Ask]:
        """Those who wait with the same k, in order, as many as fit."""
        room = self._max_queries - len(leader.queries)
        taken: list[_Ask] = []
        left: deque[_Ask] = deque()
        for ask in self._waiting:
            if ask.k == leader.k and not ask.alone and len(ask.queries) <= room:
                taken.append(ask)
                room -= len(ask.queries)
            else:
                left.append(ask)
        self._waiting = left
        return taken

    async def _send_for(self, leader: _Ask, others: list[_Ask]) -> Found:
        queries = [query for ask in (leader, *others) for query in ask.queries]
        try:
            found = await self._send(queries, leader.k)
        except Refused:
            if not others:
                raise
            for ask in others:
                ask.alone = True
            self._waiting.extendleft(reversed(others))
            self._appoint()
            return await self._send(leader.queries, leader.k)
        except EnvironmentFailure as error:
            for ask in others:
                _settle(ask, error)
            raise
        except BaseException:  # only this caller was cancelled
            self._waiting.extendleft(reversed(others))
            raise
        start = len(leader.queries)
        for ask in others:
            _settle(ask, found[start : start + len(ask.queries)])
            start += len(ask.queries)
        return found[: len(leader.queries)]


def _settle(ask: _Ask, outcome: Found | EnvironmentFailure) -> None:
    if not ask.turn.done():  # cancelled meanwhile
        ask.turn.set_result(outcome)
