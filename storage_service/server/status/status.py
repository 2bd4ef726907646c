"""The status page and what it shows: rows, rates, bytes and lake lag of tables, lately and now.

One sample every few seconds, a bounded number of them for a bounded number of tables; nothing is
read from disk for it but, once each, the timestamp of the oldest batch that a lake does not have.
The page is one file with no data in it: its script asks `/v1/status`, with the token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import itertools
import json
import logging
import re
from collections import deque
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from fastapi.responses import Response

from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.consumer_lag import consumer_lags, lag_of
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.server.status.event_loop import in_slices

__all__ = ["STATUS_INTERVAL_MS", "StatusSampler", "status_page"]

_logger = logging.getLogger(__name__)

# Rates over less are noise, and a page that is older is not watched.
STATUS_INTERVAL_MS: Final = 5_000
CONSUMERS_SHOWN_MAX: Final = 20
"""Consumers shown of each table: those that are most behind."""
SAMPLES_MAX: Final = 120
"""Samples kept of each table: ten minutes."""

_SEPARATORS: Final = (",", ":")
_ROUND_FACTS: Final = ("round_ms", "untiered_rows", "lease_left_ms", "progress")


class _Sample(NamedTuple):
    """One moment of a table. `lag_ms`: age of the oldest row outside the lake, by bucket."""

    at_s: float
    written_rows: int
    read_rows: int
    lag_ms: tuple[int, ...]


def _rates(samples: Iterable[_Sample], name: str) -> list[float]:
    """Rows a second between all samples that follow each other."""
    return [
        (getattr(now, name) - getattr(before, name)) / max(now.at_s - before.at_s, 1e-3)
        for before, now in itertools.pairwise(samples)
    ]


class StatusSampler:
    """Samples the tables of one service, `tables_max` of them. Event loop only."""

    def __init__(self, manager: TabletManager, *, tables_max: int) -> None:
        self._manager = manager
        self._tables_max = tables_max
        # By table id, the oldest first.
        self._samples: dict[int, deque[_Sample]] = {}
        self._writing: asyncio.Future[str] | None = None

    async def sample(self) -> None:
        """Take one sample of every table; those beyond the limit are left out."""
        runtime, tables = self._manager.runtime, self._sampled()
        unread = [table for table in tables if not table.is_age_known]
        if unread:
            await runtime.run(_read_ages, unread)
        for table in tables:
            await consumer_lags(table, runtime)
        now_s, now_us = runtime.monotonic_s(), runtime.clock_us()
        kept = {}
        async for table in in_slices(tables):
            if not table.is_dropped:
                samples = self._samples_of(table)
                samples.append(_sample(table, now_s=now_s, now_us=now_us))
                kept[table.info.table_id] = samples
        self._samples = kept

    async def text(self) -> str:
        """Return everything that is known, as JSON; callers at the same time share it."""
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._text())
        return await asyncio.shield(self._writing)

    async def _text(self) -> str:
        # Written table by table: a large one takes milliseconds.
        tables = [
            json.dumps(self._table(table), separators=_SEPARATORS)
            async for table in in_slices(self._sampled())
            if not table.is_dropped
        ]
        manager = self._manager
        every = list(manager.open_tables())
        rest = {
            "now_us": manager.runtime.clock_us(),
            "sample_interval_ms": STATUS_INTERVAL_MS,
            "table_count": len(every),
            "damaged_tables": [damaged.to_json() for damaged in manager.damaged_tables()],
            "strangers": list(manager.strangers),
            "workers": [
                {"worker_id": status["worker_id"], "table": str(table.path)}
                | {name: status[name] for name in _ROUND_FACTS}
                for table in every
                if (status := manager.tiering.status(table))["lease_left_ms"]
            ],
            "idle_workers": [
                {"worker_id": worker, "reason": reason}
                for worker, reason in sorted(manager.tiering.idle_workers().items())
            ],
        }
        begin = json.dumps(rest, separators=_SEPARATORS)[:-1]
        return f'{begin},"tables":[{",".join(tables)}]}}'

    def _sampled(self) -> list[OpenTable]:
        tables = sorted(self._manager.open_tables(), key=lambda table: table.path)
        return tables[: self._tables_max]

    def _samples_of(self, table: OpenTable) -> deque[_Sample]:
        return self._samples.get(table.info.table_id) or deque(maxlen=SAMPLES_MAX)

    def _table(self, table: OpenTable) -> dict[str, Any]:
        samples = self._samples_of(table)
        written, read = _rates(samples, "written_rows"), _rates(samples, "read_rows")
        lags = samples[-1].lag_ms if samples else ()
        return {
            "table": str(table.path),
            "is_primary_key_table": table.info.is_primary_key_table,
            "row_count": table.row_count,
            "log_bytes": sum(tablet.size_bytes for tablet in table.tablets),
            "written_rows_per_s": written[-1] if written else 0.0,
            "read_rows_per_s": read[-1] if read else 0.0,
            "is_tiered": table.properties.datalake_enabled,
            "freshness_ms": table.properties.datalake_freshness_ms,
            "lag_ms": max(lags, default=0),
            "lake_snapshot_id": table.lake.snapshot_id and str(table.lake.snapshot_id),
            "tiering": self._manager.tiering.status(table),
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
                "lag_ms": [list(sample.lag_ms) for sample in samples],
            },
        }

    def _consumers(self, table: OpenTable) -> list[dict[str, Any]]:
        """Return the consumers that are most behind, without where they are."""
        now_us = self._manager.runtime.clock_us()
        lags = sorted(
            (lag_of(table, one, now_us=now_us) for one in table.readers()),
            key=lambda lag: (-lag.rows, lag.consumer.key),
        )
        return [
            {
                "name": lag.consumer.name,
                "lag_rows": lag.rows,
                "lag_ms": lag.lag_ms,
                "rows_at_risk": lag.rows_at_risk,
                "reported_us": lag.consumer.reported_us,
            }
            for lag in lags[:CONSUMERS_SHOWN_MAX]
        ]


def _sample(table: OpenTable, *, now_s: float, now_us: int) -> _Sample:
    since = {}
    if table.properties.datalake_enabled and table.is_age_known:
        since = table.untiered_since_us()
    return _Sample(
        at_s=now_s,
        written_rows=sum(tablet.high_watermark for tablet in table.tablets),
        read_rows=table.read_rows,
        lag_ms=tuple(
            max(0, now_us - since[bucket]) // 1000 if bucket in since else 0
            for bucket in range(len(table.tablets))
        ),
    )


def _read_ages(tables: Iterable[OpenTable]) -> None:
    for table in tables:
        try:
            table.untiered_since_us()
        except StreamhouseError as error:
            # A damaged log shows up where it is read; the page must not fail for it.
            _logger.debug("event=status_unreadable table=%s why=%r", table.path, error.message)


_HTML: Final = (
    importlib.resources.files(__package__).joinpath("page", "status.html").read_text("utf-8")
)


def _policy(html: str) -> str:
    """Allow the page's own script, by its digest, and requests to this service: nothing else."""
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts
    ]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS: Final = {
    "Content-Security-Policy": _policy(_HTML),
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def status_page() -> Response:
    """Return the page."""
    return Response(_HTML, media_type="text/html; charset=utf-8", headers=_HEADERS)
