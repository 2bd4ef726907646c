"""The offsets of a partition that a consumer may read: in the log, and older offsets in the lake.

A consumer sees a single range of offsets. If the lake's rows reach the log without a gap, the range
begins with the lake's first row. Offsets without rows lie below the range: rows that were
overwritten, have expired, or left the log while the lake was off. Rows in the lake below such a gap
also lie below the range.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.storage_service.engine.open_table import OpenTable, ReadableTable
from streamhouse.storage_service.log.readable_log import ReadableLog

__all__ = ["ReadableOffsets", "lake_end", "readable_offsets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableOffsets:
    """Offsets [start, end) are readable; offsets from `log_start` on are in the log.

    Rows below `first` were overwritten or have expired and are no rows of the table. Rows from
    `first` to `start` are lost: neither log nor lake has the rows.
    """

    first: int
    start: int
    log_start: int
    end: int

    def __contains__(self, offset: int) -> bool:
        """Whether a consumer may be at this offset; `end` is the position of a waiting consumer."""
        return self.start <= offset <= self.end


def lake_end(table: ReadableTable[ReadableLog], bucket: int) -> int:
    """Return the end offset of a bucket's log rows in the lake, 0 without such rows.

    For a primary key table only the lake's changelog table counts: the main lake table has no
    changes.
    """
    lake = table.lake
    if lake.diverged:
        return 0
    if table.info.is_primary_key_table:
        return 0 if lake.changelog is None else lake.changelog.tiered_offsets.get(bucket, 0)
    return 0 if lake.snapshot_id is None else lake.tiered_offsets.get(bucket, 0)


def readable_offsets(table: OpenTable, bucket: int) -> ReadableOffsets:
    """Return the readable offsets of a bucket now. Event loop only.

    Raises `BucketNotFoundError`.
    """
    tablet = table.tablet(bucket)
    end, log_start = tablet.high_watermark, tablet.log_start_offset
    truncated = table.truncated_offsets.get(bucket, 0)
    expired = table.lake.expired_offsets.get(bucket, 0)
    start = log_start
    if lake_end(table, bucket) >= log_start:
        start = min(log_start, max(truncated, tablet.forgotten_offset))
    # No read returns an expired row, even if the row is still in the log or lake.
    start = min(max(start, truncated, expired), end)
    return ReadableOffsets(
        first=min(max(truncated, expired), start),
        start=start,
        log_start=max(log_start, start),
        end=end,
    )
