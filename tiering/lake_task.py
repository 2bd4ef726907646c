"""One task of a round: a range of one bucket, from the service's log into sorted Parquet files.

Plain Python on purpose: it runs in a thread of the worker or in a Spark executor, is pickled on
its way there, and imports neither pyspark nor pyiceberg.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.client import LogBatch, StorageClient
from streamhouse.storage_service.client.lake_filesystem import LakeFilesystem
from streamhouse.storage_service.errors import (
    CorruptDataError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.storage_service.model.lake import LAKE_SYSTEM_FIELDS
from streamhouse.storage_service.model.offsets import OffsetRange
from streamhouse.tiering.parquet_writer import FileFormat, PartitionedParquetWriter, WrittenFile
from streamhouse.tiering.partition_layout import LakePartitionField

__all__ = ["RowsObserver", "SplitResult", "TieringSplit", "run_split"]

RowsObserver = Callable[[int], None]
"""Told how many more rows were written."""

PAGE_BYTES: Final = 8 << 20
_CHUNK_ROWS: Final = 1 << 16
_PAGES_AHEAD: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TieringSplit:
    """What a task needs to know, all of it plain data.

    `lake_schema` is the serialised Arrow schema of the lake files, with field ids. `folder` is the
    round's own folder in the lake table: whatever lies there and is in no snapshot may be deleted.
    """

    endpoint: str
    token: str | None = field(repr=False)
    table: str
    table_id: int
    range: OffsetRange
    lake_schema: bytes = field(repr=False)
    partitioning: tuple[LakePartitionField, ...]
    folder: str
    file_format: FileFormat
    files: LakeFilesystem


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResult:
    """The files that hold exactly the rows of `range`."""

    range: OffsetRange
    files: tuple[WrittenFile, ...]


def _open_client(split: TieringSplit) -> StorageClient:
    return StorageClient(split.endpoint, token=split.token)


def run_split(
    split: TieringSplit,
    *,
    open_client: Callable[[TieringSplit], StorageClient] = _open_client,
    on_rows: RowsObserver = lambda _: None,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> SplitResult:
    """Write the split's rows and return their files; on any failure its files are deleted.

    Raises:
        StreamhouseError: the range cannot be read or written, or is not what was asked for.
    """
    schema = pa.ipc.read_schema(pa.py_buffer(split.lake_schema))
    writer = PartitionedParquetWriter(
        split.files,
        folder=split.folder,
        name=f"b{split.range.bucket:05d}-{split.range.start:020d}",
        bucket=split.range.bucket,
        schema=schema,
        partitioning=split.partitioning,
        file_format=split.file_format,
    )
    try:
        with open_client(split) as client:
            _check_identity(client, split)
            for chunk in _ahead(lambda: _chunks(_read(client, split))):
                if is_cancelled():
                    raise UnavailableError(f"tiering of '{split.table}' was cancelled")
                rows = lake_rows(chunk.batches, schema)
                writer.write(rows)
                on_rows(rows.num_rows)
            _check_identity(client, split)
        files = writer.close()
        written = sum(file.row_count for file in files)
        if written != split.range.row_count:
            raise CorruptDataError(
                f"table '{split.table}', bucket {split.range.bucket}: wrote {written} rows of"
                f" [{split.range.start}, {split.range.end})"
            )
    except BaseException:
        writer.abort()
        raise
    return SplitResult(range=split.range, files=tuple(files))


def _check_identity(client: StorageClient, split: TieringSplit) -> None:
    """Raise when the path names another table by now; asked before and after reading the rows."""
    found = client.describe_table(split.table).table_id
    if found != split.table_id:
        raise TableNotFoundError(
            f"table '{split.table}' was dropped and created again while it was tiered"
        )


def _read(client: StorageClient, split: TieringSplit) -> Iterator[LogBatch]:
    position = split.range.start
    batches = client.read_range(
        split.table,
        split.range.bucket,
        split.range.start,
        split.range.end,
        page_bytes=PAGE_BYTES,
    )
    for batch in batches:
        if batch.bucket != split.range.bucket or batch.base_offset != position:
            raise CorruptDataError(
                f"table '{split.table}', bucket {split.range.bucket}: offset {position} was asked"
                f" for, bucket {batch.bucket} offset {batch.base_offset} came"
            )
        position = batch.end_offset
        yield batch
    if position != split.range.end:
        raise CorruptDataError(
            f"table '{split.table}', bucket {split.range.bucket}: the log ends at {position},"
            f" {split.range.end} was planned"
        )


@dataclass(slots=True)
class _Chunk:
    """Consecutive batches that are worked on together."""

    batches: list[LogBatch] = field(default_factory=list)
    row_count: int = 0
    size_bytes: int = 0

    def add(self, batch: LogBatch) -> None:
        self.batches.append(batch)
        self.row_count += batch.data.num_rows
        self.size_bytes += batch.data.nbytes


def _ahead(open_chunks: Callable[[], Iterator[_Chunk]]) -> Iterator[_Chunk]:
    """Yield the chunks while a thread reads some of the next: the network and Parquet overlap."""
    ready: queue.Queue[_Chunk | BaseException | None] = queue.Queue()
    # Bytes, not chunks, are what has to be bounded: a batch has one row or a million.
    budget = _Budget(_PAGES_AHEAD * PAGE_BYTES)

    def read() -> None:
        try:
            for chunk in open_chunks():
                if not budget.take(chunk.size_bytes):
                    return
                ready.put(chunk)
            ready.put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the reading thread
            ready.put(error)

    thread = threading.Thread(target=read, name="tiering-read", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            budget.give(item.size_bytes)
            yield item
    finally:
        budget.close()
        thread.join()


class _Budget:
    """Bytes that may wait between two threads; one chunk may always wait."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._is_closed = False
        self._changed = threading.Condition()

    def take(self, size: int) -> bool:
        """Wait for room; False when nobody reads any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._used < self._size)
            self._used += size
            return not self._is_closed

    def give(self, size: int) -> None:
        """Return room."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Let the other thread end."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def _chunks(batches: Iterator[LogBatch]) -> Iterator[_Chunk]:
    """Group batches to about `_CHUNK_ROWS` rows or `PAGE_BYTES`: tiny ones cost no work each."""
    chunk = _Chunk()
    for batch in batches:
        chunk.add(batch)
        if chunk.row_count >= _CHUNK_ROWS or chunk.size_bytes >= PAGE_BYTES:
            yield chunk
            chunk = _Chunk()
    if chunk.batches:
        yield chunk


def lake_rows(batches: list[LogBatch], schema: pa.Schema) -> pa.Table:
    """Return consecutive rows of a bucket as rows of the lake: its types and system columns.

    Raises:
        CorruptDataError: the rows are not those of the lake table's columns.
    """
    user_fields = list(schema)[: len(schema) - len(LAKE_SYSTEM_FIELDS)]
    logged = pa.Table.from_batches([batch.data for batch in batches])
    if logged.column_names != [f.name for f in user_fields]:
        raise CorruptDataError(
            f"rows with columns {logged.column_names} came for a lake table with"
            f" {[f.name for f in user_fields]}"
        )
    columns: list[pa.ChunkedArray | pa.Array] = []
    for f, column in zip(user_fields, logged.columns, strict=True):
        columns.append(column if column.type.equals(f.type) else column.cast(f.type))
    start, end = batches[0].base_offset, batches[-1].end_offset
    counts = [batch.data.num_rows for batch in batches]
    timestamps = np.repeat(np.array([b.timestamp_us for b in batches], dtype=np.int64), counts)
    bucket_field, offset_field, timestamp_field = LAKE_SYSTEM_FIELDS
    columns += [
        pa.array(np.full(end - start, batches[0].bucket, dtype=np.int32), bucket_field.type),
        pa.array(np.arange(start, end, dtype=np.int64), offset_field.type),
        pa.array(timestamps).cast(timestamp_field.type),
    ]
    try:
        return pa.table(columns, schema=schema)
    except (pa.ArrowException, ValueError) as error:
        raise CorruptDataError(f"rows do not fit the lake table: {error}") from error
