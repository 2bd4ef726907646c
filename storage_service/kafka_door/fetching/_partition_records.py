"""Rows of a partition as record batches, up to a number of bytes: from the log, or from the lake.

Guarantees:
- records begin at the offset that was asked for, and take no more bytes than there is room for; but
  the first of an answer is written however large it is, alone
- a row of which no record can be made ends what is written; the rows before it are written
- an update has the row that it replaces, wherever the read before it ended
The offset of a record is that of its row. Rows that are no record, such as the row before an
update, and offsets whose rows have gone leave gaps, which a batch covers. Blocking, on any thread.
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
from streamhouse.storage_service.log.log_tablet import LogTablet, StoredBatch

__all__ = ["RecordsWriter", "TableRecords"]

_Numbers = npt.NDArray[np.int64]

# How large records are that are made of columns is not known before some were.
_FIRST_ROWS: Final = 1_024
_BATCH_ROWS_MAX: Final = 1 << 16
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1
# Records that do not fit were made for nothing; rows that are counted exactly are counted often.
_OVERSHOOT_MAX: Final = 1.25
# Rows that became few bytes say little of those behind them.
_GROWTH_MIN: Final = 0.25


@dataclass(frozen=True, slots=True)
class TableRecords:
    """How a table's rows are read as records: in one version of its schema."""

    info: TableInfo
    log_schema: pa.Schema
    record_format: RecordFormat
    schemas: SchemaSource

    @classmethod
    def of(cls, table: OpenTable) -> TableRecords:
        """Return how the table is read now. Event loop only."""
        info = table.info
        return cls(
            info,
            table.log_schema_of(info.schema_id),
            info.descriptor.record_format(),
            table.record_schemas.source(),
        )

    @property
    def weight(self) -> int:
        """So many times longer than handing out stored bytes does making records of them take."""
        return 2 if self.record_format.value is ValueFormat.RAW else 16

    @property
    def has_pairs(self) -> bool:
        """Whether an update is made of two rows, the one before it and the one after it."""
        is_debezium = self.record_format.changes is ChangesFormat.DEBEZIUM_JSON
        return self.info.is_primary_key_table and is_debezium

    def rows(self, frame: StoredBatch) -> pa.RecordBatch:
        """Return the rows of a stored batch as records are made of them."""
        if frame.schema_id == self.info.schema_id:
            return decode_payload(frame.payload, self.log_schema)
        return read_stored(frame.payload, self.info, stored_as=frame.schema_id)


@dataclass(kw_only=True)
class RecordsWriter:
    """Record batches of one partition that follow each other; `next_offset` is behind the last.

    At most `bytes_max` bytes are written, but the first record if `is_first`.
    """

    table: TableRecords
    first_offset: int
    bytes_max: int
    is_first: bool
    next_offset: int = field(init=False)
    pieces: list[Piece] = field(default_factory=list)
    byte_count: int = 0
    row_count: int = 0
    rest: OlderRows | None = None
    """Rows that have left the log, were read and are not written; none is below `next_offset`."""
    _row_bytes: int = 0
    _is_full: bool = False

    def __post_init__(self) -> None:
        self.next_offset = self.first_offset

    @property
    def has_room(self) -> bool:
        """Whether more is to be written."""
        return self._is_owed or (self._bytes_left >= BATCH_BYTES_MIN and not self._is_full)

    @property
    def rows_wanted(self) -> int:
        """About how many rows there is room for, at least one."""
        if self.row_count:
            row_bytes = max(1.0, self.byte_count / self.row_count)
            return max(1, min(_BATCH_ROWS_MAX, int(self._bytes_left / row_bytes)))
        return _BATCH_ROWS_MAX if self._is_raw else _FIRST_ROWS

    @property
    def bytes_wanted(self) -> int:
        """About how many bytes of rows become as many of records as there is room for, not none."""
        return max(1, int(self._bytes_left / self._growth))

    def write_log(self, tablet: LogTablet, *, end: int) -> None:
        """Write rows of the log from `next_offset` on, at most to `end`.

        Raises as `LogTablet.read`, `CorruptDataError`, and whatever making a record of a row does.
        """
        if not self._is_owed and self.next_offset < end:
            # A read is of a whole batch, however little of it there is room for.
            near = tablet.extent(self.next_offset)
            if near.byte_count > near.row_count * self._bytes_left / _GROWTH_MIN:
                return
        while self.next_offset < end and self.has_room:
            first = self.next_offset
            stored = tablet.read(first, bytes_max=self.bytes_wanted, end_offset=end)
            rows = self._readable(stored)
            stored = stored[: len(rows)]
            base, after = stored[0].base_offset, min(stored[-1].end_offset, end)
            offsets = np.arange(base, after, dtype=np.int64)
            times = np.repeat([f.timestamp_us for f in stored], [f.row_count for f in stored])
            joined = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
            self._write(joined.slice(0, after - base), offsets, times, first - base, after)
            if self.next_offset < after:
                return

    @property
    def older_offset(self) -> int:
        """Where rows that have left the log are to be read next."""
        return self.next_offset if self.rest is None else self.rest.next_offset

    def lacks_before(self, found: OlderRows) -> bool:
        """Whether the first of these rows is an update whose replaced row was not read."""
        return (
            self.table.has_pairs
            and self.rest is None
            and found.rows.num_rows > 0
            and found.offsets[0] == self.next_offset
            and _change_type(found.rows, 0) == UPDATE_AFTER
        )

    def write_older(self, found: OlderRows, *, before: OlderRows | None = None) -> None:
        """Write rows that have left the log, read from `older_offset` on, as far as they fit.

        What does not is `rest`, as is the last row if it is that before an update, to be given
        again with what follows it. `before` is the row before them, if they lack it. Raises as
        `write_log`.
        """
        kept = self.rest or before
        found = found if kept is None else kept.then(found)
        rows, offsets, end = found.rows, found.offsets, found.next_offset
        row = int(np.searchsorted(offsets, self.next_offset))
        stop = rows.num_rows
        if stop and self._is_before_update(rows, stop - 1):
            stop -= 1
            end = int(offsets[stop])
        try:
            self._write(rows.slice(0, stop), offsets, found.timestamps_us, row, end)
        finally:
            left = int(np.searchsorted(offsets, self.next_offset))
            self.rest = found.since(left) if left < rows.num_rows else None
        if self.rest is None:
            self.next_offset = max(self.next_offset, found.next_offset)

    def pass_over(self, offset: int) -> None:
        """Go on at `offset`: there are no rows before it but those that have been read."""
        if self.has_room and self.older_offset >= offset:
            # An update that is nowhere has no record, nor has what it replaces.
            self.rest = None
            self.next_offset = max(self.next_offset, offset)

    def cover_gap(self) -> None:
        """If there was no record among the rows, let the consumer go on behind them.

        It takes a batch without records for that, and would ask for the same rows for ever.
        """
        if not self.pieces and self.next_offset > self.first_offset:
            empty = pa.array([], pa.binary())
            columns = RecordColumns(
                keys=empty, values=empty, timestamps_ms=np.empty(0, dtype=np.int64)
            )
            nothing = np.empty(0, dtype=np.int64)
            self._append(columns, self.first_offset, nothing, self.next_offset)

    @property
    def _bytes_left(self) -> int:
        return self.bytes_max - self.byte_count

    @property
    def _is_owed(self) -> bool:
        """Whether a record is to be written though there is no room for it."""
        return self.is_first and not self.pieces

    @property
    def _is_raw(self) -> bool:
        return self.table.record_format.value is ValueFormat.RAW

    @property
    def _growth(self) -> float:
        """How many bytes of records a byte of rows has become so far."""
        if not self._row_bytes or not self.byte_count:
            return 1.0
        return max(_GROWTH_MIN, self.byte_count / self._row_bytes)

    def _readable(self, stored: Sequence[StoredBatch]) -> list[pa.RecordBatch]:
        """Return the rows of the batches before the first that cannot be read; raises at that."""
        found: list[pa.RecordBatch] = []
        for frame in stored:
            try:
                found.append(self.table.rows(frame))
            except Exception:  # raised again where a read begins with it
                if not found:
                    raise
                # The next read begins at it.
                break
        return found

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
        """Write the rows with these numbers as one batch, as far as they fit.

        Return the number of the row behind, from which on nothing is written.
        """
        found, stop = self._records(rows, times, row, stop)
        columns, of_rows = found.columns, found.rows
        if len(of_rows):
            deltas = offsets[of_rows] - offsets[of_rows[0]]
            count = fitting_count(columns, offset_deltas=deltas, bytes_max=self._bytes_left)
            if count < len(of_rows):
                count = count or int(self._is_owed)
                self._is_full = True
                if not count:
                    return row
                columns, of_rows = columns.first(count), of_rows[:count]
                stop = int(of_rows[-1]) + 1
        after = end if stop == rows.num_rows else int(offsets[stop])
        if len(of_rows):
            of_records = offsets[of_rows]
            base = int(of_records[0])
            self._append(columns, base, of_records - base, after)
        self.row_count += stop - row
        self._row_bytes += rows.slice(row, stop - row).nbytes
        self.next_offset = max(self.next_offset, after)
        return stop

    def _records(
        self, rows: pa.RecordBatch, times: _Numbers, row: int, stop: int
    ) -> tuple[RowRecords, int]:
        """Return the records of the rows with these numbers, and the number of the row behind.

        If one of them cannot be a record these are rows before it, raises if that is the first.
        """
        # The row before an update is no record, but a part of the next one.
        begin = row - 1 if row and self._is_before_update(rows, row - 1) else row
        while True:
            try:
                found = records_of(
                    rows.slice(begin, stop - begin),
                    self.table.info,
                    commit_ms=times[begin:stop] // 1_000,
                    first_row=row - begin,
                    schemas=self.table.schemas,
                )
            except Exception:  # raised again where the row is the first
                if stop - row == 1:
                    raise
                stop = row + (stop - row) // 2
            else:
                return RowRecords(found.columns, found.rows + begin), stop

    def _fitting(self, rows: pa.RecordBatch, row: int) -> int:
        """Return of how many rows, from number `row` on, records are made next: about as fit."""
        if not self.has_room:
            return 0
        left = rows.num_rows - row
        is_known = self._is_raw or self.byte_count > 0
        count: int = min(left, _BATCH_ROWS_MAX if is_known else _FIRST_ROWS)
        room = self.bytes_wanted
        while count > 1 and (row_bytes := rows.slice(row, count).nbytes) > room * _OVERSHOOT_MAX:
            count = max(1, count * room // row_bytes)
        if self._is_before_update(rows, row + count - 1):
            count = min(left, count + 1)
        return count

    def _is_before_update(self, rows: pa.RecordBatch, row: int) -> bool:
        return self.table.has_pairs and _change_type(rows, row) == UPDATE_BEFORE

    def _append(self, columns: RecordColumns, base: int, deltas: _Numbers, after: int) -> None:
        pieces = write_batch(
            columns,
            base_offset=base,
            offset_deltas=deltas,
            last_offset_delta=min(after - 1 - base, _OFFSET_DELTA_MAX),
            leader_epoch=leader_epoch_of(self.table.info.table_id),
        )
        self.pieces += pieces
        self.byte_count += sum(map(len, pieces))


def _change_type(rows: pa.RecordBatch, row: int) -> int:
    code: int = rows.column(CHANGE_TYPE_COLUMN)[row].as_py()
    return code
