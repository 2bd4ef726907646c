"""The effect of statements on our format and on attached names: done, refused, or left to Spark.

Spark 4.3 would answer OK to most statements and change only a catalog entry.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql.types import StructType

from streamhouse.connector.names._alteration import alteration_of, commented
from streamhouse.connector.names._attached_names import (
    AttachedName,
    attached,
    attached_as_written,
    is_cached,
    refresh,
    run_as_spark,
)
from streamhouse.connector.names._constraints import AddedConstraint, DroppedConstraint
from streamhouse.connector.names._definition import Definition, definition_of
from streamhouse.connector.names._name_loads import with_changes
from streamhouse.connector.names._row_changes import Arguments, change_options, change_rows
from streamhouse.connector.names._shared_options import (
    check_plan,
    check_statement,
    is_name_of_view,
)
from streamhouse.connector.names._table_statement import ROW_VERBS, TableStatement
from streamhouse.connector.write._spark_types import arrow_columns
from streamhouse.connector.write._write_options import write_options
from streamhouse.connector.write._write_table import existing_or_created
from streamhouse.core.errors import (
    AlreadyExistsError,
    InvalidRequestError,
    NotFoundError,
    TableExistsError,
    UnsupportedError,
)
from streamhouse.core.model.schema import canonical_type, type_to_json
from streamhouse.reading.options.connection import client_for, connection_options
from streamhouse.reading.options.options import (
    BATCH,
    FORMAT,
    PROVIDER_PREFIX,
    STREAM,
    WRITE,
    applicable,
    check_keys,
)

__all__ = ["Names", "is_ours", "no_such_definition"]


def is_ours(provider: Any) -> bool:
    """Whether a format is ours or an attached name's."""
    if not isinstance(provider, str):
        return False
    return provider.lower() == FORMAT or provider.lower().startswith(PROVIDER_PREFIX)


def no_such_definition(call: str, name: str) -> UnsupportedError:
    """Return the error for a call that would define a table in Spark's catalog only."""
    return UnsupportedError(
        f"{call} would make '{name}' a name in Spark's catalog without a table: write by"
        f" .format('{FORMAT}').mode('append').save('database.table') (a stream: .start), which"
        f" creates the table, then streamhouse.attach(spark, 'database.table', '{name}'); or use"
        f" SQL, CREATE TABLE {name} (...) USING {FORMAT}"
    )


def change_rows_of_name(
    spark: Any,
    statement: TableStatement,
    arguments: Arguments,
    call_options: Mapping[str, str] | None = None,
) -> Any:
    """Execute a statement that changes rows of an attached name; None leaves it to Spark.

    `call_options` are the call's, in addition to the name's.
    """
    name = _name_to_change(spark, statement, statement.name)
    if name is None:
        return None
    options = change_options(name) | dict(call_options or {})
    table = name.connection.name
    if table.part:
        raise _only_read(statement, name)
    counts = change_rows(spark, statement.text, arguments, table=str(table.path), options=options)
    if statement.explain is None and is_cached(spark, name.sql_name):
        run_as_spark(spark, f"REFRESH TABLE {name.sql_name}")
    return counts


def _name_to_change(
    spark: Any, statement: TableStatement, parts: Sequence[str]
) -> AttachedName | None:
    """Return the attached name, or None; raises `UnsupportedError` if a view hides the name."""
    name = attached_as_written(spark, parts)
    if name is None:
        hidden = attached(spark, parts)
        if hidden is not None and is_name_of_view(spark, parts):
            raise UnsupportedError(
                f"{statement.verb} {'.'.join(parts)}: a temporary view of this name hides the"
                f" attached name, and a view cannot be changed; write {hidden.sql_name}, or"
                f" DROP VIEW {'.'.join(parts)}"
            )
    return name


class Names:
    """Answers statements of one session.

    `attach` makes a name from (table, name, options).
    """

    def __init__(self, spark: Any, attach: Callable[..., Any]) -> None:
        self._spark = spark
        self._attach = attach

    def answer(self, statement: TableStatement, arguments: Arguments) -> Any:
        """Execute the statement and return its DataFrame; None leaves the statement to Spark.

        Raise `UnsupportedError` for an impossible statement, with the alternative.
        """
        if statement.verb in ROW_VERBS:
            return change_rows_of_name(self._spark, statement, arguments)
        if self._is_answered(statement):
            return self._spark.createDataFrame([], StructType([]))
        return None

    def _is_answered(self, statement: TableStatement) -> bool:
        name = ".".join(statement.name)
        if is_ours(statement.provider):
            if statement.verb == "CREATE TABLE":
                self._define(definition_of(statement))
                return True
            raise _no_replacement(statement, name)
        if statement.like is not None and attached(self._spark, statement.like) is not None:
            raise UnsupportedError(
                f"CREATE TABLE {name} LIKE {'.'.join(statement.like)}: the new name would stand for"
                " the same table; make a table with CREATE TABLE ... USING streamhouse AS SELECT"
                " ... WHERE false"
            )
        if statement.verb in ("CREATE TABLE", "CREATE VIEW"):
            return False
        if statement.verb == "COMMENT ON COLUMN":
            return self._comment(statement, name)
        if statement.verb == "REFRESH TABLE":
            attached_name = attached(self._spark, statement.name)
        else:
            attached_name = _name_to_change(self._spark, statement, statement.name)
        return attached_name is not None and self._answer_for(attached_name, statement, name)

    def refuse(self, within: Iterable[TableStatement]) -> None:
        """Refuse the statements of a script that Spark would execute without our hooks."""
        for statement in within:
            verb, of = statement.verb, statement.like or statement.name
            if verb == "COMMENT ON COLUMN":
                of = of[:-1]
            is_sparks = verb == "REFRESH TABLE" or (
                verb in ("CREATE TABLE", "CREATE VIEW") and statement.like is None
            )
            if not is_ours(statement.provider) and (is_sparks or attached(self._spark, of) is None):
                continue
            effect = (
                "reaches no table"
                if verb in ROW_VERBS
                else "would change Spark's catalog and nothing else"
            )
            raise UnsupportedError(
                f"{verb} {'.'.join(statement.name)} within BEGIN ... END or EXECUTE IMMEDIATE"
                f" {effect}, because Spark asks no Python source about such statements: give the"
                " statement to spark.sql by itself"
            )

    def _answer_for(
        self, attached_name: AttachedName, statement: TableStatement, name: str
    ) -> bool:
        table = attached_name.connection.name
        verb = statement.verb
        if verb == "REFRESH TABLE":
            refresh(self._spark, attached_name, is_forced=True)
            return False
        if verb == "REPLACE TABLE":
            raise _no_replacement(statement, name)
        if table.part:
            raise _only_read(statement, attached_name)
        if verb == "COMMENT ON TABLE":
            raise UnsupportedError(
                f"COMMENT ON TABLE {name}: a Streamhouse table has no comment, its columns have:"
                f" COMMENT ON COLUMN {name}.column IS 'text'"
            )
        words = [token.word for token in statement.tokens[:2]]
        if words == ["RENAME", "TO"]:
            raise UnsupportedError(
                f"ALTER TABLE {name} RENAME TO: a table keeps its name '{table}' for life; for"
                f" another name in Spark use streamhouse.attach(spark, '{table}', 'new_name')"
            )
        self._alter(attached_name, statement)
        return True

    def _comment(self, statement: TableStatement, name: str) -> bool:
        """Comment a column of an attached name."""
        # A table's name has at most three parts; the next part is a column, and a further part a
        # field.
        for end in range(1, min(4, len(statement.name))):
            attached_name = _name_to_change(self._spark, statement, statement.name[:end])
            if attached_name is None:
                continue
            table, column = attached_name.connection.name, statement.name[end:]
            if table.part or len(column) > 1:
                reason = f"'{table}' can only be read" if table.part else "a field has no comment"
                raise UnsupportedError(
                    f"COMMENT ON COLUMN {name}: {reason}; comment a column of '{table.path}'"
                )
            alteration = commented(column[0], statement)
            attached_name.client.alter_schema(str(table.path), alteration.changes)
            refresh(self._spark, attached_name)
            return True
        return False

    def _alter(self, attached_name: AttachedName, statement: TableStatement) -> None:
        path = str(attached_name.connection.name.path)
        alteration = alteration_of(statement, type_of=functools.partial(_type_of, table=path))
        client, updates, removals = (
            attached_name.client,
            alteration.updates,
            alteration.removals,
        )
        match alteration.constraint:
            case AddedConstraint() as added:
                added.check_new(client.describe_table(path))
                updates = added.properties()
            case DroppedConstraint() as dropped:
                removals = dropped.removals(client.describe_table(path))
        if alteration.changes:
            client.alter_schema(path, alteration.changes)
        elif updates or removals:
            client.alter_properties(path, updates=updates, removals=removals)
        refresh(self._spark, attached_name)

    def _define(self, definition: Definition) -> None:
        """Make a table, if the statement has columns or a query, and attach the table."""
        sql_name = ".".join(definition.name)
        if self._spark.catalog.tableExists(sql_name):
            if definition.only_if_absent:
                return
            raise AlreadyExistsError(
                f"Spark has a table or view '{sql_name}' already; DROP TABLE {sql_name} drops an"
                " attached name and leaves its table as it is"
            )
        options = {key.lower(): text for key, text in definition.options.items()}
        parts = definition.name[-2:]
        if len(parts) == 1:
            parts = (self._spark.catalog.currentDatabase(), *parts)
        options.setdefault("table", ".".join(parts))
        check_keys(options, uses=(BATCH, STREAM, WRITE))
        if len(definition.name) > 1 and not self._spark.catalog.databaseExists(
            ".".join(definition.name[:-1])
        ):
            raise InvalidRequestError(
                f"Spark has no database '{'.'.join(definition.name[:-1])}' for the name"
                f" '{sql_name}': CREATE DATABASE first"
            )
        self._make(definition, options)
        reads = applicable(options, uses=(BATCH, STREAM))
        table = reads.pop("table")
        self._attach(table, sql_name, reads)

    def _make(self, definition: Definition, options: dict[str, str]) -> None:
        connection = connection_options(options)
        client = client_for(connection.endpoint, connection.token)
        path = str(connection.name)
        try:
            client.describe_table(path)
            exists = True
        except NotFoundError:
            exists = False
        if definition.columns is None and definition.query is None:
            if not exists:
                raise InvalidRequestError(
                    f"there is no table '{path}' to give a name to: name its columns, or its query"
                )
            return
        if exists:
            if definition.only_if_absent:
                return
            raise TableExistsError(
                f"table '{path}' exists already: CREATE TABLE {'.'.join(definition.name)} USING"
                f" {FORMAT} without columns and query makes it a name in Spark"
            )
        write_options_by_key = applicable(options, uses=(WRITE,)) | {"keepnullability": "true"}
        if definition.columns is not None:
            if definition.query is not None:
                raise UnsupportedError("CREATE TABLE takes columns or AS SELECT, not both")
            schema = StructType.fromDDL(definition.columns)
            assert isinstance(schema, StructType)
            columns = arrow_columns(schema, table=path)
            existing_or_created(
                client, write_options(write_options_by_key), columns, is_stream=False
            )
            return
        assert definition.query is not None
        write_options_by_key.pop("keepnullability")
        check_statement(self._spark, definition.query)
        text, frames = with_changes(self._spark, definition.query)
        frame = run_as_spark(self._spark, text, **frames)
        check_plan(self._spark, frame, text=definition.query)
        frame.write.format(FORMAT).options(**write_options_by_key).mode("append").save()


def _only_read(statement: TableStatement, name: AttachedName) -> UnsupportedError:
    table = name.connection.name
    return UnsupportedError(
        f"{statement.verb} {'.'.join(statement.name)}: the name stands for '{table}', which can"
        f" only be read; attach '{table.path}'"
    )


def _no_replacement(statement: TableStatement, name: str) -> UnsupportedError:
    if statement.verb == "CREATE VIEW":
        return UnsupportedError(
            f"a temporary view USING {FORMAT} would keep the rows of its first use: make it of a"
            f" DataFrame, spark.read.format('{FORMAT}').load('database.table')"
            f".createOrReplaceTempView('{name}'), or streamhouse.attach(spark, 'database.table',"
            f" '{name}')"
        )
    return UnsupportedError(
        f"REPLACE TABLE {name}: a Streamhouse table is not replaced by another definition; INSERT"
        " OVERWRITE, or mode('overwrite'), replaces its rows, ALTER TABLE its columns, and the"
        " client's drop_table drops it"
    )


def _type_of(text: str, *, table: str) -> Any:
    """Convert a type in Spark's spelling to the type of a schema change."""
    schema = StructType.fromDDL(f"c {text}")
    assert isinstance(schema, StructType)
    arrow = arrow_columns(schema, table=table).field(0).type
    return type_to_json(canonical_type(arrow, where=text))
