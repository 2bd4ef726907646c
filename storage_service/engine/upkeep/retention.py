"""Deleting what has expired: log segments older than `table.log.ttl`, whole ones only.

Rows of a table with a lake stay until they are tiered, however old they are. Changes of a primary
key table stay until the rows they made are in the lake and durable without them; without a lake
they stay for ever, because then they are the only rows that a reader can read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.runtime import Runtime
from streamhouse.storage_service.errors import StreamhouseError
from streamhouse.storage_service.log.log_tablet import LogTablet

__all__ = ["apply_retention", "retain"]

_logger = logging.getLogger(__name__)


async def retain(
    tables: Callable[[], Iterable[OpenTable]], runtime: Runtime, *, is_early: bool = False
) -> None:
    """Apply the retention of every table; of each no file changes otherwise meanwhile."""
    for table in tables():
        # The disk budget must not wait for who changes files if there is nothing to gain by it.
        if is_early and not table.properties.datalake_enabled:
            continue
        try:
            async with runtime.changing_files:
                if table.is_dropped:
                    continue
                deleted = await apply_retention(table, runtime, is_early=is_early)
        except StreamhouseError as error:
            # A table dropped meanwhile has closed logs.
            if not table.is_dropped:
                _logger.warning("event=retention_failed table=%s why=%r", table.path, error)
            continue
        if deleted:
            runtime.observer.segments_deleted(deleted)
            _logger.info("event=retention table=%s segments=%d", table.path, deleted)


async def apply_retention(table: OpenTable, runtime: Runtime, *, is_early: bool = False) -> int:
    """Delete the table's expired segments; return how many.

    With `is_early` those that the lake has, whatever their age; without a lake the log is all there
    is, and its age a promise.
    """
    properties = table.properties
    # Of a diverged one nobody knows yet which rows are whose.
    if table.lake.diverged or (is_early and not properties.datalake_enabled):
        return 0
    ttl_ms = 0 if is_early else properties.log_ttl_ms
    timestamp_us_before = runtime.clock_us() - ttl_ms * 1_000
    deleted = 0
    for bucket, tablet in enumerate(table.tablets):
        offset_max = await table.forgettable(bucket, timestamp_us_before=timestamp_us_before)
        if offset_max > tablet.log_start_offset or table.truncated_offsets:
            tiered = table.lake.tiered_offsets.get(bucket, 0)
            deleted += await runtime.run(_delete, tablet, timestamp_us_before, offset_max, tiered)
    return deleted


def _delete(
    tablet: LogTablet, timestamp_us_before: int, offset_max: int, tiered_offset: int
) -> int:
    return tablet.apply_retention(
        timestamp_us_before=timestamp_us_before,
        offset_max=offset_max,
        tiered_offset=tiered_offset,
    )
