"""`Table`: a table of the service that Spark changes: merge, update, delete, truncate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streamhouse.client.values.arguments import checked_calls
from streamhouse.connector.changes._assigned_values import (
    Assignment,
    Case,
    types_of,
    values_of,
)
from streamhouse.connector.changes._commit import (
    DELETED,
    PROBLEM_COLUMN,
    UNCHANGED,
    UPDATED,
    Changes,
    Compute,
    ComputedRows,
    commit_changes,
)
from streamhouse.connector.changes._expressions import assignments, condition, first_of
from streamhouse.connector.changes._merge_clauses import Merge, On, changed_rows, check_changeable
from streamhouse.connector.changes._needed_rows import rows_for
from streamhouse.connector.format._spark_readers import session_zone, stream_marks
from streamhouse.connector.format.registration import register, write_batch
from streamhouse.connector.query._narrowing import Pushed
from streamhouse.connector.write._write_options import WriteOptions, write_options
from streamhouse.core.errors import (
    InvalidRequestError,
    NotFoundError,
    UnsupportedError,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.zone import spark_zone
from streamhouse.reading.options.connection import client_for
from streamhouse.reading.options.options import FORMAT, ZONE_MARK, as_options
from streamhouse.reading.options.quoted_names import quoted, quoted_list

if TYPE_CHECKING:
    from pyspark.sql.streaming.readwriter import DataStreamWriter

__all__ = ["Table"]

# Spark's metadata of a column from `window()` or `session_window()`, whatever the column's name.
_WINDOW_MARKS: Final = frozenset({"spark.timeWindow", "spark.sessionWindow"})
_WRITES_ONLY: Final = ("app.id", "app.version", "transaction.timeout")


@checked_calls
class Table:
    """A table to change: each call is a transaction, which happens as a whole, once, or not at all.

    If a different writer changes the same rows meanwhile, a call computes its rows again: no update
    is lost. `app_id` and `app_version` make a call happen once, also if its job is started again.
    """

    def __init__(self, spark: SparkSession, path: str, **options: Any) -> None:
        """Name a table, without a request to the service.

        Args:
            spark: the session whose joins do the work.
            path: `database.table`.
            options: `endpoint`, `token`, `tls.ca` and `transaction.timeout`, as of the format.
        """
        register(spark)
        self._spark = spark
        self._options = as_options(options) | {"table": path}
        self.path: Final = str(self._write_options().connection.name.path)

    def __repr__(self) -> str:
        return f"Table({self.path!r})"

    def to_df(self) -> DataFrame:
        """Return the table's rows; every statement reads the newest rows."""
        return self._spark.read.format(FORMAT).options(**self._read_options()).load()

    def _rows(self, alias: str | None) -> DataFrame:
        return self.to_df() if alias is None else self.to_df().alias(alias)

    def _read_options(self) -> dict[str, str]:
        return {k: v for k, v in self._options.items() if k.lower() not in _WRITES_ONLY}

    def _assignment(self, info: TableInfo) -> Assignment:
        zone = spark_zone(session_zone(self._spark)[ZONE_MARK], name="the time zone")
        return Assignment(info, zone)

    def _rows_for(
        self,
        info: TableInfo,
        where: Column | str | None,
        columns: Sequence[str],
        alias: str | None,
        build: Callable[[DataFrame], DataFrame],
    ) -> ComputedRows:
        """Return the result of `build` for `columns` of the rows for which `where` is true."""
        return rows_for(
            self._spark,
            self._read_options(),
            info,
            self._write_options().connection,
            lambda frames: build(frames[0].filter(condition(where))),
            columns=columns,
            where=where if isinstance(where, str) else None,
            alias=alias,
        )

    def history(self) -> DataFrame:
        """Return the changes of the table: transactions, and snapshots of the lake, oldest first.

        Column `kind` separates the two. docs/spark_changes.md describes how long the service
        remembers transactions; `asOfSnapshot` goes back to a `snapshot_id`.
        """
        options = self._read_options() | {"table": f"{self.path}$history"}
        return self._spark.read.format(FORMAT).options(**options).load()

    def merge(
        self,
        source: DataFrame,
        on: On = None,
        *,
        source_alias: str = "source",
        target_alias: str = "target",
    ) -> Merge:
        """Begin a merge of the rows of `source`; `execute` runs the merge.

        Args:
            source: the rows to merge; each may change one row of the table.
            on: the rule of a match. Default: the same primary key. Else names of columns that both
                sides have, a mapping from the table's columns to the source's, or a condition like
                `"target.id = source.user"`.
            source_alias: the name of the source in conditions and values.
            target_alias: the name of the table in conditions and values.
        """
        if source_alias.lower() == target_alias.lower():
            raise InvalidRequestError(f"source and target of a merge are both '{source_alias}'")
        return Merge(
            source=source,
            on=on,
            source_alias=source_alias,
            target_alias=target_alias,
            run=self._merged,
        )

    def _merged(
        self, merge: Merge, *, app_id: str | None, app_version: int | None, isolation: str
    ) -> Changes:
        return self._commit(
            self._write_options(app_id, app_version),
            lambda info: changed_rows(
                merge, self.to_df(), self._assignment(info), self._write_options().connection
            ),
            isolation=isolation,
        )

    def update(
        self,
        set: Mapping[str, Any],  # noqa: A002 - the word of SQL
        where: Column | str | None = None,
        *,
        target_alias: str | None = None,
        rewrite: bool = False,
        app_id: str | None = None,
        app_version: int | None = None,
        isolation: str = "snapshot",
    ) -> Changes:
        """Change columns of the rows for which `where` is true, by default of all rows.

        Args:
            set: column -> its new value: SQL text, a Spark column, or a plain value.
            where: SQL text or a Spark column.
            target_alias: the name of the table in conditions and values.
            rewrite: write a table without a primary key anew as a whole.
            app_id: see `Merge.execute`, as for `app_version` and `isolation`.
        """

        def changed(info: TableInfo) -> ComputedRows:
            names = info.schema.names
            values = assignments(set, columns=names, table=self.path, operation="update")
            in_key = [name for name in values if name in info.descriptor.primary_key]
            if in_key:
                raise UnsupportedError(
                    f"table '{self.path}': update sets column '{in_key[0]}' of the primary key,"
                    " which a row keeps for life; delete the row and insert one with the new key"
                )
            if rewrite:
                rows = self._rows(target_alias)
                frame = _rewritten(rows, values, condition(where), self._assignment(info))
                return ComputedRows(frame, Pushed(self.path))
            return self._rows_for(
                info, where, names, target_alias, lambda rows: _updated(rows, values)
            )

        return self._changed(changed, "update", rewrite, app_id, app_version, isolation)

    def delete(
        self,
        where: Column | str | None = None,
        *,
        target_alias: str | None = None,
        rewrite: bool = False,
        app_id: str | None = None,
        app_version: int | None = None,
        isolation: str = "snapshot",
    ) -> Changes:
        """Delete the rows for which `where` is true; `truncate` deletes all rows.

        The arguments are as in `update`.
        """
        if where is None:
            raise InvalidRequestError(
                f"table '{self.path}': delete needs a condition; truncate() deletes all rows"
            )

        def changed(info: TableInfo) -> ComputedRows:
            if rewrite:
                kind = first_of([(condition(where), F.lit(DELETED))], F.lit(UNCHANGED))
                frame = _marked(self._rows(target_alias), kind)
                return ComputedRows(frame, Pushed(self.path))
            key = info.descriptor.primary_key
            names = [quoted(name) for name in key]
            return self._rows_for(
                info,
                where,
                key,
                target_alias,
                lambda rows: _marked(rows.select(*names), F.lit(DELETED)),
            )

        return self._changed(changed, "delete", rewrite, app_id, app_version, isolation)

    def truncate(self, *, app_id: str | None = None, app_version: int | None = None) -> Changes:
        """Delete all rows, also rows that arrive until the commit."""
        options = self._write_options(app_id, app_version)
        connection = options.connection
        transaction = client_for(connection.endpoint, connection.token).begin_transaction(
            self.path,
            operation="overwrite",
            app_id=options.app_id,
            version=options.app_version,
            timeout_s=options.timeout_ms / 1000,
            source=options.query_id,
            run=options.run_id,
        )
        with transaction:
            return Changes(is_skipped=transaction.commit([]).is_skipped)

    def upsert_stream(
        self,
        df: DataFrame,
        keys: Sequence[str] | None = None,
        *,
        app_id: str | None = None,
        **options: Any,
    ) -> DataStreamWriter:
        """Return a writer of a stream whose rows replace the rows with the same keys, exactly once.

        The writer does the work of `outputMode("update")`, which Spark refuses for a Python sink.
        Start the writer with a checkpoint. An aggregation writes each change of its results. A
        column from `window()` or `session_window()` becomes two columns, `window_start` and
        `window_end`.

        Args:
            df: a streaming DataFrame.
            keys: the primary key, if this write creates the table; else a check. A window's name
                stands for both of its columns.
            app_id: the id of the writer, the same after every restart; default: the query's id.
            options: options of a write, as in `**{"bucket.num": 4, "sequence.column": "at"}`.
        """
        rows, windows = _without_windows(df)
        all_options = {k: v for k, v in self._options.items() if k != "table"} | as_options(options)
        if keys is not None:
            key_columns = [part for key in keys for part in windows.get(key, (key,))]
            all_options["primary.key"] = quoted_list(key_columns)
        all_options["write.mode"] = str(all_options.get("write.mode", "upsert"))
        self._check_upserts(all_options)
        path = self.path

        def upsert(frame: DataFrame, batch_id: int) -> None:
            write_batch(frame, batch_id, table=path, app_id=app_id, **all_options)

        return rows.writeStream.outputMode("update").foreachBatch(upsert)

    def _check_upserts(self, options: Mapping[str, str]) -> None:
        parsed = write_options({**options, "table": self.path})
        connection = parsed.connection
        try:
            info = client_for(connection.endpoint, connection.token).describe_table(self.path)
        except NotFoundError:
            if parsed.primary_key is None:
                raise InvalidRequestError(
                    f"table '{self.path}' does not exist; name its primary key, as in"
                    " upsert_stream(df, keys=['id']), and the first micro-batch creates it"
                ) from None
            return
        key = info.descriptor.primary_key
        if not key:
            raise UnsupportedError(
                f"table '{self.path}' has no primary key, so a stream has no rows to replace in"
                " it; append to it with writeStream.format('streamhouse')"
            )
        if parsed.primary_key not in (None, key):
            raise InvalidRequestError(
                f"table '{self.path}' has the primary key ({', '.join(key)}), not"
                f" ({', '.join(parsed.primary_key or ())})"
            )

    def _changed(
        self,
        compute: Compute,
        operation: str,
        rewrite: bool,
        app_id: str | None,
        app_version: int | None,
        isolation: str,
    ) -> Changes:
        def checked(info: TableInfo) -> ComputedRows:
            if not rewrite:
                _check_has_key(info, operation)
                check_changeable(info, operation=operation, deletes=operation == "delete")
            elif info.is_primary_key_table:
                raise InvalidRequestError(
                    f"table '{self.path}' has a primary key, so {operation} finds its rows by key;"
                    " remove rewrite=True"
                )
            return compute(info)

        return self._commit(
            self._write_options(app_id, app_version),
            checked,
            isolation=isolation,
            is_overwrite=rewrite,
        )

    def _commit(
        self,
        options: WriteOptions,
        compute: Compute,
        *,
        isolation: str,
        is_overwrite: bool = False,
    ) -> Changes:
        return commit_changes(options, compute, isolation=isolation, is_overwrite=is_overwrite)

    def _write_options(
        self, app_id: str | None = None, app_version: int | None = None
    ) -> WriteOptions:
        options = dict(self._options) | session_zone(self._spark) | stream_marks(self._spark)
        if app_id is not None:
            options["app.id"] = app_id
        if app_version is not None:
            options["app.version"] = str(app_version)
        parsed = write_options(options)
        if parsed.app_id is not None and parsed.app_version is None:
            raise InvalidRequestError("app_id needs app_version, the number of this change")
        return parsed


def _check_has_key(info: TableInfo, operation: str) -> None:
    if not info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{info.path}' has no primary key, so {operation} cannot find rows by key;"
            f" streamhouse.Table(spark, '{info.path}').{operation}(..., rewrite=True) writes the"
            " whole table anew in one transaction;"
            " a stream of the table fails then unless it has read all old rows"
        )


def _updated(rows: DataFrame, values: Mapping[str, Column]) -> DataFrame:
    """Return the changing rows, with their new values."""
    # Within CASE, Spark refuses a generator as explode(...), which would make several rows of one.
    new_values = {name: F.when(F.lit(True), value) for name, value in values.items()}
    columns = [new_values.get(name, F.col(quoted(name))).alias(name) for name in rows.columns]
    return _marked(rows.select(*columns), F.lit(UPDATED))


def _rewritten(
    rows: DataFrame, values: Mapping[str, Column], is_changed: Column, assignment: Assignment
) -> DataFrame:
    """Return all rows, the changing rows with their new values."""
    new_types = dict(zip(values, types_of(rows, list(values.values())), strict=True))
    columns = []
    for field in rows.schema:
        value = F.col(quoted(field.name))
        if (new_type := new_types.get(field.name)) is not None:
            assignment.check(field.name, new_type)
            cases = [
                Case(is_changed, values[field.name], new_type),
                Case(F.lit(True), value, field.dataType),
            ]
            value = values_of(cases, field.dataType)
        columns.append(value.alias(field.name))
    kind = first_of([(is_changed, F.lit(UPDATED))], F.lit(UNCHANGED))
    return _marked(rows.select(*columns, kind.alias(CHANGE_TYPE_COLUMN)), F.col(CHANGE_TYPE_COLUMN))


def _marked(rows: DataFrame, kind: Column) -> DataFrame:
    """Return rows with their kind of change, and no problem."""
    problem = F.lit(None).cast("string")
    return rows.withColumn(CHANGE_TYPE_COLUMN, kind).withColumn(PROBLEM_COLUMN, problem)


def _without_windows(df: DataFrame) -> tuple[DataFrame, dict[str, tuple[str, str]]]:
    """Return the frame with each window as two columns, and their names by the window's."""
    windows: dict[str, tuple[str, str]] = {}
    columns = []
    for field in df.schema:
        name = quoted(field.name)
        if isinstance(field.dataType, StructType) and _WINDOW_MARKS & field.metadata.keys():
            windows[field.name] = (f"{field.name}_start", f"{field.name}_end")
            columns += [
                F.col(f"{name}.start").alias(windows[field.name][0]),
                F.col(f"{name}.end").alias(windows[field.name][1]),
            ]
        else:
            columns.append(F.col(name))
    return (df.select(*columns) if windows else df), windows
