"""Where the pieces of a transaction of a primary key table go: to the one writer of the table."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from streamhouse.storage_service.errors import RequestTooLargeError, StreamhouseError
from streamhouse.storage_service.kv.kv_tablet import KvTablet
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER
from streamhouse.storage_service.model.changelog import OPERATION_DELETE
from streamhouse.storage_service.model.transaction import TransactionOperation
from streamhouse.storage_service.tablet.blocking import RunBlocking
from streamhouse.storage_service.tablet.key_writer import KeyWrite, KeyWriter
from streamhouse.storage_service.tablet.open_table import OpenTable
from streamhouse.storage_service.tablet.transaction_chunks import StagedRows, key_writes
from streamhouse.storage_service.tablet.transaction_files import Decision

__all__ = ["KeySink"]

_KEY_ROUND_ROWS: Final = 100_000


class KeySink:
    """The one writer of a primary key table."""

    def __init__(
        self,
        table: OpenTable,
        writer: KeyWriter,
        decision: Decision,
        *,
        run_blocking: RunBlocking,
        piece_bytes: int,
        stored: Callable[[Callable[[], Awaitable[object]], int], Awaitable[None]],
    ) -> None:
        self._table = table
        self._writer = writer
        self._columns = decision.spec.columns
        self._timestamp_us = decision.result.timestamp_us
        self._starts = decision.starts
        self._is_overwrite = decision.spec.operation is TransactionOperation.OVERWRITE
        self._run_blocking = run_blocking
        self._piece_bytes = piece_bytes
        self._stored = stored

    async def begin(self) -> None:
        """Of an overwrite, take away every row that is older than the transaction.

        What a crash left of them is found again by the offsets they were written at, so that no
        piece of this counts for the position in the transaction.
        """
        if not self._is_overwrite:
            return
        for bucket, start in self._starts.items():
            older = _OlderRows(self._table.key_buckets[bucket].rows, start, self._piece_bytes)
            try:
                await self._take_away(bucket, older)
            finally:
                await self._writer.on_thread(older.close)

    async def _take_away(self, bucket: int, older: _OlderRows) -> None:
        async def read() -> None:
            await self._writer.on_thread(older.advance)

        await self._stored(read, 0)
        while (keys := older.keys) is not None:
            deletes = np.full(keys.num_rows, OPERATION_DELETE, dtype=np.int8)
            await self._change([KeyWrite(bucket, keys, deletes)])
            await self._stored(read, 0)

    async def store(self, chunk: Sequence[StagedRows]) -> None:
        """See `transaction_commit._Sink`."""
        for writes in await self._run_blocking(_rounds, chunk):
            await self._change(writes)

    async def _change(self, writes: list[KeyWrite]) -> None:
        # Rows of the transaction say at which position they are, what it takes away does not.
        is_own = all(write.sequence for write in writes)

        async def change() -> None:
            await self._writer.write_unpublished(
                writes,
                columns=self._columns,
                timestamp_us=self._timestamp_us,
                writer_id=TRANSACTION_WRITER if is_own else 0,
            )

        try:
            row_count = sum(write.rows.num_rows for write in writes) if is_own else 0
            await self._stored(change, row_count)
        except RequestTooLargeError:
            # Large rows that are replaced make the changes larger than a frame.
            if all(write.rows.num_rows == 1 for write in writes):
                raise
        else:
            return
        halves = [_halves(write) for write in writes]
        await self._change([half[0] for half in halves])
        await self._change(list(itertools.chain(*(half[1:] for half in halves))))

    def publish(self) -> None:
        """See `transaction_commit._Sink`."""
        self._writer.publish_all()


class _OlderRows:
    """The keys of rows written below an offset, a piece at a time; started over after an error."""

    def __init__(self, rows: KvTablet, offset: int, bytes_max: int) -> None:
        self._rows = rows
        self._offset = offset
        self._bytes_max = bytes_max
        self._pieces: Generator[pa.RecordBatch] | None = None
        self.keys: pa.RecordBatch | None = None

    def advance(self) -> None:
        """Set `keys` to those of the next piece, None after the last; on the rows' thread."""
        if self._pieces is None:
            self._pieces = self._rows.keys_written_before(self._offset, bytes_max=self._bytes_max)
        try:
            self.keys = next(self._pieces, None)
        except StreamhouseError:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the rows' files; on their thread."""
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = None


def _rounds(chunk: Sequence[StagedRows]) -> list[list[KeyWrite]]:
    return list(key_writes(chunk, rows_max=_KEY_ROUND_ROWS))


def _halves(write: KeyWrite) -> list[KeyWrite]:
    """Cut a write in two, unless it is one row."""
    half = write.rows.num_rows // 2
    if half == 0:
        return [write]
    operations = write.operations
    left = None if operations is None else operations[:half]
    right = None if operations is None else operations[half:]
    position = write.sequence and write.sequence - (write.rows.num_rows - half)
    return [
        KeyWrite(write.bucket, write.rows.slice(0, half), left, sequence=position),
        KeyWrite(write.bucket, write.rows.slice(half), right, sequence=write.sequence),
    ]
