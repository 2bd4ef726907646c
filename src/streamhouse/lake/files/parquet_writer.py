"""Sorted Parquet files of one bucket range: one growing file per lake partition.

Invariants:
- rows of a partition are written in the order they come, which files thus have
- pending rows are bounded by `buffer_bytes_max`, open files by `open_files_max`
- `close` returns every file written; after `abort` none of them exists
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.casts.nested import fields_of
from streamhouse.core.model.lake.partition_fields import (
    LakePartitionField,
)
from streamhouse.core.model.partitioning import Clustering
from streamhouse.core.model.schema import OFFSET_COLUMN
from streamhouse.lake.files.lake_filesystem import (
    LakeFilesystem,
    file_name_metadata,
)
from streamhouse.lake.files.partition_layout import (
    PartitionValues,
    split_by_partition,
)

__all__ = [
    "FileFormat",
    "PartitionedParquetWriter",
    "WrittenFile",
    "clustered_format",
    "open_parquet",
]

CLUSTERED_GROUP_ROWS: Final = 1 << 14
_SAMPLE_ROWS: Final = 1 << 14
_DICTIONARY_BYTES_MIN: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat:
    """Sizes and compression of lake files."""

    target_file_bytes: int = 128 << 20
    row_group_rows: int = 1 << 17
    row_group_bytes: int = 64 << 20
    buffer_bytes_max: int = 256 << 20
    open_files_max: int = 64
    compression: str = "zstd"
    compression_level: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """One closed Parquet file: plain data, so that it can cross processes.

    `footer` is the file's own metadata, serialised; all offsets of its rows are from
    `start_offset` to `end_offset`, exclusive.
    """

    path: str
    size_bytes: int
    row_count: int
    partition: PartitionValues
    footer: bytes = field(repr=False)
    bucket: int
    start_offset: int
    end_offset: int


def clustered_format(target_file_bytes: int, clustering: Clustering) -> FileFormat:
    """Return the format of files of this size, with row groups to suit the order of rows."""
    if not clustering.columns:
        return FileFormat(target_file_bytes=target_file_bytes)
    # A read of a narrow range decodes whole row groups: smaller ones waste less.
    return FileFormat(target_file_bytes=target_file_bytes, row_group_rows=CLUSTERED_GROUP_ROWS)


def open_parquet(
    sink: pa.NativeFile, schema: pa.Schema, file_format: FileFormat, *, sample: pa.Table
) -> pq.ParquetWriter:
    """Return a Parquet writer with the settings of all lake files.

    `sample` is the first rows to write: a column whose values differ there gets no dictionary. In a
    small file no column does: dictionaries would double the time of the write for a tenth of the
    bytes (docs/decisions/0035).
    """
    columns = schema if sample.nbytes >= _DICTIONARY_BYTES_MIN else []
    return pq.ParquetWriter(
        sink,
        schema,
        version="2.6",
        compression=file_format.compression,
        compression_level=file_format.compression_level,
        use_dictionary=[
            path
            for f in columns
            if _has_repeats(sample.column(f.name))
            for path in _leaf_paths(f, f.name)
        ],
        store_decimal_as_integer=True,
        write_page_index=True,
        # Readers of every engine can detect a rotten bit.
        write_page_checksum=True,
        # Readers of other engines go by Iceberg's schema; Arrow's copy would only be carried.
        store_schema=False,
    )


def _has_repeats(column: pa.ChunkedArray) -> bool:
    """Whether a quarter of the values occurs again: only then a dictionary pays.

    A dictionary of values that differ, with an index a row, is larger than the values, and slower
    to write and to read in every engine. Columns of types that Arrow cannot count get one.
    """
    sample = column.slice(0, _SAMPLE_ROWS)
    try:
        distinct = int(pc.count_distinct(sample).as_py())
    except pa.ArrowNotImplementedError:
        return True
    value_count = len(sample) - int(sample.null_count)
    return 4 * distinct <= 3 * value_count


def _leaf_paths(parent: pa.Field, path: str) -> list[str]:
    children = fields_of(parent.type)
    if not children:
        return [path]
    infix = ""
    if pa.types.is_list(parent.type):
        infix = "list."
    elif pa.types.is_map(parent.type):
        infix = "key_value."
    return [leaf for c in children for leaf in _leaf_paths(c, f"{path}.{infix}{c.name}")]


class _PartitionFile:
    """Pending rows of a partition, and the file for their full row groups."""

    def __init__(self, partition: PartitionValues) -> None:
        self.partition = partition
        self.pending: list[pa.Table] = []
        self.pending_rows = 0
        self.pending_bytes = 0
        self.path = ""
        self.sink: pa.NativeFile | None = None
        self.writer: pq.ParquetWriter | None = None
        self.row_count = 0
        self.start_offset = 0
        self.end_offset = 0

    def add(self, rows: pa.Table) -> int:
        """Take rows and return their bytes."""
        size = int(rows.nbytes)
        self.pending.append(rows)
        self.pending_rows += rows.num_rows
        self.pending_bytes += size
        return size

    def row_group_rows(self, file_format: FileFormat) -> int:
        """Return how many pending rows make a row group."""
        row_bytes = max(self.pending_bytes / max(self.pending_rows, 1), 1.0)
        return max(1, min(file_format.row_group_rows, int(file_format.row_group_bytes / row_bytes)))


class PartitionedParquetWriter:
    """Writes rows of a bucket, in their order, into a file at a time per partition.

    Args:
        folder: URI of the folder the files go to.
        name: how file names begin; a unique part follows, against collisions between attempts.
        schema: of the files, with field ids.
    """

    def __init__(
        self,
        files: LakeFilesystem,
        *,
        folder: str,
        name: str,
        bucket: int,
        schema: pa.Schema,
        partitioning: Sequence[LakePartitionField],
        file_format: FileFormat,
    ) -> None:
        self._files = files
        self._folder = folder.rstrip("/")
        self._name = name
        self._bucket = bucket
        self._schema = schema
        self._partitioning = partitioning
        self._format = file_format
        self._open: dict[PartitionValues, _PartitionFile] = {}
        self._pending_bytes = 0
        self._written: list[WrittenFile] = []

    def write(self, rows: pa.Table) -> None:
        """Add rows with the writer's schema."""
        for partition, part in split_by_partition(rows, self._partitioning, bucket=self._bucket):
            # Popped and put back: the dictionary is in the order of last use.
            target = self._open.pop(partition, None) or _PartitionFile(partition)
            self._open[partition] = target
            self._pending_bytes += target.add(part)
            self._flush(target, until_rows=target.row_group_rows(self._format) - 1)
        while self._pending_bytes > self._format.buffer_bytes_max:
            self._flush(max(self._open.values(), key=lambda f: f.pending_bytes), until_rows=0)

    def close(self) -> list[WrittenFile]:
        """Finish all files and return the files in any order."""
        self.finish_files()
        return list(self._written)

    def finish_files(self) -> None:
        """Finish all files: rows that come later go into others."""
        for target in list(self._open.values()):
            self._flush(target, until_rows=0)
            self._finish(target)
        self._open.clear()

    def abort(self) -> None:
        """Delete everything written. Never raises: what cannot be deleted becomes an orphan."""
        for target in self._open.values():
            if target.writer is not None and target.sink is not None:
                with contextlib.suppress(OSError, pa.ArrowException):
                    target.writer.close()
                with contextlib.suppress(OSError, pa.ArrowException):
                    target.sink.close()
        paths = [file.path for file in self._written]
        paths += [target.path for target in self._open.values() if target.path]
        for path in paths:
            with contextlib.suppress(StreamhouseError):
                self._files.delete(path)
        self._open.clear()
        self._written.clear()

    def _flush(self, target: _PartitionFile, *, until_rows: int) -> None:
        """Write row groups until at most `until_rows` rows are pending."""
        if target.pending_rows <= until_rows or not target.pending_rows:
            return
        rows = pa.concat_tables(target.pending)
        group_rows = target.row_group_rows(self._format)
        position = 0
        while (remaining_rows := rows.num_rows - position) > until_rows and remaining_rows:
            group = rows.slice(position, min(group_rows, remaining_rows))
            self._write_group(target, group)
            position += group.num_rows
        tail = rows.slice(position)
        self._pending_bytes -= target.pending_bytes
        target.pending, target.pending_rows, target.pending_bytes = [], 0, 0
        if tail.num_rows:
            self._pending_bytes += target.add(tail)

    def _write_group(self, target: _PartitionFile, group: pa.Table) -> None:
        bounds = pc.min_max(group.column(OFFSET_COLUMN)).as_py()
        if target.writer is None:
            self._start(target, group)
            target.start_offset, target.end_offset = bounds["min"], 0
        assert target.writer is not None
        assert target.sink is not None
        with self._files.errors("write", target.path):
            target.writer.write_table(group, row_group_size=group.num_rows)
            size = target.sink.tell()
        target.row_count += group.num_rows
        target.start_offset = min(target.start_offset, bounds["min"])
        target.end_offset = max(target.end_offset, bounds["max"] + 1)
        if size >= self._format.target_file_bytes:
            self._finish(target)

    def _start(self, target: _PartitionFile, group: pa.Table) -> None:
        started = [f for f in self._open.values() if f.writer is not None]
        if len(started) >= self._format.open_files_max:
            self._finish(started[0])
        target.path = f"{self._folder}/{self._name}-{uuid.uuid4().hex[:16]}.parquet"
        target.sink = self._files.open_output(target.path)
        target.writer = open_parquet(target.sink, self._schema, self._format, sample=group)

    def _finish(self, target: _PartitionFile) -> None:
        """Close the partition's current file, if open."""
        if target.writer is None:
            return
        assert target.sink is not None
        with self._files.errors("write", target.path):
            target.writer.add_key_value_metadata(file_name_metadata(target.path))
            target.writer.close()
            size = target.sink.tell()
            target.sink.close()
        footer = pa.BufferOutputStream()
        target.writer.writer.metadata.write_metadata_file(footer)
        self._written.append(
            WrittenFile(
                path=target.path,
                size_bytes=size,
                row_count=target.row_count,
                partition=target.partition,
                footer=footer.getvalue().to_pybytes(),
                bucket=self._bucket,
                start_offset=target.start_offset,
                end_offset=target.end_offset,
            )
        )
        target.writer, target.sink, target.path, target.row_count = None, None, "", 0
