"""The hooks in the methods of Spark's Python classes, classic and Connect's, that run statements.

Spark asks a Python source for columns at CREATE TABLE, and never calls it at ALTER TABLE. So
`register` wraps the session's own methods, which try `Names` first. A JVM program or a SQL server
on the same catalog runs statements without these hooks, and gets Spark's own result. A read or
write through a stale name raises an error.
"""

from __future__ import annotations

import functools
import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final

from streamhouse.connector.names._advice import LAYOUT_CALLS, advising, check_layout, check_mode
from streamhouse.connector.names._answers import Names, is_ours, no_such_definition
from streamhouse.connector.names._attached_names import HOOK_MARK, attached, attached_in, refresh
from streamhouse.connector.names._name_loads import (
    changes_of_name,
    has_changes_of_view,
    load_of_name,
    with_changes,
)
from streamhouse.connector.names._row_changes import Arguments
from streamhouse.connector.names._shared_options import (
    check_plan,
    check_statement,
    check_view_options,
)
from streamhouse.connector.names._stale_streams import warn_of_stale_names
from streamhouse.connector.names._table_statement import (
    ROW_VERBS,
    name_parts,
    statement_of,
    statements_within,
)
from streamhouse.connector.names._wrapped_methods import Method, session_of, wrap_method
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.options import FORMAT

__all__ = ["answer_statements"]

_CONNECT: Final = "pyspark.sql.connect"
_SHOWN_CHARACTERS: Final = 80
"""The characters of a statement that an error shows."""
Attach = Callable[..., Any]


def answer_statements(spark: Any, attach: Attach) -> None:
    """Wrap a session's methods to try `Names` first; a second call changes nothing.

    `attach` makes a name from (spark, table, name, options).
    """
    is_connect = type(spark).__module__.startswith(_CONNECT)
    package = _CONNECT if is_connect else "pyspark.sql"

    def classes(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    wrap = functools.partial(wrap_method, mark=HOOK_MARK)
    wrap(type(spark), "sql", functools.partial(_sql, attach=attach))
    reader = type(spark.read)
    wrap(type(spark), "table", _table)
    wrap(reader, "option", _option)
    wrap(reader, "options", _options)
    wrap(reader, "table", _table)
    stream_reader = type(spark.readStream)
    wrap(stream_reader, "option", _option)
    wrap(stream_reader, "options", _options)
    wrap(stream_reader, "table", _stream_table)
    for kind in (reader, stream_reader):
        # Spark has it from 4.2 on.
        wrap(kind, "changes", functools.partial(_changes, is_stream=kind is stream_reader))
    writer, writer_v2 = (
        classes("readwriter", "DataFrameWriter"),
        classes("readwriter", "DataFrameWriterV2"),
    )
    wrap(writer, "format", _recording("format"))
    wrap(writer, "mode", _recording("mode"))
    wrap(writer, "save", _save)
    wrap(writer, "saveAsTable", _save_as_table)
    wrap(writer, "insertInto", _insert_into)
    wrap(writer_v2, "using", _recording("format"))
    for method in ("create", "replace", "createOrReplace"):
        wrap(writer_v2, method, functools.partial(_define_v2, method=method))
    for method in ("overwrite", "overwritePartitions"):
        wrap(writer_v2, method, functools.partial(_overwrite_v2, method=method))
    stream_writer = classes("streaming.readwriter", "DataStreamWriter")
    for call in LAYOUT_CALLS:
        wrap(writer, call, _recording(call))
        wrap(stream_writer, call, _recording(call))
    wrap(stream_writer, "format", _recording("format"))
    wrap(stream_writer, "start", _start)
    wrap(stream_writer, "toTable", _to_table)
    catalog = type(spark.catalog)
    for method in ("createTable", "createExternalTable"):
        wrap(catalog, method, functools.partial(_create_table, method=method))
    wrap(catalog, "truncateTable", _truncate_table)
    wrap(catalog, "refreshTable", _refresh_table)
    frame = importlib.import_module(
        f"{_CONNECT}.dataframe" if is_connect else "pyspark.sql.classic.dataframe"
    ).DataFrame
    wrap(frame, "writeTo", _write_to)
    wrap(frame, "mergeInto", _merge_into)


def _sql(self: Any, original: Method, *arguments: Any, attach: Attach, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("sqlQuery", options.get("query"))
    if isinstance(text, str):
        statement = statement_of(text)
        # A definition's query, and the source of changed rows, are statements of their own.
        if statement is None or not (is_ours(statement.provider) or statement.verb in ROW_VERBS):
            text, arguments, options = _with_changes(self, text, arguments, options)
        names = Names(self, functools.partial(attach, self))
        if statement is not None:
            answer = names.answer(statement, Arguments.of(arguments, options))
            if answer is not None:
                return answer
        names.refuse(statements_within(text))
        _refresh_mentioned(self, text)
        check_statement(self, text)
        with advising(
            textwrap.shorten(text, _SHOWN_CHARACTERS),
            is_about_us=lambda refusal: (
                FORMAT in f"{text}{refusal}".lower()
                or bool(attached_in(self, text + refusal))
                or has_changes_of_view(self, text)
            ),
        ):
            frame = original(self, *arguments, **options)
        check_plan(self, frame, text=text)
        return frame
    return original(self, *arguments, **options)


def _with_changes(
    spark: Any, text: str, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return a statement and its arguments with DataFrames in place of our names' changes."""
    is_template = bool(options.keys() - {"sqlQuery", "query", "args"})
    replaced, frames = with_changes(spark, text, is_template=is_template)
    if not frames:
        return text, arguments, options
    if arguments:
        return replaced, (replaced, *arguments[1:]), options | frames
    key = "sqlQuery" if "sqlQuery" in options else "query"
    return replaced, (), options | {key: replaced} | frames


def _changes(self: Any, original: Method, *arguments: Any, is_stream: bool, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("tableName")
    if isinstance(text, str):
        spark, named = session_of(self), _options_of_reader(self)
        frame = changes_of_name(spark, name_parts(text), named, is_stream=is_stream)
        if frame is not None:
            return frame.alias(name_parts(text)[-1])
    return original(self, *arguments, **options)


def _refresh_mentioned(spark: Any, text: str) -> None:
    for name in attached_in(spark, text):
        refresh(spark, name)


def _option(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    named = dict(zip(("key", "value"), arguments, strict=False)) | options
    _options_of_reader(self)[str(named.get("key"))] = named.get("value")
    return original(self, *arguments, **options)


def _options(self: Any, original: Method, **options: Any) -> Any:
    _options_of_reader(self).update(options)
    return original(self, **options)


def _options_of_reader(reader: Any) -> dict[str, Any]:
    """Return the options of a reader so far; only Connect's readers keep them accessible."""
    named: dict[str, Any] = reader.__dict__.setdefault("_streamhouse_options", {})
    return named


def _table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("tableName")
    if isinstance(text, str):
        spark = session_of(self)
        # `spark.table` has no options: a session has none of its own.
        named = {} if spark is self else _options_of_reader(self)
        frame = load_of_name(spark, text, named)
        if frame is not None:
            return frame
        _refresh_mentioned(spark, text)
        check_view_options(spark, name_parts(text), named)
        frame = original(self, *arguments, **options)
        check_plan(spark, frame, has_options=bool(named))
        return frame
    return original(self, *arguments, **options)


def _stream_table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("tableName")
    if isinstance(text, str):
        _refresh_mentioned(session_of(self), text)
    return original(self, *arguments, **options)


def _recording(detail: str) -> Method:
    def recorded(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
        named = arguments[0] if arguments else next(iter(options.values()), None)
        setattr(self, f"_streamhouse_{detail}", named)
        return original(self, *arguments, **options)

    return recorded


def _layout_of(writer: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layout of a table by a writer's methods and by the writing call's arguments."""
    layout = {call: getattr(writer, f"_streamhouse_{call}", None) for call in LAYOUT_CALLS}
    return layout | {key: named[key] for key in LAYOUT_CALLS if named.get(key)}


def _save(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    named = dict(zip(("path", "format", "mode", "partitionBy"), arguments, strict=False)) | options
    if is_ours(named.get("format") or getattr(self, "_streamhouse_format", None)):
        check_layout(_layout_of(self, named))
        check_mode(named.get("mode") or getattr(self, "_streamhouse_mode", None))
    return original(self, *arguments, **options)


def _start(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    keys = ("path", "format", "outputMode", "partitionBy")
    named = dict(zip(keys, arguments, strict=False)) | options
    if is_ours(named.get("format") or getattr(self, "_streamhouse_format", None)):
        check_layout(_layout_of(self, named))
    warn_of_stale_names(self)
    return original(self, *arguments, **options)


def _save_as_table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    keys = ("name", "format", "mode", "partitionBy")
    named = dict(zip(keys, arguments, strict=False)) | options
    name = str(named.get("name"))
    source = named.get("format") or getattr(self, "_streamhouse_format", None)
    mode = named.get("mode") or getattr(self, "_streamhouse_mode", None)
    spark = session_of(self)
    if attached(spark, name_parts(name)) is None:
        if is_ours(source):
            raise no_such_definition("saveAsTable", name)
        return original(self, *arguments, **options)
    check_layout(_layout_of(self, named))
    if str(mode).lower() == "overwrite":
        raise UnsupportedError(
            f"saveAsTable with mode 'overwrite' would put a table of Spark's in place of the name"
            f" '{name}': use .write.insertInto('{name}', overwrite=True)"
        )
    elif source is None:
        # Spark compares the format with the name's format; no format would mean Spark's default.
        self.format(FORMAT)
    _refresh_mentioned(spark, name)
    return original(self, *arguments, **options)


def _insert_into(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    _refresh_mentioned(session_of(self), str(arguments[0] if arguments else options))
    return original(self, *arguments, **options)


def _write_to(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("table"))
    _refresh_mentioned(self.sparkSession, name)
    writer = original(self, *arguments, **options)
    writer._streamhouse_name = name
    return writer


def _define_v2(self: Any, original: Method, *, method: str) -> Any:
    name = getattr(self, "_streamhouse_name", "")
    source = getattr(self, "_streamhouse_format", None)
    if is_ours(source):
        raise no_such_definition(f"writeTo(...).{method}()", name)
    if method != "create" and attached(session_of(self), name_parts(name)) is not None:
        raise UnsupportedError(
            f"writeTo('{name}').{method}() would put a table of Spark's in place of the name: use"
            f" .write.insertInto('{name}', overwrite=True), which replaces its rows"
        )
    return original(self)


def _overwrite_v2(self: Any, original: Method, *arguments: Any, method: str, **options: Any) -> Any:
    name = getattr(self, "_streamhouse_name", "")

    def is_about_us(_refusal: str) -> bool:
        return attached(session_of(self), name_parts(name)) is not None

    with advising(f"writeTo('{name}').{method}", is_about_us=is_about_us):
        return original(self, *arguments, **options)


def _merge_into(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("table"))
    name_of_table = attached(self.sparkSession, name_parts(name))
    if name_of_table is not None:
        raise UnsupportedError(
            f"mergeInto('{name}'): PySpark lets no Python source change rows; use spark.sql('MERGE"
            f" INTO {name} USING {{source}} s ON ...', source=frame), or"
            f" streamhouse.Table(spark, '{name_of_table.connection.name}').merge(...)"
        )
    return original(self, *arguments, **options)


def _to_table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    keys = ("tableName", "format", "outputMode", "partitionBy")
    named = dict(zip(keys, arguments, strict=False)) | options
    name = str(named.get("tableName"))
    source = named.get("format") or getattr(self, "_streamhouse_format", None)
    spark = session_of(self)
    if attached(spark, name_parts(name)) is None:
        if is_ours(source):
            raise no_such_definition("toTable", name)
    else:
        check_layout(_layout_of(self, named))
        if source is None:
            self.format(FORMAT)
    _refresh_mentioned(spark, name)
    warn_of_stale_names(self)
    return original(self, *arguments, **options)


def _create_table(self: Any, original: Method, *arguments: Any, method: str, **options: Any) -> Any:
    named = dict(zip(("tableName", "path", "source"), arguments, strict=False)) | options
    if is_ours(named.get("source")):
        raise no_such_definition(f"spark.catalog.{method}", str(named.get("tableName")))
    return original(self, *arguments, **options)


def _truncate_table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("tableName"))
    spark = session_of(self)
    if attached(spark, name_parts(name)) is not None:
        spark.sql(f"TRUNCATE TABLE {name}")
        return None
    return original(self, *arguments, **options)


def _refresh_table(self: Any, original: Method, *arguments: Any, **options: Any) -> Any:
    spark = session_of(self)
    name_of_table = attached(
        spark, name_parts(str(arguments[0] if arguments else options.get("tableName")))
    )
    if name_of_table is not None:
        refresh(spark, name_of_table, is_forced=True)
    return original(self, *arguments, **options)
