"""Rows of a partition as record batches, up to a number of bytes: from the log, or from the lake.

Records begin at the offset that was asked for and stop where the bytes do, or a row later. The
offset of a record is that of its row. Rows that are no record, such as the row before an update,
and offsets whose rows have gone leave gaps, which a batch covers. Blocking, on any thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.kafka.messages.answers import Piece
from streamhouse.storage_service.kafka.records.batches import write_batch
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource
from streamhouse.storage_service.kafka.values.records import records_of
from streamhouse.storage_service.log.log_tablet import LogTablet, StoredBatch
from streamhouse.storage_service.model.changelog import UPDATE_BEFORE
from streamhouse.storage_service.model.lake.older_rows import OlderRows
from streamhouse.storage_service.model.records.record_format import (
    ChangesFormat,
    RecordFormat,
    ValueFormat,
)
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.storage_service.model.schema_change import read_stored
from streamhouse.storage_service.model.table import TableInfo
from streamhouse.storage_service.wire.arrow_body import decode_payload

__all__ = ["RecordsWriter", "TableRecords"]

_Numbers = npt.NDArray[np.int64]

# How large records are that are made of columns is not known before some were.
_FIRST_ROWS: Final = 1_024
_BATCH_ROWS_MAX: Final = 1 << 16
_OFFSET_DELTA_MAX: Final = (1 << 31) - 1


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

    About `bytes_max` bytes are written: none beyond it begins a batch, but a first record does if
    `is_first`.
    """

    table: TableRecords
    first_offset: int
    bytes_max: int
    is_first: bool
    next_offset: int = field(init=False)
    pieces: list[Piece] = field(default_factory=list)
    byte_count: int = 0
    row_count: int = 0

    def __post_init__(self) -> None:
        self.next_offset = self.first_offset

    @property
    def has_room(self) -> bool:
        """Whether more is to be written."""
        return self._bytes_left > 0 or self._is_owed

    @property
    def rows_wanted(self) -> int:
        """About how many rows there is room for, at least one."""
        if self.row_count:
            row_bytes = max(1.0, self.byte_count / self.row_count)
            return max(1, min(_BATCH_ROWS_MAX, int(self._bytes_left / row_bytes)))
        return _BATCH_ROWS_MAX if self._is_raw else _FIRST_ROWS

    @property
    def bytes_wanted(self) -> int:
        """How many bytes of rows may become that many of records, at least one."""
        return max(1, self._bytes_left)

    def write_log(self, tablet: LogTablet, *, end: int) -> None:
        """Write rows of the log from `next_offset` on, at most to `end`.

        Raises as `LogTablet.read`, and `CorruptDataError`.
        """
        while self.next_offset < end and self.has_room:
            first = self.next_offset
            stored = tablet.read(first, bytes_max=max(1, self._bytes_left), end_offset=end)
            base, after = stored[0].base_offset, min(stored[-1].end_offset, end)
            rows = [self.table.rows(frame) for frame in stored]
            offsets = np.arange(base, after, dtype=np.int64)
            times = np.repeat([f.timestamp_us for f in stored], [f.row_count for f in stored])
            joined = rows[0] if len(rows) == 1 else pa.concat_batches(rows)
            self._write(joined.slice(0, after - base), offsets, times, first - base, after)
            if self.next_offset < after:
                return

    def write_older(self, found: OlderRows) -> None:
        """Write rows that have left the log, all of them; none is below `next_offset`."""
        count = found.rows.num_rows
        if count:
            self._put(found.rows, found.offsets, found.timestamps_us, 0, count, found.next_offset)
        self.next_offset = found.next_offset

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

    def _write(
        self, rows: pa.RecordBatch, offsets: _Numbers, times: _Numbers, row: int, end: int
    ) -> None:
        """Write the rows from number `row` on, as far as they fit; `end` is the offset behind."""
        while row < rows.num_rows and (count := self._fitting(rows, row)):
            stop = row + count
            after = end if stop == rows.num_rows else int(offsets[stop])
            self._put(rows, offsets, times, row, stop, after)
            self.next_offset, row = after, stop

    def _put(
        self,
        rows: pa.RecordBatch,
        offsets: _Numbers,
        times: _Numbers,
        row: int,
        stop: int,
        after: int,
    ) -> None:
        """Write the rows with these numbers as one batch, which ends before offset `after`."""
        # The row before an update is no record, but a part of the next one.
        begin = row - 1 if self._is_before_update(rows, row - 1) else row
        found = records_of(
            rows.slice(begin, stop - begin),
            self.table.info,
            commit_ms=times[begin:stop] // 1_000,
            first_row=row - begin,
            schemas=self.table.schemas,
        )
        if len(found.rows):
            of_records = offsets[begin:stop][found.rows]
            base = int(of_records[0])
            self._append(found.columns, base, of_records - base, after)
        self.row_count += stop - row

    def _fitting(self, rows: pa.RecordBatch, row: int) -> int:
        """Return how many rows, from number `row` on, are to be the next batch."""
        if self.row_count:
            row_bytes = self.byte_count / self.row_count
        else:
            row_bytes = rows.nbytes / rows.num_rows
        left = rows.num_rows - row
        room = int(max(0, self._bytes_left) / max(1.0, row_bytes))
        count: int = min(left, _BATCH_ROWS_MAX, room)
        if not self.row_count and not self._is_raw:
            count = min(count, _FIRST_ROWS)
        if not count and self._is_owed:
            count = 1
        if count and self._is_before_update(rows, row + count - 1):
            count = min(left, count + 1)
        return count

    def _is_before_update(self, rows: pa.RecordBatch, row: int) -> bool:
        if row < 0 or not self.table.has_pairs:
            return False
        return bool(rows.column(CHANGE_TYPE_COLUMN)[row].as_py() == UPDATE_BEFORE)

    def _append(self, columns: RecordColumns, base: int, deltas: _Numbers, after: int) -> None:
        pieces = write_batch(
            columns,
            base_offset=base,
            offset_deltas=deltas,
            last_offset_delta=min(after - 1 - base, _OFFSET_DELTA_MAX),
        )
        self.pieces += pieces
        self.byte_count += sum(map(len, pieces))
