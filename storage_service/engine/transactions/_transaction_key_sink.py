"""The destination of a transaction's pieces in a primary key table: the table's only writer."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from streamhouse.core.errors import RequestTooLargeError
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys._older_keys import older_keys
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.transactions._transaction_chunks import (
    StagedRows,
    key_writes,
)
from streamhouse.storage_service.engine.transactions.transaction_files import Decision
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of, halves
from streamhouse.storage_service.log.writer_state import TRANSACTION_WRITER

__all__ = ["KeySink"]

_KEY_ROUND_ROWS: Final = 100_000


class KeySink:
    """The only writer of a primary key table."""

    def __init__(
        self,
        table: KeyTable,
        decision: Decision,
        *,
        runtime: Runtime,
        piece_bytes: int,
        stored: Callable[[Callable[[], Awaitable[object]], int], Awaitable[None]],
    ) -> None:
        self._table = table
        self._writer = table.key_writer
        self._columns = decision.spec.columns
        self._timestamp_us = decision.result.timestamp_us
        self._starts = decision.starts
        self._is_overwrite = decision.spec.operation is TransactionOperation.OVERWRITE
        self._runtime = runtime
        self._piece_bytes = piece_bytes
        self._stored = stored

    async def begin(self) -> None:
        """For an overwrite, delete every row older than the transaction.

        After a crash the offsets of the remaining old rows reveal them, so these deletes do not
        count for the position in the transaction.
        """
        if not self._is_overwrite:
            return
        for bucket, start in self._starts.items():
            pieces = older_keys(
                self._writer,
                self._table.key_buckets[bucket].rows,
                start,
                bytes_max=self._piece_bytes,
                until_done=lambda step: self._stored(step, 0),
            )
            async with contextlib.aclosing(pieces):
                async for keys in pieces:
                    await self._change([delete_of(bucket, keys)])

    async def store(self, chunk: Sequence[StagedRows]) -> None:
        """See `transaction_commit._Sink`."""
        for writes in await self._runtime.run(_rounds, chunk):
            await self._change(writes)

    async def _change(self, writes: list[KeyWrite]) -> None:
        # Rows of the transaction say at which position they are, what it takes away does not.
        is_own = all(write.sequence for write in writes)

        async def change() -> None:
            await self._writer.write(
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
        cut = [halves(write) for write in writes]
        await self._change([parts[0] for parts in cut])
        await self._change(list(itertools.chain(*(parts[1:] for parts in cut))))

    def publish(self) -> None:
        """See `transaction_commit._Sink`."""
        self._writer.publish_all()


def _rounds(chunk: Sequence[StagedRows]) -> list[list[KeyWrite]]:
    return list(key_writes(chunk, rows_max=_KEY_ROUND_ROWS))
