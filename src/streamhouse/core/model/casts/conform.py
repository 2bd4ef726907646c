"""Make rows fit a table's schema, or raise one sentence with the reason.

Columns are matched by name in any order. A column's type may differ only without a loss: another
layout of the same type, a narrower integer, float for double, a narrower decimal.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import (
    InvalidSchemaError,
    SchemaMismatchError,
    listing,
)
from streamhouse.core.model.casts.nested import are_alike
from streamhouse.core.model.schema import Column, Schema, canonical_type, type_name

__all__ = ["check_nulls", "check_schema", "conform", "null_refused"]


def check_schema(sent: pa.Schema, schema: Schema, *, table: str) -> None:
    """Raise unless rows of schema `sent` can fit `schema`; the rows are not read."""
    names = sent.names
    seen: set[str] = set()
    for name in names:
        schema.column(name, table=table)
        if name in seen:
            raise SchemaMismatchError(f"table '{table}': column '{name}' is given twice")
        seen.add(name)
    for column in schema.columns:
        if column.name not in seen:
            raise SchemaMismatchError(
                f"table '{table}': column '{column.name}' is missing from the data"
                f" ({listing('given', names)})"
            )
        _check_type(sent.field(column.name).type, column, table=table)


def conform(
    batch: pa.RecordBatch, schema: Schema, *, table: str, key: Collection[str] = ()
) -> pa.RecordBatch:
    """Return `batch` with exactly the columns, order and Arrow types of `schema`.

    `key` has the columns of the table's primary key, which nothing frees from NOT NULL.
    Raises `SchemaMismatchError` or `UnknownColumnError` naming table, column and, for a null in a
    required column, the row.
    """
    arrow_schema = schema.to_arrow()
    if not batch.schema.equals(arrow_schema):
        check_schema(batch.schema, schema, table=table)
        arrays = []
        for column in schema.columns:
            array = batch.column(column.name)
            try:
                arrays.append(array if array.type == column.type else array.cast(column.type))
            except pa.ArrowInvalid as error:
                raise SchemaMismatchError(
                    f"table '{table}', column '{column.name}': {error}"
                ) from error
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema)
    check_nulls(batch, schema, table=table, key=key)
    return batch


def check_nulls(
    batch: pa.RecordBatch, schema: Schema, *, table: str, key: Collection[str] = ()
) -> None:
    """Raise `SchemaMismatchError` for the first null where `schema` allows none."""
    for position, column in schema.strict_columns:
        array = batch.column(position)
        if not column.nullable and array.null_count:
            row = pc.index(array.is_null(), True).as_py()
            raise null_refused(column.name, row, table=table, is_key=column.name in key)
        if pa.types.is_nested(column.type):
            _check_nested_nulls(array, where=column.name, table=table)


def null_refused(column: str, row: int, *, table: str, is_key: bool = False) -> SchemaMismatchError:
    """Return the error for a null in a NOT NULL column, with the reason and the remedy."""
    reason = (
        "it is part of the primary key"
        if is_key
        else f"it was created NOT NULL; `streamhouse alter {table} --drop-not-null {column}`, or a"
        " write of Spark with mergeSchema, lets it be null"
    )
    return SchemaMismatchError(
        f"table '{table}': column '{column}' must not be null, but row {row} is: {reason}"
    )


def _check_nested_nulls(array: pa.Array, *, where: str, table: str) -> None:
    if pa.types.is_map(array.type):
        children = [(array.type.key_field, array.keys), (array.type.item_field, array.items)]
    elif pa.types.is_list(array.type):
        children = [(array.type.value_field, array.flatten())]
    else:
        # A null struct has null children, too; only children of present structs count.
        present = array.filter(array.is_valid()) if array.null_count else array
        children = list(zip(array.type, present.flatten(), strict=True))
    for field, child in children:
        if not field.nullable and child.null_count:
            raise SchemaMismatchError(
                f"table '{table}': '{where}.{field.name}' must not be null, but some values are"
            )
        if pa.types.is_nested(field.type):
            _check_nested_nulls(child, where=f"{where}.{field.name}", table=table)


def _check_type(sent: pa.DataType, column: Column, *, table: str) -> None:
    if sent == column.type or (pa.types.is_null(sent) and column.nullable):
        return
    hint = ""
    try:
        plain = canonical_type(sent, where=column.name)
        if plain == column.type or _widens(plain, column.type):
            return
    except InvalidSchemaError as error:
        hint = "; " + error.message.rsplit("; ", 1)[-1]
    if getattr(sent, "tz", "") is None and getattr(column.type, "tz", None) is not None:
        hint = "; give the times a zone, as pandas' dt.tz_localize('UTC') does"
    raise SchemaMismatchError(
        f"table '{table}': column '{column.name}' is {type_name(column.type)}, but the data has"
        f" {type_name(sent)}{hint}"
    )


def _widens(source: pa.DataType, target: pa.DataType) -> bool:
    """Whether `target` holds every value of `source`."""
    if pa.types.is_integer(source) and pa.types.is_integer(target):
        return bool(source.bit_width <= target.bit_width)
    if pa.types.is_floating(source) and pa.types.is_floating(target):
        return bool(source.bit_width <= target.bit_width)
    if pa.types.is_decimal(source) and pa.types.is_decimal(target):
        return bool(
            source.scale <= target.scale
            and source.precision - source.scale <= target.precision - target.scale
        )
    # Nullability inside nested values is checked on the values themselves.
    return bool(are_alike(source, target, lambda s, t: s == t or _widens(s, t)))
