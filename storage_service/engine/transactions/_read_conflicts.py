"""Conflicts of a transaction with writes since the transaction's read of the table.

A merge reads the table, computes rows, and writes the rows by key, while other writes go on. The
merge states its position before the read (`ReadPosition`). The changelog from this position to the
ends of the logs has the keys of all later changes: without a common key the transaction may commit,
as if the read had been at the moment of the commit. Changes that lead back to the same row count as
conflicts, and changes missing from the log count, too. The number of overwrites reveals an
overwrite of a log table without rows.

Each `check` continues at the end of the last check: most changes are checked while writes go on,
and the remaining changes under the table's write gate. Memory has the transaction's keys in the
changed buckets, and a piece of the changes. Blocking, on any thread, one call at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    CommitConflictError,
    InvalidRequestError,
    OffsetOutOfRangeError,
    TableNotFoundError,
)
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.casts.conform import conform
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.transaction import (
    Isolation,
    ReadPosition,
    TransactionOperation,
)
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.transactions._transaction_chunks import staged_rows
from streamhouse.storage_service.log.staged_part import StagedPart

__all__ = ["ReadConflicts", "check_read_offsets"]

_READ_BYTES: Final = 8 << 20
# Every look at a piece makes a table of the transaction's keys anew.
_PIECE_ROWS: Final = 400_000


def check_read_offsets(table: OpenTable, read: ReadPosition) -> None:
    """Raise `InvalidRequestError` unless each bucket of the table has an offset.

    A dropped table may have had different buckets: a conflict, found later.
    """
    is_own = read.table_id in (None, table.info.table_id, *table.info.adopted_from)
    if is_own and sorted(read.offsets) != list(range(len(table.tablets))):
        raise InvalidRequestError(
            f"table '{table.path}': read_offsets must name all {len(table.tablets)} buckets, from 0"
            f" on, with the high watermark of each before the rows were read; they name"
            f" {sorted(read.offsets)[:10]}"
        )


class ReadConflicts:
    """The writes since the read of the rows in `parts`."""

    def __init__(
        self,
        table: OpenTable,
        operation: TransactionOperation,
        read: ReadPosition,
        parts: Sequence[StagedPart],
        *,
        truncations_known: int,
    ) -> None:
        """`truncations_known` counts the table's overwrites before the transaction began."""
        self._table = table
        self._parts = parts
        self._by_key = (
            isinstance(table, KeyTable)
            and operation is not TransactionOperation.OVERWRITE
            and read.isolation is Isolation.SNAPSHOT
        )
        self._position = read
        self._read, self._checked = read.offsets, dict(read.offsets)
        self._truncations_known = truncations_known
        self._written = {bucket for part in parts for bucket in part.rows_by_bucket()}
        self._keys: dict[int, pa.Array] = {}

    def check(self) -> None:
        """Raise `CommitConflictError` if a visible change is a conflict."""
        self._check_same_table()
        self._check_not_truncated()
        for bucket, tablet in enumerate(self._table.tablets):
            end, checked = tablet.high_watermark, self._checked[bucket]
            if end == checked:
                continue
            if end < checked:
                raise self._conflict(f"bucket {bucket} was read up to {checked} and ends at {end}")
            if not self._by_key:
                raise self._conflict(
                    f"rows were written to bucket {bucket}, at offsets {checked} to {end - 1}"
                )
            if bucket in self._written:
                self._check_keys(bucket, end)
            self._checked[bucket] = end

    def _check_same_table(self) -> None:
        info, stated_id = self._table.info, self._position.table_id
        if stated_id is None:
            return
        try:
            info.check_positions(self._read, table_id=stated_id)
        except TableNotFoundError as error:
            raise self._conflict(
                f"it was dropped and created again (table id {stated_id}, now {info.table_id})"
            ) from error
        except OffsetOutOfRangeError as error:
            raise self._conflict(error.message) from error

    def _check_not_truncated(self) -> None:
        """Raise if rows were removed at exactly the read offsets."""
        if self._table.truncation_count == self._truncations_known:
            return
        for bucket, offset in self._table.truncated_offsets.items():
            if offset >= self._read[bucket]:
                raise self._conflict(f"the rows of bucket {bucket} below {offset} were removed")

    def _check_keys(self, bucket: int, end: int) -> None:
        if bucket not in self._keys:
            self._keys[bucket] = self._staged_keys(bucket)
        keys = self._keys[bucket]
        for rows in self._changes(bucket, end):
            position = pc.index(pc.is_in(self._encoded(rows), value_set=keys), True).as_py()
            if position >= 0:
                key = rows.slice(position, 1).to_pylist()[0]
                named = ", ".join(f"{name} = {value!r}" for name, value in key.items())
                raise self._conflict(f"somebody changed the row with {named}")

    def _changes(self, bucket: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the key columns of the changes since the last look, in pieces."""
        log, offset = self._table.tablets[bucket], self._checked[bucket]
        pieces: list[pa.RecordBatch] = []
        while offset < end:
            try:
                frames = log.read(offset, bytes_max=_READ_BYTES, end_offset=end)
            except OffsetOutOfRangeError:
                raise self._conflict(
                    f"of bucket {bucket} the changes since offset {offset} have left the log"
                    " (table.log.ttl)"
                ) from None
            for frame in frames:
                rows = read_stored(frame.payload, self._table.info, stored_as=frame.schema_id)
                skipped = max(offset - frame.base_offset, 0)
                pieces.append(rows.slice(skipped).select(self._primary_key))
                offset = frame.base_offset + rows.num_rows
            if sum(piece.num_rows for piece in pieces) >= _PIECE_ROWS:
                yield pa.concat_batches(pieces)
                pieces = []
        if pieces:
            yield pa.concat_batches(pieces)

    @property
    def _primary_key(self) -> list[str]:
        return list(self._table.info.descriptor.primary_key)

    def _staged_keys(self, bucket: int) -> pa.Array:
        schema = self._table.info.schema.select(self._primary_key, table=str(self._table.path))
        changes = [
            self._encoded(
                conform(rows.select(self._primary_key), schema, table=str(self._table.path))
            )
            for rows in staged_rows(self._parts, bucket)
        ]
        return pa.concat_arrays(changes)

    def _encoded(self, rows: pa.RecordBatch) -> pa.Array:
        return encode_key([rows.column(name) for name in self._primary_key])

    def _conflict(self, why: str) -> CommitConflictError:
        return CommitConflictError(
            f"table '{self._table.path}' has changed since the rows of this transaction were"
            f" computed from it: {why}; nothing was written: read the table again, compute the rows"
            " anew and commit them in a new transaction"
        )
