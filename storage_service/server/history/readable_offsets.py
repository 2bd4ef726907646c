"""Which offsets of a partition a consumer may read: from the log, and older ones from the lake.

A consumer knows one range of offsets. The lake's rows belong to it where they lead up to the log
without a gap: then the range begins with the lake's first row. Offsets that neither has any more,
because they were overwritten, have reached their time to live, or left the log while the lake was
off, are below it, and so is what the lake has below such a hole.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamhouse.storage_service.engine.open_table import OpenTable

__all__ = ["ReadableOffsets", "lake_end", "readable_offsets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadableOffsets:
    """Offsets [start, end) are readable, those from `log_start` on in the log.

    Rows below `first` were overwritten or have expired: they are no rows of the table. Those from
    `first` to `start` are lost: no part of the table has them any more.
    """

    first: int
    start: int
    log_start: int
    end: int

    def __contains__(self, offset: int) -> bool:
        """Whether a consumer may stand at this offset: the end is where it waits."""
        return self.start <= offset <= self.end


def lake_end(table: OpenTable, bucket: int) -> int:
    """Return up to which offset the lake has the rows of a bucket's log, 0 if it has none.

    Of a primary key table that is its full history: the rows' own lake table has no changes.
    """
    lake = table.lake
    if lake.diverged:
        return 0
    if table.info.is_primary_key_table:
        return 0 if lake.changelog is None else lake.changelog.tiered_offsets.get(bucket, 0)
    return 0 if lake.snapshot_id is None else lake.tiered_offsets.get(bucket, 0)


def readable_offsets(table: OpenTable, bucket: int, *, has_history: bool) -> ReadableOffsets:
    """Return what is readable of a bucket now. Event loop only.

    Raises `BucketNotFoundError`. Without `has_history` the lake is not looked at.
    """
    tablet = table.tablet(bucket)
    end, log_start = tablet.high_watermark, tablet.log_start_offset
    truncated = table.truncated_offsets.get(bucket, 0)
    expired = table.lake.expired_offsets.get(bucket, 0)
    start = log_start
    if has_history and lake_end(table, bucket) >= log_start:
        start = min(log_start, max(truncated, tablet.forgotten_offset))
    # What has reached its time to live is found by no read of the table, wherever it still lies.
    start = min(max(start, truncated, expired), end)
    return ReadableOffsets(
        first=min(max(truncated, expired), start),
        start=start,
        log_start=max(log_start, start),
        end=end,
    )
