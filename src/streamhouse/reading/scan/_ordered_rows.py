"""Rows of several lake files in the order of their offsets, a batch at a time.

Files of one bucket and partition follow each other; files of several partitions overlap. So the
files with the next offset are open side by side and merged, and all other files are opened later. A
file in another order, as other engines write, is read a window of offsets at a time. Files beyond
the limit of open files are read by windows, too.

Invariants:
- offsets ascend over all batches; a repeated row is damage
- memory is a row group's compressed columns and a decoded batch for each of at most
  `files_open_max` files, and a window's rows of the other files
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.values.numpy_arrays import integer_values
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.projection import FileColumns
from streamhouse.reading.scan._lake_scan import gone_files, read_lake_piece
from streamhouse.reading.scan.scan import LakePiece, ScanContext

__all__ = ["OrderedRows"]

FILES_OPEN_MAX: Final = 32
WINDOW_ROWS: Final = 1 << 16
_Offsets = npt.NDArray[np.int64]


class OrderedRows:
    """The rows of `wanted` in `pieces`. `context.output` has the offset column.

    Nothing is opened before the first read. For one thread at a time.
    """

    def __init__(
        self,
        filesystem: LakeFilesystem,
        pieces: Iterable[LakePiece],
        context: ScanContext,
        offsets: OffsetRange,
        *,
        files_open_max: int = FILES_OPEN_MAX,
        window_rows: int = WINDOW_ROWS,
    ) -> None:
        self.next_offset = offsets.start
        """All rows below it were returned."""
        self.end_offset = offsets.end
        self._filesystem = filesystem
        self._context = context
        self._bucket = offsets.bucket
        self._files_open_max = files_open_max
        self._window_rows = window_rows
        # The next one to open is the last.
        self._waiting = sorted(pieces, key=_first_offset, reverse=True)
        self._files: list[_File] = []
        # Merged, and not returned yet: they are all there is below `_ready_end`.
        self._ready = _KnownRows(context)
        self._ready_end = offsets.start

    @property
    def held_bytes(self) -> int:
        """The approximate memory of the open files and of the merged rows."""
        return self._ready.row_bytes + sum(file.held_bytes for file in self._files)

    def close(self) -> None:
        """Close all files; there is nothing more to read."""
        for file in self._files:
            file.close()
        self._files.clear()
        self._waiting.clear()
        self._ready = _KnownRows(self._context)
        self.next_offset = self.end_offset

    def read(self, *, rows_max: int, bytes_max: int) -> pa.RecordBatch | None:
        """Return the next rows, about `bytes_max` of them but at least one row; None at the end."""
        batches: list[pa.RecordBatch] = []
        rows = size = 0
        while self.next_offset < self.end_offset and rows < rows_max and size < bytes_max:
            batch = self._next(rows_max - rows, bytes_max - size)
            if batch is not None:
                batches.append(batch)
                rows += batch.num_rows
                size += batch.nbytes
        if not batches:
            return None
        return batches[0] if len(batches) == 1 else pa.concat_batches(batches)

    def _next(self, rows_max: int, bytes_max: int) -> pa.RecordBatch | None:
        """Return the following rows; None without rows up to the known end."""
        if not self._ready.row_count:
            self._merge()
        rows = self._ready.first(rows_max, bytes_max)
        self._ready.drop(rows.num_rows)
        self.next_offset = self._ready.first_offset(default=self._ready_end)
        return rows if rows.num_rows else None

    def _merge(self) -> None:
        """Sort the rows up to the offset known for all open files, before the next file begins."""
        self._advance()
        waiting = _first_offset(self._waiting[-1]) if self._waiting else self.end_offset
        frontier = min([waiting, *(file.known_end for file in self._files)])
        parts = [part for file in self._files if (part := file.below(frontier)).num_rows]
        for file in self._files:
            file.drop_below(frontier)
        self._ready_end = max(self._ready_end, frontier)
        if parts:
            self._ready.know(_in_order(parts, self._context, self._bucket))

    def _advance(self) -> None:
        """Open the files with the possible next row, and read on in files without ready rows."""
        while self._waiting and _first_offset(self._waiting[-1]) <= self.next_offset:
            self._files.append(self._open(self._waiting.pop()))
        for file in tuple(self._files):
            if file.known_end <= self.next_offset and not file.advance():
                file.close()
                self._files.remove(file)

    def _open(self, piece: LakePiece) -> _File:
        if len(self._files) < self._files_open_max:
            with gone_files(self._context):
                group_bytes, is_in_order = _file_figures(self._filesystem, piece, self._context)
            if is_in_order:
                return _FileInOrder(self._filesystem, piece, self._context, group_bytes)
        offsets = OffsetRange(bucket=self._bucket, start=self.next_offset, end=self.end_offset)
        return _FileByWindows(
            self._filesystem, piece, self._context, offsets, window_rows=self._window_rows
        )


class _File(Protocol):
    """Rows of one file; remaining rows below `known_end` are in memory."""

    known_end: int

    @property
    def held_bytes(self) -> int: ...

    def advance(self) -> bool:
        """Read on once all known rows are dropped; False if there are no more."""

    def below(self, offset: int) -> pa.RecordBatch:
        """Return the known rows below `offset`."""

    def drop_below(self, offset: int) -> None:
        """Forget the known rows below `offset`."""

    def close(self) -> None: ...


class _KnownRows:
    """Rows that are in memory, in the order of their offsets."""

    def __init__(self, context: ScanContext) -> None:
        self._context = context
        self._rows = pa.RecordBatch.from_pylist([], schema=context.output_schema)
        self._offsets: _Offsets = np.empty(0, dtype=np.int64)

    @property
    def row_count(self) -> int:
        return len(self._offsets)

    @property
    def row_bytes(self) -> int:
        return int(self._rows.nbytes)

    def know(self, rows: pa.RecordBatch) -> None:
        """Have these rows instead."""
        self._rows, self._offsets = rows, _offsets(rows, self._context)

    def first_offset(self, *, default: int) -> int:
        return int(self._offsets[0]) if len(self._offsets) else default

    def first(self, rows_max: int, bytes_max: int) -> pa.RecordBatch:
        """Return the first rows, about the requested bytes of them but at least one row, if any."""
        if not self.row_count:
            return self._rows
        row_bytes = max(1, self.row_bytes // self.row_count)
        return self._rows.slice(0, min(rows_max, max(1, bytes_max // row_bytes)))

    def below(self, offset: int) -> pa.RecordBatch:
        return self._rows.slice(0, int(np.searchsorted(self._offsets, offset)))

    def drop_below(self, offset: int) -> None:
        """Forget the rows below `offset`."""
        self.drop(int(np.searchsorted(self._offsets, offset)))

    def drop(self, count: int) -> None:
        """Forget the first rows."""
        if count == self.row_count:
            # A slice of no rows would keep all of them in memory.
            self._rows = pa.RecordBatch.from_pylist([], schema=self._rows.schema)
        else:
            self._rows = self._rows.slice(count)
        self._offsets = self._offsets[count:]


class _FileInOrder(_KnownRows):
    """A file whose rows are in the order of their offsets: it stays open, and is read once."""

    def __init__(
        self,
        filesystem: LakeFilesystem,
        piece: LakePiece,
        context: ScanContext,
        group_bytes: int,
    ) -> None:
        super().__init__(context)
        self.known_end = 0
        self._path = piece.path
        self._group_bytes = group_bytes
        self._batches = read_lake_piece(filesystem, piece, context, context.output)

    @property
    def held_bytes(self) -> int:
        return self._group_bytes + self.row_bytes

    def advance(self) -> bool:
        rows = next(self._batches, None)
        if rows is None:
            return False
        self.know(rows)
        if self._offsets[0] < self.known_end or (np.diff(self._offsets) <= 0).any():
            raise CorruptDataError(
                f"table '{self._context.table}': the offsets of lake file '{self._path}' do not"
                " ascend as they did when it was opened; restore it from a copy"
            )
        self.known_end = int(self._offsets[-1]) + 1
        return True

    def close(self) -> None:
        self._batches.close()


class _FileByWindows(_KnownRows):
    """A file with rows in any order: opened and sorted for each window of offsets."""

    def __init__(
        self,
        filesystem: LakeFilesystem,
        piece: LakePiece,
        context: ScanContext,
        offsets: OffsetRange,
        *,
        window_rows: int,
    ) -> None:
        super().__init__(context)
        self.known_end = max(offsets.start, _first_offset(piece))
        self._filesystem = filesystem
        self._piece = piece
        self._wanted = offsets
        self._window_rows = window_rows
        self._last_end = min(offsets.end, piece.offset_end or offsets.end)

    @property
    def held_bytes(self) -> int:
        return self.row_bytes

    def advance(self) -> bool:
        while self.known_end < self._last_end:
            start = self.known_end
            self.known_end = min(start + self._window_rows, self._last_end)
            window = OffsetRange(bucket=self._wanted.bucket, start=start, end=self.known_end)
            piece = replace(self._piece, ranges=(window,))
            batches = [
                *read_lake_piece(self._filesystem, piece, self._context, self._context.output)
            ]
            if batches:
                self.know(_in_order(batches, self._context, self._wanted.bucket))
                return True
        return False

    def close(self) -> None:
        """It is open only while it is read."""


def _first_offset(piece: LakePiece) -> int:
    return piece.offset_start or 0


def _file_figures(
    filesystem: LakeFilesystem, piece: LakePiece, context: ScanContext
) -> tuple[int, bool]:
    """Return the compressed size of a file's row groups, and whether the file's offsets ascend."""
    column = context.offset_column
    with filesystem.open_parquet(piece.path, file_bytes=piece.file_bytes) as file:
        groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
        group_bytes = max((_compressed_bytes(group) for group in groups), default=0)
        schema = file.schema_arrow
        columns = FileColumns.of_file(schema, piece.name_mapping, path=piece.path)
        at = columns.position(column.field_id, column.name)
        if at is None:
            # Its absence is said where it is read.
            return group_bytes, False
        last = -1
        for batch in file.iter_batches(columns=[schema.names[at]], use_threads=False):
            offsets = integer_values(batch.column(0))
            if len(offsets) and (offsets[0] <= last or (np.diff(offsets) <= 0).any()):
                return group_bytes, False
            last = int(offsets[-1]) if len(offsets) else last
    return group_bytes, True


def _compressed_bytes(group: pq.RowGroupMetaData) -> int:
    return sum(group.column(i).total_compressed_size for i in range(group.num_columns))


def _in_order(parts: Sequence[pa.RecordBatch], context: ScanContext, bucket: int) -> pa.RecordBatch:
    """Return the rows of a bucket by offset; raises `CorruptDataError` if one is there twice."""
    rows = parts[0] if len(parts) == 1 else pa.concat_batches(parts)
    offsets = _offsets(rows, context)
    if (np.diff(offsets) > 0).all():
        return rows
    order = np.argsort(offsets, kind="stable")
    ordered = offsets[order]
    twice = np.flatnonzero(ordered[1:] == ordered[:-1])
    if len(twice):
        raise CorruptDataError(
            f"table '{context.table}', bucket {bucket}: the lake has offset"
            f" {ordered[twice[0]]} more than once; see `streamhouse check --lake-rows`"
        )
    return rows.take(pa.array(order))


def _offsets(rows: pa.RecordBatch, context: ScanContext) -> _Offsets:
    offsets: _Offsets = integer_values(rows.column(context.offset_column.name))
    return offsets
