"""Records as rows of a table.

Every part of a record is read for all records at once: values, keys, timestamps, headers. Their
columns are put together, and divided into rows that fit the table and records that do not, by the
same checks as rows of any other write. A batch that has nothing wrong is never looked at record by
record; raw values are not even copied.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
from streamhouse.core.model.rejected.companion import ROW_TEXT_MAX
from streamhouse.core.model.rejected.row_splitter import BadRow, RowSplitter
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.text.json_reading import json_object, plain_values
from streamhouse.storage_service.kafka.records.columns import RecordColumns
from streamhouse.storage_service.kafka.values._debezium import debezium_draft, debezium_keys
from streamhouse.storage_service.kafka.values._draft import (
    Bad,
    Draft,
    DraftBounds,
    MovedRows,
    first_that_differs,
)
from streamhouse.storage_service.kafka.values._json_columns import json_columns, json_keys
from streamhouse.storage_service.kafka.values.avro_columns import (
    SchemaSource,
    avro_columns,
)

__all__ = ["RecordRows", "rows_of"]

_US_PER_MS: Final = 1_000
_MS_MAX: Final = (1 << 63) // _US_PER_MS - 1
_NO_TIMESTAMP: Final = -1
_SHOWN_BYTES: Final = 64 << 10
# The reason, and where it was.
_BAD_ROW_BYTES: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRows:
    """What a batch of records is to a table.

    `rows` have the table's columns, in the order of their records; `records` has the number of
    each row's record, from 0 on. A record that gives a row another key has two rows. `operations`
    (`model.changelog`) is set for tables with a primary key; of a row that is deleted only the key
    matters. `bad` has the records that are no rows, with their numbers as positions, and what they
    have if it is to be kept (`kafka.on.error`). A record in neither changes nothing.
    """

    rows: pa.RecordBatch
    records: npt.NDArray[np.int64]
    operations: npt.NDArray[np.int8] | None
    bad: Sequence[BadRow]
    bad_nbytes: int = 0
    """What `bad` holds of memory: all records of the batch, where some are kept."""

    def parts(self, counts: Sequence[int]) -> Iterator[RecordRows]:
        """Yield what each of several batches is, of which these are the records, by their counts.

        Rows are not copied: a part is a slice of these.
        """
        bounds = list(itertools.accumulate(counts, initial=0))
        rows = np.searchsorted(self.records, bounds).tolist()
        bad = [bisect.bisect_left(self.bad, at, key=lambda row: row.position) for at in bounds]
        for at, first in enumerate(bounds[:-1]):
            start, stop = rows[at], rows[at + 1]
            yield RecordRows(
                rows=self.rows.slice(start, stop - start),
                records=self.records[start:stop] - first,
                operations=None if self.operations is None else self.operations[start:stop],
                bad=[
                    dataclasses.replace(row, position=row.position - first)
                    for row in self.bad[bad[at] : bad[at + 1]]
                ],
                bad_nbytes=self.bad_nbytes,
            )


def rows_of(
    records: RecordColumns,
    table: TableInfo,
    *,
    bytes_max: int,
    schemas: SchemaSource | None = None,
) -> RecordRows:
    """Read records as rows. On any thread.

    Args:
        bytes_max: what the rows may take as Arrow's.
        schemas: where schemas of Avro are found.

    Raises `RequestTooLargeError` for more than that; what a record has that does not fit is in the
    result.
    """
    form = table.descriptor.record_format()
    bounds = DraftBounds(what=f"produce to '{table.path}'", bytes_max=bytes_max)
    reading = _Reading(records, table, form, bounds, schemas)
    draft = reading.draft()
    return _fitted(draft, reading)


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
                draft.columns[column.name] = pa.nulls(len(self.records), column.type)
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
            rows, bad = avro_columns(
                values,
                types,
                self.bounds,
                schemas=self.schemas,
                what_each="value",
                table=self.table,
            )
        else:
            rows, bad = json_columns(
                values, types, self.bounds, whose="the table", what_each="value"
            )
        columns = dict(zip(rows.schema.names, rows.columns, strict=True))
        return Draft(columns=columns, bad=bad, deletes=deletes)

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
        found: Mapping[str, pa.Array]
        bad: Bad = {}
        if form.key is KeyFormat.RAW:
            found = {form.key_columns[0]: keys}
        else:
            if form.key is KeyFormat.AVRO:
                rows, bad = avro_columns(
                    keys,
                    types,
                    self.bounds,
                    schemas=self.schemas,
                    what_each="key",
                    table=self.table,
                )
            elif form.value is ValueFormat.DEBEZIUM_JSON:
                rows, bad = debezium_keys(keys, types, self.bounds)
            else:
                rows, bad = json_keys(keys, types, self.bounds)
            found = dict(zip(rows.schema.names, rows.columns, strict=True))
        for at, why in bad.items():
            draft.bad.setdefault(at, why)
        for name, array in found.items():
            self._merge(draft, name, array)

    def _merge(self, draft: Draft, name: str, keys: pa.Array) -> None:
        """Let a column have what keys say, where values say nothing; both must be the same."""
        values = draft.columns.get(name)
        if values is None or values.null_count == len(values):
            draft.columns[name] = keys
            return
        if keys.type != values.type:
            keys, bad = _as_text(name, keys)
            draft.bad = {**bad, **draft.bad}
        for at in first_that_differs(keys, values):
            of_key, of_value = (str(python_value(array[int(at)]))[:80] for array in (keys, values))
            reason = f"the record's key has {of_key!r}, and its value has {of_value!r}"
            draft.bad.setdefault(int(at), (name, reason))
        draft.columns[name] = pc.coalesce(values, keys) if values.null_count else values

    def _add_timestamps(self, draft: Draft) -> None:
        name = self.form.timestamp_column
        if name is None:
            return
        ms = self.records.timestamps_ms
        least = int(ms.min(initial=0))
        if least < -_MS_MAX or ms.max(initial=0) > _MS_MAX:
            for at in np.flatnonzero((ms > _MS_MAX) | (ms < -_MS_MAX)):
                reason = f"the record's timestamp {int(ms[at])} is out of range"
                draft.bad.setdefault(int(at), (name, reason))
        with np.errstate(over="ignore"):
            us = ms * _US_PER_MS
        t = self._types((name,))[name]
        if least < 0 and (is_null := ms == _NO_TIMESTAMP).any():
            found = pa.array(us, mask=is_null).view(t)
        else:
            found = pa.Array.from_buffers(t, len(us), [None, pa.py_buffer(us)])
        values = draft.columns.get(name)
        draft.columns[name] = (
            found
            if values is None or not values.null_count < len(values)
            else pc.coalesce(values, found)
        )

    def _add_headers(self, draft: Draft) -> None:
        name, headers = self.form.headers_column, self.records.headers
        if name is None or headers is None:
            return
        # No headers are null, whether a record has an empty list of them or none.
        has_any = pc.greater(pc.list_value_length(headers), 0)
        found = pc.if_else(has_any, headers, None).cast(self._types()[name])
        values = draft.columns.get(name)
        draft.columns[name] = found if values is None else pc.coalesce(values, found)

    def _check_deletes(self, draft: Draft) -> None:
        """A record without a value needs a key."""
        assert draft.deletes is not None
        for name in self.table.descriptor.primary_key:
            nulls = draft.columns[name].is_null().to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(draft.deletes & nulls):
                reason = f"the record deletes a row, and its key does not say '{name}'"
                draft.bad.setdefault(int(at), (name, reason))

    def kept_nbytes(self, draft: Draft) -> int:
        """Return what bad records hold until they are stored: the batch."""
        records = self.records
        parts = (records.keys, records.values, records.headers, *draft.columns.values())
        return sum(part.get_total_buffer_size() for part in parts if part is not None)

    def given(self, at: int, draft: Draft) -> dict[str, Any]:
        """Return what a record has, as columns of the table as far as it could be read."""
        form, records = self.form, self.records
        row: dict[str, Any] = {}
        value = records.values[at].as_py()
        if form.value is ValueFormat.RAW:
            row[str(form.value_column)] = value
        elif value is not None and len(value) > ROW_TEXT_MAX:
            # Its objects would be far more than what is kept of it: it is cut where rows are.
            row["kafka.value"] = value[: 4 * ROW_TEXT_MAX + 4].decode(errors="replace")
        elif form.value is ValueFormat.JSON and value is not None:
            try:
                row.update(plain_values(json_object(value), self._types()))
            except ValueError:
                row["kafka.value"] = _shown(value)
        elif value is not None:
            row["kafka.value"] = _shown(value)
        for name in form.key_columns:
            found = draft.columns[name]
            if name not in row and at < len(found) and found[at].is_valid:
                row[name] = python_value(found[at])
        key = records.keys[at].as_py()
        if key is not None and not all(name in row for name in form.key_columns):
            row["kafka.key"] = _shown(key)
        for part in (form.timestamp_column, form.headers_column):
            if part is not None and part not in row:
                row[part] = python_value(draft.columns[part][at])
        return row


class _Given(Mapping[str, Any]):
    """What a bad record has, read when that is asked: until then it is the bytes that came.

    As Python's objects it may take thirty times as much.
    """

    def __init__(self, reading: _Reading, at: int, draft: Draft) -> None:
        self._reading, self._at, self._draft = reading, at, draft

    def items(self) -> ItemsView[str, Any]:
        """Return all of it, read once."""
        return self._reading.given(self._at, self._draft).items()

    def __getitem__(self, name: str) -> Any:
        return dict(self.items())[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.items()))

    def __len__(self) -> int:
        return len(self.items())


def _as_text(name: str, keys: pa.Array) -> tuple[pa.Array, Bad]:
    """Return raw keys as texts, and which are none."""
    try:
        return keys.cast(pa.string()), {}
    except pa.ArrowInvalid:
        pass
    bad: Bad = {}
    texts: list[str | None] = []
    for at, key in enumerate(keys.to_pylist()):
        try:
            texts.append(None if key is None else key.decode())
        except UnicodeDecodeError:
            texts.append(None)
            bad[at] = (name, f"the record's key {key[:80]!r} is no text")
    return pa.array(texts, pa.string()), bad


def _shown(data: bytes) -> str:
    """Return bytes as JSON can have them: as a text, or as hexadecimal digits."""
    cut = data[:_SHOWN_BYTES]
    try:
        return cut.decode()
    except UnicodeDecodeError:
        return cut.hex()


def _with_old_rows(
    rows: pa.RecordBatch, moved: MovedRows
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Return rows with one of the old key before each that gets another, and their numbers."""
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


def _fitted(draft: Draft, reading: _Reading) -> RecordRows:
    """Return the rows that fit, by the checks that every write has."""
    table, count = reading.table, len(reading.records)
    wanted = table.schema.to_arrow()
    arrays = [draft.columns[name] for name in wanted.names]
    if [array.type for array in arrays] == wanted.types:
        # As they are to be stored: nothing is cast then.
        rows = pa.RecordBatch.from_arrays(arrays, schema=wanted)
    else:
        rows = pa.RecordBatch.from_arrays(arrays, names=wanted.names)
    left, deletes = np.arange(count), draft.deletes
    if draft.moved is not None and deletes is not None and len(draft.moved.records):
        rows, left = _with_old_rows(rows, draft.moved)
        # Of two rows with one number the first is the old one.
        deletes = deletes[left] | np.append(left[1:] == left[:-1], False)
    if deletes is not None:
        codes = np.where(deletes, DELETE, UPDATE_AFTER).astype(np.int8)
        rows = rows.append_column(CHANGE_TYPE_COLUMN, pa.array(codes))
    if draft.bad or draft.skipped is not None:
        out = np.zeros(count, np.bool_) if draft.skipped is None else draft.skipped.copy()
        out[np.fromiter(draft.bad, np.int64, len(draft.bad))] = True
        is_in = np.flatnonzero(~out[left])
        rows, left = rows.take(pa.array(is_in)), left[is_in]
        deletes = None if deletes is None else deletes[is_in]
    fit, misfits = RowSplitter(table).split(rows)
    bad = {
        **{int(left[row.position]): (row.column, row.reason) for row in misfits},
        **draft.bad,
    }
    if misfits:
        is_fit = np.ones(len(left), np.bool_)
        is_fit[[row.position for row in misfits]] = False
        # A record is written as a whole or not at all.
        is_whole = ~np.isin(left, list(bad))
        fit = fit.filter(pa.array(is_whole[is_fit]))
        left, deletes = left[is_whole], None if deletes is None else deletes[is_whole]
    operations = None
    if table.is_primary_key_table:
        operations = np.full(len(left), OPERATION_UPSERT, np.int8)
    if deletes is None:
        if not fit.schema.equals(wanted):
            fit = pa.RecordBatch.from_arrays(fit.columns, schema=wanted)
    else:
        assert operations is not None
        operations[deletes] = OPERATION_DELETE
        # Of a row that is deleted required columns are null, too.
        fit = fit.select(wanted.names)
    reading.bounds.check_bytes(count, fit.nbytes)
    # Where a bad record refuses its batch, nobody asks what it had.
    is_kept = reading.form.on_error is OnError.REJECT
    return RecordRows(
        rows=fit,
        records=left,
        operations=operations,
        bad=[
            BadRow(
                position=at,
                column=why[0],
                reason=why[1],
                values=_Given(reading, at, draft) if is_kept else {},
            )
            for at, why in sorted(bad.items())
        ],
        bad_nbytes=reading.kept_nbytes(draft) + _BAD_ROW_BYTES * len(bad) if bad and is_kept else 0,
    )
