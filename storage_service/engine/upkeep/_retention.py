"""Deleting expired log segments: whole segments older than `table.log.ttl`.

Rows of a table with a lake stay until tiered, at any age. Changes of a primary key table stay until
their rows are in the lake and durable without the changes; without a lake the changes stay for
ever, as the only readable rows.

With `table.log.consumers.wait` rows stay until every consumer has read them; if the disk budget
needs room only the age counts. Without the property, lost rows of slow consumers are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from streamhouse.core.errors import StreamhouseError
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep.consumer_lag import (
    first_wanted,
    tell_of_lost_rows,
    tell_of_rows_at_risk,
)
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["apply_retention", "retain"]

_logger = logging.getLogger(__name__)


async def retain(
    tables: Callable[[], Iterable[OpenTable]], runtime: Runtime, *, is_early: bool = False
) -> None:
    """Apply the retention of every table, each without other changes of its files."""
    for table in tables():
        # The disk budget must not wait for who changes files if there is nothing to gain by it.
        if is_early and not _gains_by_early(table):
            continue
        try:
            async with runtime.changing_files:
                if table.is_dropped:
                    continue
                deleted = await apply_retention(table, runtime, is_early=is_early)
                await tell_of_rows_at_risk(table, runtime)
            await table.consumers.save()
        except StreamhouseError as error:
            # A table dropped meanwhile has closed logs.
            if not table.is_dropped:
                _logger.warning("event=retention_failed table=%s why=%r", table.path, error)
            continue
        if deleted:
            runtime.observer.segments_deleted(deleted)
            _logger.info("event=retention table=%s segments=%d", table.path, deleted)


async def apply_retention(table: OpenTable, runtime: Runtime, *, is_early: bool = False) -> int:
    """Delete the table's expired segments; return the number.

    With `is_early` all segments in the lake are deleted, of any age and whether or not read;
    without a lake the log has the only copy, and the age is a promise.
    """
    properties = table.properties
    # Of a diverged one nobody knows yet which rows are whose.
    if table.lake.diverged or (is_early and not _gains_by_early(table)):
        return 0
    is_age_ignored = is_early and properties.datalake_enabled
    ttl_ms = 0 if is_age_ignored else properties.log_ttl_ms
    timestamp_us_before = runtime.clock_us() - ttl_ms * 1_000
    deleted = 0
    for bucket, tablet in enumerate(table.tablets):
        offset_max = await table.forgettable(bucket, timestamp_us_before=timestamp_us_before)
        if properties.log_consumers_wait and not is_early:
            first_unread = first_wanted(table, bucket)
            offset_max = offset_max if first_unread is None else min(offset_max, first_unread)
        start = tablet.log_start_offset
        if offset_max > start or table.truncated_offsets:
            end = await runtime.run(_expired_offset, tablet, timestamp_us_before, offset_max)
            # Readers are told before the first file goes, and between two steps of the event loop
            # like all that they see: some have the files, too, in a process of their own.
            tablet.truncate(end)
            if end > start:
                table.wakeups.wake((bucket,))
                if lost := tell_of_lost_rows(table, bucket, start=start, end=end):
                    runtime.observer.unread_rows_deleted(lost)
            tiered = table.lake.tiered_offsets.get(bucket, 0)
            deleted += await runtime.run(_delete, tablet, timestamp_us_before, end, tiered)
    return deleted


def _gains_by_early(table: OpenTable) -> bool:
    return table.properties.datalake_enabled or table.properties.log_consumers_wait


def _expired_offset(tablet: LogTablet, timestamp_us_before: int, offset_max: int) -> int:
    return tablet.expired_offset(timestamp_us_before=timestamp_us_before, offset_max=offset_max)


def _delete(
    tablet: LogTablet, timestamp_us_before: int, offset_max: int, tiered_offset: int
) -> int:
    return tablet.apply_retention(
        timestamp_us_before=timestamp_us_before,
        offset_max=offset_max,
        tiered_offset=tiered_offset,
    )
