"""What `register` adds to Spark's readers of our format: what Spark does not tell a source.

Both kinds of load get the session's time zone, in which Spark reads times that name none. A load of
`readStream` is marked, because a source learns too late whether it is a stream's. A load of `read`
gets one more column, `PLANNED_COLUMN`, which is always true, and a filter on it. That
filter is there for its effect on Spark's planner. PySpark 4.3 asks a Python source for its
partitions once a relation and keeps them for good, with one exception: with
`spark.sql.python.filterPushdown.enabled` it asks again each time it plans a scan that has a filter
to offer. (`PythonScanBuilder.pushFilters` then replaces what the relation read before.) So each
statement, and each micro-batch of a stream that joins the DataFrame, reads the table as it is when
it is planned. All scans of one relation in one statement share what was planned last, and so one
cut of the table. The filter itself is never used: what Spark offers goes to every scan of the
relation, also to those without it.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, StructField, StructType

from streamhouse.connector.format.decimal_numbers import can_make_decimals, shown
from streamhouse.connector.options.options import (
    NUMBERS_MARK,
    PLANNED_COLUMN,
    PLANNED_MARK,
    STREAM_MARK,
    ZONE_MARK,
)

__all__ = ["FORMAT", "hand_over_zone", "mark_streams", "plan_reads_afresh", "session_zone"]

FORMAT: Final = "streamhouse"
PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
_ZONE: Final = "spark.sql.session.timeZone"
_CHANGED: Final = "_changed_by_streamhouse"


def session_zone(spark: SparkSession) -> dict[str, str]:
    """Return the option that tells a read the time zone of the session."""
    return {ZONE_MARK: spark.conf.get(_ZONE) or "UTC"}


def mark_streams(reader_class: Any) -> None:
    """Let `reader_class`, Spark's `DataStreamReader`, mark its loads; again changes nothing."""
    if getattr(reader_class, _CHANGED, False):
        return
    choose, load = reader_class.format, reader_class.load

    @functools.wraps(choose)
    def marked_format(self: Any, source: str) -> Any:
        _mark_stream(self, source)
        return choose(self, source)

    @functools.wraps(load)
    def marked_load(self: Any, *arguments: Any, **options: Any) -> Any:
        _mark_stream(self, _format_of_load(arguments, options))
        return load(self, *arguments, **options)

    reader_class.format, reader_class.load = marked_format, marked_load
    setattr(reader_class, _CHANGED, True)


def plan_reads_afresh(spark: SparkSession) -> None:
    """Let the DataFrames of this session's `read` be planned afresh by every statement.

    Spark's setting `PUSHDOWN` is switched on for it. A session that switches it off afterwards
    gets DataFrames that keep the rows of their first use, and a warning that says so.
    """
    # A declarative pipeline sets it in its specification: its definitions may set nothing.
    if spark.conf.get(PUSHDOWN, None) != "true":
        spark.conf.set(PUSHDOWN, "true")
    _change(type(spark.read))


def hand_over_zone(writer_class: Any) -> None:
    """Let `writer_class`, one of Spark's two kinds of writers, tell our format the session's zone.

    A date that is written to a timestamp begins at its midnight there.
    """
    if getattr(writer_class, _CHANGED, False):
        return
    choose = writer_class.format

    @functools.wraps(choose)
    def zoned_format(self: Any, source: str) -> Any:
        if _is_ours(source):
            self.options(**session_zone(_session(self)))
        return choose(self, source)

    writer_class.format = zoned_format
    setattr(writer_class, _CHANGED, True)


def _change(reader_class: Any) -> None:
    if getattr(reader_class, _CHANGED, False):
        return
    choose, choose_schema, load = reader_class.format, reader_class.schema, reader_class.load

    @functools.wraps(choose)
    def noted_format(self: Any, source: str) -> Any:
        self._streamhouse_format = _is_ours(source)
        return choose(self, source)

    @functools.wraps(choose_schema)
    def noted_schema(self: Any, schema: Any) -> Any:
        self._streamhouse_schema = schema
        return choose_schema(self, schema)

    @functools.wraps(load)
    def planned_load(self: Any, *arguments: Any, **options: Any) -> Any:
        named = _format_of_load(arguments, options)
        is_ours = getattr(self, "_streamhouse_format", False) if named is None else _is_ours(named)
        if is_ours:
            self.options(**session_zone(_session(self)))
        if not is_ours or not _is_pushdown_on(self):
            return load(self, *arguments, **options)
        given = arguments[2] if len(arguments) > 2 else options.get("schema")
        given = getattr(self, "_streamhouse_schema", None) if given is None else given
        if given is not None:
            arguments, options = arguments[:2], {k: v for k, v in options.items() if k != "schema"}
            choose_schema(self, _with_planned(given))
        elif can_make_decimals(_session(self)):
            self.option(NUMBERS_MARK, "true")
        self.option(PLANNED_MARK, "true")
        frame: DataFrame = load(self, *arguments, **options)
        return shown(frame.filter(PLANNED_COLUMN))

    reader_class.format, reader_class.schema = noted_format, noted_schema
    reader_class.load = planned_load
    setattr(reader_class, _CHANGED, True)


def _is_pushdown_on(reader: Any) -> bool:
    if (_session(reader).conf.get(PUSHDOWN, "false") or "").lower() == "true":
        return True
    warnings.warn(
        f"{PUSHDOWN} is off in this session: the DataFrame keeps the rows of its first use, also"
        " where a stream joins it; set it to true, or load again to see newer rows",
        stacklevel=3,
    )
    return False


def _session(reader: Any) -> SparkSession:
    # Spark Connect's readers call their session a client, and its stream writer calls it so.
    names = ("_spark", "_session", "_client")
    session: SparkSession = next(
        found for name in names if (found := getattr(reader, name, None)) is not None
    )
    return session


def _with_planned(schema: StructType | str) -> StructType | str:
    if isinstance(schema, str):
        return f"{schema}, {PLANNED_COLUMN} boolean"
    return StructType([*schema.fields, StructField(PLANNED_COLUMN, BooleanType())])


def _mark_stream(reader: Any, source: Any) -> None:
    if _is_ours(source):
        reader.options(**{STREAM_MARK: "true"}, **session_zone(_session(reader)))


def _format_of_load(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[1] if len(arguments) > 1 else options.get("format")


def _is_ours(source: Any) -> bool:
    return isinstance(source, str) and source.lower() == FORMAT
