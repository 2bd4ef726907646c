"""What the status page shows: the service, and rows, rates, bytes and lake lag of its tables.

One sample every few seconds, a bounded number of them for a bounded number of tables; nothing is
read from disk for it but, once each, the timestamp of the oldest batch that a lake does not have.
A table is told in full, or in brief: a page of a thousand tables asks again every few seconds.
"""

from __future__ import annotations

import asyncio
import heapq
import json
import logging
from collections.abc import Iterable
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

__all__ = ["BRIEF_TABLES_MAX", "CONSUMERS_TOLD_MAX", "STATUS_INTERVAL_MS", "StatusSampler"]

_logger = logging.getLogger(__name__)

# Rates over less are noise, and a page that is older is not watched.
STATUS_INTERVAL_MS: Final = 5_000
CONSUMERS_SHOWN_MAX: Final = 20
"""Consumers shown of each table: those that are most behind."""
CONSUMERS_TOLD_MAX: Final = 50
"""Consumers told of all tables together, in brief."""
BRIEF_TABLES_MAX: Final = 2_000
"""Tables that are sampled, and told in brief."""

_BRIEF_KEPT_S: Final = 1.0
_ERROR_CHARACTERS_MAX: Final = 300
_SEPARATORS: Final = (",", ":")
_ROUND_FACTS: Final = ("round_ms", "untiered_rows", "lease_left_ms", "progress")

# Maintenance packs and rewrites long before that: more of it says that it does not keep up.
_SMALL_FILES_MANY: Final = 200
_DELETE_FILES_MANY: Final = 200
_DELETED_SHARE_HIGH: Final = 0.2


def has_much_debt(debt: LakeDebt) -> bool:
    """Whether a lake table waits for maintenance that should have been done by now.

    One whose rounds scatter their rows will always have such debt, whatever is done.
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
        """Tell so many tables in full and in brief; those beyond are left out."""
        self._manager = manager
        self._figures = figures
        self._full_tables_max = full_tables_max
        self._tables_max = max(full_tables_max, brief_tables_max)
        # By table id.
        self._histories: dict[int, TableHistory] = {}
        self._writing: dict[bool, asyncio.Future[str]] = {}
        self._brief_text, self._brief_until_s = "", 0.0

    async def sample(self) -> None:
        """Take one sample of every table; those beyond the limit are left out."""
        runtime, tables = self._manager.runtime, self._sampled()
        unread = [table for table in tables if not table.is_age_known]
        if unread:
            await runtime.run(_read_ages, unread)
        for table in tables:
            await consumer_lags(table, runtime)
        now_us, kept = runtime.clock_us(), {}
        at_us = int(runtime.monotonic_s() * 1e6)
        written = read = log_bytes = 0
        async for table in in_slices(tables):
            if not table.is_dropped:
                history = self._history_of(table)
                before = history.last_rows
                _add_sample(history, table, at_us=at_us, now_us=now_us)
                after = history.last_rows
                if before is not None and after is not None:
                    written, read = written + after[0] - before[0], read + after[1] - before[1]
                log_bytes += _log_bytes(table)
                kept[table.info.table_id] = history
        self._histories = kept
        await self._figures.look(written_rows=written, read_rows=read, log_bytes=log_bytes)

    async def text(self, *, is_brief: bool = False) -> str:
        """Return everything that is known, as JSON; callers at the same time share it.

        In brief it is kept for a moment, so that many who watch cost little more than one.
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
        """Return the status with one table alone, which is told in full; none if it is not here."""
        tables = [table for table in self._sampled() if table.path == path]
        return _joined(self._rest(), (_json(self._full(table)) for table in tables))

    async def _text(self, *, is_brief: bool) -> str:
        # Written table by table: a large one takes milliseconds.
        tell = self._brief if is_brief else self._full
        shown = self._sampled()[: self._tables_max if is_brief else self._full_tables_max]
        tables = [_json(tell(table)) async for table in in_slices(shown) if not table.is_dropped]
        rest = self._rest()
        if is_brief:
            rest["consumers"] = await self._worst_consumers(shown)
        return _joined(rest, tables)

    def _rest(self) -> dict[str, Any]:
        """Return all but the tables."""
        manager = self._manager
        every = list(manager.open_tables())
        return {
            "now_us": manager.runtime.clock_us(),
            "sample_interval_ms": STATUS_INTERVAL_MS,
            "service": self._figures.to_json(),
            "table_count": len(every),
            "damaged_tables": [damaged.to_json() for damaged in manager.damaged_tables()],
            "strangers": list(manager.strangers),
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
        """Return what one line of a long list needs; what is nothing is left out of `tiering`."""
        history = self._history_of(table)
        written, read = history.last_per_s()
        last_round = self._manager.tiering.round_of(table)
        debt = last_round.debt
        told = {
            "untiered_rows": table.untiered_rows,
            "worker_id": last_round.worker_id,
            "failures": last_round.failures,
            "diverged": table.lake.diverged[:_ERROR_CHARACTERS_MAX],
            "last_error": last_round.last_error[:_ERROR_CHARACTERS_MAX],
            "maintenance_debt": debt.told() if debt and has_much_debt(debt) else None,
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
            "tiering": {name: value for name, value in told.items() if value},
            "unusable": [why[:_ERROR_CHARACTERS_MAX] for why in table.failures[:1]],
            "history": {"written_rows_per_s": list(map(round, history.written_per_s_short()))},
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
        }

    def _consumers(self, table: OpenTable) -> list[dict[str, Any]]:
        """Return the consumers that are most behind, without where they are."""
        now_us = self._manager.runtime.clock_us()
        lags = sorted(
            (lag_of(table, one, now_us=now_us) for one in table.readers()),
            key=lambda lag: (-lag.rows, lag.consumer.key),
        )
        return [_told(lag) for lag in lags[:CONSUMERS_SHOWN_MAX]]

    async def _worst_consumers(self, tables: Iterable[OpenTable]) -> dict[str, Any]:
        """Return how many consumers there are, and those of all tables that are most behind."""
        now_us = self._manager.runtime.clock_us()
        count, worst = 0, list[tuple[OpenTable, ConsumerLag]]()
        async for table in in_slices(tables):
            if table.is_dropped or not (consumers := table.readers()):
                continue
            count += len(consumers)
            worst.extend((table, lag_of(table, one, now_us=now_us)) for one in consumers)
            worst = heapq.nsmallest(CONSUMERS_TOLD_MAX, worst, key=_how_late)
        told = [{"table": str(table.path), **_told(lag)} for table, lag in worst]
        return {"count": count, "worst": told}


def _how_late(entry: tuple[OpenTable, ConsumerLag]) -> tuple[bool, bool, int, int, str]:
    """Order consumers: rows at risk, rows that are in the lake alone, then by age and rows."""
    _, lag = entry
    return (
        not lag.rows_at_risk,
        lag.lag_ms is not None,
        -(lag.lag_ms or 0),
        -lag.rows,
        lag.consumer.name,
    )


def _told(lag: ConsumerLag) -> dict[str, Any]:
    """Return a consumer without where it is."""
    return {
        "name": lag.consumer.name,
        "lag_rows": lag.rows,
        "lag_ms": lag.lag_ms,
        "rows_at_risk": lag.rows_at_risk,
        "reported_us": lag.consumer.reported_us,
    }


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=_SEPARATORS)


def _joined(rest: dict[str, Any], tables: Iterable[str]) -> str:
    return f'{_json(rest)[:-1]},"tables":[{",".join(tables)}]}}'


def _log_bytes(table: OpenTable) -> int:
    return sum(tablet.size_bytes for tablet in table.tablets)


def _add_sample(history: TableHistory, table: OpenTable, *, at_us: int, now_us: int) -> None:
    """Add one moment of a table; a bucket's lag is the age of its oldest row outside the lake."""
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
            # A damaged log shows up where it is read; the page must not fail for it.
            _logger.debug("event=status_unreadable table=%s why=%r", table.path, error.message)
