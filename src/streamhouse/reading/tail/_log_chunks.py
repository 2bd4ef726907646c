"""Reading a range of one bucket's log in chunks of a useful size, ahead of their use."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from streamhouse.client import LogBatch
from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.threads import NamedThread

__all__ = ["LogChunk", "LogReads", "chunks_of", "read_chunks", "read_log"]

PAGE_BYTES: Final = 8 << 20
_CHUNK_ROWS: Final = 1 << 16
_PAGES_AHEAD: Final = 2
# A thread costs more than reading this few rows takes.
_ROWS_WITHOUT_THREAD: Final = 1 << 13


class LogReads(Protocol):
    """Reads of the log: a worker's client over HTTP, or the service's own log."""

    def read_range(
        self,
        path: str,
        bucket: int,
        start: int,
        end: int,
        *,
        columns: Sequence[str] | None = None,
        page_bytes: int = PAGE_BYTES,
        schema_id: int | None = None,
        table_id: int | None = None,
    ) -> Iterator[LogBatch]:
        """See `StorageClient.read_range`."""


def read_log(
    log: LogReads,
    table: str,
    offset_range: OffsetRange,
    *,
    table_id: int,
    schema_id: int,
    columns: Sequence[str] | None = None,
) -> Iterator[LogBatch]:
    """Yield the rows of exactly `offset_range`, in order, in this version of the table's schema.

    Raises `CorruptDataError` if the service sends other rows, `TableNotFoundError` if the table
    with this id is gone.
    """
    position = offset_range.start
    batches = log.read_range(
        table,
        offset_range.bucket,
        offset_range.start,
        offset_range.end,
        columns=columns,
        page_bytes=PAGE_BYTES,
        schema_id=schema_id,
        table_id=table_id,
    )
    for batch in batches:
        if batch.bucket != offset_range.bucket or batch.base_offset != position:
            raise CorruptDataError(
                f"table '{table}', bucket {offset_range.bucket}: offset {position} was asked"
                f" for, bucket {batch.bucket} offset {batch.base_offset} came"
            )
        position = batch.end_offset
        yield batch
    if position != offset_range.end:
        raise CorruptDataError(
            f"table '{table}', bucket {offset_range.bucket}: the log ends at {position},"
            f" {offset_range.end} was planned"
        )


def read_chunks(
    log: LogReads, table: str, offset_range: OffsetRange, *, table_id: int, schema_id: int
) -> Iterator[LogChunk]:
    """Yield the rows of exactly `offset_range` in chunks; a thread reads ahead in a long range."""

    def chunks() -> Iterator[LogChunk]:
        return chunks_of(read_log(log, table, offset_range, table_id=table_id, schema_id=schema_id))

    return chunks() if offset_range.row_count <= _ROWS_WITHOUT_THREAD else _ahead(chunks)


@dataclass(slots=True)
class LogChunk:
    """Consecutive batches, converted together."""

    batches: list[LogBatch] = field(default_factory=list)
    row_count: int = 0
    size_bytes: int = 0

    def add(self, batch: LogBatch) -> None:
        self.batches.append(batch)
        self.row_count += batch.data.num_rows
        # `nbytes` takes fifty times as long; it is less only for a part of a batch.
        self.size_bytes += batch.data.get_total_buffer_size()


def _ahead(open_chunks: Callable[[], Iterator[LogChunk]]) -> Iterator[LogChunk]:
    """Yield the chunks while a thread reads ahead: the network and Parquet overlap."""
    ready: queue.Queue[LogChunk | BaseException | None] = queue.Queue()
    # The bound counts bytes, not chunks: a batch has one row or a million.
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

    thread = NamedThread("tiering-read", read)
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
        """Wait for room; False after `close`."""
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


def chunks_of(batches: Iterator[LogBatch]) -> Iterator[LogChunk]:
    """Group batches to about `_CHUNK_ROWS` rows or `PAGE_BYTES`, because each chunk costs work."""
    chunk = LogChunk()
    for batch in batches:
        chunk.add(batch)
        if chunk.row_count >= _CHUNK_ROWS or chunk.size_bytes >= PAGE_BYTES:
            yield chunk
            chunk = LogChunk()
    if chunk.batches:
        yield chunk
