"""The figures of one process for the status page: rates, latency, memory, disk, errors.

Every sample of the tables also reads the counters for Prometheus. Recent rates are the difference
of two reads.
"""

from __future__ import annotations

import itertools
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from streamhouse.core.threads import thread_figures
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.server.status.metrics import ServiceMetrics, package_version
from streamhouse.storage_service.server.status.process_memory import resident_bytes

__all__ = ["ServiceFigures", "quantile_ms"]

_LOOKS_MAX: Final = 120
_RECENT_LOOKS: Final = 12
"""Latency and processor time are of the last minute, errors of all looks in memory."""
_CODES_SHOWN_MAX: Final = 8

# Without fetches and subscriptions: their waits for rows say nothing about the service's speed.
_ROUTES: Final[Mapping[str, Sequence[str]]] = {
    "write": ("append", "upsert", "delete"),
    "lookup": ("lookup", "prefix_lookup", "row"),
}

Buckets = Mapping[float, float]
"""Upper bound in seconds -> number of requests within the bound."""


class _Look(NamedTuple):
    at_s: float
    processor_s: float
    written_rows: int
    read_rows: int
    seconds: Mapping[str, Buckets]
    errors: Mapping[str, float]


class ServiceFigures:
    """The figures of one process. Event loop only."""

    def __init__(
        self,
        manager: TabletManager,
        metrics: ServiceMetrics,
        *,
        data_dir: Path,
        disk_bytes_max: int | None,
        ownership: Callable[[], dict[str, Any]],
        request_memory_bytes: Callable[[], int],
    ) -> None:
        """`ownership` returns the role of the process and the figures of the journal."""
        self._manager = manager
        self._metrics = metrics
        self._data_dir = data_dir
        self._disk_bytes_max = disk_bytes_max
        self._ownership = ownership
        self._request_memory_bytes = request_memory_bytes
        self._version = package_version()
        self._began_s = manager.runtime.monotonic_s()
        self._looks: deque[_Look] = deque(maxlen=_LOOKS_MAX)
        self._written_rows = self._read_rows = 0
        self._log_bytes = 0
        self._disk: tuple[int, int] | None = None

    async def look(self, *, written_rows: int, read_rows: int, log_bytes: int) -> None:
        """Take a look; the row counts are since the last look."""
        runtime = self._manager.runtime
        self._disk = await runtime.run(_disk, self._data_dir)
        self._written_rows += written_rows
        self._read_rows += read_rows
        self._log_bytes = log_bytes
        buckets = self._metrics.request_buckets()
        self._looks.append(
            _Look(
                at_s=runtime.monotonic_s(),
                processor_s=time.process_time(),
                written_rows=self._written_rows,
                read_rows=self._read_rows,
                seconds={name: _sum(buckets, routes) for name, routes in _ROUTES.items()},
                errors=self._metrics.error_counts(),
            )
        )

    def to_json(self) -> dict[str, Any]:
        """Return the figures."""
        disk = self._manager.disk_budget
        free, total = self._disk or (None, None)
        return {
            **self._ownership(),
            "version": self._version,
            "uptime_ms": int((self._manager.runtime.monotonic_s() - self._began_s) * 1_000),
            "memory_bytes": resident_bytes(),
            "request_memory_bytes": self._request_memory_bytes(),
            "disk_bytes": disk.bytes_used if self._disk_bytes_max else self._log_bytes,
            "disk_bytes_max": self._disk_bytes_max,
            "disk_free_bytes": free,
            "disk_total_bytes": total,
            "threads": [figures._asdict() for figures in thread_figures()],
            **self._lately(),
        }

    def _lately(self) -> dict[str, Any]:
        looks = list(self._looks)
        written, read = _rates(looks, "written_rows"), _rates(looks, "read_rows")
        recent = looks[-_RECENT_LOOKS - 1 :]
        errors: list[tuple[str, float]] = []
        latency: dict[str, Any] = dict.fromkeys(_ROUTES)
        processor = 0.0
        if len(looks) > 1:
            first, last = recent[0], recent[-1]
            processor = (last.processor_s - first.processor_s) / max(last.at_s - first.at_s, 1e-3)
            latency = {name: _latency(first, last, name) for name in _ROUTES}
            since = looks[0].errors
            counts = {code: count - since.get(code, 0) for code, count in last.errors.items()}
            errors = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
        return {
            "written_rows_per_s": written[-1] if written else 0.0,
            "read_rows_per_s": read[-1] if read else 0.0,
            "processor_share": round(processor, 3),
            "latency": latency,
            "errors_window_ms": int((looks[-1].at_s - looks[0].at_s) * 1_000) if looks else 0,
            "errors": {code: int(n) for code, n in errors[:_CODES_SHOWN_MAX] if n},
            "history": {
                "written_rows_per_s": list(map(round, written)),
                "read_rows_per_s": list(map(round, read)),
            },
        }


def quantile_ms(buckets: Buckets, share: float) -> float | None:
    """Return the time limit that `share` of the requests kept, None without requests.

    Requests within a bucket count as evenly spread, as in Prometheus.
    """
    bounds = sorted(buckets)
    if not bounds or buckets[bounds[-1]] <= 0:
        return None
    rank = share * buckets[bounds[-1]]
    below, count_below = 0.0, 0.0
    for bound in bounds:
        count = buckets[bound]
        if count >= rank and count > count_below:
            if bound == float("inf"):
                break
            part = (rank - count_below) / (count - count_below)
            return round(1_000 * (below + part * (bound - below)), 2)
        below, count_below = bound, count
    return round(1_000 * below, 2)


def _latency(first: _Look, last: _Look, name: str) -> dict[str, float] | None:
    """Return the median and the 99th percentile, in ms, of the requests between two looks."""
    counts_before = first.seconds[name]
    between = {bound: n - counts_before.get(bound, 0) for bound, n in last.seconds[name].items()}
    median, p99 = quantile_ms(between, 0.5), quantile_ms(between, 0.99)
    return None if median is None or p99 is None else {"p50_ms": median, "p99_ms": p99}


def _sum(by_route: Mapping[str, Buckets], routes: Sequence[str]) -> dict[float, float]:
    total: dict[float, float] = {}
    for route in routes:
        for bound, count in by_route.get(route, {}).items():
            total[bound] = total.get(bound, 0) + count
    return total


def _rates(looks: Sequence[_Look], name: str) -> list[float]:
    return [
        (getattr(later, name) - getattr(earlier, name)) / max(later.at_s - earlier.at_s, 1e-3)
        for earlier, later in itertools.pairwise(looks)
    ]


def _disk(folder: Path) -> tuple[int, int] | None:
    """Return the free bytes and the size of the folder's disk. Blocking."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free, usage.total
