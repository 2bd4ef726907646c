"""Avro in Confluent's framing of five bytes, as columns of a table and back.

The framing is a zero byte, then the schema's id as four big-endian bytes. Records with the same id
are read together, by whole columns; a field of the schema is the column of its name.

Source: Confluent, "Schema Registry wire format".
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    InvalidRequestError,
    NotFoundError,
    SchemaMismatchError,
    StreamhouseError,
    UnsupportedError,
)
from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.casts.lossless import castings, fitted, may_fit
from streamhouse.core.model.casts.written_rows import check_names
from streamhouse.core.model.schema import Column, Schema, empty_batch, type_name
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.core.rows.checked_rows import Misfit, Misfits, ReadRows
from streamhouse.storage_service.kafka.avro_library import read_values, write_rows
from streamhouse.storage_service.kafka.avro_schema import AvroSchema, cached_schema
from streamhouse.storage_service.kafka.values._avro_arrays import from_plain, to_plain
from streamhouse.storage_service.kafka.values._draft import DraftBounds, spread_out

__all__ = ["SchemaSource", "avro_columns", "avro_records"]

_HEAD: Final = struct.Struct(">BI")
_HEAD_BYTES: Final = _HEAD.size
# The limit for records that are decoded together, at their largest possible size.
_STEP_BYTES: Final = 32 << 20
_REMEDY: Final = "register a schema that has such values, or change the row"


class SchemaSource(Protocol):
    """Finds Avro schemas, without waiting."""

    def schema(self, schema_id: int, /) -> str:
        """Return a schema by id; raises `NotFoundError` for an unknown id."""

    def table_schema(self, schema_id: int, /) -> int | None:
        """Return the version of the table's schema whose column names the fields have.

        None if the version is unknown.
        """

    def latest(self, path: TablePath, part: str, /) -> tuple[int, str]:
        """Return the id and text of the newest schema for a table's `key` or `value`.

        Raises `NotFoundError` without any schema.
        """


def avro_columns(
    values: pa.BinaryArray,
    types: Mapping[str, pa.DataType],
    bounds: DraftBounds,
    *,
    schemas: SchemaSource | None,
    record_part: str,
    table: TableInfo,
) -> ReadRows:
    """Return values as rows of columns `types` of a table; a null is a row of nulls."""
    bounds.check(types, len(values))
    reader = _Reader(types, bounds, schemas, record_part, table)
    return spread_out(values, reader.rows)


class _Reader:
    def __init__(
        self,
        types: Mapping[str, pa.DataType],
        bounds: DraftBounds,
        schemas: SchemaSource | None,
        record_part: str,
        table: TableInfo,
    ) -> None:
        self._types = types
        self._table = table
        self._row_schema = Schema(
            tuple(Column(id=n, name=name, type=t) for n, (name, t) in enumerate(types.items(), 1))
        )
        self._bounds = bounds
        self._schemas = schemas
        self._record_part = record_part
        self._byte_count = 0

    def rows(self, values: pa.BinaryArray) -> ReadRows:
        """Return the rows of values, without null values."""
        misfits: Misfits = {}
        ids = _schema_ids(values)
        for at in np.flatnonzero(ids < 0):
            misfits[int(at)] = Misfit(
                None,
                f"the {self._record_part} is no Avro in Confluent's framing: a zero byte and the"
                " schema's id come first",
            )
        parts: list[pa.RecordBatch] = []
        order: list[npt.NDArray[np.int64]] = []
        for schema_id in np.unique(ids[ids >= 0]):
            places = np.flatnonzero(ids == schema_id)
            try:
                schema = self._schema(int(schema_id))
                batches_of_schema, misfit_values = self._decoded(
                    values.take(pa.array(places)), schema, int(schema_id)
                )
            except StreamhouseError as error:
                if not isinstance(error, InvalidRequestError | NotFoundError):
                    raise
                misfits |= {int(at): Misfit(None, error.message) for at in places}
                continue
            misfits |= {int(places[at]): why for at, why in misfit_values.items()}
            good = np.delete(places, list(misfit_values))
            parts += batches_of_schema
            order.append(good)
        joined = pa.Table.from_batches(parts, schema=self._row_schema.to_arrow()).combine_chunks()
        indices = np.full(len(values), -1, np.int64)
        if order:
            places = np.concatenate(order)
            indices[places] = np.arange(len(places))
        rows = joined.take(pa.array(indices, mask=indices < 0)).combine_chunks()
        batches = rows.to_batches()
        if not batches:
            return ReadRows(empty_batch(joined.schema), misfits)
        return ReadRows(batches[0], misfits)

    def _schema(self, schema_id: int) -> AvroSchema:
        """Return a schema whose fields are columns; raises `InvalidRequestError` otherwise."""
        if self._schemas is None:
            raise UnsupportedError("the service has no schemas of Avro")
        text = self._schemas.schema(schema_id)
        schema = cached_schema(text)
        if schema.is_wrapped and len(self._types) != 1:
            raise SchemaMismatchError(
                f"schema {schema_id} is no record, and the {self._record_part} has several columns"
            )
        pairs = self._pairs(schema)
        check_names(
            self._table,
            [column for _, column, _ in pairs if column is not None],
            since=self._schemas.table_schema(schema_id),
            how=f"register a schema of another text than schema {schema_id}, as another doc,",
        )
        for name, column, arrow in pairs:
            if column is None:
                raise SchemaMismatchError(
                    f"the table has no column '{name[:100]}', which schema {schema_id} has"
                )
            if not may_fit(arrow, self._types[column]):
                raise SchemaMismatchError(
                    f"field '{name}' of schema {schema_id} is {type_name(arrow)}, and column"
                    f" '{column}' is {type_name(self._types[column])}"
                )
        return schema

    def _pairs(self, schema: AvroSchema) -> Sequence[tuple[str, str | None, pa.DataType]]:
        """Return every field with its column and the values' type."""
        if schema.is_wrapped:
            return [(schema.fields[0].name, next(iter(self._types)), schema.fields[0].type.arrow)]
        return [
            (field.name, field.name if field.name in self._types else None, field.type.arrow)
            for field in schema.fields
        ]

    def _decoded(
        self, values: pa.BinaryArray, schema: AvroSchema, schema_id: int
    ) -> tuple[list[pa.RecordBatch], Misfits]:
        """Return the rows of one schema in order, without misfits."""
        lengths = pc.binary_length(values).to_numpy().astype(np.int64)
        bytes_bound = schema.width + lengths * schema.growth
        batches: list[pa.RecordBatch] = []
        misfits: Misfits = {}
        # Decoded rows are in memory before their size is known.
        for at in np.flatnonzero(bytes_bound > self._bounds.bytes_max):
            misfits[int(at)] = Misfit(
                None,
                f"the {self._record_part} has {int(lengths[at])} bytes, which by schema {schema_id}"
                f" may be more than {self._bounds.bytes_max} bytes of rows (body_bytes_max)",
            )
        if misfits:
            places = np.delete(np.arange(len(values)), list(misfits))
            batches, misfit_values = self._decoded(values.take(pa.array(places)), schema, schema_id)
            misfits |= {int(places[at]): why for at, why in misfit_values.items()}
            return batches, misfits
        bytes_bound = np.cumsum(bytes_bound)
        first = 0
        while first < len(values):
            used = int(bytes_bound[first - 1]) if first else 0
            end = max(
                int(np.searchsorted(bytes_bound, used + _STEP_BYTES, side="right")), first + 1
            )
            self._decode_step(values, first, end, schema, schema_id, batches, misfits)
            first = end
        return batches, misfits

    def _decode_step(
        self,
        values: pa.BinaryArray,
        first: int,
        end: int,
        schema: AvroSchema,
        schema_id: int,
        batches: list[pa.RecordBatch],
        misfits: Misfits,
    ) -> None:
        waiting = [(first, end)]
        while waiting:
            start, stop = waiting.pop()
            try:
                rows = self._read(values.slice(start, stop - start), schema)
            except (ValueError, pa.ArrowException, StreamhouseError) as error:
                if stop - start == 1:
                    message = error.message if isinstance(error, StreamhouseError) else str(error)
                    misfits[start] = Misfit(
                        None,
                        f"the {self._record_part} is no Avro of schema {schema_id}"
                        f" that the table can have: {message[:300]}",
                    )
                    continue
                half = (start + stop) // 2
                waiting += [(half, stop), (start, half)]
                continue
            self._byte_count += rows.nbytes
            self._bounds.check_bytes(len(values), self._byte_count)
            batches.append(rows)

    def _read(self, values: pa.BinaryArray, schema: AvroSchema) -> pa.RecordBatch:
        plain = read_values(pc.binary_slice(values, _HEAD_BYTES).to_pylist(), schema)
        arrays = dict(zip(plain.schema.names, plain.columns, strict=True))
        columns_read: dict[str, pa.Array] = {}
        for field, (_, column, _) in zip(schema.fields, self._pairs(schema), strict=True):
            assert column is not None, "checked by _schema"
            columns_read[column] = from_plain(arrays[field.name], field.type)
        field_rows = pa.RecordBatch.from_pydict(columns_read)
        # Texts may be invalid: the library does not check UTF-8.
        field_rows.validate(full=True)
        rows = fitted(
            field_rows, castings(field_rows.schema, self._row_schema), table=self._record_part
        )
        columns = [
            rows.column(name).cast(t) if name in columns_read else self._missing(name, len(values))
            for name, t in self._types.items()
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._row_schema.to_arrow())

    def _missing(self, name: str, count: int) -> pa.Array:
        """Return the values of a column that the schema of the records lacks."""
        return missing_values(self._table.schema.column(name, table=self._record_part), count)


def _schema_ids(values: pa.BinaryArray) -> npt.NDArray[np.int64]:
    """Return the schema id of every value; -1 without a valid framing."""
    lengths = pc.binary_length(values).to_numpy().astype(np.int64)
    heads = pc.binary_join_element_wise(
        pc.binary_slice(values, 0, _HEAD_BYTES), pa.scalar(b"\1" * _HEAD_BYTES), pa.scalar(b"")
    )
    # Shorter values are padded with ones to five bytes.
    joined_heads = b"".join(pc.binary_slice(heads, 0, _HEAD_BYTES).to_pylist())
    table = np.frombuffer(joined_heads, np.uint8).reshape(-1, _HEAD_BYTES)
    ids = table[:, 1:].astype(np.int64) @ np.array([1 << 24, 1 << 16, 1 << 8, 1])
    return np.where((lengths >= _HEAD_BYTES) & (table[:, 0] == 0), ids, -1)


def avro_records(
    rows: pa.RecordBatch, table: TableInfo, *, schemas: SchemaSource | None, record_part: str
) -> pa.BinaryArray:
    """Return rows as framed Avro, in the newest schema of the table's key or value.

    Raises `SchemaMismatchError` for a row that the schema cannot express, with the column if known.
    """
    if schemas is None:
        raise UnsupportedError(f"table '{table.path}': the service has no schemas of Avro")
    schema_id, text = schemas.latest(table.path, record_part)
    schema = cached_schema(text)
    where = f"table '{table.path}', schema {schema_id} of its {record_part}"
    arrays, fields = [], []
    for number, field in enumerate(schema.fields):
        name = rows.schema.names[number] if schema.is_wrapped else field.name
        if name in rows.schema.names:
            array = rows.column(name)
        else:
            array = pa.nulls(rows.num_rows, field.type.arrow)
        if not may_fit(array.type, field.type.arrow):
            raise SchemaMismatchError(
                f"{where}: column '{name}' is {type_name(array.type)}, and its field is"
                f" {type_name(field.type.arrow)}"
            )
        field_schema = Schema((Column(id=1, name=name, type=field.type.arrow),))
        column_batch = pa.RecordBatch.from_arrays([array], names=[name])
        try:
            column_batch = fitted(
                column_batch, castings(column_batch.schema, field_schema), table=str(table.path)
            )
            array = to_plain(column_batch.column(0), field.type, where=f"{where}: column '{name}'")
        except pa.ArrowInvalid as error:
            raise SchemaMismatchError(
                f"{where}: column '{name}' has a value that the schema cannot express: {error};"
                f" {_REMEDY}"
            ) from error
        arrays.append(array)
        fields.append(pa.field(field.name, arrays[-1].type, nullable=field.type.is_nullable))
    if not rows.num_rows:
        return pa.array([], pa.binary())
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    try:
        written = write_rows(batch, schema)
    except SchemaMismatchError as error:
        raise SchemaMismatchError(
            f"{where}: the rows do not fit the schema: {error.message}; {_REMEDY}"
        ) from error
    head = pa.scalar(_HEAD.pack(0, schema_id), pa.binary())
    return pc.binary_join_element_wise(head, written, pa.scalar(b""))
