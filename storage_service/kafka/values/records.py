"""Rows of a table's log as records.

One row is one record. Of a table with a primary key, whose log is its changelog, a row before an
update is part of the record of the update, and has no record of its own: offsets have gaps there,
as those of a compacted topic have.

A value of JSON has all columns of a row but that of the headers: those of the key and the timestamp
too, so nothing is lost by the milliseconds that a record's timestamp has.
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
from streamhouse.core.text.json_text import row_texts
from streamhouse.storage_service.kafka.records.columns import HEADERS_TYPE, RecordColumns
from streamhouse.storage_service.kafka.values.avro_columns import SchemaSource, avro_records

__all__ = ["RowRecords", "records_of"]

_OPS: Final = pa.array(['"c"', '"c"', None, '"u"', '"d"'], pa.large_string())
"""Debezium's name of each change type."""
_NO_TIMESTAMP: Final = -1
_US_PER_MS: Final = 1_000
_CHANGELOG_NAMES: Final = frozenset(field.name for field in CHANGELOG_FIELDS)


@dataclass(frozen=True, slots=True)
class RowRecords:
    """Records, and the number of each one's row: its offset is that of this row."""

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
    """Write rows as records. On any thread.

    Args:
        rows: rows of one bucket's log, in their order, with the columns of the table's current
            schema and, of a table with a primary key, `__change_type`.
        commit_ms: when the rows were written, in milliseconds since 1970: the timestamp of records
            of a table that has no column for it.
        first_row: the first row that becomes a record. A row before it is only looked at as what an
            update replaces: reading one more finds it, where a read begins with a `+U`.
        schemas: where schemas of Avro are found.
    """
    form = table.descriptor.record_format()
    writer = _Writer(table, form, schemas)
    ms = np.broadcast_to(np.asarray(commit_ms, np.int64), rows.num_rows)
    if not table.is_primary_key_table:
        kept = np.arange(first_row, rows.num_rows)
        own = rows if first_row == 0 else rows.slice(first_row)
        return RowRecords(writer.columns(own, writer.values(own), ms[kept]), kept)
    codes = rows.column(CHANGE_TYPE_COLUMN).to_numpy(zero_copy_only=False)
    rows = rows.select([name for name in rows.schema.names if name not in _CHANGELOG_NAMES])
    is_kept = codes != UPDATE_BEFORE
    is_kept[:first_row] = False
    kept = np.flatnonzero(is_kept)
    own = rows if is_kept.all() else rows.take(pa.array(kept))
    if form.changes is ChangesFormat.DEBEZIUM_JSON:
        values = writer.envelopes(rows, codes, kept, ms)
    else:
        values = writer.values(own)
        is_deleted = codes[kept] == DELETE
        if is_deleted.any():
            values = pc.if_else(pa.array(is_deleted), None, values)
    return RowRecords(writer.columns(own, values, ms[kept]), kept)


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
        named = rows.select(self._value_names(rows))
        if form.value is ValueFormat.AVRO:
            try:
                return avro_records(named, self.table, schemas=self.schemas, what_each="value")
            except NotFoundError:
                beside = {*form.key_columns, form.timestamp_column}
                if not beside.issuperset(named.schema.names):
                    raise
                # Nobody has registered one, and no column wants one.
                return pa.nulls(rows.num_rows, pa.binary())
        return _as_bytes(row_texts(named))

    def _value_names(self, rows: pa.RecordBatch) -> list[str]:
        return [name for name in rows.schema.names if name != self.form.headers_column]

    def envelopes(
        self,
        rows: pa.RecordBatch,
        codes: npt.NDArray[np.int8],
        kept: npt.NDArray[np.int64],
        commit_ms: npt.NDArray[np.int64],
    ) -> pa.BinaryArray:
        """Return the change of every row that is kept as Debezium has it."""
        named = rows.select(self._value_names(rows))
        texts = row_texts(_with_base64(named))
        own = codes[kept]
        is_delete = own == DELETE
        # What an update replaces is the row before it, if that was read.
        has_before = (own == UPDATE_AFTER) & (kept > 0) & (codes[kept - 1] == UPDATE_BEFORE)
        before = np.where(is_delete, kept, kept - 1)
        befores = texts.take(pa.array(before, mask=~(is_delete | has_before))).fill_null("null")
        afters = texts.take(pa.array(kept, mask=is_delete)).fill_null("null")
        parts = [
            '{"before": ',
            befores,
            ', "after": ',
            afters,
            ', "op": ',
            _OPS.take(pa.array(own)),
            ', "ts_ms": ',
            pa.array(commit_ms[kept]).cast(pa.large_string()),
            "}",
        ]
        scalars = [pa.scalar(p, pa.large_string()) if isinstance(p, str) else p for p in parts]
        empty = pa.scalar("", pa.large_string())
        return _as_bytes(pc.binary_join_element_wise(*scalars, empty))

    def columns(
        self, rows: pa.RecordBatch, values: pa.BinaryArray, commit_ms: npt.NDArray[np.int64]
    ) -> RecordColumns:
        """Return records of rows that have these values."""
        form = self.form
        timestamps = np.ascontiguousarray(commit_ms)
        if form.timestamp_column is not None:
            us = rows.column(form.timestamp_column).view(pa.int64())
            known = us.fill_null(_NO_TIMESTAMP * _US_PER_MS).to_numpy(zero_copy_only=False)
            timestamps = known // _US_PER_MS
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
        named = rows.select(list(form.key_columns))
        has_any = np.zeros(rows.num_rows, np.bool_)
        for column in named.columns:
            has_any |= column.is_valid().to_numpy(zero_copy_only=False)
        if has_any.all():
            return self._key_bytes(named)
        # A row without any of them was a record without a key, which no schema need have.
        keys = self._key_bytes(named.filter(pa.array(has_any)))
        return keys.take(pa.array(np.cumsum(has_any) - 1, mask=~has_any))

    def _key_bytes(self, named: pa.RecordBatch) -> pa.BinaryArray:
        if self.form.key is KeyFormat.AVRO:
            return avro_records(named, self.table, schemas=self.schemas, what_each="key")
        is_debezium = ValueFormat.DEBEZIUM_JSON is self.form.value
        return _as_bytes(row_texts(_with_base64(named) if is_debezium else named))


def _as_bytes(texts: pa.LargeStringArray) -> pa.BinaryArray:
    return texts.cast(pa.large_binary()).cast(pa.binary())


def _with_base64(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows whose bytes are texts as Debezium writes them."""
    for at, (name, column) in enumerate(zip(rows.schema.names, rows.columns, strict=True)):
        if pa.types.is_binary(column.type):
            rows = rows.set_column(at, name, to_base64(column))
    return rows


def _headers(lists: pa.ListArray) -> pa.ListArray | None:
    """Return headers as a record has them; None if no row has any."""
    if lists.null_count == len(lists) or not len(lists):
        return None
    pairs = lists.flatten()
    if not len(pairs):
        return None
    keys, values = pairs.flatten()
    # A record's header has a name always.
    fields = list(HEADERS_TYPE.value_type)
    named = pa.StructArray.from_arrays([keys.fill_null(""), values], fields=fields)
    mask = lists.is_null() if lists.null_count else None
    return pa.ListArray.from_arrays(offsets_of(lists), named, HEADERS_TYPE, mask=mask)
