"""Rows of one table as values in RocksDB.

    version offset u64 | schema id u8 | the row (row_layout)          all little endian

Shorter values than 13 bytes have zeros before the row up to 13 bytes.

The version offset is the changelog offset of the `+I` or `+U` that wrote this version of the row.
Values are encoded before their offset is known and stamped in place afterwards. Two values with the
same stamp and of one schema are equal exactly when their rows are identical.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from streamhouse.core.errors import CorruptDataError, InvalidSchemaError
from streamhouse.core.model.hashing.byte_runs import binary_parts, gather_at, write_at
from streamhouse.core.model.schema import Schema
from streamhouse.core.model.schema_change import (
    KEY_TABLE_SCHEMA_ID_MAX,
    convert_rows,
)
from streamhouse.storage_service.kv.rows._row_layout import RowLayout

__all__ = ["RowCodec", "stamp_versions", "versions_of"]

_VERSION: Final = np.dtype("<i8")
_SCHEMA_ID: Final = np.dtype("u1")
_PREFIX_BYTES: Final = _VERSION.itemsize + _SCHEMA_ID.itemsize
VALUE_BYTES_MIN: Final = 13
"""The least length of a value; `row_arena` relies on this minimum."""


class RowCodec:
    """Encodes rows of `schema`, and decodes rows of any version; thread-safe.

    `earlier` are older schema versions of stored rows, by schema id. Decoded rows have `schema`.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        schema_id: int,
        table: str,
        earlier: Mapping[int, Schema] | None = None,
    ) -> None:
        if not 0 <= schema_id <= KEY_TABLE_SCHEMA_ID_MAX:
            raise InvalidSchemaError(
                f"table '{table}': schema {schema_id} cannot be stored; a primary key table has at"
                f" most {KEY_TABLE_SCHEMA_ID_MAX + 1} schemas"
            )
        self.schema: Final = schema
        self.arrow_schema: Final = schema.to_arrow()
        self.schema_id: Final = schema_id
        self._table: Final = table
        types = self.arrow_schema.types
        shortest = RowLayout(types, prefix_bytes=_PREFIX_BYTES).header.itemsize
        spare = max(0, VALUE_BYTES_MIN - shortest)
        self._layout: Final = RowLayout(types, prefix_bytes=_PREFIX_BYTES + spare)
        self._earlier: Final = {
            earlier_schema: RowCodec(version, schema_id=earlier_schema, table=table)
            for earlier_schema, version in (earlier or {}).items()
            if earlier_schema != schema_id
        }

    @property
    def value_bytes_min(self) -> int:
        """The bytes of a row whose strings and nested values are all empty."""
        return self._layout.header.itemsize

    def encode(self, rows: pa.RecordBatch) -> pa.Array:
        """Return one value a row, stamped with version 0. Columns are in schema order."""
        values = self._layout.encode(rows.columns)
        if self.schema_id:
            data, offsets = binary_parts(values)
            places = offsets[:-1].astype(np.int64) + _VERSION.itemsize
            write_at(data, places, np.full(len(values), self.schema_id, dtype=_SCHEMA_ID))
        return values

    def decode(self, values: pa.Array) -> pa.RecordBatch:
        """Return the rows of `values` in the current version; no value is null."""
        data, starts, shortest = self._parts(values)
        ids = data[starts + _VERSION.itemsize]
        if (ids == self.schema_id).all():
            return self._decode_own(data, starts, shortest)
        order = np.argsort(ids, kind="stable")
        parts = []
        for schema_id in np.unique(ids):
            codec = self if schema_id == self.schema_id else self._earlier.get(int(schema_id))
            if codec is None:
                raise CorruptDataError(
                    f"table '{self._table}': a stored row has schema {schema_id}, which is not"
                    " known"
                )
            version_values = values.take(pa.array(np.flatnonzero(ids == schema_id)))
            rows = codec._decode_own(*codec._parts(version_values))
            parts.append(convert_rows(rows, codec.schema, self.schema, table=self._table))
        return pa.concat_batches(parts).take(pa.array(np.argsort(order)))

    def in_current_version(self, values: pa.Array) -> pa.Array:
        """Return `values` with earlier versions encoded in the current one; stamps and nulls stay.

        Used to compare values.
        """
        if not self._earlier or values.null_count == len(values):
            return values
        present = values.drop_null() if values.null_count else values
        data, starts, _ = self._parts(present)
        if (data[starts + _VERSION.itemsize] == self.schema_id).all():
            return values
        encoded = self.encode(self.decode(present))
        stamp_versions(encoded, versions_of(present))
        if present is values:
            return encoded
        is_stored = values.is_valid().to_numpy(zero_copy_only=False)
        return encoded.take(pa.array(np.cumsum(is_stored) - 1, mask=~is_stored))

    def _parts(self, values: pa.Array) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], int]:
        """Return the data, the start of each value, and the length of the shortest value."""
        data, offsets = binary_parts(values)
        starts = offsets[:-1].astype(np.int64)
        shortest = int((offsets[1:] - starts).min(initial=self.value_bytes_min))
        self._check_length(shortest, VALUE_BYTES_MIN)
        return data, starts, shortest

    def _check_length(self, shortest: int, least: int) -> None:
        if shortest < least:
            raise CorruptDataError(f"table '{self._table}': a stored row is too short")

    def _decode_own(
        self, data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], shortest: int
    ) -> pa.RecordBatch:
        self._check_length(shortest, self.value_bytes_min)
        columns = self._layout.decode_at(data, starts)
        return pa.RecordBatch.from_arrays(columns, schema=self.arrow_schema)


def versions_of(values: pa.Array) -> npt.NDArray[np.int64]:
    """Return the version offset of every value; no value may be null."""
    data, offsets = binary_parts(values)
    versions: npt.NDArray[Any] = gather_at(data, offsets[:-1].astype(np.int64), _VERSION)
    return versions


def stamp_versions(values: pa.Array, versions: npt.NDArray[np.int64]) -> None:
    """Write the version offsets into `values`, in place: the caller must own their bytes."""
    data, offsets = binary_parts(values)
    write_at(data, offsets[:-1].astype(np.int64), versions.astype(_VERSION, copy=False))
