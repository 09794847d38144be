"""Counters of the retrieval server and their text for Prometheus. Never: clocks, sockets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

_PREFIX = "trace_retriever"
_BATCH_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_SECONDS_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Histogram:
    """Observations counted into buckets with these upper bounds; a bound belongs to its bucket."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[sum(value > bound for bound in self._bounds)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        total = 0
        for bound, count in zip((*map(repr, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{bound}"}} {total}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {total}"


class ServerMetrics:
    """What the server has done so far."""

    def __init__(self) -> None:
        self.requests: Counter[int] = Counter()  # to /retrieve, by status
        self.queries = 0  # answered
        self.rejected = 0  # queries that found the queue full
        self.batch_queries = Histogram(_BATCH_BOUNDS)
        self.request_s = Histogram(_SECONDS_BOUNDS)

    def render(self, *, queued: int) -> str:
        """Text format 0.0.4; `queued`: queries that wait or are being searched."""
        lines = [
            *_family("requests_total", "counter", "Requests to /retrieve by status."),
            *(f'{_PREFIX}_requests_total{{code="{code}"}} {count}' for code, count in sorted(self.requests.items())),
            *_family("queries_total", "counter", "Queries answered."),
            f"{_PREFIX}_queries_total {self.queries}",
            *_family("rejected_queries_total", "counter", "Queries turned away because the queue was full."),
            f"{_PREFIX}_rejected_queries_total {self.rejected}",
            *_family("queue_queries", "gauge", "Queries that wait or are being searched."),
            f"{_PREFIX}_queue_queries {queued}",
            *_family("batch_queries", "histogram", "Queries searched at once."),
            *self.batch_queries.lines(f"{_PREFIX}_batch_queries"),
            *_family("request_seconds", "histogram", "Seconds from a request's arrival to its answer."),
            *self.request_s.lines(f"{_PREFIX}_request_seconds"),
        ]
        return "\n".join(lines) + "\n"


def _family(name: str, kind: str, text: str) -> tuple[str, str]:
    return f"# HELP {_PREFIX}_{name} {text}", f"# TYPE {_PREFIX}_{name} {kind}"
