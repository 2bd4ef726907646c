"""Rows which have left the log, as `reading` reads them from the lake for the service.

The rows have the same offsets as in the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ["LakeBucket", "OlderRows", "WrittenAt"]


class OlderRows(NamedTuple):
    """Rows of one bucket in the order of their offsets, with gaps for removed rows.

    `rows` have the table's columns in the current schema; rows of a primary key table are changes,
    with a `__change_type` code as the last column. `timestamps_us` is the write time of each row.
    Below `next_offset` the read is complete.
    """

    rows: pa.RecordBatch
    offsets: npt.NDArray[np.int64]
    timestamps_us: npt.NDArray[np.int64]
    next_offset: int

    def up_to(self, row: int) -> OlderRows:
        """Return the rows before number `row`, which must exist."""
        return OlderRows(
            self.rows.slice(0, row),
            self.offsets[:row],
            self.timestamps_us[:row],
            int(self.offsets[row]),
        )

    def since(self, row: int) -> OlderRows:
        """Return the rows from number `row` on."""
        return OlderRows(
            self.rows.slice(row), self.offsets[row:], self.timestamps_us[row:], self.next_offset
        )

    def followed_by(self, following: OlderRows) -> OlderRows:
        """Return these rows, followed by the rows of `following`."""
        return OlderRows(
            pa.concat_batches([self.rows, following.rows]),
            np.concatenate([self.offsets, following.offsets]),
            np.concatenate([self.timestamps_us, following.timestamps_us]),
            following.next_offset,
        )


class LakeBucket(NamedTuple):
    """The rows of one bucket after all changes below `end_offset`.

    `batches` have the table's columns in order, then `__offset`, where the row was written.
    `fingerprint` is the log's at `end_offset`, or None if the lake's snapshot has none.
    """

    end_offset: int
    batches: Iterator[pa.RecordBatch]
    fingerprint: str | None = None


class WrittenAt(NamedTuple):
    """The offset of a row, and its write time."""

    offset: int
    timestamp_us: int
