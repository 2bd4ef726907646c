"""Metrics of the present state: the use of limited resources, and the state of the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.tiering_desk.tiering_coordinator import TieringCoordinator
from streamhouse.storage_service.engine.upkeep.consumer_lag import consumer_lags
from streamhouse.storage_service.server.service import Service
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["read_state"]

OTHER_TABLES: Final = "(other)"
"""The label of all tables beyond `metrics_tables_max`."""

# Name of a table's metric -> help text, and the function that reads the value.
_TABLE_GAUGES: Final[Mapping[str, tuple[str, Callable[[OpenTable, TieringCoordinator], float]]]] = {
    "rows": (
        "Rows ever appended: the sum of the buckets' high watermarks.",
        lambda table, _: sum(tablet.high_watermark for tablet in table.tablets),
    ),
    "untiered_rows": (
        "Rows in the log that the lake does not have.",
        lambda table, _: table.untiered_rows,
    ),
    "log_bytes": (
        "Bytes of the table's log files.",
        lambda table, _: sum(tablet.size_bytes for tablet in table.tablets),
    ),
    "tiering_epoch": ("Tiering rounds ever claimed.", lambda table, _: table.lake.tiering_epoch),
    "lag_seconds": (
        "Age of the oldest row missing in the lake; 0 if the lake has all rows.",
        lambda table, tiering: tiering.lag_ms(table) / 1000,
    ),
    "freshness_seconds": (
        "The allowed lag: table.datalake.freshness; 0 without a lake.",
        lambda table, _: (
            table.properties.datalake_freshness_ms / 1000
            if table.properties.datalake_enabled
            else 0
        ),
    ),
    "last_round_seconds": (
        "Time of the last tiering round.",
        lambda table, tiering: tiering.round_of(table).last_round_ms / 1000,
    ),
    "tiering_failures": (
        "Tiering rounds failed in a row.",
        lambda table, tiering: tiering.round_of(table).failures,
    ),
}


CONSUMERS_MAX: Final = 500
"""Consumers with metrics; those beyond have none, the first tables by name come first."""

_CONSUMER_GAUGES: Final[Mapping[str, str]] = {
    "lag_rows": "Rows that the consumer has not read.",
    "lag_seconds": "Age of the oldest row that the consumer has not read; 0 when it has read all.",
    "rows_at_risk": "Rows that the consumer has not read and that retention takes soon.",
}


async def read_state(service: Service) -> list[Metric]:
    """Return all metrics of the present state. Event loop only."""
    gauges = await _gauges(service) | _reader_gauges(service)
    rounds = CounterMetricFamily(
        "streamhouse_tiering_rounds",
        "Tiering rounds ended: in_time (within the freshness), late or failed.",
        labels=["how"],
    )
    for how in ("in_time", "late", "failed"):
        rounds.add_metric([how], service.manager.tiering.rounds_ended[how])
    return [
        *(
            GaugeMetricFamily(f"streamhouse_{name}", text, value=value)
            for name, (text, value) in gauges.items()
        ),
        rounds,
        _damaged_tables(service),
        *await _tables(service),
        await _broken_rows(service),
        *await _consumers(service),
    ]


def _damaged_tables(service: Service) -> Metric:
    family = GaugeMetricFamily(
        "streamhouse_damaged_table",
        "1 for a table that is not served, by the code of the error at its opening.",
        labels=["table", "code"],
    )
    counts = Counter(
        (_label(service, damaged.path, number), damaged.code)
        for number, damaged in enumerate(service.manager.damaged_tables())
    )
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


async def _tables(service: Service) -> list[Metric]:
    gauges: dict[str, dict[str, float]] = {name: {} for name in _TABLE_GAUGES}
    number = 0
    tables = sorted(service.manager.open_tables(), key=lambda table: table.path)
    async for table in in_slices(tables):
        if table.is_dropped:
            continue
        label = _label(service, table.path, number)
        number += 1
        for name, (_, read) in _TABLE_GAUGES.items():
            values, value = gauges[name], read(table, service.manager.tiering)
            # Several tables of one label: the sum of counts, the maximum of times.
            join = max if name.endswith("_seconds") else sum
            values[label] = join((values[label], value)) if label in values else value
    families: list[Metric] = []
    for name, (text, _) in _TABLE_GAUGES.items():
        family = GaugeMetricFamily(f"streamhouse_table_{name}", text, labels=["table"])
        for label, value in gauges[name].items():
            family.add_metric([label], value)
        families.append(family)
    return families


async def _broken_rows(service: Service) -> Metric:
    family = CounterMetricFamily(
        "streamhouse_broken_rows",
        "Rows that broke a constraint of their table: refused, or rejected (kept in $rejected).",
        labels=["table", "constraint", "how"],
    )
    counts: Counter[tuple[str, str, str]] = Counter()
    number = 0
    async for table in in_slices(sorted(service.manager.open_tables(), key=lambda t: t.path)):
        if table.is_dropped or not table.broken_rows:
            continue
        label = _label(service, table.path, number)
        number += 1
        for (constraint, how), count in table.broken_rows.items():
            name = constraint if label != OTHER_TABLES else OTHER_TABLES
            counts[label, name, how] += count
    for labels, count in counts.items():
        family.add_metric(labels, count)
    return family


async def _consumers(service: Service) -> list[Metric]:
    """Return the lags of the tables' consumers, for at most `CONSUMERS_MAX` consumers."""
    labels = ["table", "consumer"]
    families = {
        name: GaugeMetricFamily(f"streamhouse_consumer_{name}", text, labels=labels)
        for name, text in _CONSUMER_GAUGES.items()
    }
    remaining = CONSUMERS_MAX
    tables = sorted(service.manager.open_tables(), key=lambda table: table.path)
    async for table in in_slices(tables):
        if not remaining:
            break
        # Consumers of two tokens may have the same name: the larger lag counts.
        worst: dict[str, dict[str, float]] = {}
        for lag in await consumer_lags(table, service.manager.runtime):
            values: dict[str, float] = {"lag_rows": lag.rows, "rows_at_risk": lag.rows_at_risk}
            if lag.lag_ms is not None:
                values["lag_seconds"] = lag.lag_ms / 1000
            of_name = worst.setdefault(lag.consumer.name, {})
            for name, value in values.items():
                of_name[name] = max(value, of_name.get(name, 0))
        for consumer, values_of_name in list(worst.items())[:remaining]:
            for name, value in values_of_name.items():
                families[name].add_metric([str(table.path), consumer], value)
        remaining = max(0, remaining - len(worst))
    return list(families.values())


def _label(service: Service, path: TablePath, number: int) -> str:
    return str(path) if number < service.config.metrics_tables_max else OTHER_TABLES


async def _gauges(service: Service) -> dict[str, tuple[str, float]]:
    """Return name -> help, value."""
    manager, disk = service.manager, service.manager.disk_budget
    key_memory_bytes = await _key_memory_bytes(manager.open_tables())
    tables = manager.open_tables()  # No await from here on: the values are of the same moment.
    transactions = manager.transactions
    key_tables = [table for table in tables if isinstance(table, KeyTable)]
    key_buckets = [keys for table in key_tables for keys in table.key_buckets]
    return {
        "connections": ("Open connections.", len(service.connections)),
        "idle_connections_closed": (
            "Idle connections closed to admit new connections.",
            service.connections.closed_idle_count,
        ),
        "open_requests": ("Requests in progress.", service.open_requests),
        "subscriptions": ("Open subscriptions.", service.subscription_count),
        "waiting_requests": ("Requests waiting for rows.", manager.waiter_limit.count),
        **{name: (text, read()) for name, (text, read) in service.door_gauges.items()},
        "worker_calls": (
            "Calls on worker threads, including waiting calls.",
            service.turns.held + service.turns.waiting_count,
        ),
        "body_bytes": ("Bytes held by request bodies.", service.body_memory.held),
        "request_memory_bytes": ("Bytes held by all requests.", service.request_memory_bytes),
        "answer_bytes": (
            "Bytes held by answers that are being built or not sent yet.",
            service.answers.held,
        ),
        "answers_waiting": (
            "Requests waiting for memory for answers.",
            service.answers.waiting_count,
        ),
        "commit_queue_bytes": ("Appended bytes waiting for the disk.", manager.queued_bytes),
        "disk_bytes": ("Bytes of rows on disk, counted against --disk-max.", disk.bytes_used),
        "disk_max_bytes": ("Limit of disk_bytes: --disk-max; 0 without it.", disk.bytes_max or 0),
        "key_writes_waiting": (
            "Writes to primary key tables waiting for their turn.",
            sum(table.key_writer.waiting_count for table in key_tables),
        ),
        "key_memory_bytes": (
            "Memory of rows by key: in the cache, waiting for RocksDB, and in RocksDB.",
            key_memory_bytes,
        ),
        "key_rows": ("Rows of primary key tables.", sum(keys.row_count for keys in key_buckets)),
        "transactions_open": ("Transactions that are not finished.", transactions.open_count),
        "transaction_staged_bytes": (
            "Bytes staged by open transactions.",
            transactions.staged_bytes,
        ),
        "databases": ("Databases.", len(manager.databases())),
        "tables": ("Tables.", len(list(tables))),
        "damaged_tables": ("Tables that are not served.", len(manager.damaged_tables())),
        "diverged_tables": (
            "Tables that are neither written nor tiered, because their lake has another history.",
            sum(bool(table.lake.diverged) for table in tables),
        ),
        "buckets": ("Buckets of all tables.", sum(len(table.tablets) for table in tables)),
        "read_only_buckets": (
            "Buckets that a failed disk has made read-only.",
            sum(tablet.is_read_only for table in tables for tablet in table.tablets),
        ),
        "unusable_key_buckets": (
            "Buckets whose rows by key are out of use, because they are damaged or behind.",
            sum(not keys.is_usable for keys in key_buckets),
        ),
        "grants_reload_failures": (
            "Changed grants files that were broken; the old grants stayed in use.",
            service.access.reload_failures,
        ),
    }


def _reader_gauges(service: Service) -> dict[str, tuple[str, float]]:
    readers = service.reader_figures()
    return {
        "readers": ("Processes that read beside this one.", readers.processes),
        "reader_connections": ("Connections that readers have.", readers.connections),
        "reader_key_bytes": (
            "Memory of rows by key in all readers; each has a copy of its own.",
            readers.key_bytes,
        ),
    }


async def _key_memory_bytes(tables: Iterable[OpenTable]) -> int:
    """Return the memory of rows by key, in slices, because the query is slow. Event loop only."""
    total = 0
    async for table in in_slices(tables):
        if isinstance(table, KeyTable) and not table.is_dropped:
            # An unusable bucket may be closing.
            usable = [keys.rows for keys in table.key_buckets if keys.is_usable]
            for rows in usable:
                by_place = rows.memory_bytes()
                total += sum(by_place.values()) - by_place["files"]
    return total
