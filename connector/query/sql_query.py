"""`streamhouse.sql`: Spark's SQL, where a query reads only the needed part of our tables."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession

from streamhouse.connector.format.registration import register
from streamhouse.connector.names._advice import missing_table
from streamhouse.connector.names._answers import change_rows_of_name
from streamhouse.connector.names._attached_names import attached_as_written
from streamhouse.connector.names._name_loads import (
    ChangesUse,
    changes_of_name,
    load_changes,
    replace_changes,
)
from streamhouse.connector.names._option_uses import named_at
from streamhouse.connector.names._row_changes import Arguments, change_rows
from streamhouse.connector.names._table_statement import (
    ROW_VERBS,
    TableStatement,
    statement_of,
    tokens_of,
)
from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.connector.query._narrowing import (
    NarrowedQuery,
    QueryTable,
    narrowed,
    needs_by_text,
)
from streamhouse.connector.query._query_text import QueryText
from streamhouse.core.errors import (
    InvalidNameError,
    NotFoundError,
    TableNotFoundError,
    UnsupportedError,
)
from streamhouse.reading.options.connection import CHANGES
from streamhouse.reading.options.options import (
    BATCH,
    WRITE,
    applicable,
    as_options,
    check_keys,
)
from streamhouse.reading.options.quoted_names import quoted

__all__ = ["changes_of_use", "service_table", "sql"]

_ONCE: Final = ("app.id", "app.version")


def sql(
    spark: SparkSession,
    statement: str,
    args: dict[str, Any] | list[Any] | None = None,
    **options: Any,
) -> DataFrame:
    """Return the DataFrame of a SQL query, reading only relevant columns and rows.

    `MERGE INTO`, `UPDATE`, `DELETE FROM` and `TRUNCATE TABLE` change rows like `Table`, once, and
    return the counts; the options `app.id` and `app.version` make a repeated call happen once.

    A table of the service is named `db.table`, or `` `db`.`table$part` ``, unless Spark has a table
    or view of that name; or by its attached name. The query may also use all names of Spark's SQL.
    Each statement on the DataFrame reads the newest rows. `explain()` of the DataFrame first shows
    the read of each table.

    Spark's planner determines the needs of a query. Under Spark Connect, where the planner is out
    of reach, the statement's text determines them less precisely.

    Args:
        spark: the session.
        statement: one query. Any other statement is given to `spark.sql` as it is.
        args: values of the statement's parameters, as for `spark.sql`.
        options: options of the format for every table, as in `endpoint="http://a:8765"`; an
            attached name has its own.
    """
    table_statement = statement_of(statement)
    if table_statement is not None and table_statement.verb in ROW_VERBS:
        return _changed(spark, table_statement, args, options)
    all_options = check_keys(as_options(options), uses=(BATCH,))
    text, frames = replace_changes(statement, functools.partial(changes_of_use, spark, all_options))
    read = QueryText.of(text)
    names = {name: _attached(spark, name) for name in read.names}
    service_tables = {
        name: table
        for name in read.names
        if ".".join(name) not in frames
        and names[name] is None
        and (table := service_table(spark, name, all_options)) is not None
    }
    by_name = {name: table for name, table in names.items() if table is not None}
    if by_name:
        try:
            return _narrowed(spark, read, args, service_tables | by_name, frames)
        except PySparkException:
            # Spark accepts more qualifiers for an attached name than for a DataFrame in its place.
            pass
    if service_tables:
        return _narrowed(spark, read, args, service_tables, frames)
    if frames and read.tree is not None:
        return spark.sql(read.template({(name,): name for name in frames}), args=args, **frames)
    try:
        frame = spark.sql(statement, args=args)
        if read.tree is None and not has_jvm(spark):
            frame.schema  # noqa: B018 - Spark Connect looks for tables only when it is asked
    except AnalysisException as error:
        if error.getCondition() == "TABLE_OR_VIEW_NOT_FOUND":
            _refuse_clause(spark, statement, all_options)
            _refuse_missing(spark, missing_table(error), all_options)
        raise
    return frame


def _refuse_clause(spark: SparkSession, statement: str, options: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if a statement unknown to us names a table of the service."""
    for _, name, _ in named_at(tokens_of(statement)):
        if service_table(spark, name, options) is not None:
            table = ".".join(name)
            raise UnsupportedError(
                f"streamhouse.sql reads '{table}' in queries, and this statement gives the name to"
                " Spark, which lacks such a table. Options of a read (WITH (...), AS OF) are"
                f" arguments, as in streamhouse.sql(spark, 'SELECT ... FROM {table}',"
                " asOfTimestamp='2026-11-21 10:00:00'). For every other statement or clause give"
                f" the table a name in Spark: streamhouse.attach(spark, '{table}', 'name')"
            )


def _refuse_missing(spark: SparkSession, name: tuple[str, ...], options: Mapping[str, str]) -> None:
    """Raise for a table that neither Spark nor the service has, with the nearest name."""
    if len(name) != 2:
        return
    try:
        QueryTable(spark, ".".join(name), options).schema  # noqa: B018 - asking is the act
    except TableNotFoundError as error:
        raise TableNotFoundError(
            f"{error.message}, and Spark has no table or view of the name"
        ) from None


def changes_of_use(
    spark: SparkSession, options: Mapping[str, str], use: ChangesUse
) -> DataFrame | None:
    """Return the changes of an attached name, or of a table of the service."""
    frame: DataFrame | None = changes_of_name(spark, use.name, use.options, is_stream=use.is_stream)
    if frame is None and service_table(spark, use.name, options) is not None:
        path = f"{'.'.join(use.name)}${CHANGES}"
        frame = load_changes(spark, path, {**options, **use.options}, is_stream=use.is_stream)
    return frame


def _changed(
    spark: SparkSession,
    statement: TableStatement,
    args: dict[str, Any] | list[Any] | None,
    options: Mapping[str, Any],
) -> DataFrame:
    """Execute a statement that changes rows of the service's table, or give it to `spark.sql`."""
    register(spark)
    all_options = check_keys(as_options(options), uses=(BATCH, WRITE))
    reads = applicable(all_options, uses=(BATCH,))
    # An attached name of two parts is a table of Spark, too.
    if service_table(spark, statement.name, reads) is not None:
        frame: DataFrame = change_rows(
            spark,
            statement.text,
            Arguments(args),
            table=".".join(statement.name),
            options=all_options,
        )
        return frame
    once = {key: text for key, text in all_options.items() if key.lower() in _ONCE}
    if not once:
        return spark.sql(statement.text, args=args)
    counts: DataFrame | None = change_rows_of_name(spark, statement, Arguments(args), once)
    if counts is None:
        raise UnsupportedError(
            f"'{'.'.join(statement.name)}' is no table of the service and no attached name, so"
            " app.id and app.version cannot make the statement happen once"
        )
    return counts


def _narrowed(
    spark: SparkSession,
    read: QueryText,
    args: dict[str, Any] | list[Any] | None,
    tables: Mapping[tuple[str, ...], QueryTable],
    changes: Mapping[str, DataFrame],
) -> DataFrame:
    """Return the query's DataFrame, with narrowed tables, and changes, in place of their names."""
    fields = {name: f"streamhouse_{number}" for number, name in enumerate(tables)}
    text = read.template(fields | {(name,): name for name in changes})

    def build(frames: Sequence[DataFrame]) -> DataFrame:
        named = dict(zip(fields.values(), frames, strict=True))
        return spark.sql(text, args=args, **named, **changes)

    by_text = functools.partial(needs_by_text, spark, read, tables)
    return _explained(narrowed(list(tables.values()), build, by_text))


def _attached(spark: SparkSession, name: tuple[str, ...]) -> QueryTable | None:
    """Return the table of an attached name of one or two parts."""
    attached_name = attached_as_written(spark, name) if len(name) <= 2 else None
    if attached_name is None:
        return None
    options = {
        key: value
        for key, value in applicable(attached_name.options, uses=(BATCH,)).items()
        if key.lower() != "table"
    }
    return QueryTable(spark, str(attached_name.connection.name), options)


def service_table(
    spark: SparkSession, name: tuple[str, ...], options: Mapping[str, str]
) -> QueryTable | None:
    """Return the service's table of a name, unless Spark has a table or view of the name."""
    if len(name) != 2 or spark.catalog.tableExists(".".join(map(quoted, name))):
        return None
    table = QueryTable(spark, ".".join(name), options)
    try:
        table.schema  # noqa: B018 - asking is the act
    except (InvalidNameError, NotFoundError):
        return None
    return table


def _explained(query: NarrowedQuery) -> DataFrame:
    """Return the query's DataFrame, with an `explain` that first shows the read of each table."""
    frame, plain = query.frame, query.frame.explain

    @functools.wraps(plain)
    def explain(*arguments: Any, **named: Any) -> None:
        sys.stdout.write(f"{query}\n")
        plain(*arguments, **named)

    frame.explain = explain  # type: ignore[method-assign]
    return frame
