"""Rows of a table's log as records.

A row is one record. In a table with a primary key the log is the changelog. The row before an
update is a part of the update's record, and has no record of its own. Offsets then have gaps, as in
a compacted topic.

A JSON value has all columns of a row except the headers, including key and timestamp, so that the
milliseconds of a record's timestamp lose nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import NotFoundError
from streamhouse.core.model.casts.nested import offsets_of
from streamhouse.core.model.changelog import (
    CHANGELOG_FIELDS,
    DELETE,
    UPDATE_AFTER,
    UPDATE_BEFORE,
)
from streamhouse.core.model.records.record_format import (
    ChangesFormat,
    KeyFormat,
    RecordFormat,
    ValueFormat,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.text.base64_columns import to_base64
from streamhouse.core.text.rows_as_json import row_texts
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE, RecordColumns
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource, avro_records

__all__ = ["RowRecords", "records_of"]

_OPS: Final = pa.array(['"c"', '"c"', None, '"u"', '"d"'], pa.large_string())
"""Debezium's op for each change type."""
_NO_TIMESTAMP: Final = -1
_US_PER_MS: Final = 1_000
_CHANGELOG_NAMES: Final = frozenset(field.name for field in CHANGELOG_FIELDS)


@dataclass(frozen=True, slots=True)
class RowRecords:
    """Records, and the row number of each record, which determines its offset."""

    columns: RecordColumns
    rows: npt.NDArray[np.int64]


def records_of(
    rows: pa.RecordBatch,
    table: TableInfo,
    *,
    commit_ms: npt.NDArray[np.int64] | int,
    first_row: int = 0,
    schemas: SchemaSource | None = None,
) -> RowRecords:
    """Return rows as records. On any thread.

    Args:
        rows: consecutive rows of one bucket's log, with the columns of the table's current
            schema and, in a table with a primary key, `__change_type`.
        commit_ms: the write times of the rows, in milliseconds since 1970: the records'
            timestamps in a table without a timestamp column.
        first_row: the first row that becomes a record. The previous row only serves as the row
            that an update replaces, for a read that begins with a `+U`.
        schemas: the source of Avro schemas.
    """
    form = table.descriptor.record_format()
    writer = _Writer(table, form, schemas)
    ms = np.broadcast_to(np.asarray(commit_ms, np.int64), rows.num_rows)
    if not table.is_primary_key_table:
        record_rows = np.arange(first_row, rows.num_rows)
        rows_written = rows if first_row == 0 else rows.slice(first_row)
        return RowRecords(
            writer.columns(rows_written, writer.values(rows_written), ms[record_rows]), record_rows
        )
    codes = rows.column(CHANGE_TYPE_COLUMN).to_numpy(zero_copy_only=False)
    rows = rows.select([name for name in rows.schema.names if name not in _CHANGELOG_NAMES])
    has_record = codes != UPDATE_BEFORE
    has_record[:first_row] = False
    record_rows = np.flatnonzero(has_record)
    rows_written = rows if has_record.all() else rows.take(pa.array(record_rows))
    if form.changes is ChangesFormat.DEBEZIUM_JSON:
        values = writer.envelopes(rows, codes, record_rows, ms)
    else:
        values = writer.values(rows_written)
        is_deleted = codes[record_rows] == DELETE
        if is_deleted.any():
            values = pc.if_else(pa.array(is_deleted), None, values)
    return RowRecords(writer.columns(rows_written, values, ms[record_rows]), record_rows)


@dataclass(frozen=True, slots=True)
class _Writer:
    table: TableInfo
    form: RecordFormat
    schemas: SchemaSource | None

    def values(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """Return the value of every row."""
        form = self.form
        if form.value is ValueFormat.RAW:
            return rows.column(str(form.value_column)).cast(pa.binary())
        value_columns = rows.select(self._value_names(rows))
        if form.value is ValueFormat.AVRO:
            try:
                return avro_records(
                    value_columns, self.table, schemas=self.schemas, record_part="value"
                )
            except NotFoundError:
                other_parts = {*form.key_columns, form.timestamp_column}
                if not other_parts.issuperset(value_columns.schema.names):
                    raise
                # No schema is registered, and no column needs a schema.
                return pa.nulls(rows.num_rows, pa.binary())
        return _as_bytes(row_texts(value_columns))

    def _value_names(self, rows: pa.RecordBatch) -> list[str]:
        return [name for name in rows.schema.names if name != self.form.headers_column]

    def envelopes(
        self,
        rows: pa.RecordBatch,
        codes: npt.NDArray[np.int8],
        record_rows: npt.NDArray[np.int64],
        commit_ms: npt.NDArray[np.int64],
    ) -> pa.BinaryArray:
        """Return Debezium's envelope for every row in `record_rows`."""
        value_columns = rows.select(self._value_names(rows))
        texts = row_texts(_with_base64(value_columns))
        record_codes = codes[record_rows]
        is_delete = record_codes == DELETE
        # An update replaces the previous row, if that row was read.
        has_before = (
            (record_codes == UPDATE_AFTER)
            & (record_rows > 0)
            & (codes[record_rows - 1] == UPDATE_BEFORE)
        )
        before_rows = np.where(is_delete, record_rows, record_rows - 1)
        befores = texts.take(pa.array(before_rows, mask=~(is_delete | has_before))).fill_null(
            "null"
        )
        afters = texts.take(pa.array(record_rows, mask=is_delete)).fill_null("null")
        parts = [
            '{"before": ',
            befores,
            ', "after": ',
            afters,
            ', "op": ',
            _OPS.take(pa.array(record_codes)),
            ', "ts_ms": ',
            pa.array(commit_ms[record_rows]).cast(pa.large_string()),
            "}",
        ]
        scalars = [pa.scalar(p, pa.large_string()) if isinstance(p, str) else p for p in parts]
        empty = pa.scalar("", pa.large_string())
        return _as_bytes(pc.binary_join_element_wise(*scalars, empty))

    def columns(
        self, rows: pa.RecordBatch, values: pa.BinaryArray, commit_ms: npt.NDArray[np.int64]
    ) -> RecordColumns:
        """Return the records for rows with these values."""
        form = self.form
        timestamps = np.ascontiguousarray(commit_ms)
        if form.timestamp_column is not None:
            us = rows.column(form.timestamp_column).view(pa.int64())
            timestamps_us = us.fill_null(_NO_TIMESTAMP * _US_PER_MS).to_numpy(zero_copy_only=False)
            timestamps = timestamps_us // _US_PER_MS
        headers = None
        if form.headers_column is not None:
            headers = _headers(rows.column(form.headers_column))
        return RecordColumns(
            keys=self._keys(rows), values=values, timestamps_ms=timestamps, headers=headers
        )

    def _keys(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        form = self.form
        if not form.key_columns:
            return pa.nulls(rows.num_rows, pa.binary())
        if form.key is KeyFormat.RAW:
            return rows.column(form.key_columns[0]).cast(pa.binary())
        key_columns = rows.select(list(form.key_columns))
        has_any = np.zeros(rows.num_rows, np.bool_)
        for column in key_columns.columns:
            has_any |= column.is_valid().to_numpy(zero_copy_only=False)
        if has_any.all():
            return self._key_bytes(key_columns)
        # A row without any key column was a record without a key, which no schema has to express.
        keys = self._key_bytes(key_columns.filter(pa.array(has_any)))
        return keys.take(pa.array(np.cumsum(has_any) - 1, mask=~has_any))

    def _key_bytes(self, key_columns: pa.RecordBatch) -> pa.BinaryArray:
        if self.form.key is KeyFormat.AVRO:
            return avro_records(key_columns, self.table, schemas=self.schemas, record_part="key")
        is_debezium = ValueFormat.DEBEZIUM_JSON is self.form.value
        return _as_bytes(row_texts(_with_base64(key_columns) if is_debezium else key_columns))


def _as_bytes(texts: pa.LargeStringArray) -> pa.BinaryArray:
    return texts.cast(pa.large_binary()).cast(pa.binary())


def _with_base64(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows with base64 texts for bytes, as in Debezium."""
    for at, (name, column) in enumerate(zip(rows.schema.names, rows.columns, strict=True)):
        if pa.types.is_binary(column.type):
            rows = rows.set_column(at, name, to_base64(column))
    return rows


def _headers(lists: pa.ListArray) -> pa.ListArray | None:
    """Return headers in a record's form; None without any headers."""
    if lists.null_count == len(lists) or not len(lists):
        return None
    pairs = lists.flatten()
    if not len(pairs):
        return None
    keys, values = pairs.flatten()
    # A record's header always has a key.
    fields = list(HEADERS_TYPE.value_type)
    structs = pa.StructArray.from_arrays([keys.fill_null(""), values], fields=fields)
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets_of(lists), structs, HEADERS_TYPE, mask=mask)
