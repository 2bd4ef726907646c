"""The service's counters for Prometheus; every label has a bounded number of values."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from streamhouse.storage_service.directory.runtime import RunBlocking

__all__ = ["METRICS_CONTENT_TYPE", "Counts", "ServiceMetrics", "package_version"]

_LIMITS: Final = "The service's settings."
METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]
Counts = Mapping[tuple[str, str, Labels], float]
"""(family, sample, labels) -> value."""
_COUNTED: Final = ("counter", "histogram")
_LAG_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_SECONDS: Final = (0.0005, 0.001, 0.002, *_LAG_SECONDS, 30)


class RequestCounts:
    """The answered requests of one protocol: number and time."""

    def __init__(self, requests: Counter, seconds: Histogram) -> None:
        self._requests = requests
        self.seconds = seconds
        self._children: dict[tuple[str, object], tuple[Counter, Histogram]] = {}

    def count(self, route: str, outcome: object, seconds: float) -> None:
        """Count one answered request."""
        counters = self._children.get((route, outcome))
        if counters is None:
            # The lookup of labels costs more than the counting, so the counters are kept.
            counters = self._requests.labels(route, str(outcome)), self.seconds.labels(route)
            self._children[route, outcome] = counters
        counters[0].inc()
        counters[1].observe(seconds)


class ServiceMetrics(Collector):
    """The counters of one service, in a separate registry."""

    def __init__(self) -> None:
        # Start times of all series would be a sixth of the text, and rates do not need them.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # their one untyped call
        self.registry = CollectorRegistry()
        self._limits = Gauge("streamhouse_limit", _LIMITS, ["limit"], registry=self.registry)
        ProcessCollector(registry=self.registry)
        Gauge(
            "streamhouse_build_info",
            "1; the labels are the release and the version of Python.",
            ["version", "python_version"],
            registry=self.registry,
        ).labels(package_version(), platform.python_version()).set(1)
        self._read_state: Callable[[], Awaitable[Sequence[Metric]]] | None = None
        self._state: Sequence[Metric] = ()
        self._writing: asyncio.Future[bytes] | None = None
        self.add_counts: Callable[[], Counts] = dict
        """Returns the counters of other processes of the service, as their `counts`."""
        self.requests = self.request_counts(
            "request",
            ("route", "status"),
            count_text="Requests answered; status 0: the client went away.",
            time_text="Time from the request's first byte to its answer's last, waits included.",
        )
        self.received_bytes = self._counter("received_bytes", "Bytes of append bodies.")
        self.sent_bytes = self._counter("sent_bytes", "Bytes of fetch answers and subscriptions.")
        self.appended_rows = self._counter("appended_rows", "Rows appended, repeats included.")
        self.sent_rows = self._counter("sent_rows", "Rows sent by fetches and subscriptions.")
        self._committed_appends = self._counter(
            "committed_appends", "Appends that the commit thread has decided about."
        )
        self._commit_seconds = self._histogram(
            "commit_seconds",
            "Time of a group commit: a write and a sync of each touched log.",
        )
        self._transactions = self._counter(
            "transactions", "Transactions ended: committed, skipped, aborted or timed_out.", "how"
        )
        self._transaction_rows = self._counter(
            "transaction_rows", "Rows of committed transactions."
        )
        self._transaction_seconds = self._histogram(
            "transaction_commit_seconds",
            "Time from a transaction's commit to its rows being visible.",
        )
        self._segments_deleted = self._counter(
            "retention_deleted_segments", "Log segments deleted because they expired."
        )
        self._unread_rows_deleted = self._counter(
            "retention_unread_rows",
            "Rows that left the log before a consumer had read them, counted for each consumer.",
        )
        self._rows_expired = self._counter(
            "expired_rows", "Rows of primary key tables deleted because of their age."
        )
        self.worker_wait_seconds = self._histogram(
            "worker_wait_seconds", "Time that calls wait for one of the worker threads."
        )
        self.loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds",
            "The lag of the event loop, measured ten times a second: a delay of all requests.",
            buckets=_LAG_SECONDS,
        )
        self._add_live_cuts()
        self.limits_reached = self._counter(
            "limits_reached",
            "Requests refused because of a limit, by the name of its setting.",
            "limit",
        )
        self.errors = self._counter("errors", "Errors answered, by their stable code.", "code")

    def _add_live_cuts(self) -> None:
        self.live_loads = self._counter("live_loads", "Live tables loaded through the catalog.")
        self._live_rows = self._counter("live_rows", "Rows written to files of live cuts.")
        self._live_written_bytes = self._counter(
            "live_written_bytes", "Bytes written to data files of live cuts."
        )
        self._live_cut_seconds = self._histogram(
            "live_cut_seconds", "Time to make a live cut; not of a cut that was made before."
        )

    def _histogram(
        self, name: str, text: str, *labels: str, buckets: Sequence[float] = _SECONDS
    ) -> Histogram:
        return Histogram(
            f"streamhouse_{name}", text, labels, buckets=buckets, registry=self.registry
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"streamhouse_{name}", text, labels, registry=self.registry)

    def request_counts(
        self, name: str, labels: tuple[str, str], *, count_text: str, time_text: str
    ) -> RequestCounts:
        """Return the counters `{name}s` by both labels and `{name}_seconds` by the first label."""
        return RequestCounts(
            self._counter(f"{name}s", count_text, *labels),
            self._histogram(f"{name}_seconds", time_text, labels[0]),
        )

    def show_limits(self, limits: Mapping[str, int]) -> None:
        """Report the settings, so that an alert can compare use and limit."""
        for name, value in limits.items():
            self._limits.labels(name).set(value)

    def request_buckets(self) -> dict[str, dict[float, float]]:
        """Return route -> bound in seconds -> number of requests within the bound."""
        buckets_by_route: dict[str, dict[float, float]] = {}
        for family in self._added(self.requests.seconds.collect()):
            for sample in family.samples:
                if "le" in sample.labels:
                    of_route = buckets_by_route.setdefault(sample.labels["route"], {})
                    of_route[float(sample.labels["le"])] = sample.value
        return buckets_by_route

    def error_counts(self) -> dict[str, float]:
        """Return code -> errors answered."""
        return {
            sample.labels["code"]: sample.value
            for family in self._added(self.errors.collect())
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    def count_sent(self, *, row_count: int, byte_count: int) -> None:
        """Count rows sent to a reader."""
        self.sent_rows.inc(row_count)
        self.sent_bytes.inc(byte_count)

    def committed(self, *, units: int, seconds: float) -> None:
        """Count one group commit of this many appends."""
        self._committed_appends.inc(units)
        self._commit_seconds.observe(seconds)

    def transaction_ended(self, how: str, *, row_count: int, seconds: float) -> None:
        """Count a transaction that was committed, skipped, aborted or timed out."""
        self._transactions.labels(how).inc()
        if how == "committed":
            self._transaction_rows.inc(row_count)
            self._transaction_seconds.observe(seconds)

    def rows_expired(self, count: int) -> None:
        """Count rows of primary key tables deleted because of their age."""
        self._rows_expired.inc(count)

    def segments_deleted(self, count: int) -> None:
        """Count log segments that retention deleted."""
        self._segments_deleted.inc(count)

    def unread_rows_deleted(self, count: int) -> None:
        """Count rows that left the log before a consumer had read them."""
        self._unread_rows_deleted.inc(count)

    def live_cut_made(self, row_count: int, byte_count: int, seconds: float) -> None:
        """Count a new live cut and what was written for it."""
        self._live_rows.inc(row_count)
        self._live_written_bytes.inc(byte_count)
        self._live_cut_seconds.observe(seconds)

    def counts(self) -> Counts:
        """Return all counters of this process."""
        return {
            (family.name, sample.name, tuple(sample.labels.items())): sample.value
            for family in self.registry.collect()
            if family.type in _COUNTED and family.name.startswith("streamhouse_")
            for sample in family.samples
            if sample.value or family.type == "histogram"
        }

    def _added(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """Yield the families with the counters of other processes added."""
        others: dict[str, dict[tuple[str, Labels], float]] = {}
        for (family_name, name, labels), value in self.add_counts().items():
            others.setdefault(family_name, {})[name, labels] = value
        for family in families:
            counts = others.get(family.name)
            if counts is not None:
                family.samples = [
                    sample._replace(
                        value=sample.value
                        + counts.pop((sample.name, tuple(sample.labels.items())), 0)
                    )
                    for sample in family.samples
                ]
                for (name, labels), value in counts.items():
                    family.samples.append(Sample(name, dict(labels), value))
            yield family

    def watch(self, read_state: Callable[[], Awaitable[Sequence[Metric]]]) -> None:
        """Report the metrics of `read_state` at each scrape, in place of an earlier function."""
        if self._read_state is None:
            self.registry.register(self)
        self._read_state = read_state

    def describe(self) -> Iterator[Metric]:
        """Return no names in advance: the registration must not read the state."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return the state of the last read. On any thread."""
        return iter(self._state)

    async def text(self, run_blocking: RunBlocking) -> bytes:
        """Return all metrics in Prometheus' text format; concurrent scrapes share a text."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._text(run_blocking))
        return await asyncio.shield(self._writing)

    async def _text(self, run_blocking: RunBlocking) -> bytes:
        if self._read_state is not None:
            self._state = await self._read_state()
        text: bytes = await run_blocking(generate_latest, _Added(self.registry, self._added))
        return text


class _Added(Collector):
    """The metrics of a registry, with the counters of other processes."""

    def __init__(
        self, registry: CollectorRegistry, added: Callable[[Iterable[Metric]], Iterator[Metric]]
    ) -> None:
        self._registry = registry
        self._added_to = added

    def collect(self) -> Iterator[Metric]:
        """Return the families. On any thread."""
        return self._added_to(self._registry.collect())


def package_version() -> str:
    """Return the installed release."""
    try:
        return version("pyspark-streamhouse")
    except PackageNotFoundError:
        return "unknown"
