"""How published versions spread among the live actors: what somebody may still need, and how long confirming takes.

Pure: times and versions are handed in. Invariants: what is remembered of versions that were not confirmed is bounded;
an actor without a proven version of this epoch counts as -1, so nothing is taken from it. Never looks at files.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection

_MAX_PENDING = 64
"""Versions whose confirmations are awaited; an actor that is further behind gets no leases anyway."""


class Spread:
    """One learner start's versions."""

    def __init__(self) -> None:
        self._newest = -1
        self._first: OrderedDict[int, float] = OrderedDict()  # version -> when it was published; nobody has it
        self._all: OrderedDict[int, float] = OrderedDict()  # somebody has not got it
        self._first_s = self._all_s = math.nan
        self.needed_since = -1

    def publish(self, version: int, *, now_s: float) -> None:
        """A version can be fetched from now on."""
        self._newest = version
        for pending in (self._first, self._all):
            pending[version] = now_s
            if len(pending) > _MAX_PENDING:
                pending.popitem(last=False)

    def look(self, versions: Collection[int], *, now_s: float) -> bool:
        """The proven versions of all live actors, as they are now; whether older ones became needless since then."""
        if versions:
            self._first_s = _settle(self._first, max(versions), now_s=now_s, otherwise=self._first_s)
            self._all_s = _settle(self._all, min(versions), now_s=now_s, otherwise=self._all_s)
        before, self.needed_since = self.needed_since, min(versions, default=self._newest)
        return self.needed_since > before

    def read(self) -> dict[str, float]:
        """Metrics of the newest version that was confirmed since the last call; NaN for what was not."""
        row = {"publication/first_confirm_s": self._first_s, "publication/all_confirm_s": self._all_s}
        self._first_s = self._all_s = math.nan
        return row


def _settle(pending: OrderedDict[int, float], version: int, *, now_s: float, otherwise: float) -> float:
    """Seconds since the newest pending version up to `version` was published; none up to it is pending any more."""
    settled = [pending.pop(known) for known in list(pending) if known <= version]
    return now_s - settled[-1] if settled else otherwise
