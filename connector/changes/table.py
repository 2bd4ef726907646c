"""`Table`: a table of the service as one that Spark changes: merge, update, delete, truncate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streamhouse.connector.changes._assigned_values import (
    Assignment,
    Case,
    types_of,
    values_of,
)
from streamhouse.connector.changes._commit import (
    DELETED,
    KEPT,
    PROBLEM_COLUMN,
    UPDATED,
    Changes,
    commit_changes,
)
from streamhouse.connector.changes._expressions import assignments, condition, first_of
from streamhouse.connector.changes._merge import Merge, On, changed_rows, check_changeable
from streamhouse.connector.changes._needed_rows import rows_for
from streamhouse.connector.format._spark_readers import session_zone, stream_marks
from streamhouse.connector.format.registration import register, write_batch
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

# What Spark notes of a column that `window()` or `session_window()` made, whatever it is called.
_WINDOW_MARKS: Final = frozenset({"spark.timeWindow", "spark.sessionWindow"})
_WRITES_ONLY: Final = ("app.id", "app.version", "transaction.timeout")


class Table:
    """A table to change: each call is one transaction, which happens as a whole, once, or not.

    What a call computes from the table it computes anew if others change the same rows meanwhile:
    no update is lost. `app_id` and `app_version` make a call happen once, also if its job is
    started again.
    """

    def __init__(self, spark: SparkSession, path: str, **options: Any) -> None:
        """Name a table; nothing is asked yet.

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
        """Return the table's rows; every statement reads the newest."""
        return self._spark.read.format(FORMAT).options(**self._read_options()).load()

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
        build: Callable[[DataFrame], DataFrame],
    ) -> DataFrame:
        """Return what `build` makes of `columns` of the rows for which `where` is true."""
        return rows_for(
            self._spark,
            self._read_options(),
            info,
            self._write_options().connection,
            lambda frames: build(frames[0].filter(condition(where))),
            columns=columns,
            where=where if isinstance(where, str) else None,
        )

    def history(self) -> DataFrame:
        """Return what changed the table: transactions, and snapshots of the lake, oldest first.

        Column `kind` tells them apart. Transactions are those that the service remembers, which
        docs/spark_changes.md describes; `asOfSnapshot` goes back to a `snapshot_id`.
        """
        given = self._read_options() | {"table": f"{self.path}$history"}
        return self._spark.read.format(FORMAT).options(**given).load()

    def merge(
        self,
        source: DataFrame,
        on: On = None,
        *,
        source_alias: str = "source",
        target_alias: str = "target",
    ) -> Merge:
        """Begin a merge of the rows of `source`; it runs with `execute`.

        Args:
            source: the rows to merge; each may change one row of the table.
            on: which rows match. Default: those with the same primary key. Else names of columns
                that both have, a mapping from the table's columns to the source's, or a condition
                like `"target.id = source.user"`.
            source_alias: what conditions and values call the source.
            target_alias: what they call the table.
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
        return commit_changes(
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
        rewrite: bool = False,
        app_id: str | None = None,
        app_version: int | None = None,
        isolation: str = "snapshot",
    ) -> Changes:
        """Change columns of the rows for which `where` is true, by default of all.

        Args:
            set: column -> its new value: SQL text, a Spark column, or a plain value.
            where: SQL text or a Spark column.
            rewrite: a table without a primary key is written anew as a whole.
            app_id: see `Merge.execute`, as for `app_version` and `isolation`.
        """

        def changed(info: TableInfo) -> DataFrame:
            names = info.schema.names
            given = assignments(set, columns=names, table=self.path, what="update")
            in_key = [name for name in given if name in info.descriptor.primary_key]
            if in_key:
                raise UnsupportedError(
                    f"table '{self.path}': update sets column '{in_key[0]}' of the primary key,"
                    " which a row keeps for life; delete the row and insert one with the new key"
                )
            if rewrite:
                return _rewritten(self.to_df(), given, condition(where), self._assignment(info))
            return self._rows_for(info, where, names, lambda rows: _updated(rows, given))

        return self._changed(changed, "update", rewrite, app_id, app_version, isolation)

    def delete(
        self,
        where: Column | str | None = None,
        *,
        rewrite: bool = False,
        app_id: str | None = None,
        app_version: int | None = None,
        isolation: str = "snapshot",
    ) -> Changes:
        """Delete the rows for which `where` is true; all rows: `truncate`.

        The arguments are those of `update`.
        """
        if where is None:
            raise InvalidRequestError(
                f"table '{self.path}': delete needs a condition; truncate() deletes all rows"
            )

        def changed(info: TableInfo) -> DataFrame:
            if rewrite:
                kind = first_of([(condition(where), F.lit(DELETED))], F.lit(KEPT))
                return _marked(self.to_df(), kind)
            key = info.descriptor.primary_key
            names = [quoted(name) for name in key]
            return self._rows_for(
                info, where, key, lambda rows: _marked(rows.select(*names), F.lit(DELETED))
            )

        return self._changed(changed, "delete", rewrite, app_id, app_version, isolation)

    def truncate(self, *, app_id: str | None = None, app_version: int | None = None) -> Changes:
        """Delete all rows, also those that arrive until the commit."""
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
        """Return a writer of a stream whose rows replace those with their keys, exactly once.

        It is what `outputMode("update")` would be, which Spark refuses a Python sink: start it with
        a checkpoint. The results of an aggregation come as often as they change. A column that
        `window()` or `session_window()` made becomes two, `window_start` and `window_end`.

        Args:
            df: a streaming DataFrame.
            keys: the primary key, if this write creates the table; else a check. A window's name
                stands for both of its columns.
            app_id: who writes, the same after every restart; default: the query's id.
            options: options of a write, as in `**{"bucket.num": 4, "sequence.column": "at"}`.
        """
        rows, windows = _without_windows(df)
        given = {k: v for k, v in self._options.items() if k != "table"} | as_options(options)
        if keys is not None:
            named = [part for key in keys for part in windows.get(key, (key,))]
            given["primary.key"] = quoted_list(named)
        given["write.mode"] = str(given.get("write.mode", "upsert"))
        self._check_upserts(given)
        path = self.path

        def upsert(frame: DataFrame, batch_id: int) -> None:
            write_batch(frame, batch_id, table=path, app_id=app_id, **given)

        return rows.writeStream.outputMode("update").foreachBatch(upsert)

    def _check_upserts(self, given: Mapping[str, str]) -> None:
        parsed = write_options({**given, "table": self.path})
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
        compute: Any,
        what: str,
        rewrite: bool,
        app_id: str | None,
        app_version: int | None,
        isolation: str,
    ) -> Changes:
        def checked(info: TableInfo) -> DataFrame:
            if not rewrite:
                _check_has_key(info, what)
                check_changeable(info, what=what, deletes=what == "delete")
            elif info.is_primary_key_table:
                raise InvalidRequestError(
                    f"table '{self.path}' has a primary key, so {what} finds its rows by key;"
                    " remove rewrite=True"
                )
            frame: DataFrame = compute(info)
            return frame

        return commit_changes(
            self._write_options(app_id, app_version),
            checked,
            isolation=isolation,
            is_overwrite=rewrite,
        )

    def _write_options(
        self, app_id: str | None = None, app_version: int | None = None
    ) -> WriteOptions:
        given = dict(self._options) | session_zone(self._spark) | stream_marks(self._spark)
        if app_id is not None:
            given["app.id"] = app_id
        if app_version is not None:
            given["app.version"] = str(app_version)
        parsed = write_options(given)
        if parsed.app_id is not None and parsed.app_version is None:
            raise InvalidRequestError("app_id needs app_version, the number of this change")
        return parsed


def _check_has_key(info: TableInfo, what: str) -> None:
    if not info.is_primary_key_table:
        raise UnsupportedError(
            f"table '{info.path}' has no primary key, so {what} cannot find rows by key;"
            f" {what}(..., rewrite=True) writes the whole table anew in one transaction, and"
            " streams of it that have not read all old rows fail then"
        )


def _updated(rows: DataFrame, given: Mapping[str, Column]) -> DataFrame:
    """Return the rows that change, with their new values."""
    columns = [given.get(name, F.col(quoted(name))).alias(name) for name in rows.columns]
    return _marked(rows.select(*columns), F.lit(UPDATED))


def _rewritten(
    rows: DataFrame, given: Mapping[str, Column], is_changed: Column, assignment: Assignment
) -> DataFrame:
    """Return all rows, those that change with their new values."""
    new_types = dict(zip(given, types_of(rows, list(given.values())), strict=True))
    columns = []
    for field in rows.schema:
        own = F.col(quoted(field.name))
        if (new_type := new_types.get(field.name)) is not None:
            assignment.check(field.name, new_type)
            cases = [
                Case(is_changed, given[field.name], new_type),
                Case(F.lit(True), own, field.dataType),
            ]
            own = values_of(cases, field.dataType)
        columns.append(own.alias(field.name))
    kind = first_of([(is_changed, F.lit(UPDATED))], F.lit(KEPT))
    return _marked(rows.select(*columns, kind.alias(CHANGE_TYPE_COLUMN)), F.col(CHANGE_TYPE_COLUMN))


def _marked(rows: DataFrame, kind: Column) -> DataFrame:
    """Return rows with what becomes of each, and no problem."""
    problem = F.lit(None).cast("string")
    return rows.withColumn(CHANGE_TYPE_COLUMN, kind).withColumn(PROBLEM_COLUMN, problem)


def _without_windows(df: DataFrame) -> tuple[DataFrame, dict[str, tuple[str, str]]]:
    """Return the frame with each window as two columns, and their names by the window's."""
    windows: dict[str, tuple[str, str]] = {}
    columns = []
    for field in df.schema:
        own = quoted(field.name)
        if isinstance(field.dataType, StructType) and _WINDOW_MARKS & field.metadata.keys():
            windows[field.name] = (f"{field.name}_start", f"{field.name}_end")
            columns += [
                F.col(f"{own}.start").alias(windows[field.name][0]),
                F.col(f"{own}.end").alias(windows[field.name][1]),
            ]
        else:
            columns.append(F.col(own))
    return (df.select(*columns) if windows else df), windows
