"""The data of the status page: the service, and rows, rates, bytes and lake lag of the tables.

Samples are taken every few seconds; the number of samples and of sampled tables is bounded. The
only read from disk is, once per table, the timestamp of the oldest batch outside the lake.
A table has a full and a brief form: a page of a thousand tables is fetched every few seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.lake.facts import LakeDebt
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.consumer_lag import (
    ConsumerLag,
    consumer_lags,
    lag_of,
)
from streamhouse.storage_service.server.status._service_figures import ServiceFigures
from streamhouse.storage_service.server.status._table_history import TableHistory
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = [
    "BRIEF_TABLES_MAX",
    "CONSUMERS_BRIEF_MAX",
    "STATUS_INTERVAL_MS",
    "StatusSampler",
    "lateness",
]

_logger = logging.getLogger(__name__)

# Rates over a shorter time are noise, and a slower page would look dead.
STATUS_INTERVAL_MS: Final = 5_000
CONSUMERS_SHOWN_MAX: Final = 20
"""Consumers in the full form of a table: the consumers with the largest lags."""
CONSUMERS_BRIEF_MAX: Final = 50
"""Consumers of all tables in the brief status."""
BRIEF_TABLES_MAX: Final = 2_000
"""Sampled tables, and tables in the brief status."""

_BRIEF_KEPT_S: Final = 1.0
_ERROR_CHARACTERS_MAX: Final = 300
_SEPARATORS: Final = (",", ":")
_ROUND_FACTS: Final = ("round_ms", "untiered_rows", "lease_left_ms", "progress")

# Maintenance works at far smaller counts: such counts mean that maintenance does not keep up.
_SMALL_FILES_MANY: Final = 200
_DELETE_FILES_MANY: Final = 200
_DELETED_SHARE_HIGH: Final = 0.2


def has_much_debt(debt: LakeDebt) -> bool:
    """Whether maintenance of a lake table is overdue.

    A table whose rounds scatter rows over many files always has such debt.
    """
    return (
        bool(debt.maintenance_error)
        or debt.is_scattered
        or min(debt.small_files, debt.data_files - debt.needed_files) >= _SMALL_FILES_MANY
        or debt.delete_files >= _DELETE_FILES_MANY
        or debt.deleted_share >= _DELETED_SHARE_HIGH
    )


class StatusSampler:
    """Samples the tables of one service. Event loop only."""

    def __init__(
        self,
        manager: TabletManager,
        figures: ServiceFigures,
        *,
        full_tables_max: int,
        brief_tables_max: int = BRIEF_TABLES_MAX,
    ) -> None:
        """The limits are the number of tables in the full and in the brief status."""
        self._manager = manager
        self._figures = figures
        self._full_tables_max = full_tables_max
        self._tables_max = max(full_tables_max, brief_tables_max)
        # By table id.
        self._histories: dict[int, TableHistory] = {}
        self._troubles: dict[int, tuple[str, int]] = {}
        self.live_state: Callable[[OpenTable], dict[str, Any] | None] = lambda _: None
        """The live cut of a table, set by the door with live tables; None without a cut."""
        self._writing: dict[bool, asyncio.Future[str]] = {}
        self._brief_text, self._brief_until_s = "", 0.0

    async def sample(self) -> None:
        """Take a sample of every table within the limit."""
        runtime, tables = self._manager.runtime, self._sampled()
        unread = [table for table in tables if not table.is_age_known]
        if unread:
            await runtime.run(_read_ages, unread)
        for table in tables:
            await consumer_lags(table, runtime)
        now_us, histories = runtime.clock_us(), {}
        at_us = int(runtime.monotonic_s() * 1e6)
        written = read = log_bytes = 0
        async for table in in_slices(tables):
            if not table.is_dropped:
                history = self._history_of(table)
                rows_before = history.last_rows
                _add_sample(history, table, at_us=at_us, now_us=now_us)
                rows_after = history.last_rows
                if rows_before is not None and rows_after is not None:
                    written, read = (
                        written + rows_after[0] - rows_before[0],
                        read + rows_after[1] - rows_before[1],
                    )
                log_bytes += _log_bytes(table)
                histories[table.info.table_id] = history
        self._histories = histories
        self._note_troubles(tables, now_us=now_us)
        await self._figures.look(written_rows=written, read_rows=read, log_bytes=log_bytes)

    def _note_troubles(self, tables: Iterable[OpenTable], *, now_us: int) -> None:
        """Remember since when each table has its trouble; a new kind of trouble begins anew."""
        kinds = {table.info.table_id: self._trouble(table) for table in tables}
        kinds |= {table.table_id: "damaged" for table in self._manager.damaged_tables()}
        before = self._troubles
        self._troubles = {
            table_id: before[table_id] if before.get(table_id, ("",))[0] == kind else (kind, now_us)
            for table_id, kind in kinds.items()
            if kind
        }

    def _trouble(self, table: OpenTable) -> str:
        """Return the kind of a table's trouble, or an empty text."""
        last_round = self._manager.tiering.round_of(table)
        if table.failures:
            return "unusable"
        if table.lake.diverged:
            return "two histories"
        if last_round.failures:
            return "failing"
        if max(self._history_of(table).last_lags_ms, default=0) > (
            table.properties.datalake_freshness_ms
        ):
            return "late"
        return "debt" if last_round.debt and has_much_debt(last_round.debt) else ""

    def _since(self, table_id: int) -> dict[str, int]:
        """Return the field `since_us` of a table with trouble."""
        trouble = self._troubles.get(table_id)
        return {} if trouble is None else {"since_us": trouble[1]}

    async def text(self, *, is_brief: bool = False) -> str:
        """Return the status as JSON; concurrent callers share the text.

        The brief text is cached for a moment: many watchers cost little more than a single watcher.
        """
        now_s = self._manager.runtime.monotonic_s()
        if is_brief and self._brief_text and now_s < self._brief_until_s:
            return self._brief_text
        writing = self._writing.get(is_brief)
        if writing is None or writing.done():
            writing = self._writing[is_brief] = asyncio.ensure_future(self._text(is_brief=is_brief))
        text = await asyncio.shield(writing)
        if is_brief:
            self._brief_text = text
            self._brief_until_s = now_s + _BRIEF_KEPT_S
        return text

    def text_of(self, path: TablePath) -> str:
        """Return the status with one table in full form; without tables if it is absent."""
        tables = [table for table in self._sampled() if table.path == path]
        return _joined(self._summary(), (_json(self._full(table)) for table in tables))

    async def _text(self, *, is_brief: bool) -> str:
        # Written table by table: a large table takes milliseconds.
        form = self._brief if is_brief else self._full
        shown = self._sampled()[: self._tables_max if is_brief else self._full_tables_max]
        tables = [_json(form(table)) async for table in in_slices(shown) if not table.is_dropped]
        summary = self._summary()
        if is_brief:
            summary["consumers"] = await self._worst_consumers(shown)
        return _joined(summary, tables)

    def _summary(self) -> dict[str, Any]:
        """Return the status without the tables."""
        manager = self._manager
        every = list(manager.open_tables())
        return {
            "now_us": manager.runtime.clock_us(),
            "sample_interval_ms": STATUS_INTERVAL_MS,
            "service": self._figures.to_json(),
            "table_count": len(every),
            "damaged_tables": [
                damaged.to_json() | self._since(damaged.table_id)
                for damaged in manager.damaged_tables()
            ],
            "strangers": list(manager.registry.strangers),
            "workers": [
                {"worker_id": status["worker_id"], "table": str(table.path)}
                | {name: status[name] for name in _ROUND_FACTS}
                for table in every
                if manager.tiering.round_of(table).worker_id
                if (status := manager.tiering.status(table))["lease_left_ms"]
            ],
            "idle_workers": [
                {"worker_id": worker, "reason": reason}
                for worker, reason in sorted(manager.tiering.idle_workers().items())
            ],
        }

    def _sampled(self) -> list[OpenTable]:
        tables = sorted(self._manager.open_tables(), key=lambda table: table.path)
        return tables[: self._tables_max]

    def _history_of(self, table: OpenTable) -> TableHistory:
        return self._histories.get(table.info.table_id) or TableHistory(len(table.tablets))

    def _brief(self, table: OpenTable) -> dict[str, Any]:
        """Return the fields for a line of a long list; `tiering` has no empty fields."""
        history = self._history_of(table)
        written, read = history.last_per_s()
        last_round = self._manager.tiering.round_of(table)
        debt = last_round.debt
        tiering = {
            "untiered_rows": table.untiered_rows,
            "worker_id": last_round.worker_id,
            "failures": last_round.failures,
            "diverged": table.lake.diverged[:_ERROR_CHARACTERS_MAX],
            "last_error": last_round.last_error[:_ERROR_CHARACTERS_MAX],
            "maintenance_debt": debt.status_json() if debt and has_much_debt(debt) else None,
        }
        return {
            "table": str(table.path),
            "is_primary_key_table": table.info.is_primary_key_table,
            "row_count": table.row_count,
            "log_bytes": _log_bytes(table),
            "written_rows_per_s": round(written, 1),
            "read_rows_per_s": round(read, 1),
            "is_tiered": table.properties.datalake_enabled,
            "freshness_ms": table.properties.datalake_freshness_ms,
            "lag_ms": max(history.last_lags_ms, default=0),
            "tiering": {name: value for name, value in tiering.items() if value},
            "unusable": [why[:_ERROR_CHARACTERS_MAX] for why in table.failures[:1]],
            "history": {"written_rows_per_s": list(map(round, history.written_per_s_short()))},
            **self._since(table.info.table_id),
        }

    def _full(self, table: OpenTable) -> dict[str, Any]:
        history = self._history_of(table)
        written, read = history.written_per_s(), history.read_per_s()
        lags = history.last_lags_ms
        debt = self._manager.tiering.round_of(table).debt
        return {
            "table": str(table.path),
            "is_primary_key_table": table.info.is_primary_key_table,
            "row_count": table.row_count,
            "log_bytes": _log_bytes(table),
            "written_rows_per_s": written[-1] if written else 0.0,
            "read_rows_per_s": read[-1] if read else 0.0,
            "is_tiered": table.properties.datalake_enabled,
            "freshness_ms": table.properties.datalake_freshness_ms,
            "lag_ms": max(lags, default=0),
            "lake_snapshot_id": table.lake.snapshot_id and str(table.lake.snapshot_id),
            "tiering": self._manager.tiering.status(table),
            "has_much_debt": bool(debt and has_much_debt(debt)),
            "unusable": table.failures,
            "consumers": self._consumers(table),
            "constraints": [
                {
                    "name": name,
                    "predicate": predicate,
                    "refused_rows": table.broken_rows[name, "refused"],
                    "rejected_rows": table.broken_rows[name, "rejected"],
                }
                for name, predicate in sorted(table.info.descriptor.checks)
            ],
            "buckets": [
                {
                    "bucket": bucket,
                    "log_start_offset": positions.log_start_offset,
                    "high_watermark": positions.high_watermark,
                    "tiered_offset": positions.tiered_offset,
                    "lag_ms": lags[bucket] if bucket < len(lags) else 0,
                }
                for bucket, positions in table.positions().items()
            ],
            "history": {
                "written_rows_per_s": list(map(round, written)),
                "read_rows_per_s": list(map(round, read)),
                "lag_ms": history.lags_ms(),
            },
            "live": self.live_state(table),
            **self._since(table.info.table_id),
        }

    def _consumers(self, table: OpenTable) -> list[dict[str, Any]]:
        """Return the consumers with the largest lags, without positions."""
        now_us = self._manager.runtime.clock_us()
        lags = sorted(
            (lag_of(table, consumer, now_us=now_us) for consumer in table.readers()),
            key=lambda lag: (-lag.rows, lag.consumer.key),
        )
        return [_consumer_json(lag) for lag in lags[:CONSUMERS_SHOWN_MAX]]

    async def _worst_consumers(self, tables: Iterable[OpenTable]) -> dict[str, Any]:
        """Return the number of consumers, and the worst consumers of all tables."""
        now_us = self._manager.runtime.clock_us()
        count, worst = 0, list[dict[str, Any]]()
        async for table in in_slices(tables):
            if table.is_dropped or not (consumers := table.readers()):
                continue
            count += len(consumers)
            name = str(table.path)
            worst.extend(
                {"table": name, **_consumer_json(lag_of(table, consumer, now_us=now_us))}
                for consumer in consumers
            )
            worst = heapq.nsmallest(CONSUMERS_BRIEF_MAX, worst, key=lateness)
        return {"count": count, "worst": worst}


def lateness(consumer: Mapping[str, Any]) -> tuple[bool, bool, int, int, str]:
    """Order consumers: first rows at risk, then rows only in the lake, then by age and rows."""
    lag_ms = consumer.get("lag_ms")
    return (
        not consumer.get("rows_at_risk"),
        lag_ms is not None,
        -(lag_ms or 0),
        -consumer.get("lag_rows", 0),
        consumer.get("name", ""),
    )


def _consumer_json(lag: ConsumerLag) -> dict[str, Any]:
    """Return a consumer without the positions."""
    return {
        "name": lag.consumer.name,
        "lag_rows": lag.rows,
        "lag_ms": lag.lag_ms,
        "rows_at_risk": lag.rows_at_risk,
        "reported_us": lag.consumer.reported_us,
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=_SEPARATORS)


def _joined(summary: dict[str, Any], tables: Iterable[str]) -> str:
    return f'{_json(summary)[:-1]},"tables":[{",".join(tables)}]}}'


def _log_bytes(table: OpenTable) -> int:
    return sum(tablet.size_bytes for tablet in table.tablets)


def _add_sample(history: TableHistory, table: OpenTable, *, at_us: int, now_us: int) -> None:
    """Add a sample of a table; a bucket's lag is the age of the oldest row outside the lake."""
    since = {}
    if table.properties.datalake_enabled and table.is_age_known:
        since = table.untiered_since_us()
    history.add(
        at_us=at_us,
        written_rows=sum(tablet.high_watermark for tablet in table.tablets),
        read_rows=table.read_rows,
        lag_ms=[
            max(0, now_us - since[bucket]) // 1000 if bucket in since else 0
            for bucket in range(len(table.tablets))
        ],
    )


def _read_ages(tables: Iterable[OpenTable]) -> None:
    for table in tables:
        try:
            table.untiered_since_us()
        except StreamhouseError as error:
            # A read of the damaged log reports the error; the page must not fail.
            _logger.debug("event=status_unreadable table=%s why=%r", table.path, error.message)
