"""Rows of a partition as record batches of a limited size, from the log or from the lake.

Guarantees:
- records begin at the requested offset and fit into the room; only the first record of an answer is
  written whatever its size, alone
- the records end before the first unwritable row; the rows before are written
- an update has the replaced row, wherever the previous read ended

The offset of a record is the offset of its row. Rows without a record, such as the row before an
update, and offsets without a row leave gaps, which a batch covers. Blocking, on any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.model.changelog import UPDATE_AFTER, UPDATE_BEFORE
from streamhouse.core.model.lake.older_rows import OlderRows
from streamhouse.core.model.records.record_format import (
    ChangesFormat,
    RecordFormat,
    ValueFormat,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.schema_change import read_stored
from streamhouse.core.model.table import TableInfo
from streamhouse.core.wire.arrow_body import decode_payload
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.messages.answers import Piece
from streamhouse.storage_service.kafka.records.batches import (
    BATCH_BYTES_MIN,
    fitting_count,
    write_batch,
)
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from streamhouse.storage_service.kafka.topics import leader_epoch_of
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.records import RowRecords, records_of
from streamhouse.storage_service.kafka_door._record_schemas import schemas_of
from streamhouse.storage_service.log.log_tablet import LogTablet, StoredBatch

__all__ = ["RecordsWriter", "TableRecords"]

_Numbers = npt.NDArray[np.int64]

# The size of records made of columns is unknown before some records are written.
_FIRST_ROWS: Final = 1_024
_BATCH_ROWS_MAX: Final = 1 << 16
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1
# A trade-off: records that do not fit are wasted work, and exact counts of rows take many passes.
_OVERSHOOT_MAX: Final = 1.25
# Rows that became few bytes are a poor estimate for the rows behind them.
_GROWTH_MIN: Final = 0.25


@dataclass(frozen=True, slots=True)
class TableRecords:
    """How rows of a table become records, in one version of the table's schema."""

    info: TableInfo
    log_schema: pa.Schema
    record_format: RecordFormat
    schemas: SchemaSource

    @classmethod
    def of(cls, table: OpenTable) -> TableRecords:
        """Return the present way to read the table. Event loop only."""
        info = table.info
        return cls(
            info,
            table.log_schema_of(info.schema_id),
            info.descriptor.record_format(),
            schemas_of(table).source(),
        )

    @property
    def weight(self) -> int:
        """How many times longer making records takes than handing out stored bytes."""
        return 2 if self.record_format.value is ValueFormat.RAW else 16

    @property
    def has_pairs(self) -> bool:
        """Whether an update is two rows: the row before and the row after the update."""
        is_debezium = self.record_format.changes is ChangesFormat.DEBEZIUM_JSON
        return self.info.is_primary_key_table and is_debezium

    def rows(self, frame: StoredBatch) -> pa.RecordBatch:
        """Return the rows of a stored batch in this version of the schema."""
        if frame.schema_id == self.info.schema_id:
            return decode_payload(frame.payload, self.log_schema)
        return read_stored(frame.payload, self.info, stored_as=frame.schema_id)


@dataclass(kw_only=True)
class RecordsWriter:
    """Consecutive record batches of one partition; `next_offset` is behind the last batch.

    At most `bytes_max` bytes are written, except for the first record if `is_first`.
    """

    table: TableRecords
    first_offset: int
    bytes_max: int
    is_first: bool
    next_offset: int = field(init=False)
    pieces: list[Piece] = field(default_factory=list)
    byte_count: int = 0
    row_count: int = 0
    pending_rows: OlderRows | None = None
    """Rows read from the lake but not yet written, all at or above `next_offset`."""
    _row_bytes: int = 0
    _is_full: bool = False

    def __post_init__(self) -> None:
        self.next_offset = self.first_offset

    @property
    def has_room(self) -> bool:
        """Whether more records are to be written."""
        return self._is_owed or (self._remaining_bytes >= BATCH_BYTES_MIN and not self._is_full)

    @property
    def rows_estimate(self) -> int:
        """About how many rows fit into the room, at least 1."""
        if self.row_count:
            row_bytes = max(1.0, self.byte_count / self.row_count)
            return max(1, min(_BATCH_ROWS_MAX, int(self._remaining_bytes / row_bytes)))
        return _BATCH_ROWS_MAX if self._is_raw else _FIRST_ROWS

    @property
    def bytes_estimate(self) -> int:
        """About how many bytes of rows fill the room as records, at least 1."""
        return max(1, int(self._remaining_bytes / self._growth))

    def write_log(self, tablet: LogTablet, *, end: int) -> None:
        """Write rows of the log from `next_offset` on, at most to `end`.

        Raises as `LogTablet.read`, `CorruptDataError`, and any error of making a record.
        """
        if not self._is_owed and self.next_offset < end:
            # The log reads whole batches, even if the room is smaller.
            near = tablet.extent(self.next_offset)
            if near.byte_count > near.row_count * self._remaining_bytes / _GROWTH_MIN:
                return
        while self.next_offset < end and self.has_room:
            first = self.next_offset
            stored = tablet.read(first, bytes_max=self.bytes_estimate, end_offset=end)
            rows = self._readable(stored)
            stored = stored[: len(rows)]
            base, stop_offset = stored[0].base_offset, min(stored[-1].end_offset, end)
            offsets = np.arange(base, stop_offset, dtype=np.int64)
            times = np.repeat([f.timestamp_us for f in stored], [f.row_count for f in stored])
            joined = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
            self._write(
                joined.slice(0, stop_offset - base), offsets, times, first - base, stop_offset
            )
            if self.next_offset < stop_offset:
                return

    @property
    def older_offset(self) -> int:
        """The offset of the next read from the lake."""
        return self.next_offset if self.pending_rows is None else self.pending_rows.next_offset

    def lacks_replaced_row(self, rows: OlderRows) -> bool:
        """Whether the first row is an update whose replaced row was not read."""
        return (
            self.table.has_pairs
            and self.pending_rows is None
            and rows.rows.num_rows > 0
            and rows.offsets[0] == self.next_offset
            and _change_type(rows.rows, 0) == UPDATE_AFTER
        )

    def write_older(self, older: OlderRows, *, replaced_row: OlderRows | None = None) -> None:
        """Write as many rows from the lake as fit, read from `older_offset` on.

        Rows that do not fit become `pending_rows`. A last row before an update also waits for the
        update. `before` is the row before the first row, if `lacks_replaced_row`. Raises as
        `write_log`.
        """
        earlier = self.pending_rows or replaced_row
        older = older if earlier is None else earlier.followed_by(older)
        rows, offsets, end = older.rows, older.offsets, older.next_offset
        row = int(np.searchsorted(offsets, self.next_offset))
        stop = rows.num_rows
        if stop and self._is_before_update(rows, stop - 1):
            stop -= 1
            end = int(offsets[stop])
        try:
            self._write(rows.slice(0, stop), offsets, older.timestamps_us, row, end)
        finally:
            written_count = int(np.searchsorted(offsets, self.next_offset))
            self.pending_rows = (
                older.since(written_count) if written_count < rows.num_rows else None
            )
        if self.pending_rows is None:
            self.next_offset = max(self.next_offset, older.next_offset)

    def pass_over(self, offset: int) -> None:
        """Continue at `offset`: no unread rows lie below."""
        if self.has_room and self.older_offset >= offset:
            # The update after a pending row is nowhere, so the pending row has no record either.
            self.pending_rows = None
            self.next_offset = max(self.next_offset, offset)

    def cover_gap(self) -> None:
        """Let the consumer continue behind rows without records.

        An empty batch covers the gap. Without this batch the consumer would request the same rows
        for ever.
        """
        if not self.pieces and self.next_offset > self.first_offset:
            empty = pa.array([], pa.binary())
            columns = RecordColumns(
                keys=empty, values=empty, timestamps_ms=np.empty(0, dtype=np.int64)
            )
            deltas = np.empty(0, dtype=np.int64)
            self._append(columns, self.first_offset, deltas, self.next_offset)

    @property
    def _remaining_bytes(self) -> int:
        return self.bytes_max - self.byte_count

    @property
    def _is_owed(self) -> bool:
        """Whether a record is due although the room is full."""
        return self.is_first and not self.pieces

    @property
    def _is_raw(self) -> bool:
        return self.table.record_format.value is ValueFormat.RAW

    @property
    def _growth(self) -> float:
        """The ratio of record bytes to row bytes up to now."""
        if not self._row_bytes or not self.byte_count:
            return 1.0
        return max(_GROWTH_MIN, self.byte_count / self._row_bytes)

    def _readable(self, stored: Sequence[StoredBatch]) -> list[pa.RecordBatch]:
        """Return the rows of the batches before the first unreadable one; raise if none precede."""
        readable: list[pa.RecordBatch] = []
        for frame in stored:
            try:
                readable.append(self.table.rows(frame))
            except Exception:  # raised again when a read begins with this batch
                if not readable:
                    raise
                # The next read begins at this batch.
                break
        return readable

    def _write(
        self, rows: pa.RecordBatch, offsets: _Numbers, times: _Numbers, row: int, end: int
    ) -> None:
        """Write the rows from number `row` on, as far as they fit; `end` is the offset behind."""
        while row < rows.num_rows and (count := self._fitting(rows, row)):
            row = self._put(rows, offsets, times, row, row + count, end)

    def _put(
        self,
        rows: pa.RecordBatch,
        offsets: _Numbers,
        times: _Numbers,
        row: int,
        stop: int,
        end: int,
    ) -> int:
        """Write the rows `row` to `stop` as one batch, as far as the rows fit.

        Return the number of the first unwritten row.
        """
        row_records, stop = self._records(rows, times, row, stop)
        columns, of_rows = row_records.columns, row_records.rows
        if len(of_rows):
            deltas = offsets[of_rows] - offsets[of_rows[0]]
            count = fitting_count(columns, offset_deltas=deltas, bytes_max=self._remaining_bytes)
            if count < len(of_rows):
                count = count or int(self._is_owed)
                self._is_full = True
                if not count:
                    return row
                columns, of_rows = columns.first(count), of_rows[:count]
                stop = int(of_rows[-1]) + 1
        end_offset = end if stop == rows.num_rows else int(offsets[stop])
        if len(of_rows):
            of_records = offsets[of_rows]
            base = int(of_records[0])
            self._append(columns, base, of_records - base, end_offset)
        self.row_count += stop - row
        self._row_bytes += rows.slice(row, stop - row).nbytes
        self.next_offset = max(self.next_offset, end_offset)
        return stop

    def _records(
        self, rows: pa.RecordBatch, times: _Numbers, row: int, stop: int
    ) -> tuple[RowRecords, int]:
        """Return the records of the rows `row` to `stop`, and the number of the row behind.

        If a row cannot become a record, the result has rows before that row only. Raises if that
        row is the first.
        """
        # The row before an update is a part of the next record.
        begin = row - 1 if row and self._is_before_update(rows, row - 1) else row
        while True:
            try:
                records = records_of(
                    rows.slice(begin, stop - begin),
                    self.table.info,
                    commit_ms=times[begin:stop] // 1_000,
                    first_row=row - begin,
                    schemas=self.table.schemas,
                )
            except Exception:  # raised again when the row is the first
                if stop - row == 1:
                    raise
                stop = row + (stop - row) // 2
            else:
                return RowRecords(records.columns, records.rows + begin), stop

    def _fitting(self, rows: pa.RecordBatch, row: int) -> int:
        """Return how many rows, from number `row` on, become records next; about as many as fit."""
        if not self.has_room:
            return 0
        remaining_rows = rows.num_rows - row
        has_estimate = self._is_raw or self.byte_count > 0
        count: int = min(remaining_rows, _BATCH_ROWS_MAX if has_estimate else _FIRST_ROWS)
        room = self.bytes_estimate
        while count > 1 and (row_bytes := rows.slice(row, count).nbytes) > room * _OVERSHOOT_MAX:
            count = max(1, count * room // row_bytes)
        if self._is_before_update(rows, row + count - 1):
            count = min(remaining_rows, count + 1)
        return count

    def _is_before_update(self, rows: pa.RecordBatch, row: int) -> bool:
        return self.table.has_pairs and _change_type(rows, row) == UPDATE_BEFORE

    def _append(self, columns: RecordColumns, base: int, deltas: _Numbers, end_offset: int) -> None:
        pieces = write_batch(
            columns,
            base_offset=base,
            offset_deltas=deltas,
            last_offset_delta=min(end_offset - 1 - base, _OFFSET_DELTA_MAX),
            leader_epoch=leader_epoch_of(self.table.info.table_id),
        )
        self.pieces += pieces
        self.byte_count += sum(map(len, pieces))


def _change_type(rows: pa.RecordBatch, row: int) -> int:
    code: int = rows.column(CHANGE_TYPE_COLUMN)[row].as_py()
    return code
