"""A port for reading rows which have left the log, in the order of their offsets.

The service depends on no lake library. The program around the service provides a `LakeHistory`;
without a `LakeHistory` the service answers from the log alone. The lake rows are the same rows at
the same offsets as in the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.lake.coverage import CoveredOffsets
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.table import TableInfo

__all__ = ["LakeBucket", "LakeHistory", "OlderRows", "OlderRowsCursor", "WrittenAt"]


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


class OlderRowsCursor(Protocol):
    """A position in the lake rows of one bucket. Not thread-safe."""

    @property
    def next_offset(self) -> int:
        """The offset where the next read begins."""

    @property
    def end_offset(self) -> int:
        """The end of the cursor; rows tiered later need a new cursor."""

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the cursor."""

    @property
    def covered(self) -> CoveredOffsets | None:
        """The offsets covered by the lake table when opened; None if its properties have none."""

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """Return the next rows within the limits, at least one row unless the cursor is at its end.

        Raises `SnapshotNotFoundError` if the files have been removed since the open.
        """

    def close(self) -> None:
        """Release all resources. Idempotent."""


class LakeHistory(Protocol):
    """Opens cursors. Thread-safe."""

    def open(
        self, table: TableInfo, lake: LakeState, bucket: int, *, offset: int
    ) -> OlderRowsCursor:
        """Return a cursor before `offset`, which is below the bucket's tiered offset.

        For a primary key table with a full history, the cursor reads the changes in the full
        history. Raises `SnapshotNotFoundError` if the lake table is gone or replaced.
        """

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """Return the first row from `offset` on written at or after the time, if the lake has one.

        Raises like `open`, and like a cursor's `read`.
        """
