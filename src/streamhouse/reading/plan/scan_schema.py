"""The columns that a read returns, the columns read only to filter, and the schema of the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from streamhouse.core.errors import (
    SchemaMismatchError,
    UnknownColumnError,
    suggestion,
)
from streamhouse.core.model.casts.column_defaults import default_value
from streamhouse.core.model.casts.nested import are_alike
from streamhouse.core.model.changelog import APPEND, CHANGE_TYPE_NAMES, INSERT
from streamhouse.core.model.lake.facts import LAKE_SYSTEM_FIELDS, SYSTEM_FIELD_ID_FIRST
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    COMMIT_TIMESTAMP_COLUMN,
    COMMIT_VERSION_COLUMN,
    SPARK_CHANGE_TYPE_COLUMN,
    Column,
    Schema,
    type_name,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.scan.scan import ScanColumn, ScanContext

if TYPE_CHECKING:
    from streamhouse.reading.files.planner import LakeFiles

__all__ = [
    "change_type_column",
    "cheapest_column",
    "output_columns",
    "scan_context",
    "spark_change_columns",
]

SYSTEM_COLUMNS = tuple(
    ScanColumn(
        name=field.name, type=field.type, nullable=False, field_id=SYSTEM_FIELD_ID_FIRST + position
    )
    for position, field in enumerate(LAKE_SYSTEM_FIELDS)
)
"""`__bucket`, `__offset` and `__timestamp`, in this order."""


def change_type_column(*, has_changelog: bool) -> ScanColumn:
    """Return `__change_type`; a lake row is an append, or an insert into a table with keys."""
    return ScanColumn(
        name=CHANGE_TYPE_COLUMN,
        type=pa.string(),
        nullable=False,
        field_id=None,
        lake_constant=CHANGE_TYPE_NAMES[INSERT if has_changelog else APPEND],
    )


def spark_change_columns(*, has_changelog: bool) -> tuple[ScanColumn, ...]:
    """Return the columns of changes in Spark's form; a version is the commit's time as a number."""
    change_type, timestamp = change_type_column(has_changelog=has_changelog), SYSTEM_COLUMNS[-1]
    version = replace(timestamp, name=COMMIT_VERSION_COLUMN, type=pa.int64())
    return (
        replace(change_type, name=SPARK_CHANGE_TYPE_COLUMN, base=change_type.name),
        replace(version, base=timestamp.name),
        replace(timestamp, name=COMMIT_TIMESTAMP_COLUMN, base=timestamp.name),
    )


def output_columns(
    schema: Schema,
    *,
    columns: Sequence[str] | None,
    include_metadata: bool,
    table: str,
    change_columns: Sequence[ScanColumn] = (),
) -> tuple[ScanColumn, ...]:
    """Return the columns of the result: the named columns, else all, then requested metadata
    columns.

    Names are matched as Spark does, without case where no column matches exactly. Metadata columns
    may be named, too. `change_columns` are the columns after the table's own.
    """
    table_columns = [*map(_user_column, schema.columns), *change_columns]
    everything = [*table_columns, *SYSTEM_COLUMNS]
    if columns is None:
        return tuple(everything if include_metadata else table_columns)
    output = [_resolve(name, everything, table=table) for name in columns]
    if include_metadata:
        output += [column for column in SYSTEM_COLUMNS if column not in output]
    return tuple(output)


def check_types(
    output: Sequence[ScanColumn], wanted: pa.Schema, *, table: str, is_loaded: bool = False
) -> None:
    """Raise `SchemaMismatchError` if a column has another type than Spark asks for.

    Spark asks for the types in `.schema(...)`, or for the table's types when the table `is_loaded`.
    """
    for column, field in zip(output, wanted, strict=True):
        if not _same_type(column.type, field.type):
            if is_loaded:
                raise SchemaMismatchError(
                    f"table '{table}': column '{column.name}' was {type_name(field.type)} when the"
                    f" table was loaded, and is {type_name(column.type)} now: load it again"
                )
            raise SchemaMismatchError(
                f"table '{table}': column '{column.name}' is {type_name(column.type)}, but"
                f" .schema(...) asks for {type_name(field.type)}; leave .schema(...) out, and cast"
                " the column afterwards"
            )


def scan_context(
    table: TableInfo,
    rows: RowRequest,
    *,
    name: str | None = None,
    files: LakeFiles | None = None,
    lake_properties: Mapping[str, str] | None = None,
    lake_snapshot_id: int | None = None,
    lake_is_changelog: bool = False,
) -> ScanContext:
    """Return the values shared by all splits of a read; `files` are the lake files of the read.

    `name` stands for the table in messages. The lake's own schema gives the columns' field ids.
    """
    field_ids: Mapping[str, int | None] = {} if files is None else files.field_ids

    def numbered(column: ScanColumn) -> ScanColumn:
        if column.name not in field_ids:
            return column
        return replace(column, field_id=field_ids[column.name])

    schema, has_changelog = table.schema, table.is_primary_key_table
    change_type = change_type_column(has_changelog=has_changelog)
    columns = (*map(_user_column, schema.columns), change_type, *SYSTEM_COLUMNS)
    net_keys = () if rows.change_form is None else rows.change_form.net_keys
    by_name = {column.name: column for column in columns}
    shown = {column.name for column in rows.output}
    filters = () if rows.predicate is None else rows.predicate.columns
    bucket, offset, timestamp = map(numbered, SYSTEM_COLUMNS)
    return ScanContext(
        table=name or str(table.path),
        table_id=table.table_id,
        schema_id=table.schema_id,
        endpoint=rows.endpoint,
        token=rows.token,
        output=tuple(map(numbered, rows.output)),
        filters=tuple(numbered(by_name[column]) for column in filters if column not in shown),
        keys=tuple(numbered(by_name[name]) for name in net_keys),
        bucket_column=bucket,
        offset_column=offset,
        timestamp_column=timestamp,
        change_type_column=numbered(change_type),
        carrier_column=cheapest_column(schema),
        predicate=rows.predicate,
        from_timestamp_us=rows.from_timestamp_us,
        to_timestamp_us=rows.to_timestamp_us,
        lake_properties=lake_properties or {},
        lake_snapshot_id=lake_snapshot_id if files is None else files.snapshot_id,
        fail_on_data_loss=rows.fail_on_data_loss,
        has_changelog=has_changelog,
        lake_is_changelog=lake_is_changelog,
        change_types=rows.change_types,
        change_form=rows.change_form,
        batch_rows=rows.batch_rows,
    )


def _user_column(column: Column) -> ScanColumn:
    return ScanColumn(
        name=column.name,
        type=column.type,
        nullable=column.nullable,
        field_id=column.id,
        lake_constant=default_value(column),
    )


def _resolve(name: str, columns: Sequence[ScanColumn], *, table: str) -> ScanColumn:
    for column in columns:
        if column.name == name:
            return column
    for column in columns:
        if column.name.lower() == name.lower():
            return column
    names = [column.name for column in columns]
    raise UnknownColumnError(
        f"table '{table}' has no column '{name}'{suggestion(name, names)}"
        f" (columns: {', '.join(names)})"
    )


def _same_type(ours: pa.DataType, theirs: pa.DataType) -> bool:
    """Whether Spark would see one type; names and nullability inside nested types do not count."""
    return bool(ours == theirs or are_alike(ours, theirs, _same_type))


def cheapest_column(schema: Schema) -> str:
    """Return the narrowest column: something must carry rows of which nothing is wanted."""

    def width(t: pa.DataType) -> int:
        try:
            return int(t.bit_width)
        except ValueError:
            return 1 << 20

    return min(schema.columns, key=lambda column: width(column.type)).name
