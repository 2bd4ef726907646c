"""What reads rows that have left the log, in the order of their offsets: a port.

The service knows no lake library. Whoever runs it gives it a `LakeHistory`; without one it answers
from the log alone. What is read here is the same rows at the same offsets that the log had.
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
    """Rows of one bucket in the order of their offsets, which have gaps where rows have gone.

    `rows` have the table's columns in its current schema; those of a primary key table are changes
    and have `__change_type` after them, as a code. `timestamps_us` is when each row was written.
    Below `next_offset` there is no more to read.
    """

    rows: pa.RecordBatch
    offsets: npt.NDArray[np.int64]
    timestamps_us: npt.NDArray[np.int64]
    next_offset: int

    def up_to(self, row: int) -> OlderRows:
        """Return the rows before number `row`, which there is."""
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

    def then(self, following: OlderRows) -> OlderRows:
        """Return these rows and those that follow them."""
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
    """The offset of a row, and when it was written."""

    offset: int
    timestamp_us: int


class OlderRowsCursor(Protocol):
    """A place in the lake rows of one bucket. For one thread at a time."""

    @property
    def next_offset(self) -> int:
        """Where the next read begins."""

    @property
    def end_offset(self) -> int:
        """Up to where the cursor reads; what was tiered later another cursor has."""

    @property
    def held_bytes(self) -> int:
        """About how much memory it holds."""

    @property
    def covered(self) -> CoveredOffsets | None:
        """What the lake table as it was found covers; None if it does not say."""

    def read(self, *, rows_max: int, bytes_max: int) -> OlderRows:
        """Return the next rows: about so many bytes of them, at least one unless none are left.

        Raises `SnapshotNotFoundError` when its files are gone since it was opened.
        """

    def close(self) -> None:
        """Hold nothing more. Idempotent."""


class LakeHistory(Protocol):
    """Opens cursors. Called by several threads at a time."""

    def open(
        self, table: TableInfo, lake: LakeState, bucket: int, *, offset: int
    ) -> OlderRowsCursor:
        """Return a cursor before `offset`, which is below the bucket's tiered offset.

        Of a primary key table it reads the changes in the full history, which it has.
        Raises `SnapshotNotFoundError` when the lake table is gone or is another one.
        """

    def first_since(
        self, table: TableInfo, lake: LakeState, bucket: int, timestamp_us: int, *, offset: int
    ) -> WrittenAt | None:
        """Return the first row from `offset` on that was written so late, if the lake has one.

        Raises as `open`, and as a cursor's `read`.
        """
