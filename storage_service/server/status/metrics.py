"""What the service counts, for Prometheus; every label has a bounded number of values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streamhouse.storage_service.engine.directory.damaged_table import DamagedTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.runtime import RunBlocking
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.model.table import TablePath
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["METRICS_CONTENT_TYPE", "ServiceMetrics"]

METRICS_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OTHER_TABLES: Final = "(other)"
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 30)

_LAG_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ServiceMetrics:
    """The counters of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._state: _StateCollector | None = None
        self._writing: asyncio.Future[bytes] | None = None
        self._requests = Counter(
            "streamhouse_requests",
            "Requests answered; status 0: the client went away.",
            ["route", "status"],
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "streamhouse_request_seconds",
            "Time from the request's first byte to its answer's last, waits included.",
            ["route"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._by_route: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.received_bytes = self._counter("received_bytes", "Bytes of append bodies.")
        self.sent_bytes = self._counter("sent_bytes", "Bytes of fetch answers and subscriptions.")
        self.appended_rows = self._counter("appended_rows", "Rows appended, repeats included.")
        self.sent_rows = self._counter("sent_rows", "Rows sent by fetches and subscriptions.")
        self._committed_appends = self._counter(
            "committed_appends", "Appends that the commit thread has decided about."
        )
        self._commit_seconds = self._histogram(
            "commit_seconds",
            "Time of one group commit: one write and one sync of each log it touches.",
            _SECONDS,
        )
        self._transactions = Counter(
            "streamhouse_transactions",
            "Transactions ended: committed, skipped, aborted or timed_out.",
            ["how"],
            registry=self.registry,
        )
        self._transaction_rows = self._counter(
            "transaction_rows", "Rows of committed transactions."
        )
        self._transaction_seconds = self._histogram(
            "transaction_commit_seconds",
            "Time from a transaction's commit to its rows being visible.",
            _SECONDS,
        )
        self._segments_deleted = self._counter(
            "retention_deleted_segments", "Log segments deleted because they expired."
        )
        self._rows_expired = self._counter(
            "expired_rows", "Rows of primary key tables deleted because of their age."
        )
        self.worker_wait_seconds = self._histogram(
            "worker_wait_seconds", "Time that calls wait for one of the worker threads.", _SECONDS
        )
        self.loop_lag_seconds = self._histogram(
            "event_loop_lag_seconds",
            "How late the event loop is, measured ten times a second: what everybody waits.",
            _LAG_SECONDS,
        )
        self.limits_reached = Counter(
            "streamhouse_limits_reached",
            "Requests refused because of a limit, by the name of its setting.",
            ["limit"],
            registry=self.registry,
        )
        self.errors = Counter(
            "streamhouse_errors",
            "Errors answered, by their stable code.",
            ["code"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"streamhouse_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"streamhouse_{name}", text, registry=self.registry)

    def show_limits(self, limits: Mapping[str, int]) -> None:
        """Report the settings, so that an alert can compare what is used with what may be."""
        gauge = Gauge(
            "streamhouse_limit", "The service's settings.", ["limit"], registry=self.registry
        )
        for name, value in limits.items():
            gauge.labels(name).set(value)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        counters = self._by_route.get((route, status))
        if counters is None:
            # Looking labels up costs more than counting.
            counters = (
                self._requests.labels(route, str(status)),
                self._request_seconds.labels(route),
            )
            self._by_route[route, status] = counters
        counters[0].inc()
        counters[1].observe(seconds)

    def count_sent(self, *, row_count: int, byte_count: int) -> None:
        """Count rows sent to a reader."""
        self.sent_rows.inc(row_count)
        self.sent_bytes.inc(byte_count)

    def committed(self, *, units: int, seconds: float) -> None:
        """Count one group commit of this many appends."""
        self._committed_appends.inc(units)
        self._commit_seconds.observe(seconds)

    def transaction_ended(self, how: str, *, row_count: int, seconds: float) -> None:
        """Count one that was committed, skipped, aborted or timed out."""
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

    def watch(
        self,
        *,
        tables: Callable[[], Iterable[OpenTable]],
        damaged_tables: Callable[[], Iterable[DamagedTable]],
        tiering: TieringCoordinator,
        gauges: Callable[[], Awaitable[dict[str, tuple[str, float]]]],
        tables_max: int,
    ) -> None:
        """Also report `gauges` (name -> help, value) and the tables' state, read at each scrape."""
        self._state = _StateCollector(tables, damaged_tables, tiering, gauges, tables_max)
        self.registry.register(self._state)

    async def text(self, run_blocking: RunBlocking) -> bytes:
        """Return everything in Prometheus' text format; scrapes at the same time share one."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._text(run_blocking))
        return await asyncio.shield(self._writing)

    async def _text(self, run_blocking: RunBlocking) -> bytes:
        if self._state is not None:
            await self._state.read()
        text: bytes = await run_blocking(generate_latest, self.registry)
        return text


class _StateCollector(Collector):
    def __init__(
        self,
        tables: Callable[[], Iterable[OpenTable]],
        damaged_tables: Callable[[], Iterable[DamagedTable]],
        tiering: TieringCoordinator,
        gauges: Callable[[], Awaitable[dict[str, tuple[str, float]]]],
        tables_max: int,
    ) -> None:
        self._read: list[Metric] = []
        self._tables = tables
        self._damaged_tables = damaged_tables
        self._tiering = tiering
        self._gauges = gauges
        self._tables_max = tables_max

    def describe(self) -> Iterator[Metric]:
        """Name nothing in advance: registering must not read the state."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return what was read last. On any thread."""
        return iter(self._read)

    async def read(self) -> None:
        """Read the service's state. Event loop only."""
        gauges = await self._gauges()
        found: list[Metric] = [
            GaugeMetricFamily(f"streamhouse_{name}", text, value=value)
            for name, (text, value) in gauges.items()
        ]
        rounds = CounterMetricFamily(
            "streamhouse_tiering_rounds",
            "Tiering rounds ended: in_time (within the freshness), late or failed.",
            labels=["how"],
        )
        for how in ("in_time", "late", "failed"):
            rounds.add_metric([how], self._tiering.rounds_ended[how])
        self._read = [*found, rounds, self._collect_damaged(), *await self._collect_tables()]

    def _collect_damaged(self) -> Metric:
        family = GaugeMetricFamily(
            "streamhouse_damaged_table",
            "1 for a table that is not served, by the code of what was met when it was opened.",
            labels=["table", "code"],
        )
        counts: dict[tuple[str, str], int] = {}
        for number, damaged in enumerate(self._damaged_tables()):
            label = str(damaged.path) if number < self._tables_max else OTHER_TABLES
            counts[label, damaged.code] = counts.get((label, damaged.code), 0) + 1
        for labels, count in counts.items():
            family.add_metric(labels, count)
        return family

    async def _collect_tables(self) -> list[Metric]:
        families = {
            name: GaugeMetricFamily(f"streamhouse_table_{name}", text, labels=["table"])
            for name, text in _TABLE_GAUGES.items()
        }
        found: dict[str, dict[str, float]] = {name: {} for name in families}
        number = -1
        async for table in in_slices(sorted(self._tables(), key=_path)):
            if table.is_dropped:
                continue
            number += 1
            label = str(table.path) if number < self._tables_max else OTHER_TABLES
            for name, value in _facts(table, self._tiering).items():
                values = found[name]
                # Of many tables together: the sum of what is counted, the worst of what is timed.
                join = max if name.endswith("_seconds") else sum
                values[label] = join((values[label], value)) if label in values else value
        for name, family in families.items():
            for label, value in found[name].items():
                family.add_metric([label], value)
        return list(families.values())


_TABLE_GAUGES: Final = {
    "rows": "Rows ever appended: the sum of the buckets' high watermarks.",
    "untiered_rows": "Rows in the log that the lake does not have.",
    "log_bytes": "Bytes of the table's log files.",
    "tiering_epoch": "Tiering rounds ever claimed.",
    "lag_seconds": "Age of the oldest row that the lake does not have; 0 when it has all.",
    "freshness_seconds": "The lag wanted: table.datalake.freshness; 0 without a lake.",
    "last_round_seconds": "Time of the last tiering round.",
    "tiering_failures": "Tiering rounds failed in a row.",
}


def _path(table: OpenTable) -> TablePath:
    return table.path


def _facts(table: OpenTable, tiering: TieringCoordinator) -> dict[str, float]:
    is_tiered = table.properties.datalake_enabled
    tiering_round = tiering.round_of(table)
    return {
        "rows": sum(tablet.high_watermark for tablet in table.tablets),
        "untiered_rows": table.untiered_rows,
        "log_bytes": sum(tablet.size_bytes for tablet in table.tablets),
        "tiering_epoch": table.lake.tiering_epoch,
        "lag_seconds": tiering.lag_ms(table) / 1000,
        "freshness_seconds": table.properties.datalake_freshness_ms / 1000 if is_tiered else 0,
        "last_round_seconds": tiering_round.last_round_ms / 1000,
        "tiering_failures": tiering_round.failures,
    }
