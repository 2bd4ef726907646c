"""Rows divided into rows which fit a table and rows which do not, each with a reason.

Arrow's kernels cast and check a whole batch, with the same checks as a write without division. A
refused batch is halved until each part fits or is one row. Good rows thus cost one pass, and each
bad row a few small ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    RequestTooLargeError,
    SchemaMismatchError,
    StreamhouseError,
)
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.casts.conform import check_nulls
from streamhouse.core.model.changelog import OPERATION_DELETE, operations_of
from streamhouse.core.model.lake.limits import LakeLimits
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN, type_name
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import python_value
from streamhouse.core.rows.checked_rows import CheckedRows, Misfit, Misfits, ReadRows
from streamhouse.core.types.registry import type_of

__all__ = ["Cast", "RowSplitter", "cast_values", "castable"]

Cast = Callable[[pa.Array, pa.DataType], pa.Array]

KEY_BYTES_MAX: Final = 16 << 10
ROW_BYTES_MAX: Final = 8 << 20
"""The most bytes of a key, and of a row, of a primary key table: the service's limits."""
LOG_ROW_BYTES_MAX: Final = 31 << 20
_OWN_WORDS: Final = re.compile(r"^table '[^']*'[:,] |, but row \d+ is$| of row \d+(?= )")
_COLUMN: Final = re.compile(r"column '([^']*)'")


def castable(schema: pa.Schema, table: TableInfo) -> pa.Schema:
    """Return `schema` with the table's types where values may be cast one by one.

    A text may hold any number, date or timestamp; a number may fit a narrower type.
    """
    table_schema = table.schema.to_arrow()
    fields = []
    for field in schema:
        position = table_schema.get_field_index(field.name)
        t = field.type if position < 0 else table_schema.field(position).type
        fields.append(field.with_type(t) if _may_be_tried(field.type, t) else field)
    return pa.schema(fields)


def _may_be_tried(source: pa.DataType, target: pa.DataType) -> bool:
    if pa.types.is_nested(target) or pa.types.is_nested(source) or source == target:
        return False
    is_text = pa.types.is_string(source) or pa.types.is_large_string(source)
    if is_text:
        return not pa.types.is_binary(target)
    return _is_number(source) and _is_number(target) and _has_cast(source, target)


def _has_cast(source: pa.DataType, target: pa.DataType) -> bool:
    try:
        pa.array([], source).cast(target)
    except pa.ArrowNotImplementedError:
        return False
    return True


def _is_number(t: pa.DataType) -> bool:
    if pa.types.is_decimal(t):
        # Arrow reads beyond its tables for other scales; see `model.values.decimals`.
        return bool(0 <= t.scale <= t.precision)
    return bool(pa.types.is_integer(t) or pa.types.is_floating(t))


class RowSplitter:
    """Divides batches of rows of one table. `castable` has checked the columns before.

    Args:
        table: the table of the write.
        is_delete: whether rows are keys to delete.
        cast: casts values to a type; raises `SchemaMismatchError` or `ArrowInvalid` if a value does
            not fit.
        cast_key: casts values of primary key columns; default: `cast`.
    """

    def __init__(
        self,
        table: TableInfo,
        *,
        is_delete: bool = False,
        cast: Cast | None = None,
        cast_key: Cast | None = None,
    ) -> None:
        self._cast_values = cast or cast_values
        self._cast_key = cast_key or self._cast_values
        self._table = table
        self._name = str(table.path)
        self._schema = table.schema.to_arrow()
        self._limits = LakeLimits.of_table(table, table.schema_id)
        self._key = table.descriptor.primary_key
        self._strict = table.schema.strict_columns
        rules = table.descriptor.merge_rules() if self._key else None
        self._version = None if rules is None else rules.version_column
        self._is_delete = is_delete
        self._row_bytes_max = ROW_BYTES_MAX if self._key else LOG_ROW_BYTES_MAX

    def split(self, rows: pa.RecordBatch) -> CheckedRows:
        """Return the rows which fit, with the table's types, and the misfits."""
        return self.check(ReadRows(rows, {}))

    def check(self, read: ReadRows) -> CheckedRows:
        """Return the rows which fit, with the table's types; misfits of the reader stay misfits."""
        cast, misfits = self._cast(read)
        self._find_nulls(cast, misfits)
        good, positions = _without(cast, misfits)
        for position, message in _refused(good, self._check):
            column = _COLUMN.search(message)
            reason = _OWN_WORDS.sub("", message)
            misfits[int(positions[position])] = Misfit(column and column[1], reason)
        if not misfits:
            return CheckedRows(cast, misfits)
        return CheckedRows(
            _without(cast, misfits)[0],
            dict(sorted(misfits.items())),
            original=read.original or (lambda at: _values(read.rows, at)),
        )

    def _cast(self, read: ReadRows) -> tuple[pa.RecordBatch, Misfits]:
        """Cast each column; a value without a cast becomes null, with a reason."""
        rows, misfits = read.rows, dict(read.misfits)
        if rows.schema.equals(self._schema):
            return rows, misfits
        arrays, fields = [], []
        for field, array in zip(rows.schema, rows.columns, strict=True):
            position = self._schema.get_field_index(field.name)
            t = field.type if position < 0 else self._schema.field(position).type
            cast_values = self._cast_key if field.name in self._key else self._cast_values
            cast, wrong = _cast_array(array, t, cast_values)
            for at, reason in wrong:
                misfits.setdefault(at, Misfit(field.name, reason))
            arrays.append(cast)
            fields.append(pa.field(field.name, t))
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)), misfits

    def _find_nulls(self, rows: pa.RecordBatch, misfits: Misfits) -> None:
        for _, required in self._strict:
            name = required.name
            position = rows.schema.get_field_index(name)
            if required.nullable or position < 0:
                continue
            array = rows.column(position)
            if array.null_count == 0:
                continue
            nulls = array.is_null().to_numpy(zero_copy_only=False)
            if name not in self._key:
                nulls = nulls & ~self._deletes(rows)
            for at in np.flatnonzero(nulls):
                kind = "the key" if name in self._key else "the column"
                reason = f"null, and {kind} '{name}' must not be null"
                misfits.setdefault(int(at), Misfit(name, reason))
        version = self._version
        if version is not None and version in rows.schema.names:
            # Deletes have a version, too.
            nulls = rows.column(version).is_null().to_numpy(zero_copy_only=False)
            for at in np.flatnonzero(nulls):
                reason = f"null, and the version column '{version}' must not be null"
                misfits.setdefault(int(at), Misfit(version, reason))

    def _deletes(self, rows: pa.RecordBatch) -> npt.NDArray[np.bool_]:
        """Return which rows are deletes, as far as the change types are readable."""
        everything = np.ones(rows.num_rows, dtype=np.bool_)
        if self._is_delete:
            return everything
        if CHANGE_TYPE_COLUMN not in rows.schema.names:
            return ~everything
        types = rows.column(CHANGE_TYPE_COLUMN)
        deletes = ~everything
        try:
            return np.asarray(operations_of(types, table=self._name) == OPERATION_DELETE)
        except SchemaMismatchError:
            for at, text in enumerate(types.to_pylist()):
                deletes[at] = str(text).lower() in ("-d", "d", "delete")
        return deletes

    def _check(self, rows: pa.RecordBatch) -> None:
        """Raise for rows that the service would refuse."""
        upserts = rows
        has_types = CHANGE_TYPE_COLUMN in rows.schema.names
        if has_types:
            operations_of(rows.column(CHANGE_TYPE_COLUMN), table=self._name)
        if has_types or self._is_delete:
            deletes = self._deletes(rows)
            upserts = rows.filter(pa.array(~deletes)) if deletes.any() else rows
        if (
            self._strict
            and upserts.num_rows
            and set(self._schema.names) <= set(upserts.schema.names)
        ):
            # Required columns have no nulls by now: this check looks into nested columns.
            check_nulls(upserts.select(self._schema.names), self._table.schema, table=self._name)
        self._limits.check(upserts, table=self._name)
        byte_count = rows.nbytes
        if byte_count > self._row_bytes_max and rows.num_rows == 1:
            raise SchemaMismatchError(
                f"the row has {byte_count} bytes; at most {self._row_bytes_max}"
            )
        if byte_count > self._row_bytes_max // 2 and rows.num_rows > 1:
            raise RequestTooLargeError("rows that may be too large: look closer")
        if self._key and rows.num_rows:
            longest = pc.max(pc.binary_length(encode_key([rows.column(n) for n in self._key])))
            if longest.as_py() > KEY_BYTES_MAX:
                raise SchemaMismatchError(
                    f"the key ({', '.join(self._key)}) has {longest} bytes; at most {KEY_BYTES_MAX}"
                )


def _without(
    rows: pa.RecordBatch, misfits: Misfits
) -> tuple[pa.RecordBatch, npt.NDArray[np.int64]]:
    """Return the rows without misfits, and their positions."""
    positions = np.arange(rows.num_rows)
    if not misfits:
        return rows, positions
    positions = np.delete(positions, list(misfits))
    return rows.take(pa.array(positions)), positions


def _refused(
    rows: pa.RecordBatch, check: Callable[[pa.RecordBatch], None]
) -> Iterator[tuple[int, str]]:
    """Yield the rows refused by `check`, with its message."""
    waiting = [(0, rows)]
    while waiting:
        first, part = waiting.pop()
        if part.num_rows == 0:
            continue
        try:
            check(part)
        except StreamhouseError as error:
            if part.num_rows == 1:
                yield first, error.message
                continue
            half = part.num_rows // 2
            waiting.append((first + half, part.slice(half)))
            waiting.append((first, part.slice(0, half)))


def _cast_array(
    array: pa.Array, t: pa.DataType, cast: Cast
) -> tuple[pa.Array, Sequence[tuple[int, str]]]:
    """Return an array of type `t`, with null for a value without a cast, and the failures."""
    if array.type == t:
        return array, ()
    parts: list[pa.Array] = []
    wrong: list[tuple[int, str]] = []
    waiting = [(0, array)]
    while waiting:
        first, part = waiting.pop()
        try:
            parts.append(cast(part, t))
        except (pa.ArrowInvalid, SchemaMismatchError):
            if len(part) == 1:
                parts.append(pa.nulls(1, t))
                shown = str(python_value(part[0]))[:100]
                wrong.append((first, f"{shown!r} is no {type_name(t)}, or is outside of its range"))
                continue
            half = len(part) // 2
            waiting.append((first + half, part.slice(half)))
            waiting.append((first, part.slice(0, half)))
    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), wrong


def cast_values(array: pa.Array, t: pa.DataType) -> pa.Array:
    """Return values of type `t`; texts may become numbers, dates and timestamps."""
    is_text = pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
    if not is_text or pa.types.is_binary(t) or pa.types.is_nested(t):
        return array.cast(t)
    return type_of(t).values_of_texts(array)


def _values(rows: pa.RecordBatch, at: int) -> dict[str, Any]:
    return {
        name: python_value(column[at])
        for name, column in zip(rows.schema.names, rows.columns, strict=True)
    }
