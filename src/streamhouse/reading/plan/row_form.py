"""The request of a read: a table's rows, changes or upserts, and the columns.

A stream of a primary key table is a stream of changes, unless `readChangeFeed` says otherwise.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import replace

from streamhouse.core.errors import (
    InvalidPredicateError,
    InvalidRequestError,
    UnknownColumnError,
    UnsupportedError,
)
from streamhouse.core.extras import require
from streamhouse.core.model.merge_engine import ChangelogImage
from streamhouse.core.model.schema import (
    CHANGE_TYPE_COLUMN,
    SPARK_CHANGE_COLUMNS,
    SPARK_CHANGE_TYPE_COLUMN,
)
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.zone import spark_zone
from streamhouse.reading.options.connection import CHANGELOG, CHANGES, LOG, TableName
from streamhouse.reading.options.options import ReadOptions, ShapeOptions
from streamhouse.reading.plan.row_request import RowRequest
from streamhouse.reading.plan.scan_schema import (
    change_type_column,
    output_columns,
    spark_change_columns,
)
from streamhouse.reading.scan._retraction import UPSERTS
from streamhouse.reading.scan.scan import ChangeForm, ScanColumn

__all__ = [
    "RowForm",
    "batch_form",
    "batch_request",
    "row_request",
    "shape_columns",
    "stream_form",
    "stream_request",
    "table_columns",
]


class RowForm(enum.Enum):
    """What one row of a read stands for."""

    ROWS = "rows"
    """A row of the table."""

    CHANGES = "changes"
    """One change, with `__change_type`; what was appended to a log table is `+A`."""

    UPSERTS = "upserts"
    """A new version of a row: changes without deletes and before images."""


def batch_form(table: TableInfo, name: TableName) -> RowForm:
    """Return what a batch read of `name` yields."""
    if name.part in (CHANGELOG, CHANGES) or (name.part == LOG and table.is_primary_key_table):
        return RowForm.CHANGES
    return RowForm.ROWS


def stream_form(table: TableInfo, options: ReadOptions, output: Sequence[ScanColumn]) -> RowForm:
    """Return the form of a stream; raises `InvalidRequestError` for a missing option."""
    name, feed = options.connection.name, options.read_change_feed
    if options.change_options is not None:
        feed = True if feed is None else feed
        if not feed:
            raise InvalidRequestError(
                "option 'readChangeFeed' = 'false' reads no changes, which 'changeFormat' = 'spark'"
                " has: remove one"
            )
        return RowForm.CHANGES
    has_change_type = any(column.name == CHANGE_TYPE_COLUMN for column in output)
    if batch_form(table, name) is RowForm.CHANGES:
        if feed is False:
            raise InvalidRequestError(
                f"option 'readChangeFeed' = 'false' cannot be used with '{name}', which has all"
                f" changes; stream '{name.path}'"
            )
        return RowForm.CHANGES
    if feed and table.is_primary_key_table and not has_change_type:
        raise InvalidRequestError(
            f"the stream's columns lack {CHANGE_TYPE_COLUMN}, without which the deletes of table"
            f" '{name.path}' look like rows: name it in .schema(...), or attach"
            f" '{name.path}${CHANGELOG}' to stream changes by a SQL name"
        )
    if feed or (feed is None and has_change_type):
        return RowForm.CHANGES
    if not table.is_primary_key_table:
        return RowForm.ROWS
    if feed is None:
        raise InvalidRequestError(
            f"table '{name.path}' has a primary key, so its stream has updates and deletes: set"
            " option 'readChangeFeed' to 'true' for all changes, each with its"
            f" {CHANGE_TYPE_COLUMN}, or to 'false' for new versions of rows only"
        )
    return RowForm.UPSERTS


def shape_columns(table: TableInfo, shape: ShapeOptions) -> tuple[ScanColumn, ...]:
    """Return the columns of a read without `.schema(...)`."""
    name, columns, feed = shape.connection.name, shape.columns, shape.read_change_feed
    if shape.is_spark_form:
        return table_columns(
            table,
            columns=columns,
            include_metadata=shape.include_metadata,
            has_change_type=False,
            is_spark_form=True,
        )
    if feed is None:
        feed = shape.is_stream and table.is_primary_key_table and not name.part
    has_change_type = feed or batch_form(table, name) is RowForm.CHANGES
    if columns is not None:
        is_named = any(column.lower() == CHANGE_TYPE_COLUMN for column in columns)
        if feed and not is_named:
            columns = (*columns, CHANGE_TYPE_COLUMN)
        # A stream may say by naming the column that it wants it.
        has_change_type |= is_named and table.is_primary_key_table
    return table_columns(
        table,
        columns=columns,
        include_metadata=shape.include_metadata or (name.part == CHANGELOG and columns is None),
        has_change_type=has_change_type,
    )


def table_columns(
    table: TableInfo,
    *,
    columns: Sequence[str] | None,
    include_metadata: bool,
    has_change_type: bool,
    is_spark_form: bool = False,
) -> tuple[ScanColumn, ...]:
    """Return `output_columns`, with `__change_type` or Spark's columns of changes, if any."""
    has_changelog = table.is_primary_key_table
    change_columns: tuple[ScanColumn, ...] = ()
    if is_spark_form:
        _check_own_columns(table)
        change_columns = spark_change_columns(has_changelog=has_changelog)
    elif has_change_type:
        change_columns = (change_type_column(has_changelog=has_changelog),)
    return output_columns(
        table.schema,
        columns=columns,
        include_metadata=include_metadata,
        table=str(table.path),
        change_columns=change_columns,
    )


def _check_own_columns(table: TableInfo) -> None:
    for name in table.schema.names:
        if name.lower() in SPARK_CHANGE_COLUMNS:
            raise UnsupportedError(
                f"table '{table.path}' has a column '{name}' of its own, so its changes have no"
                f" form of Spark's; load '{table.path}${CHANGELOG}'"
            )


def batch_request(
    table: TableInfo, options: ReadOptions, output: Sequence[ScanColumn]
) -> tuple[RowForm, RowRequest]:
    """Return what a batch read asks for; raises `StreamhouseError` for an invalid option."""
    rows = row_request(table, options, output)
    form = batch_form(table, options.connection.name)
    if options.change_options is not None and form is RowForm.ROWS:
        name = options.connection.name
        raise InvalidRequestError(
            f"option 'changeFormat' = 'spark' is for changes, and '{name}' is read as rows; load"
            f" '{name.path}${CHANGES}'"
        )
    _check_columns(rows, form, options.connection.name)
    return form, rows


def stream_request(
    table: TableInfo, options: ReadOptions, output: Sequence[ScanColumn]
) -> RowRequest:
    """Return what a stream asks for; raises `StreamhouseError` for an invalid option."""
    rows = row_request(table, options, output)
    form = stream_form(table, options, output)
    _check_columns(rows, form, options.connection.name)
    if options.change_options is not None:
        # A version in the future is no offset yet: rows that arrive until then are left out.
        rows = replace(rows, from_timestamp_us=options.from_timestamp_us)
    return replace(rows, change_types=UPSERTS) if form is RowForm.UPSERTS else rows


def row_request(table: TableInfo, options: ReadOptions, output: Sequence[ScanColumn]) -> RowRequest:
    """Return the request of a read's options, without bounds of time."""
    predicate = None
    change_form = _change_form(table, options)
    if options.where is not None:
        if change_form is not None and change_form.net_keys:
            # An earlier change of a key decides what its later changes come to.
            raise InvalidPredicateError(
                "option 'where' cannot be used with 'deduplicationMode' = 'netChanges': filter the"
                " net changes"
            )
        # Only the driver parses: executors must not need, nor wait for, the SQL parser.
        require("lake", "'where'")
        from streamhouse.reading.where.parser import parse_predicate  # noqa: PLC0415 - sqlglot is an extra

        zone = spark_zone(options.time_zone, name="the time zone")
        try:
            predicate = parse_predicate(
                options.where, table.schema, table=str(table.path), zone=zone
            )
        except UnknownColumnError as error:
            if change_form is None or not any(c in options.where for c in SPARK_CHANGE_COLUMNS):
                raise
            raise InvalidPredicateError(
                f"option 'where': {error.message}; bound the changes by 'startingVersion' and"
                f" 'endingVersion', and filter the result by {SPARK_CHANGE_TYPE_COLUMN}"
            ) from error
    return RowRequest(
        output=tuple(output),
        predicate=predicate,
        change_form=change_form,
        fail_on_data_loss=options.fail_on_data_loss,
        endpoint=options.connection.endpoint,
        token=options.connection.token,
    )


def _change_form(table: TableInfo, options: ReadOptions) -> ChangeForm | None:
    changes = options.change_options
    if changes is None:
        return None
    has_before_images = table.descriptor.merge_rules().image is ChangelogImage.FULL
    if table.is_primary_key_table and not has_before_images:
        asked = "'deduplicationMode' = 'netChanges'" if changes.is_net else ""
        asked = asked or ("" if changes.has_updates else "'computeUpdates' = 'false'")
        if asked:
            raise UnsupportedError(
                f"option {asked} needs the rows before updates, which the changes of table"
                f" '{table.path}' lack (table.changelog.image = after); read its changes without"
                " the option"
            )
    keys = table.descriptor.primary_key if changes.is_net else ()
    return ChangeForm(has_updates=changes.has_updates, net_keys=tuple(keys or ()))


def _check_columns(rows: RowRequest, form: RowForm, name: TableName) -> None:
    """Raise `InvalidRequestError` for `__change_type` in a read whose rows are not changes."""
    columns = [column.name for column in rows.output]
    columns += () if rows.predicate is None else rows.predicate.columns
    if form is not RowForm.CHANGES and CHANGE_TYPE_COLUMN in columns:
        raise InvalidRequestError(
            f"'{name}' is read as rows, which have no {CHANGE_TYPE_COLUMN}; load"
            f" '{name.path}${CHANGELOG}' for changes"
        )
