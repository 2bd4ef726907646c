"""Reading a piece of a lake file on an executor: pyarrow only, row group by row group.

Invariants:
- every row group belongs to exactly one of the byte ranges a file is cut into
- memory is one row group's compressed columns and one decoded batch, whatever the file's size
- columns are found by field id, so a renamed column is read and a missing column is null; columns
  of a file without ids are found by the table's name mapping
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.core.errors import (
    CorruptDataError,
    SnapshotNotFoundError,
    StorageFailedError,
)
from streamhouse.core.model.values.numpy_arrays import boolean_array, integer_values
from streamhouse.lake.files.bounds import integer_range, row_group_statistics
from streamhouse.lake.files.deletes.deleted_positions import read_deleted_positions
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.name_mapping import NameMapping, is_renaming
from streamhouse.lake.files.projection import FileColumns, conformed
from streamhouse.reading.scan._retraction import change_type_mask, retracted_mask
from streamhouse.reading.scan.scan import LakePiece, RetractedOffsets, ScanColumn, ScanContext
from streamhouse.reading.where._evaluation import filtered
from streamhouse.reading.where._pruning import may_match
from streamhouse.reading.where.predicate import Predicate

__all__ = ["gone_files", "read_lake_piece"]

_BATCH_BYTES_MAX: Final = 32 << 20


def read_lake_piece(
    filesystem: LakeFilesystem,
    piece: LakePiece,
    context: ScanContext,
    columns: Sequence[ScanColumn],
) -> Generator[pa.RecordBatch, None, None]:
    """Yield the piece's rows with exactly `columns`, after deletes, offset ranges and time bounds.

    The predicate only skips row groups here. Raises `SnapshotNotFoundError` when the file is gone.
    """
    needed = {column.name: column for column in columns}
    if piece.ranges is not None or (piece.retracted and piece.bucket is None):
        needed |= {c.name: c for c in (context.bucket_column, context.offset_column)}
    if piece.retracted:
        needed[context.offset_column.name] = context.offset_column
    if context.lake_is_changelog and context.change_types is not None:
        needed[context.change_type_column.name] = context.change_type_column
    if piece.check_timestamp:
        needed[context.timestamp_column.name] = context.timestamp_column
    schema = pa.schema([column.to_arrow() for column in columns])
    with (
        gone_files(context),
        filesystem.open_parquet(piece.path, file_bytes=piece.file_bytes) as file,
    ):
        layout = _Layout.of(file, tuple(needed.values()), piece, context)
        deleted = read_deleted_positions(filesystem, piece.deletes, data_paths=[piece.path]).get(
            piece.path
        )
        for group, first_row in _row_groups(file.metadata, piece):
            if not _may_hold_rows(file.metadata, group, piece, layout, context):
                continue
            position = first_row
            for batch in layout.read(file, group, context.batch_rows):
                mask = _mask(batch, position, deleted, piece, context)
                position += batch.num_rows
                arrays = [batch.column(column.name) for column in columns]
                rows = pa.RecordBatch.from_arrays(arrays, schema=schema)
                if mask is not None:
                    rows = filtered(rows, mask)
                if rows.num_rows:
                    yield rows


@contextlib.contextmanager
def gone_files(context: ScanContext) -> Iterator[None]:
    """Raise `SnapshotNotFoundError` where a file read in the block is missing."""
    try:
        yield
    except StorageFailedError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        raise SnapshotNotFoundError(
            f"table '{context.table}': {error.message}; if snapshot {context.lake_snapshot_id} was"
            " expired after this read was planned, load the table again"
        ) from error


@dataclass(frozen=True, slots=True)
class _Layout:
    """The places of the requested columns in one file: each with its name there, or None.

    `renamed` has the file's names inside nested columns whose names differ in the table.
    """

    columns: tuple[tuple[ScanColumn, str | None], ...]
    renamed: Mapping[str, NameMapping | None]
    constants: Mapping[int, Any]
    path: str
    table: str

    @classmethod
    def of(
        cls,
        file: pq.ParquetFile,
        requested: Sequence[ScanColumn],
        piece: LakePiece,
        context: ScanContext,
    ) -> _Layout:
        schema = file.schema_arrow
        in_file = FileColumns.of_file(schema, piece.name_mapping, path=piece.path)
        places = [(column, in_file.position(column.field_id, column.name)) for column in requested]
        columns = [(column, None if at is None else schema.names[at]) for column, at in places]
        renamed = {
            column.name: names
            for column, at in places
            if at is not None and is_renaming(names := in_file.names_inside(at))
        }
        return cls(tuple(columns), renamed, piece.constants, piece.path, context.table)

    def name_of(self, column: ScanColumn) -> str | None:
        """Return the column's name in this file, or None."""
        return next((name for c, name in self.columns if c.name == column.name), None)

    def read(self, file: pq.ParquetFile, group: int, batch_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield one row group's rows as batches of exactly the requested columns and types."""
        metadata = file.metadata.row_group(group)
        row_bytes = max(1, metadata.total_byte_size // max(1, metadata.num_rows))
        rows = max(1, min(batch_rows, _BATCH_BYTES_MAX // row_bytes))
        names = [name for _, name in self.columns if name is not None]
        if not names:
            # Nothing of the file is wanted but its number of rows.
            for start in range(0, metadata.num_rows, rows):
                yield self._adapt({}, min(rows, metadata.num_rows - start))
            return
        for batch in file.iter_batches(
            batch_size=rows, row_groups=[group], columns=names, use_threads=False
        ):
            arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
            yield self._adapt(arrays, batch.num_rows)

    def _adapt(self, arrays: Mapping[str, pa.Array], count: int) -> pa.RecordBatch:
        adapted = []
        for column, name in self.columns:
            if name is not None:
                array = arrays[name]
                if column.name in self.renamed:
                    below = self.renamed[column.name]
                    array = conformed(array, column.to_arrow(), below, path=self.path)
                elif array.type != column.type:
                    array = array.cast(column.type)
                if not column.nullable and array.null_count:
                    raise CorruptDataError(
                        f"table '{self.table}': lake file '{self.path}' has nulls in column"
                        f" '{column.name}', which was NOT NULL when this read was planned; if that"
                        " was dropped since, load the table or start the stream again"
                    )
            elif column.field_id is not None and column.field_id in self.constants:
                array = pa.repeat(pa.scalar(self.constants[column.field_id], column.type), count)
            elif column.nullable or column.lake_constant is not None:
                array = pa.repeat(pa.scalar(column.lake_constant, column.type), count)
            else:
                raise CorruptDataError(
                    f"table '{self.table}': lake file '{self.path}' lacks column"
                    f" '{column.name}', which must not be null"
                )
            adapted.append(array)
        schema = pa.schema([column.to_arrow() for column, _ in self.columns])
        return pa.RecordBatch.from_arrays(adapted, schema=schema)


def _row_groups(metadata: pq.FileMetaData, piece: LakePiece) -> Iterator[tuple[int, int]]:
    """Yield (row group, position of its first row) for the groups which start in the piece."""
    first_row = 0
    for group in range(metadata.num_row_groups):
        info = metadata.row_group(group)
        if piece.start_byte <= row_group_start(info) < piece.end_byte:
            yield group, first_row
        first_row += info.num_rows


def row_group_start(group: pq.RowGroupMetaData) -> int:
    """Return where a row group's first column starts, as Iceberg's split offsets count."""
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    data = int(column.data_page_offset)
    return data if dictionary is None or dictionary > data else int(dictionary)


def _may_hold_rows(
    metadata: pq.FileMetaData,
    group: int,
    piece: LakePiece,
    layout: _Layout,
    context: ScanContext,
) -> bool:
    """Return False when statistics prove that the group has no requested row."""
    if piece.ranges is not None:
        name = layout.name_of(context.offset_column)
        bounds = None if name is None else integer_range(metadata.row_group(group), name)
        if bounds is not None:
            low, high = bounds
            if not any(r.start <= high and low < r.end for r in piece.ranges):
                return False
    predicate = context.predicate
    return predicate is None or _may_match(predicate, metadata, group, layout)


def _may_match(
    predicate: Predicate, metadata: pq.FileMetaData, group: int, layout: _Layout
) -> bool:
    # Statistics go by the file's names; of a renamed column nothing is known then.
    names = [c.name for c, name in layout.columns if name == c.name and name not in layout.renamed]
    return may_match(predicate, row_group_statistics(metadata, group, columns=names))


def _mask(
    batch: pa.RecordBatch,
    position: int,
    deleted: npt.NDArray[np.int64] | None,
    piece: LakePiece,
    context: ScanContext,
) -> pa.BooleanArray | None:
    """Return which rows to keep, or None for all; `position` is the first row's in the file."""
    keep = np.ones(batch.num_rows, dtype=np.bool_)
    if deleted is not None:
        first, last = np.searchsorted(deleted, [position, position + batch.num_rows])
        keep[deleted[first:last] - position] = False
    if piece.ranges is not None:
        buckets = integer_values(batch.column(context.bucket_column.name))
        offsets = integer_values(batch.column(context.offset_column.name))
        inside = np.zeros(batch.num_rows, dtype=np.bool_)
        for offset_range in piece.ranges:
            inside |= (
                (buckets == offset_range.bucket)
                & (offset_range.start <= offsets)
                & (offsets < offset_range.end)
            )
        keep &= inside
    for retracted in piece.retracted:
        keep &= ~_retracted_rows(batch, retracted, piece, context)
    if context.lake_is_changelog and context.change_types is not None:
        names = batch.column(context.change_type_column.name)
        keep &= change_type_mask(names, context.change_types)
    if piece.check_timestamp:
        times = integer_values(batch.column(context.timestamp_column.name))
        if context.from_timestamp_us is not None:
            keep &= times >= context.from_timestamp_us
        if context.to_timestamp_us is not None:
            keep &= times < context.to_timestamp_us
    return None if keep.all() else boolean_array(keep)


def _retracted_rows(
    batch: pa.RecordBatch, retracted: RetractedOffsets, piece: LakePiece, context: ScanContext
) -> npt.NDArray[np.bool_]:
    offsets = integer_values(batch.column(context.offset_column.name))
    gone = retracted_mask(offsets, retracted.offsets)
    if piece.bucket is None:
        gone &= integer_values(batch.column(context.bucket_column.name)) == retracted.bucket
    return gone
