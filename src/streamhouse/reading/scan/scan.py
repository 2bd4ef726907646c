"""What a planned read consists of: plain, picklable data that driver and executors share.

Invariants:
- a piece names rows by (bucket, offset range); two pieces of one plan never share a row
- the pieces of a plan together hold exactly the rows of its offset ranges, before filters
- nothing here opens a file or a connection, and secrets never show in a repr
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.offsets import OffsetRange
from streamhouse.lake.files.deletes.deleted_positions import Deletes
from streamhouse.lake.files.name_mapping import NameMapping
from streamhouse.reading.where.predicate import Predicate

__all__ = [
    "ChangeForm",
    "LakeFile",
    "LakePiece",
    "LogPiece",
    "RetractedOffsets",
    "RowsPiece",
    "ScanColumn",
    "ScanContext",
    "Split",
    "without_retracted",
]

BATCH_ROWS: Final = 65_536
"""Rows of a batch handed to Spark; more gains nothing and costs memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanColumn:
    """A column of the result, or a column for a filter.

    `field_id` finds the column in lake files. None when the lake does not have the column (yet).
    Rows of a file without the column have `lake_constant`, which may be null. A column in Spark's
    form of changes is made of the column `base` (`_change_form.py`).
    """

    name: str
    type: pa.DataType
    nullable: bool
    field_id: int | None
    lake_constant: Any = None
    base: str = ""

    def to_arrow(self) -> pa.Field:
        """Return the Arrow field."""
        return pa.field(self.name, self.type, nullable=self.nullable)


# Not frozen: a plan makes one for each file, and a frozen value takes twice as long.
@dataclass(slots=True, kw_only=True)
class LakeFile:
    """A Parquet data file of the lake as its manifest describes it.

    `bucket`, offsets and timestamps are bounds from the manifest; None for a missing bound.
    `constants` are identity partition values by field id, for columns missing from the file.
    `name_mapping` is the table's, which finds columns without field ids; None if the columns have
    the names of the table.
    """

    path: str
    file_bytes: int
    row_count: int
    bucket: int | None
    offset_start: int | None
    offset_end: int | None
    timestamp_min_us: int | None
    timestamp_max_us: int | None
    row_group_starts: tuple[int, ...] = ()
    deletes: tuple[Deletes, ...] = ()
    constants: Mapping[int, Any] = field(default_factory=dict)
    partition: str = ""
    name_mapping: NameMapping | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetractedOffsets:
    """Row versions of one bucket retracted by the changelog after a read's lake snapshot.

    Packed for the way to a task: the first offset, then the gap to each next offset in as few bytes
    as the widest gap needs; one or two bytes a row where many rows have changed.
    """

    bucket: int
    first: int
    gap_bytes: int
    gaps: bytes

    @classmethod
    def of(cls, bucket: int, offsets: npt.NDArray[np.int64]) -> RetractedOffsets:
        """Pack at least one offset; the offsets ascend, each once."""
        gaps = np.diff(offsets)
        widest = int(gaps.max()) if len(gaps) else 0
        width = next(w for w in (1, 2, 4, 8) if widest < 1 << (8 * w))
        return cls(
            bucket=bucket,
            first=int(offsets[0]),
            gap_bytes=width,
            gaps=gaps.astype(f"<u{width}").tobytes(),
        )

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """The offsets, unpacked."""
        gaps = np.frombuffer(self.gaps, dtype=f"<u{self.gap_bytes}")
        unpacked = np.empty(len(gaps) + 1, dtype=np.int64)
        unpacked[0] = self.first
        np.cumsum(gaps, dtype=np.int64, out=unpacked[1:])
        unpacked[1:] += self.first
        return unpacked

    @classmethod
    def within(
        cls, bucket: int, offsets: npt.NDArray[np.int64], start: int | None, end: int | None
    ) -> RetractedOffsets | None:
        """Pack those in [start, end), None being unbounded; None if there are none."""
        first = 0 if start is None else int(np.searchsorted(offsets, start))
        last = len(offsets) if end is None else int(np.searchsorted(offsets, end))
        return cls.of(bucket, offsets[first:last]) if first < last else None

    def between(self, start: int, end: int) -> RetractedOffsets | None:
        """Return the offsets in [start, end); None if there are none."""
        return self.within(self.bucket, self.offsets, start, end)


@dataclass(frozen=True, slots=True, kw_only=True)
class LakePiece:
    """The row groups of one lake file that start in bytes [start_byte, end_byte).

    With `ranges` only rows inside the ranges are read; None means all rows. `bucket` is the bucket
    of every row, None where the file may have several; offsets are bounds, where known. Rows in
    `retracted` are skipped.
    """

    path: str
    file_bytes: int
    start_byte: int
    end_byte: int
    row_count: int
    ranges: tuple[OffsetRange, ...] | None = None
    check_timestamp: bool = False
    deletes: tuple[Deletes, ...] = ()
    constants: Mapping[int, Any] = field(default_factory=dict)
    row_group_starts: tuple[int, ...] = ()
    bucket: int | None = None
    offset_start: int | None = None
    offset_end: int | None = None
    retracted: tuple[RetractedOffsets, ...] = ()
    name_mapping: NameMapping | None = None

    def between(self, start_byte: int, end_byte: int) -> LakePiece:
        """Return the part of the piece in these bytes, with a share of the rows."""
        if (start_byte, end_byte) == (self.start_byte, self.end_byte):
            return self
        rows = self.row_count * (end_byte - start_byte) // (self.end_byte - self.start_byte)
        return replace(
            self, start_byte=start_byte, end_byte=end_byte, row_count=rows, row_group_starts=()
        )

    def without(self, retracted: Mapping[int, npt.NDArray[np.int64]]) -> LakePiece:
        """Return the piece without the offsets of its buckets, ascending, in `retracted`."""
        buckets = retracted if self.bucket is None else {self.bucket} & retracted.keys()
        parts = (
            RetractedOffsets.within(b, retracted[b], self.offset_start, self.offset_end)
            for b in sorted(buckets)
        )
        return replace(self, retracted=tuple(part for part in parts if part is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece:
    """Rows [start, end) of one bucket's log, without the offsets in `retracted`.

    One task reads an ordered piece, and the changes of a key keep their order.
    """

    bucket: int
    start: int
    end: int
    retracted: RetractedOffsets | None = None
    is_ordered: bool = False

    @property
    def row_count(self) -> int:
        """Rows before filters; offsets are dense."""
        return self.end - self.start

    def without(self, retracted: Mapping[int, npt.NDArray[np.int64]]) -> LogPiece:
        """Return the piece without the offsets of its bucket, ascending, in `retracted`."""
        offsets = retracted.get(self.bucket)
        if offsets is None:
            return self
        part = RetractedOffsets.within(self.bucket, offsets, self.start, self.end)
        return replace(self, retracted=part)

    def between(self, start: int, end: int) -> LogPiece:
        """Return the part of the piece in [start, end)."""
        retracted = None if self.retracted is None else self.retracted.between(start, end)
        return replace(self, start=start, end=end, retracted=retracted)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPiece:
    """Rows made at planning, as one Arrow IPC stream: metadata tables."""

    stream: bytes
    row_count: int

    def between(self, start: int, end: int) -> RowsPiece:  # noqa: ARG002 - as other pieces
        """Return the piece, which has no parts."""
        return self


Piece = LakePiece | LogPiece | RowsPiece


def without_retracted(
    pieces: Sequence[Piece], retracted: Mapping[int, npt.NDArray[np.int64]]
) -> list[Piece]:
    """Return pieces without the offsets in `retracted`, by bucket, ascending."""
    return [p if isinstance(p, RowsPiece) else p.without(retracted) for p in pieces]


@dataclass(frozen=True, slots=True)
class Split:
    """What one Spark task reads, piece after piece."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeForm:
    """Changes in Spark's form: without `has_updates` an update is a delete and an insert.

    With `net_keys`, the columns of the primary key, each key has its net change only.
    """

    has_updates: bool = True
    net_keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanContext:
    """The values shared by all splits of a plan; shipped to executors once, beside the splits.

    `output` are the result's columns in order; `filters` are columns read only to filter; `keys`
    are the columns by which net changes are folded;
    `carrier_column` is fetched from the log where no user column is requested. `schema_id` is the
    version of the table's schema for log rows. Rows have `from_timestamp_us <= __timestamp <
    to_timestamp_us` where a bound is set. With `has_changelog` log rows are changes; with
    `lake_is_changelog` the lake's rows are changes, too. Only change types in `change_types` are
    read (None: all).
    """

    table: str
    table_id: int
    schema_id: int
    endpoint: str
    # In no log or plan: only in what Spark ships to executors.
    token: str | None = field(repr=False)
    output: tuple[ScanColumn, ...]
    filters: tuple[ScanColumn, ...] = ()
    keys: tuple[ScanColumn, ...] = ()
    bucket_column: ScanColumn
    offset_column: ScanColumn
    timestamp_column: ScanColumn
    change_type_column: ScanColumn
    carrier_column: str = ""
    predicate: Predicate | None = None
    from_timestamp_us: int | None = None
    to_timestamp_us: int | None = None
    lake_properties: Mapping[str, str] = field(default_factory=dict)
    lake_snapshot_id: int | None = None
    fail_on_data_loss: bool = True
    has_changelog: bool = False
    lake_is_changelog: bool = False
    change_types: tuple[int, ...] | None = None
    change_form: ChangeForm | None = None
    batch_rows: int = BATCH_ROWS

    @property
    def scanned(self) -> tuple[ScanColumn, ...]:
        """The columns to read: those of the result, or those that the result is made of."""
        if self.change_form is None:
            return (*self.output, *self.filters)
        system = (self.bucket_column, self.offset_column, self.timestamp_column)
        by_name = {column.name: column for column in (self.change_type_column, *system)}
        plain = (by_name.get(column.base, column) for column in self.output)
        needed = (*plain, *self.keys, *([self.change_type_column] if self.keys else []))
        return tuple({column.name: column for column in (*needed, *self.filters)}.values())

    @property
    def output_schema(self) -> pa.Schema:
        """The exact Arrow schema of every batch of the result."""
        return pa.schema([column.to_arrow() for column in self.output])

    def __repr__(self) -> str:
        columns = ", ".join(column.name for column in self.output)
        return f"ScanContext({self.table}: {columns})"
