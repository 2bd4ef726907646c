"""`MERGE`, `UPDATE`, `DELETE` and `TRUNCATE TABLE` as text, executed by the calls of `Table`.

A statement runs once, before its DataFrame is returned; the DataFrame has the counts, named as by
Delta. Under EXPLAIN nothing runs, and the DataFrame has the text of the plan.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Mapping
from typing import Any

from streamhouse.client import StorageClient
from streamhouse.connector.changes._bound_text import bound_text
from streamhouse.connector.changes._commit import Changes, Compute
from streamhouse.connector.changes._merge_clauses import Merge
from streamhouse.connector.changes._side_names import side_clauses
from streamhouse.connector.changes._statement_clauses import (
    MergeText,
    check_truncation,
    merge_of,
    rows_of,
)
from streamhouse.connector.changes._subquery_tables import subquery_tables
from streamhouse.connector.changes.spark_table import Table
from streamhouse.connector.names._attached_names import run_as_spark
from streamhouse.connector.names._name_loads import ChangesUse
from streamhouse.connector.names._row_changes import Arguments
from streamhouse.connector.names._table_statement import TableStatement, statement_of
from streamhouse.connector.query._narrowing import Pushed
from streamhouse.connector.query.sql_query import changes_of_use, sql
from streamhouse.connector.write._write_options import WriteOptions
from streamhouse.core.errors import UnsupportedError
from streamhouse.core.model.table import TableInfo
from streamhouse.reading.options.connection import client_for, connection_options
from streamhouse.reading.options.options import BATCH, applicable, read_options
from streamhouse.reading.plan.pinned_table import PinnedTable
from streamhouse.reading.scan.scan import LakePiece, LogPiece

__all__ = ["change_rows"]


def change_rows(
    spark: Any, text: str, arguments: Arguments, *, table: str, options: Mapping[str, str]
) -> Any:
    """Execute a statement that changes rows of a table; see `names/_row_changes.py`."""
    reads = applicable(options, uses=(BATCH,))
    load = functools.partial(_changes_once, spark, reads)
    with bound_text(text, arguments, load) as complete_text:
        statement = statement_of(complete_text)
        assert statement is not None, "the caller has parsed the statement"
        if statement.explain is not None:
            explained = _ExplainedTable(spark, table, statement, options)
            _run(spark, explained, statement, options)
            return spark.createDataFrame([(explained.plan,)], "plan string")
        changes = _run(spark, Table(spark, table, **options), statement, options)
    updated, deleted, inserted = (
        changes.rows_updated,
        changes.rows_deleted,
        changes.rows_inserted,
    )
    counts = {"num_affected_rows": updated + deleted + inserted}
    if statement.verb == "TRUNCATE TABLE":
        return run_as_spark(spark, "SELECT 1 WHERE false").select()
    if statement.verb == "MERGE":
        counts |= {
            "num_updated_rows": updated,
            "num_deleted_rows": deleted,
            "num_inserted_rows": inserted,
        }
    # Spark runs no job for VALUES.
    values = ", ".join(f"{count}L" for count in counts.values())
    return run_as_spark(spark, f"SELECT * FROM VALUES ({values}) AS counts({', '.join(counts)})")


def _changes_once(spark: Any, options: Mapping[str, str], use: ChangesUse) -> Any:
    frame = changes_of_use(spark, options, use)
    if frame is not None and use.is_stream:
        raise UnsupportedError(
            f"STREAM {'.'.join(use.name)} CHANGES: the statement runs once; leave out STREAM, or"
            " give the statement to spark.sql in foreachBatch of a stream of the changes"
        )
    return frame


def _run(
    spark: Any, table: Table, statement: TableStatement, options: Mapping[str, str]
) -> Changes:
    if statement.verb == "TRUNCATE TABLE":
        check_truncation(statement)
        return table.truncate()
    with subquery_tables(spark, applicable(options, uses=(BATCH,))) as tables:
        if statement.verb == "MERGE":
            text = tables.merge(merge_of(statement))
            return _merge(spark, table, text, options).execute()
        rows = tables.rows(rows_of(statement))
        if rows.values is not None:
            return table.update(rows.values, rows.where, target_alias=rows.alias)
        where = "true" if rows.where is None else rows.where
        return table.delete(where, target_alias=rows.alias)


def _merge(spark: Any, table: Table, text: MergeText, options: Mapping[str, str]) -> Merge:
    read: dict[str, Any] = dict(applicable(options, uses=(BATCH,)))
    source = sql(spark, text.source, **read)
    if any(clause.is_all for clause in text.clauses):
        connection = connection_options({**options, "table": table.path})
        client = client_for(connection.endpoint, connection.token)
        _check_all_columns(text, client.describe_table(table.path))
    merge = table.merge(
        source, text.on, source_alias=text.source_alias, target_alias=text.target_alias
    )
    for clause in side_clauses(text, source=source, target=functools.cache(table.to_df)):
        method = getattr(merge, clause.method)
        values = () if clause.values is None else (clause.values,)
        merge = method(*values, condition=clause.condition)
    return merge


def _check_all_columns(text: MergeText, info: TableInfo) -> None:
    """Refuse `*` where SQL gives a key column another value than the matched row's key."""
    equal = {target.lower(): source.lower() for target, source in text.equal_columns.items()}
    for clause in text.clauses:
        if not clause.is_all:
            continue
        for name in info.descriptor.primary_key:
            source_name = equal.get(name.lower(), "" if clause.action == "update" else name)
            if source_name.lower() != name.lower():
                what = "UPDATE SET *" if clause.action == "update" else "INSERT *"
                raise UnsupportedError(
                    f"MERGE {info.path}: {what} sets every column, also '{name}' of the primary"
                    f" key, which ON does not compare with the source's '{name}': name the columns,"
                    " as in UPDATE SET column = value, or INSERT (columns) VALUES (values)"
                )


class _ExplainedTable(Table):
    """A table whose calls describe the change in `plan`, and execute nothing."""

    def __init__(
        self, spark: Any, path: str, statement: TableStatement, options: Mapping[str, str]
    ) -> None:
        super().__init__(spark, path, **options)
        self._mode = (statement.explain or "simple").lower().replace("logical", "extended")
        self._verb = statement.verb
        self.plan = ""

    def _commit(
        self,
        options: WriteOptions,
        compute: Compute,
        *,
        isolation: str,
        is_overwrite: bool = False,
    ) -> Changes:
        connection = options.connection
        client = client_for(connection.endpoint, connection.token)
        computed = compute(client.table_state(self.path).table)
        read = computed.read
        if isinstance(read, Pushed):
            read = f"{read}; {_extent(client, read, self._read_options())}"
        else:
            read = f"{self.path}: {read}"
        if computed.looks_up_inserts:
            read = f"{read}; the keys of the rows to insert, looked up at the service"
        key = ", ".join(client.describe_table(self.path).descriptor.primary_key)
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            computed.frame.explain(mode=self._mode)
        self._describe(
            read,
            f"the changed rows by the primary key ({key}), all or none; another writer's change of"
            " such a row makes the statement read again",
            shown.getvalue(),
        )
        return Changes()

    def truncate(self, *, app_id: str | None = None, app_version: int | None = None) -> Changes:
        """Describe the deletion of all rows."""
        self._describe("nothing", "the deletion of all rows, also rows that arrive until then", "")
        return Changes()

    def _describe(self, read: str, written: str, frame_plan: str) -> None:
        self.plan = "\n".join(
            [
                f"== Streamhouse: {self._verb} {self.path} ==",
                f"reads {read}",
                f"writes {self.path}: in one transaction {written}",
                "",
                frame_plan,
            ]
        )


def _extent(client: StorageClient, read: Pushed, options: Mapping[str, str]) -> str:
    """Return the part of the lake and of the log that a read covers, in words."""
    table = PinnedTable.of(client, read_options(options, use=BATCH))
    columns = read.columns or table.schema.names
    pieces, all_pieces = (
        [piece for split in table.narrowed(columns, where).plan().splits for piece in split.pieces]
        for where in (read.where, None)
    )
    files, all_files = (
        len({piece.path for piece in some if isinstance(piece, LakePiece)})
        for some in (pieces, all_pieces)
    )
    log = [
        f"{piece.start} to {piece.end} of bucket {piece.bucket}"
        for piece in pieces
        if isinstance(piece, LogPiece)
    ]
    return f"{files} of {all_files} lake files; log offsets {', '.join(log) or 'none'}"
