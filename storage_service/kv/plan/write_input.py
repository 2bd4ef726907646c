"""The rows of one upsert or delete, checked and made uniform before planning.

Every error independent of the stored rows is raised here, as one sentence with table, column and
row; row numbers are the caller's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    InvalidRequestError,
    RequestTooLargeError,
    SchemaMismatchError,
    UnsupportedError,
)
from streamhouse.core.model.bucketing import encode_key
from streamhouse.core.model.casts.conform import check_nulls, conform, null_refused
from streamhouse.core.model.changelog import (
    OPERATION_DELETE,
    OPERATION_NONE,
    OPERATION_UPSERT,
)
from streamhouse.core.model.hashing.byte_runs import longest_of
from streamhouse.core.model.merge_engine import DeleteBehavior, MergeEngine
from streamhouse.core.model.schema import Schema
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = [
    "KEY_BYTES_MAX",
    "MET_BYTES_MAX",
    "ROW_BYTES_MAX",
    "WriteInput",
    "check_keys",
    "check_rows",
    "is_merged",
    "too_much_met",
]

KEY_BYTES_MAX: Final = 16 << 10
"""Longest encoded key."""

ROW_BYTES_MAX: Final = 8 << 20
"""Longest encoded row."""

MET_BYTES_MAX: Final = 512 << 20
"""The most bytes of stored rows in one plan: planning needs several times as much, and old and
new rows share an array of less than 2 GiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteInput:
    """Checked changes, in order.

    `rows` has all columns of the table; values in columns not `named`, or outside the key of a
    delete, are meaningless. `deletes` marks the deletes. `row_numbers` are the caller's.
    """

    rows: pa.RecordBatch
    keys: pa.Array
    deletes: npt.NDArray[np.bool_]
    named: frozenset[str]
    row_numbers: npt.NDArray[np.int64]

    @property
    def is_partial(self) -> bool:
        """Whether some columns keep their stored values."""
        return len(self.named) < int(self.rows.num_columns)


def check_rows(
    rows: pa.RecordBatch,
    rules: TableRules,
    *,
    operations: npt.NDArray[np.int8] | None = None,
    columns: Sequence[str] | None = None,
    row_numbers: npt.NDArray[np.int64] | None = None,
) -> WriteInput:
    """Check rows to upsert, or by `operations` to upsert and delete.

    `columns` makes a partial update: `rows` has exactly these columns, including the key. Deletes
    alone need key columns only. `row_numbers`, ascending, are the rows' numbers for errors; by
    default rows are counted from 0.
    """
    is_renumbered = row_numbers is not None
    if row_numbers is None:
        row_numbers = np.arange(rows.num_rows)
    checked_rows, deletes, row_numbers = _apply_behavior(rows, operations, rules, row_numbers)
    if operations is not None and not (operations == OPERATION_UPSERT).any():
        columns = rules.primary_key
        checked_rows = _only_keys(checked_rows, rules)
    names = _named_columns(rules, columns)
    _check_partial(checked_rows, rules, names)
    # Making a schema takes as long as checking a thousand rows.
    part = rules.schema if columns is None else rules.schema.select(names, table=rules.table)
    if len(checked_rows) == len(rows) and not deletes.any() and not is_renumbered:
        conformed = conform(checked_rows, part, table=rules.table, key=rules.primary_key)
    else:
        conformed = conform(checked_rows, _nullable(part), table=rules.table)
        _check_nulls(conformed, part, rules, deletes=deletes, row_numbers=row_numbers)
    _check_limits(conformed, rules, deletes=deletes, row_numbers=row_numbers)
    conformed = _widened(conformed, rules.schema)
    _check_versions(conformed, rules, row_numbers)
    if rules.checks and not is_merged(rules, names) and not deletes.all():
        rules.checks.refuse(conformed, deletes=deletes, row_numbers=row_numbers)
    return WriteInput(
        rows=conformed,
        keys=check_keys(conformed, rules, row_numbers=row_numbers),
        deletes=deletes,
        named=frozenset(names),
        row_numbers=row_numbers,
    )


def is_merged(rules: TableRules, names: Collection[str]) -> bool:
    """Whether rows with these columns become rows only together with stored rows.

    Such rows are judged by the table's constraints once they are merged.
    """
    return bool(rules.merge.aggregates) or len(names) < len(rules.schema.names)


def check_keys(
    rows: pa.RecordBatch, rules: TableRules, *, row_numbers: npt.NDArray[np.int64] | None = None
) -> pa.Array:
    """Return the encoded keys of `rows` with key columns without nulls."""
    keys = encode_key([rows.column(name) for name in rules.primary_key])
    longest = longest_of(keys)
    if longest > KEY_BYTES_MAX:
        row = pc.index(pc.binary_length(keys), longest).as_py()
        number = row if row_numbers is None else int(row_numbers[row])
        raise InvalidRequestError(
            f"table '{rules.table}': the key ({', '.join(rules.primary_key)}) of row {number} has"
            f" {longest} bytes; at most {KEY_BYTES_MAX}"
        )
    return keys


def _apply_behavior(
    rows: pa.RecordBatch,
    operations: npt.NDArray[np.int8] | None,
    rules: TableRules,
    numbers: npt.NDArray[np.int64],
) -> tuple[pa.RecordBatch, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Return the effective rows, the mask of deletes, and the rows' numbers."""
    if operations is None:
        return rows, np.zeros(rows.num_rows, dtype=np.bool_), numbers
    assert len(operations) == rows.num_rows
    deletes = operations == OPERATION_DELETE
    behavior = rules.merge.delete_behavior
    if behavior is DeleteBehavior.DISALLOW and deletes.any():
        raise UnsupportedError(
            f"table '{rules.table}': row {int(numbers[np.argmax(deletes)])} is a delete, and"
            " table.delete.behavior = disallow"
        )
    is_kept = operations != OPERATION_NONE
    if behavior is DeleteBehavior.IGNORE:
        is_kept = operations == OPERATION_UPSERT
    if is_kept.all():
        return rows, deletes, numbers
    return rows.filter(pa.array(is_kept)), deletes[is_kept], numbers[is_kept]


def _only_keys(rows: pa.RecordBatch, rules: TableRules) -> pa.RecordBatch:
    """Return the key columns of rows to delete; other columns of the table are ignored."""
    for name in rows.schema.names:
        rules.schema.column(name, table=rules.table)
    names = rows.schema.names
    return rows.select([i for i, name in enumerate(names) if name in rules.primary_key])


def _named_columns(rules: TableRules, columns: Sequence[str] | None) -> list[str]:
    """Return the required columns of the rows, in the table's order."""
    if columns is None:
        return rules.schema.names
    for name in columns:
        rules.schema.column(name, table=rules.table)
    missing = [name for name in rules.primary_key if name not in columns]
    if missing:
        raise SchemaMismatchError(
            f"table '{rules.table}': a partial update must name the key column '{missing[0]}'"
            f" (named: {', '.join(columns)})"
        )
    return [name for name in rules.schema.names if name in columns]


def _check_partial(rows: pa.RecordBatch, rules: TableRules, names: Sequence[str]) -> None:
    if len(names) == len(rules.schema.names):
        return
    unnamed = [name for name in rows.schema.names if name not in names]
    if unnamed:
        raise SchemaMismatchError(
            f"table '{rules.table}': column '{unnamed[0]}' is in the data but not among the"
            f" columns to update ({', '.join(names)})"
        )
    if rows.num_rows and rules.merge.engine in (MergeEngine.FIRST_ROW, MergeEngine.VERSIONED):
        raise UnsupportedError(
            f"table '{rules.table}': table.merge-engine = {rules.merge.engine} takes whole rows,"
            " no partial updates"
        )


def _nullable(schema: Schema) -> Schema:
    """Return `schema` with nulls allowed everywhere."""
    return Schema(tuple(replace(column, nullable=True) for column in schema.columns))


def _check_nulls(
    rows: pa.RecordBatch,
    schema: Schema,
    rules: TableRules,
    *,
    deletes: npt.NDArray[np.bool_],
    row_numbers: npt.NDArray[np.int64],
) -> None:
    """Check nulls as `conform`, of deletes only the key, with the caller's row numbers."""
    upserts = np.flatnonzero(~deletes)
    upserted = rows.take(pa.array(upserts)) if deletes.any() else rows
    for column in schema.columns:
        whole = column.name in rules.primary_key
        array = (rows if whole else upserted).column(column.name)
        if not column.nullable and array.null_count:
            position = pc.index(array.is_null(), True).as_py()
            row = row_numbers[position if whole else upserts[position]]
            raise null_refused(column.name, int(row), table=rules.table, is_key=whole)
    check_nulls(upserted, schema, table=rules.table)


def _check_limits(
    rows: pa.RecordBatch,
    rules: TableRules,
    *,
    deletes: npt.NDArray[np.bool_],
    row_numbers: npt.NDArray[np.int64],
) -> None:
    """Check the values to be stored; values of deletes are exempt."""
    try:
        rules.limits.check(rows, table=rules.table, row_numbers=row_numbers)
    except SchemaMismatchError:
        if not deletes.any():
            raise
        upserts = np.flatnonzero(~deletes)
        upserted = rows.take(pa.array(upserts))
        rules.limits.check(upserted, table=rules.table, row_numbers=row_numbers[upserts])


def _check_versions(
    rows: pa.RecordBatch, rules: TableRules, row_numbers: npt.NDArray[np.int64]
) -> None:
    name = rules.merge.version_column
    if name is None or rows.column(name).null_count == 0:
        return
    row = int(row_numbers[pc.index(rows.column(name).is_null(), True).as_py()])
    raise SchemaMismatchError(
        f"table '{rules.table}': version column '{name}' must not be null, but row {row} is"
    )


def _widened(rows: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """Return `rows` with every column of the table; added columns are null and meaningless."""
    arrow_schema = schema.to_arrow()
    if rows.schema.equals(arrow_schema):
        return rows
    columns = [
        rows.column(field.name)
        if field.name in rows.schema.names
        else pa.nulls(rows.num_rows, field.type)
        for field in arrow_schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema)


def too_much_met(table: str, bytes_max: int) -> RequestTooLargeError:
    """Return the error for changes of too large stored rows."""
    return RequestTooLargeError(
        f"table '{table}': the stored rows that are changed have more than {bytes_max} bytes;"
        " send fewer rows at once"
    )
