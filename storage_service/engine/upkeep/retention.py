"""Deleting what has expired: log segments older than `table.log.ttl`, whole ones only.

Rows of a table with a lake stay until they are tiered, however old they are. Changes of a primary
key table stay until the rows they made are in the lake and durable without them; without a lake
they stay for ever, because then they are the only rows that a reader can read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from streamhouse.storage_service.engine.blocking import RunBlocking
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.log.log_tablet import LogTablet
from streamhouse.storage_service.model.lake import SideLakeState

__all__ = ["RetentionObserver", "apply_retention", "run_retention"]

_logger = logging.getLogger(__name__)


class RetentionObserver(Protocol):
    """Told of what was deleted, on the event loop."""

    def segments_deleted(self, count: int) -> None:
        """Count deleted segments."""


async def run_retention(
    tables: Callable[[], Iterable[OpenTable]],
    *,
    run_blocking: RunBlocking,
    clock_us: Callable[[], int],
    interval_ms: int,
    observer: RetentionObserver,
    changing_files: asyncio.Lock,
) -> None:
    """Apply the retention of every table each `interval_ms`, for ever; holds the lock for each."""
    while True:
        await asyncio.sleep(interval_ms / 1000)
        for table in tables():
            try:
                async with changing_files:
                    deleted = await apply_retention(
                        table, now_us=clock_us(), run_blocking=run_blocking
                    )
            except StreamhouseError as error:
                # A table dropped meanwhile has closed logs.
                if not table.is_dropped:
                    _logger.warning("event=retention_failed table=%s why=%r", table.path, error)
                continue
            if deleted:
                observer.segments_deleted(deleted)
                _logger.info("event=retention table=%s segments=%d", table.path, deleted)


async def apply_retention(
    table: OpenTable, *, now_us: int, run_blocking: RunBlocking, ttl_ms: int | None = None
) -> int:
    """Delete the table's expired segments; return how many. `ttl_ms` overrides its own."""
    if table.lake.diverged:
        # Nobody knows yet which rows are whose.
        return 0
    properties = table.properties
    ttl_ms = properties.log_ttl_ms if ttl_ms is None else ttl_ms
    timestamp_us_before = now_us - ttl_ms * 1_000
    deleted = 0
    for bucket, tablet in enumerate(table.tablets):
        offset_max = tablet.high_watermark
        if properties.datalake_enabled or table.key_writer is not None:
            offset_max = min(offset_max, table.lake.tiered_offsets.get(bucket, 0))
            if properties.datalake_changelog:
                offset_max = min(offset_max, _covered(table.lake.changelog, bucket))
            if properties.has_batch_layout:
                offset_max = min(offset_max, _covered(table.lake.batch, bucket))
        if table.key_writer is not None:
            if not table.key_buckets[bucket].is_usable:
                # They may have to be made again, from all of the log.
                continue
            # A bucket that nobody writes to gives back here what others need now.
            await table.key_writer.on_thread(table.key_buckets[bucket].rows.keep_to_budget)
            offset_max = await _flushed(table, bucket, timestamp_us_before, offset_max)
        if offset_max > tablet.log_start_offset or table.truncated_offsets:
            tiered = table.lake.tiered_offsets.get(bucket, 0)
            deleted += await run_blocking(_delete, tablet, timestamp_us_before, offset_max, tiered)
    return deleted


def _covered(side: SideLakeState | None, bucket: int) -> int:
    return 0 if side is None else side.tiered_offsets.get(bucket, 0)


async def _flushed(table: OpenTable, bucket: int, timestamp_us_before: int, offset_max: int) -> int:
    """Flush the bucket's rows if expired changes are still needed; return what they are not."""
    assert table.key_writer is not None
    keys = table.key_buckets[bucket]
    flushed = offset_max

    def flush() -> None:
        nonlocal flushed
        expired = keys.log.offset_for_timestamp(timestamp_us_before)
        flushed = keys.flush_before(min(offset_max, expired))

    await table.key_writer.on_thread(flush)
    return min(offset_max, flushed)


def _delete(
    tablet: LogTablet, timestamp_us_before: int, offset_max: int, tiered_offset: int
) -> int:
    return tablet.apply_retention(
        timestamp_us_before=timestamp_us_before,
        offset_max=offset_max,
        tiered_offset=tiered_offset,
    )
