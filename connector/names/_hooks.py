"""Where statements are met: the methods of Spark's Python classes, classic and Connect's.

A Python source hears of CREATE TABLE at most as a question for columns, and of ALTER TABLE never.
So `register` lets the session's own methods ask `Names` first. Statements that come another way (a
JVM program, a SQL server on the same catalog) get what Spark gives, and reads and writes through a
name that is stale say so.
"""

from __future__ import annotations

import functools
import importlib
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, Final

from pyspark.sql.types import StructType

from streamhouse.connector.names._advice import advising
from streamhouse.connector.names._answers import Names, is_ours, no_such_definition
from streamhouse.connector.names._asked_first import Around, put_around, session_of
from streamhouse.connector.names._attached_names import OWN_METHOD, attached, attached_in, refresh
from streamhouse.connector.names._held_reads import planned_afresh
from streamhouse.connector.names._shared_options import (
    check_plan,
    check_statement,
    check_view_options,
)
from streamhouse.connector.names._stale_streams import warn_of_stale_names
from streamhouse.connector.names._statement import name_parts, statement_of, statements_within
from streamhouse.connector.names._writers import LAYOUT_CALLS, check_layout, check_mode
from streamhouse.core.errors import UnsupportedError
from streamhouse.reading.options.options import FORMAT

__all__ = ["answer_statements"]

_CONNECT: Final = "pyspark.sql.connect"
_SHOWN_CHARACTERS: Final = 80
"""How much of a statement an error shows."""
Attach = Callable[..., Any]


def answer_statements(spark: Any, attach: Attach) -> None:
    """Let a session's methods ask us first; doing it again changes nothing.

    `attach` makes a name: (spark, table, name, options).
    """
    is_connect = type(spark).__module__.startswith(_CONNECT)
    package = _CONNECT if is_connect else "pyspark.sql"

    def classes(module: str, name: str) -> Any:
        return getattr(importlib.import_module(f"{package}.{module}"), name)

    change = functools.partial(put_around, mark=OWN_METHOD)
    change(type(spark), "sql", functools.partial(_sql, attach=attach))
    reader = type(spark.read)
    change(type(spark), "table", _table)
    change(reader, "option", _option)
    change(reader, "options", _options)
    change(reader, "table", _table)
    change(type(spark.readStream), "table", _stream_table)
    writer, writer_v2 = (
        classes("readwriter", "DataFrameWriter"),
        classes("readwriter", "DataFrameWriterV2"),
    )
    change(writer, "format", _noted("format"))
    change(writer, "mode", _noted("mode"))
    change(writer, "save", _save)
    change(writer, "saveAsTable", _save_as_table)
    change(writer, "insertInto", _insert_into)
    change(writer_v2, "using", _noted("format"))
    for method in ("create", "replace", "createOrReplace"):
        change(writer_v2, method, functools.partial(_define_v2, method=method))
    for method in ("overwrite", "overwritePartitions"):
        change(writer_v2, method, functools.partial(_overwrite_v2, method=method))
    stream_writer = classes("streaming.readwriter", "DataStreamWriter")
    for call in LAYOUT_CALLS:
        change(writer, call, _noted(call))
        change(stream_writer, call, _noted(call))
    change(stream_writer, "format", _noted("format"))
    change(stream_writer, "start", _start)
    change(stream_writer, "toTable", _to_table)
    catalog = type(spark.catalog)
    for method in ("createTable", "createExternalTable"):
        change(catalog, method, functools.partial(_create_table, method=method))
    change(catalog, "truncateTable", _truncate_table)
    change(catalog, "refreshTable", _refresh_table)
    frame = importlib.import_module(
        f"{_CONNECT}.dataframe" if is_connect else "pyspark.sql.classic.dataframe"
    ).DataFrame
    change(frame, "writeTo", _write_to)
    change(frame, "mergeInto", _merge_into)


def _sql(self: Any, own: Around, *arguments: Any, attach: Attach, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("sqlQuery", options.get("query"))
    if isinstance(text, str):
        statement = statement_of(text)
        names = Names(self, functools.partial(attach, self))
        if statement is not None and names.answer(statement):
            return self.createDataFrame([], StructType([]))
        names.refuse(statements_within(text))
        _refresh_mentioned(self, text)
        check_statement(self, text)
        with advising(
            textwrap.shorten(text, _SHOWN_CHARACTERS),
            is_about_us=lambda: FORMAT in text.lower() or bool(attached_in(self, text)),
        ):
            frame = own(self, *arguments, **options)
        check_plan(self, frame, text=text)
        return frame
    return own(self, *arguments, **options)


def _refresh_mentioned(spark: Any, text: str) -> None:
    for name in attached_in(spark, text):
        refresh(spark, name)


def _option(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    given = dict(zip(("key", "value"), arguments, strict=False)) | options
    _given_options(self)[str(given.get("key"))] = given.get("value")
    return own(self, *arguments, **options)


def _options(self: Any, own: Around, **options: Any) -> Any:
    _given_options(self).update(options)
    return own(self, **options)


def _given_options(reader: Any) -> dict[str, Any]:
    """Return what a reader was given until now, which only one of Connect would say itself."""
    given: dict[str, Any] = reader.__dict__.setdefault("_streamhouse_options", {})
    return given


def _table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("tableName")
    if isinstance(text, str):
        spark = session_of(self)
        # A session has no options of its own, and a reader must not get its.
        given = {} if spark is self else _given_options(self)
        frame = planned_afresh(spark, text, given)
        if frame is not None:
            return frame
        _refresh_mentioned(spark, text)
        check_view_options(spark, name_parts(text), given)
        frame = own(self, *arguments, **options)
        check_plan(spark, frame, has_options=bool(given))
        return frame
    return own(self, *arguments, **options)


def _stream_table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    text = arguments[0] if arguments else options.get("tableName")
    if isinstance(text, str):
        _refresh_mentioned(session_of(self), text)
    return own(self, *arguments, **options)


def _noted(what: str) -> Around:
    def around(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
        given = arguments[0] if arguments else next(iter(options.values()), None)
        setattr(self, f"_streamhouse_{what}", given)
        return own(self, *arguments, **options)

    return around


def _told(writer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a writer shall lay out a table, by its methods and by what its end is given."""
    told = {call: getattr(writer, f"_streamhouse_{call}", None) for call in LAYOUT_CALLS}
    return told | {key: given[key] for key in LAYOUT_CALLS if given.get(key)}


def _save(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    given = dict(zip(("path", "format", "mode", "partitionBy"), arguments, strict=False)) | options
    if is_ours(given.get("format") or getattr(self, "_streamhouse_format", None)):
        check_layout(_told(self, given))
        check_mode(given.get("mode") or getattr(self, "_streamhouse_mode", None))
    return own(self, *arguments, **options)


def _start(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    keys = ("path", "format", "outputMode", "partitionBy")
    given = dict(zip(keys, arguments, strict=False)) | options
    if is_ours(given.get("format") or getattr(self, "_streamhouse_format", None)):
        check_layout(_told(self, given))
    warn_of_stale_names(self)
    return own(self, *arguments, **options)


def _save_as_table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    keys = ("name", "format", "mode", "partitionBy")
    given = dict(zip(keys, arguments, strict=False)) | options
    name = str(given.get("name"))
    source = given.get("format") or getattr(self, "_streamhouse_format", None)
    mode = given.get("mode") or getattr(self, "_streamhouse_mode", None)
    spark = session_of(self)
    if attached(spark, name_parts(name)) is None:
        if is_ours(source):
            raise no_such_definition("saveAsTable", name)
        return own(self, *arguments, **options)
    check_layout(_told(self, given))
    if str(mode).lower() == "overwrite":
        raise UnsupportedError(
            f"saveAsTable with mode 'overwrite' would put a table of Spark's in place of the name"
            f" '{name}': use .write.insertInto('{name}', overwrite=True)"
        )
    elif source is None:
        # Spark compares the format with the name's, and takes none for its own default.
        self.format(FORMAT)
    _refresh_mentioned(spark, name)
    return own(self, *arguments, **options)


def _insert_into(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    _refresh_mentioned(session_of(self), str(arguments[0] if arguments else options))
    return own(self, *arguments, **options)


def _write_to(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("table"))
    _refresh_mentioned(self.sparkSession, name)
    writer = own(self, *arguments, **options)
    writer._streamhouse_name = name
    return writer


def _define_v2(self: Any, own: Around, *, method: str) -> Any:
    name = getattr(self, "_streamhouse_name", "")
    source = getattr(self, "_streamhouse_format", None)
    if is_ours(source):
        raise no_such_definition(f"writeTo(...).{method}()", name)
    if method != "create" and attached(session_of(self), name_parts(name)) is not None:
        raise UnsupportedError(
            f"writeTo('{name}').{method}() would put a table of Spark's in place of the name: use"
            f" .write.insertInto('{name}', overwrite=True), which replaces its rows"
        )
    return own(self)


def _overwrite_v2(self: Any, own: Around, *arguments: Any, method: str, **options: Any) -> Any:
    name = getattr(self, "_streamhouse_name", "")

    def is_about_us() -> bool:
        return attached(session_of(self), name_parts(name)) is not None

    with advising(f"writeTo('{name}').{method}", is_about_us=is_about_us):
        return own(self, *arguments, **options)


def _merge_into(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("table"))
    found = attached(self.sparkSession, name_parts(name))
    if found is not None:
        raise UnsupportedError(
            f"mergeInto('{name}'): PySpark lets no Python source change rows; use"
            f" streamhouse.Table(spark, '{found.connection.name}').merge(...)"
        )
    return own(self, *arguments, **options)


def _to_table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    keys = ("tableName", "format", "outputMode", "partitionBy")
    given = dict(zip(keys, arguments, strict=False)) | options
    name = str(given.get("tableName"))
    source = given.get("format") or getattr(self, "_streamhouse_format", None)
    spark = session_of(self)
    if attached(spark, name_parts(name)) is None:
        if is_ours(source):
            raise no_such_definition("toTable", name)
    else:
        check_layout(_told(self, given))
        if source is None:
            self.format(FORMAT)
    _refresh_mentioned(spark, name)
    warn_of_stale_names(self)
    return own(self, *arguments, **options)


def _create_table(self: Any, own: Around, *arguments: Any, method: str, **options: Any) -> Any:
    given = dict(zip(("tableName", "path", "source"), arguments, strict=False)) | options
    if is_ours(given.get("source")):
        raise no_such_definition(f"spark.catalog.{method}", str(given.get("tableName")))
    return own(self, *arguments, **options)


def _truncate_table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    name = str(arguments[0] if arguments else options.get("tableName"))
    found = attached(session_of(self), name_parts(name))
    if found is not None:
        raise UnsupportedError(
            f"truncateTable('{name}'): PySpark lets no Python source change rows; use"
            f" streamhouse.Table(spark, '{found.connection.name}').truncate()"
        )
    return own(self, *arguments, **options)


def _refresh_table(self: Any, own: Around, *arguments: Any, **options: Any) -> Any:
    spark = session_of(self)
    found = attached(
        spark, name_parts(str(arguments[0] if arguments else options.get("tableName")))
    )
    if found is not None:
        refresh(spark, found, is_forced=True)
    return own(self, *arguments, **options)
