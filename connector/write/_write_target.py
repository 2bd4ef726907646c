"""The facts of a write before the first row: a single value for all tasks."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from streamhouse.client import StorageClient
from streamhouse.connector.write._assignment import assigned, assigned_key, can_assign
from streamhouse.connector.write._write_options import WriteMode, WriteOptions
from streamhouse.connector.write._write_table import (
    CHANGELOG_COLUMNS,
    as_changes,
    existing_or_created,
    merge_schema,
    missing_columns,
)
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
    UnsupportedError,
    listing,
)
from streamhouse.core.model.casts.column_defaults import missing_values
from streamhouse.core.model.casts.conform import check_schema
from streamhouse.core.model.casts.written_rows import check_names, version_of
from streamhouse.core.model.merge_engine import DeleteBehavior, MergeEngine
from streamhouse.core.model.nested_fields import fields_lacking, named_like
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    SPARK_CHANGE_TYPE_COLUMN,
    Column,
    Schema,
    type_name,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.zone import Zone, spark_zone
from streamhouse.core.rows.row_splitter import castable
from streamhouse.reading.options.connection import ConnectionOptions
from streamhouse.reading.where.checks import NO_CHECKS, Checks

__all__ = ["RowShape", "WriteTarget", "not_assigned", "resolve_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowShape:
    """The form of rows that leave a task: in the `types` of the table, without the columns in
    `dropped`.

    The DataFrame's columns come in the order of `names`, which are the table's names. `filled` are
    columns that the rows lack; their values are the default, or null. `keys` are the columns of the
    primary key, which take values without loss. In a timestamp column a date means its midnight in
    `zone`.
    """

    types: pa.Schema
    names: tuple[str, ...]
    dropped: frozenset[str] = frozenset()
    filled: tuple[Column, ...] = ()
    keys: frozenset[str] = frozenset()
    zone: Zone | None = None

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch to send; raise `SchemaMismatchError` for a value that does not fit."""
        arrays, fields = [], []
        for name, array in zip(self.names, batch.columns, strict=True):
            if name in self.dropped:
                continue
            position = self.types.get_field_index(name)
            data_type = array.type if position < 0 else self.types.field(position).type
            assign = assigned_key if name in self.keys else assigned
            arrays.append(assign(array, data_type, column=name, zone=self.zone))
            fields.append(pa.field(name, data_type))
        for column in self.filled:
            arrays.append(missing_values(column, batch.num_rows))
            fields.append(column.to_arrow())
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTarget:
    """The table of a write and the effect of the rows. Small: every task gets a pickled copy.

    Column names are of version `schema_id` of the table's schema. `columns` are the columns of a
    partial update, else None. `ordered_by` is the column that orders the rows, if the last row of a
    key wins. With `is_overwrite` the rows replace all rows of the table.
    """

    connection: ConnectionOptions
    table_id: int
    schema_id: int
    mode: WriteMode
    columns: tuple[str, ...] | None
    shape: RowShape
    ordered_by: str | None = None
    is_overwrite: bool = False
    rejecting: TableInfo | None = None
    """The table for checks row by row; None: a value that does not fit fails the write."""
    checks: Checks = NO_CHECKS
    """The constraints of `rejecting`: executors have no parser."""

    @property
    def path(self) -> str:
        """The table's path."""
        return str(self.connection.name.path)


def resolve_target(
    client: StorageClient,
    options: WriteOptions,
    schema: pa.Schema,
    *,
    is_stream: bool,
    is_overwrite: bool = False,
) -> WriteTarget:
    """Check the write as a whole against the table, which is created if it does not exist.

    `schema` is the DataFrame's. Every failure visible from the schema is raised here.
    """
    current = existing_or_created(client, options, schema, is_stream=is_stream)
    info = current.in_version(options.schema_id)
    frame_names = schema.names
    schema = _in_names_of(schema, info)
    type_name_of_frame = next(
        (n for n in schema.names if n.lower() == SPARK_CHANGE_TYPE_COLUMN), CHANGE_TYPE_COLUMN
    )
    schema, foreign = as_changes(schema, info.schema.names, table=str(info.path))
    if options.schema_id is None and (is_stream or options.app_version is not None):
        # This write may be a repetition, begun under an earlier version of the schema.
        how = f"set option 'schema.id' = '{info.schema_id}'"
        check_names(info, schema.names, how=how)
    mode = _mode(options, current)
    ordered_by = _ordering(options, info, mode, schema, _version_column(current, info))
    zone = None if options.time_zone is None else spark_zone(options.time_zone, name="time zone")
    has_changes = CHANGE_TYPE_COLUMN in schema.names
    dropped = {*CHANGELOG_COLUMNS, *foreign} if has_changes else set()
    if ordered_by is not None and ordered_by not in info.schema.names:
        dropped.add(ordered_by)
    columns = [name for name in schema.names if name not in dropped | {CHANGE_TYPE_COLUMN}]
    if has_changes:
        _check_takes_changes(info, mode, type_name_of_frame)
    data = pa.schema([field for field in schema if field.name in columns])
    if options.merges_schema and mode is not WriteMode.DELETE:
        info = merge_schema(client, info, data, options.properties)
    fills = options.merges_schema or _is_earlier(info, data)
    if options.rejects:
        data = castable(data, info)
    data = _assigned_types(data, info, zone, fills=fills)
    filled = _filled(info, mode, data) if fills else ()
    whole = pa.schema([*data, *(column.to_arrow() for column in filled)])
    _check_columns(whole, info, mode, has_changes=has_changes)
    return WriteTarget(
        connection=options.connection,
        table_id=info.table_id,
        schema_id=info.schema_id,
        mode=mode,
        columns=tuple(columns) if mode is WriteMode.PARTIAL else None,
        shape=RowShape(
            types=info.schema.to_arrow(),
            names=tuple(schema.names),
            dropped=frozenset(dropped),
            filled=filled,
            keys=frozenset(info.descriptor.primary_key),
            zone=zone,
        ),
        # The check of the order sees rows under the DataFrame's names.
        ordered_by=None if ordered_by is None else frame_names[schema.names.index(ordered_by)],
        is_overwrite=is_overwrite,
        rejecting=info if options.rejects else None,
        checks=Checks.of_table(info) if options.rejects else NO_CHECKS,
    )


def _in_names_of(schema: pa.Schema, info: TableInfo) -> pa.Schema:
    """Return the DataFrame's schema with the table's spelling of names, also of fields of structs.

    A table has no two names that differ only in case. If the DataFrame has both spellings of a
    name, the second column keeps its name and is unknown to the table.
    """
    table_names = (*info.schema.names, CHANGE_TYPE_COLUMN, *CHANGELOG_COLUMNS)
    by_lower = {name.lower(): name for name in table_names}
    frame_names = set(schema.names)
    types = {column.name: column.type for column in info.schema.columns}

    def renamed(field: pa.Field) -> pa.Field:
        name = by_lower.get(field.name.lower(), field.name)
        if name not in frame_names:
            field = field.with_name(name)
        column = types.get(field.name)
        return field if column is None else field.with_type(named_like(field.type, column))

    return pa.schema([renamed(field) for field in schema])


def _is_earlier(info: TableInfo, data: pa.Schema) -> bool:
    """Whether `data` is exactly an earlier version of the table, with fewer columns or fields.

    The program of the write does not know the later columns.
    """
    return version_of(info, data, stated=info.schema_id) != info.schema_id


def _assigned_types(
    data: pa.Schema, info: TableInfo, zone: Zone | None, *, fills: bool
) -> pa.Schema:
    """Return `data` with the table's types for assignable columns.

    With `fills` the fields that structs of `data` lack are null.
    """
    column_types = {column.name: column.type for column in info.schema.columns}
    fields = []
    for field in data:
        column_type = column_types.get(field.name)
        if column_type is not None and not pa.types.is_null(field.type):
            if not can_assign(field.type, column_type, zone=zone, fills=fills):
                raise not_assigned(field, column_type, info)
            field = field.with_type(column_type)
        fields.append(field)
    return pa.schema(fields)


def not_assigned(field: pa.Field, target: pa.DataType, info: TableInfo) -> SchemaMismatchError:
    """Return the error for a column of type `target` to which `field` cannot be assigned."""
    begin = (
        f"table '{info.path}': column '{field.name}' is {type_name(target)}, and"
        f" {type_name(field.type)} is not assigned to it; "
    )
    for path, _ in fields_lacking(target, field.type):
        shown = ".".join([field.name, *path])
        return SchemaMismatchError(f"{begin}field '{shown}' is new: add it with mergeSchema")
    for path, _ in fields_lacking(field.type, target):
        shown = ".".join([field.name, *path])
        return SchemaMismatchError(
            f"{begin}field '{shown}' is missing: write it, or mergeSchema, which makes it null"
        )
    return SchemaMismatchError(f"{begin}write cast({field.name} AS {type_name(target)})")


def _filled(info: TableInfo, mode: WriteMode, data: pa.Schema) -> tuple[Column, ...]:
    """Return the table's columns that rows with the columns of `data` get as defaults or nulls.

    Missing columns are filled for a DataFrame that merges its schema, and for a program with
    exactly the columns of an earlier version of the table.
    """
    is_whole = mode in (WriteMode.APPEND, WriteMode.UPSERT)
    if not is_whole or set(data.names) <= set(info.descriptor.primary_key):
        return ()
    return missing_columns(info, data)


def _mode(options: WriteOptions, info: TableInfo) -> WriteMode:
    mode = options.mode
    if not info.is_primary_key_table:
        if mode not in (None, WriteMode.APPEND):
            raise UnsupportedError(
                f"table '{info.path}' has no primary key, so write.mode = '{mode}' has no rows to"
                " find; rows are appended to it: remove the option"
            )
        return WriteMode.APPEND
    if mode is WriteMode.APPEND:
        raise UnsupportedError(
            f"table '{info.path}' has a primary key, so rows replace those with the same key; use"
            " write.mode = 'upsert', which is its default"
        )
    mode = mode or WriteMode.UPSERT
    rules = info.descriptor.merge_rules()
    if mode is WriteMode.PARTIAL and rules.engine in (
        MergeEngine.FIRST_ROW,
        MergeEngine.VERSIONED,
    ):
        raise UnsupportedError(
            f"table '{info.path}': table.merge-engine = {rules.engine} takes whole rows, no partial"
            " updates"
        )
    if mode is WriteMode.DELETE and rules.delete_behavior is not DeleteBehavior.ALLOW:
        raise UnsupportedError(
            f"table '{info.path}' has table.delete.behavior = {rules.delete_behavior}, so"
            " write.mode = 'delete' would delete nothing"
        )
    return mode


def _version_column(current: TableInfo, info: TableInfo) -> str | None:
    """Return the name in `info` of the column whose greatest value wins, None without."""
    name = current.descriptor.merge_rules().version_column
    if name is None:
        return None
    column = current.schema.column(name, table=str(current.path))
    return next((c.name for c in info.schema.columns if c.id == column.id), None)


def _ordering(
    options: WriteOptions,
    info: TableInfo,
    mode: WriteMode,
    schema: pa.Schema,
    version_column: str | None,
) -> str | None:
    """Return the column that orders this write's rows; None if the table orders rows itself."""
    name = options.sequence_column
    if name is None:
        return None
    name = next((n for n in schema.names if n.lower() == name.lower()), name)
    if not info.is_primary_key_table:
        raise InvalidRequestError(
            f"table '{info.path}' has no primary key, so 'sequence.column' has nothing to decide;"
            " remove the option"
        )
    if name not in schema.names:
        raise UnknownColumnError(
            f"option 'sequence.column' = '{name}': the DataFrame has no such column (columns:"
            f" {', '.join(schema.names)})"
        )
    if mode is WriteMode.DELETE:
        raise InvalidRequestError(
            "option 'sequence.column' has no meaning for write.mode = 'delete', whose rows are"
            " keys alone; remove it"
        )
    if version_column is None:
        return name
    if version_column != name:
        raise InvalidRequestError(
            f"option 'sequence.column' = '{name}': in table '{info.path}' the greater"
            f" '{version_column}' wins already (table.merge-engine = versioned); remove the option"
        )
    return None


def _check_takes_changes(info: TableInfo, mode: WriteMode, column: str) -> None:
    if mode is WriteMode.APPEND:
        raise UnsupportedError(
            f"table '{info.path}' has no primary key, so changes cannot be applied to it; drop"
            f" column '{column}', or rename it to append the changes as rows"
        )
    if mode is WriteMode.DELETE:
        raise InvalidRequestError(
            f"write.mode = 'delete' takes the key columns only; drop '{column}', or"
            " remove the option to apply the changes"
        )


def _check_columns(data: pa.Schema, info: TableInfo, mode: WriteMode, *, has_changes: bool) -> None:
    table = str(info.path)
    key = info.descriptor.primary_key
    expected: Schema = info.schema
    is_keys_alone = has_changes and set(data.names) == set(key)
    if mode is WriteMode.DELETE:
        extra_columns = [name for name in data.names if name not in key]
        if extra_columns:
            raise SchemaMismatchError(
                f"table '{table}': write.mode = 'delete' takes the key columns only"
                f" ({', '.join(key)}); drop column '{extra_columns[0]}'"
            )
    if mode is WriteMode.PARTIAL:
        missing = [name for name in key if name not in data.names]
        if missing:
            raise SchemaMismatchError(
                f"table '{table}': write.mode = 'partial' needs the key column '{missing[0]}'"
                f" (given: {', '.join(data.names)})"
            )
        expected = expected.select(data.names, table=table)
    elif mode is WriteMode.DELETE or is_keys_alone:
        # Deletes need only the key. The service refuses an insert or update of the key alone, and
        # names the row.
        expected = expected.select(key, table=table)
    try:
        for name in data.names:
            expected.column(name, table=table)
    except UnknownColumnError as error:
        raise UnknownColumnError(
            f"{error.message}; option mergeSchema = 'true' adds new columns to the table"
        ) from None
    _check_missing_columns(data, expected, info, mode)
    check_schema(data, expected, table=table)


def _check_missing_columns(
    data: pa.Schema, expected: Schema, info: TableInfo, mode: WriteMode
) -> None:
    """Raise for a missing column, with the remedies."""
    for column in expected.columns:
        is_key = column.name in info.descriptor.primary_key
        if column.name not in data.names and not column.nullable and not is_key:
            raise SchemaMismatchError(
                f"table '{info.path}': column '{column.name}' is missing from the data, and it was"
                f" created NOT NULL: add it, or free it by `streamhouse alter {info.path}"
                f" --drop-not-null {column.name}`"
            )
        if column.name not in data.names and not is_key:
            partial = "" if mode is WriteMode.APPEND else ", and write.mode = 'partial' keeps it"
            raise SchemaMismatchError(
                f"table '{info.path}': column '{column.name}' is missing from the data"
                f" ({listing('given', data.names)}): add it; option mergeSchema = 'true' writes"
                f" null into it{partial}"
            )
