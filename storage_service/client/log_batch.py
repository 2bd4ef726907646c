"""Rows of one bucket with their addresses."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from streamhouse.storage_service.wire.arrow_body import BatchAddress

__all__ = ["LogBatch", "cut_batch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogBatch:
    """Consecutive rows of one bucket.

    Row i of `data` has offset `base_offset + i`. `timestamp_us` is when the service made the rows
    durable, in microseconds since the epoch; it never decreases within a bucket.
    """

    bucket: int
    base_offset: int
    timestamp_us: int
    data: pa.RecordBatch

    @property
    def end_offset(self) -> int:
        """The offset after the last row."""
        return self.base_offset + int(self.data.num_rows)


def cut_batch(
    address: BatchAddress, batch: pa.RecordBatch, *, start: int, end: int | None
) -> LogBatch | None:
    """Return the part of a stored batch in [start, end), or None when nothing of it is."""
    first = max(start - address.base_offset, 0)
    last = address.row_count if end is None else min(end - address.base_offset, address.row_count)
    if first >= last:
        return None
    is_whole = first == 0 and last == address.row_count
    return LogBatch(
        bucket=address.bucket,
        base_offset=address.base_offset + first,
        timestamp_us=address.timestamp_us,
        data=batch if is_whole else batch.slice(first, last - first),
    )
