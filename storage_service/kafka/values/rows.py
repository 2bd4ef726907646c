"""Records as rows of a table.

Each part of the records is read for all records at once: values, keys, timestamps, headers. The
columns are divided into rows for the table and misfits, by the checks of every write. A batch
without misfits is never read record by record, and raw values are not even copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.changelog import (
    DELETE,
    OPERATION_DELETE,
    OPERATION_UPSERT,
    UPDATE_AFTER,
)
from streamhouse.core.model.records.record_format import (
    KeyFormat,
    OnError,
    RecordFormat,
    ValueFormat,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.rows.checked_rows import CheckedRows, Misfit, Misfits, ReadRows
from streamhouse.core.rows.companion import ROW_TEXT_MAX
from streamhouse.core.rows.row_splitter import RowSplitter
from streamhouse.core.text.json_reading import json_object, plain_values
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from streamhouse.storage_service.kafka.values._debezium import debezium_draft, debezium_keys
from streamhouse.storage_service.kafka.values._draft import (
    Draft,
    DraftBounds,
    MovedRows,
    differing_rows,
)
from streamhouse.storage_service.kafka.values._json_columns import json_columns, json_keys
from streamhouse.storage_service.kafka.values.avro_columns import (
    SchemaSource,
    avro_columns,
)

__all__ = ["rows_of"]

_US_PER_MS: Final = 1_000
_MS_MAX: Final = (1 << 63) // _US_PER_MS - 1
_NO_TIMESTAMP: Final = -1
_SHOWN_BYTES: Final = 64 << 10
# The size of a reason and its place.
_MISFIT_BYTES: Final = 512


def rows_of(
    records: RecordColumns,
    table: TableInfo,
    *,
    bytes_max: int,
    schemas: SchemaSource | None = None,
) -> CheckedRows:
    """Return records as rows. On any thread.

    The rows have the table's columns, in the order of the records; a position is the number of a
    record in `records`. A record with a new key for a row has two rows; a record with neither a row
    nor a misfit has no effect. `operations` is set for tables with a primary key; only the key
    matters in a deleted row. With `kafka.on.error = reject` misfits have their content.

    Args:
        bytes_max: the limit for the rows in Arrow's form.
        schemas: the source of Avro schemas.

    Raises `RequestTooLargeError` above the limit; misfit records are in the result.
    """
    form = table.descriptor.record_format()
    bounds = DraftBounds(what=f"produce to '{table.path}'", bytes_max=bytes_max)
    reading = _Reading(records, table, form, bounds, schemas)
    draft = reading.draft()
    return _checked_rows(draft, reading)


@dataclass(slots=True)
class _Reading:
    records: RecordColumns
    table: TableInfo
    form: RecordFormat
    bounds: DraftBounds
    schemas: SchemaSource | None

    def draft(self) -> Draft:
        """Return all columns of the table, over all records."""
        draft = self._values()
        self._add_keys(draft)
        self._add_timestamps(draft)
        self._add_headers(draft)
        for column in self.table.schema.columns:
            if column.name not in draft.columns:
                draft.columns[column.name] = missing_values(column, len(self.records))
        if draft.deletes is not None:
            self._check_deletes(draft)
        return draft

    def _values(self) -> Draft:
        form, values = self.form, self.records.values
        deletes = None
        if self.table.is_primary_key_table and values.null_count:
            deletes = values.is_null().to_numpy(zero_copy_only=False)
        if form.value is ValueFormat.RAW:
            assert form.value_column is not None
            return Draft(columns={form.value_column: values}, deletes=deletes)
        types = self._types()
        if form.value is ValueFormat.DEBEZIUM_JSON:
            key = self.table.descriptor.primary_key
            return debezium_draft(values, types, self.bounds, key=key)
        if form.value is ValueFormat.AVRO:
            read = avro_columns(
                values,
                types,
                self.bounds,
                schemas=self.schemas,
                record_part="value",
                table=self.table,
            )
        else:
            read = json_columns(values, types, self.bounds, owner="the table", record_part="value")
        return Draft(columns=_columns_of(read), misfits=read.misfits, deletes=deletes)

    def _types(self, names: Sequence[str] | None = None) -> dict[str, pa.DataType]:
        return {
            column.name: column.type
            for column in self.table.schema.columns
            if names is None or column.name in names
        }

    def _add_keys(self, draft: Draft) -> None:
        form, keys = self.form, self.records.keys
        if not form.key_columns or keys.null_count == len(keys):
            return
        types = self._types(form.key_columns)
        if form.key is KeyFormat.RAW:
            self._merge(draft, form.key_columns[0], keys)
            return
        if form.key is KeyFormat.AVRO:
            read = avro_columns(
                keys,
                types,
                self.bounds,
                schemas=self.schemas,
                record_part="key",
                table=self.table,
            )
        elif form.value is ValueFormat.DEBEZIUM_JSON:
            read = debezium_keys(keys, types, self.bounds)
        else:
            read = json_keys(keys, types, self.bounds)
        draft.misfits = {**read.misfits, **draft.misfits}
        for name, array in _columns_of(read).items():
            self._merge(draft, name, array)

    def _merge(self, draft: Draft, name: str, keys: pa.Array) -> None:
        """Fill nulls of a column from the keys; differing values and keys are misfits."""
        values = draft.columns.get(name)
        if values is None or values.null_count == len(values):
            draft.columns[name] = keys
            return
        if keys.type != values.type:
            keys, misfits = _as_text(name, keys)
            draft.misfits = {**misfits, **draft.misfits}
        for at in differing_rows(keys, values):
            key_text, value_text = (
                str(python_value(array[int(at)]))[:80] for array in (keys, values)
            )
            reason = f"the record's key has {key_text!r}, and its value has {value_text!r}"
            draft.misfits.setdefault(int(at), Misfit(name, reason))
        draft.columns[name] = pc.coalesce(values, keys) if values.null_count else values

    def _add_timestamps(self, draft: Draft) -> None:
        name = self.form.timestamp_column
        if name is None:
            return
        ms = self.records.timestamps_ms
        ms_min = int(ms.min(initial=0))
        if ms_min < -_MS_MAX or ms.max(initial=0) > _MS_MAX:
            for at in np.flatnonzero((ms > _MS_MAX) | (ms < -_MS_MAX)):
                reason = f"the record's timestamp {int(ms[at])} is out of range"
                draft.misfits.setdefault(int(at), Misfit(name, reason))
        with np.errstate(over="ignore"):
            us = ms * _US_PER_MS
        t = self._types((name,))[name]
        if ms_min < 0 and (is_null := ms == _NO_TIMESTAMP).any():
            times = pa.array(us, mask=is_null).view(t)
        else:
            times = pa.Array.from_buffers(t, len(us), [None, pa.py_buffer(us)])
        values = draft.columns.get(name)
        draft.columns[name] = (
            times
            if values is None or not values.null_count < len(values)
            else pc.coalesce(values, times)
        )

    def _add_headers(self, draft: Draft) -> None:
        name, headers = self.form.headers_column, self.records.headers
        if name is None or headers is None:
            return
        # A record without headers, or with an empty list, becomes a null.
        has_any = pc.greater(pc.list_value_length(headers), 0)
        cast_headers = pc.if_else(has_any, headers, None).cast(self._types()[name])
        values = draft.columns.get(name)
        draft.columns[name] = cast_headers if values is None else pc.coalesce(values, cast_headers)

    def _check_deletes(self, draft: Draft) -> None:
        """Mark deletes without a complete key as misfits."""
        assert draft.deletes is not None
        for name in self.table.descriptor.primary_key:
            nulls = draft.columns[name].is_null().to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(draft.deletes & nulls):
                reason = f"the record deletes a row, but its key lacks '{name}'"
                draft.misfits.setdefault(int(at), Misfit(name, reason))

    def kept_nbytes(self, draft: Draft) -> int:
        """Return the memory of misfits until stored: the whole batch."""
        records = self.records
        parts = (records.keys, records.values, records.headers, *draft.columns.values())
        return sum(part.get_total_buffer_size() for part in parts if part is not None)

    def content(self, at: int, draft: Draft) -> dict[str, Any]:
        """Return the content of a record, as columns of the table as far as readable."""
        form, records = self.form, self.records
        row: dict[str, Any] = {}
        value = records.values[at].as_py()
        if form.value is ValueFormat.RAW:
            row[str(form.value_column)] = value
        elif value is not None and len(value) > ROW_TEXT_MAX:
            # Parsed objects would be much larger than the kept text, which is cut at the same limit
            # as rows.
            row["kafka.value"] = value[: 4 * ROW_TEXT_MAX + 4].decode(errors="replace")
        elif form.value is ValueFormat.JSON and value is not None:
            try:
                row.update(plain_values(json_object(value), self._types()))
            except ValueError:
                row["kafka.value"] = _shown(value)
        elif value is not None:
            row["kafka.value"] = _shown(value)
        for name in form.key_columns:
            key_column = draft.columns[name]
            if name not in row and at < len(key_column) and key_column[at].is_valid:
                row[name] = python_value(key_column[at])
        key = records.keys[at].as_py()
        if key is not None and not all(name in row for name in form.key_columns):
            row["kafka.key"] = _shown(key)
        for part in (form.timestamp_column, form.headers_column):
            if part is not None and part not in row:
                row[part] = python_value(draft.columns[part][at])
        return row


def _columns_of(read: ReadRows) -> dict[str, pa.Array]:
    return dict(zip(read.rows.schema.names, read.rows.columns, strict=True))


def _as_text(name: str, keys: pa.Array) -> tuple[pa.Array, Misfits]:
    """Return raw keys as texts, and the keys that are no texts."""
    try:
        return keys.cast(pa.string()), {}
    except pa.ArrowInvalid:
        pass
    misfits: Misfits = {}
    texts: list[str | None] = []
    for at, key in enumerate(keys.to_pylist()):
        try:
            texts.append(None if key is None else key.decode())
        except UnicodeDecodeError:
            texts.append(None)
            misfits[at] = Misfit(name, f"the record's key {key[:80]!r} is no text")
    return pa.array(texts, pa.string()), misfits


def _shown(data: bytes) -> str:
    """Return bytes for JSON: as a text, or as hexadecimal digits."""
    cut = data[:_SHOWN_BYTES]
    try:
        return cut.decode()
    except UnicodeDecodeError:
        return cut.hex()


def _with_old_rows(
    rows: pa.RecordBatch, moved: MovedRows
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Return rows with a row of the old key before each moved row, and the record numbers."""
    count = len(moved.records)
    old = [
        moved.old_keys[field.name].cast(field.type)
        if field.name in moved.old_keys
        else pa.nulls(count, field.type)
        for field in rows.schema
    ]
    schema = pa.schema([field.with_nullable(True) for field in rows.schema])
    parts = [pa.RecordBatch.from_arrays(columns, schema=schema) for columns in (rows.columns, old)]
    numbers = np.arange(rows.num_rows)
    order = np.insert(numbers, moved.records, rows.num_rows + np.arange(count))
    batch = pa.concat_batches(parts).take(pa.array(order))
    return batch, np.insert(numbers, moved.records, moved.records)


def _checked_rows(draft: Draft, reading: _Reading) -> CheckedRows:
    """Return the rows that fit, by the checks of every write."""
    table, count = reading.table, len(reading.records)
    table_schema = table.schema.to_arrow()
    arrays = [draft.columns[name] for name in table_schema.names]
    if [array.type for array in arrays] == table_schema.types:
        # The types are those of storage: no cast is needed.
        rows = pa.RecordBatch.from_arrays(arrays, schema=table_schema)
    else:
        rows = pa.RecordBatch.from_arrays(arrays, names=table_schema.names)
    numbers, deletes = np.arange(count), draft.deletes
    if draft.moved is not None and deletes is not None and len(draft.moved.records):
        rows, numbers = _with_old_rows(rows, draft.moved)
        # The first of two rows with the same record number is the old row.
        deletes = deletes[numbers] | np.append(numbers[1:] == numbers[:-1], False)
    if deletes is not None:
        codes = np.where(deletes, DELETE, UPDATE_AFTER).astype(np.int8)
        rows = rows.append_column(CHANGE_TYPE_COLUMN, pa.array(codes))
    if draft.misfits or draft.skipped is not None:
        is_excluded = np.zeros(count, np.bool_) if draft.skipped is None else draft.skipped.copy()
        is_excluded[list(draft.misfits)] = True
        included = np.flatnonzero(~is_excluded[numbers])
        rows, numbers = rows.take(pa.array(included)), numbers[included]
        deletes = None if deletes is None else deletes[included]
    fitting = RowSplitter(table).split(rows)
    fit = fitting.rows
    misfits = {int(numbers[at]): why for at, why in fitting.misfits.items()} | draft.misfits
    if fitting.misfits:
        # A record is written completely or not at all.
        is_whole = ~np.isin(numbers, list(misfits))
        fit = fit.filter(pa.array(np.delete(is_whole, list(fitting.misfits))))
        numbers, deletes = numbers[is_whole], None if deletes is None else deletes[is_whole]
    operations = None
    if table.is_primary_key_table:
        operations = np.full(len(numbers), OPERATION_UPSERT, np.int8)
    if deletes is None:
        if not fit.schema.equals(table_schema):
            fit = pa.RecordBatch.from_arrays(fit.columns, schema=table_schema)
    else:
        assert operations is not None
        operations[deletes] = OPERATION_DELETE
        # Required columns of a deleted row are null, too.
        fit = fit.select(table_schema.names)
    reading.bounds.check_bytes(count, fit.nbytes)
    # If a misfit refuses its batch, its content is not needed.
    if not misfits or reading.form.on_error is not OnError.REJECT:
        return CheckedRows(fit, dict(sorted(misfits.items())), operations, numbers)
    # Content is parsed on access: parsed objects may take thirty times as much memory.
    return CheckedRows(
        fit,
        dict(sorted(misfits.items())),
        operations,
        numbers,
        original=lambda at: reading.content(at, draft),
        original_nbytes=reading.kept_nbytes(draft) + _MISFIT_BYTES * len(misfits),
    )
