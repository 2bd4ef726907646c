"""The additions of `register` to Spark's readers of our format: facts hidden from a source.

Both kinds of load get the session's time zone, in which Spark reads times without a zone. A load of
`readStream` gets a mark, because a source learns too late whether it is a stream's.

A load of `read` gets an additional column, `PLANNED_COLUMN`, which is always true, and a filter on
this column. The filter changes Spark's planning. PySpark 4.1 and later ask a Python source for
partitions once a relation, and keep the partitions for good. The exception is a scan with a filter
to offer, under `spark.sql.python.filterPushdown.enabled`: Spark asks again at each plan of the scan
(`PythonScanBuilder.pushFilters` replaces the earlier partitions of the relation). Each statement,
and each micro-batch of a stream joining the DataFrame, therefore reads the current table. All scans
of a relation in a statement share the last plan, and therefore a cut of the table. The filter
itself is never used: Spark offers the filter to every scan of the relation, also to unfiltered
scans.
"""

from __future__ import annotations

import re
import warnings
from typing import Any, Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import BooleanType, StructField, StructType

from streamhouse.connector._spark_versions import ASKS_FOR_FILTERS, GIVES_READ_LIMITS
from streamhouse.connector.format._decimal_numbers import shown
from streamhouse.connector.format._java_zone import with_java_rules
from streamhouse.connector.format._stream_steps import named_load
from streamhouse.connector.names._wrapped_methods import (
    has_jvm,
    original_method,
    session_of,
    wrap_method,
)
from streamhouse.reading.options.options import (
    FORMAT,
    NUMBERS_MARK,
    PLANNED_COLUMN,
    PLANNED_MARK,
    QUERY_MARK,
    RUN_MARK,
    STREAM_MARK,
    ZONE_MARK,
)

__all__ = [
    "QUERY_ID",
    "hand_over_zone",
    "mark_streams",
    "plan_reads_afresh",
    "session_zone",
    "stream_marks",
    "warn_of_stale_reads",
]

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
_ZONE: Final = "spark.sql.session.timeZone"
QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's name of the property with the stream for which a thread works."""
_JOB_GROUP: Final = "spark.jobGroup.id"
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_MARK: Final = "_without_streamhouse"
"""The mark of the wrappers around methods here."""


def session_zone(spark: SparkSession) -> dict[str, str]:
    """Return the option with the session's time zone, by Java's rules, for a read."""
    return {ZONE_MARK: with_java_rules(spark, spark.conf.get(_ZONE) or "UTC")}


def stream_marks(spark: SparkSession) -> dict[str, str]:
    """Return the options with a write's stream and run, for a write in foreachBatch."""
    if not has_jvm(spark):
        return {}
    context = spark.sparkContext
    query_id, group = (context.getLocalProperty(key) for key in (QUERY_ID, _JOB_GROUP))
    if query_id is None:
        return {}
    # The job group of a stream has the name of the run, unless the program chose another group.
    run = {RUN_MARK: group} if group is not None and _UUID.fullmatch(group) else {}
    return {QUERY_MARK: query_id} | run


def mark_streams(reader_class: Any) -> None:
    """Make `reader_class`, Spark's `DataStreamReader`, mark its loads; idempotent."""

    def marked_format(self: Any, choose: Any, source: str) -> Any:
        _mark_stream(self, source)
        return choose(self, source)

    def marked_load(self: Any, load: Any, *arguments: Any, **options: Any) -> Any:
        _mark_stream(self, _format_of_load(arguments, options))
        return load(self, *arguments, **options)

    wrap_method(reader_class, "format", marked_format, mark=_MARK)
    wrap_method(reader_class, "load", marked_load, mark=_MARK)


def plan_reads_afresh(spark: SparkSession) -> None:
    """Make every statement plan the DataFrames of this session's `read` afresh.

    The function switches Spark's setting `PUSHDOWN` on. After a session has switched `PUSHDOWN`
    off, DataFrames keep the rows of the first use, with a warning.
    """
    # A declarative pipeline sets it in its specification: its definitions cannot change settings.
    if ASKS_FOR_FILTERS and spark.conf.get(PUSHDOWN, None) != "true":
        spark.conf.set(PUSHDOWN, "true")
    _change(type(spark.read))


def hand_over_zone(writer_class: Any) -> None:
    """Make `writer_class`, one of Spark's two writers, pass the session's zone to our format.

    A date written to a timestamp begins at midnight in this zone. In foreachBatch the writer passes
    the stream, too.
    """

    def zoned_format(self: Any, choose: Any, source: str) -> Any:
        if _is_ours(source):
            spark = session_of(self)
            self.options(**session_zone(spark), **stream_marks(spark))
        return choose(self, source)

    wrap_method(writer_class, "format", zoned_format, mark=_MARK)


def _change(reader_class: Any) -> None:
    original_schema = original_method(reader_class, "schema", mark=_MARK)

    def remembered_format(self: Any, choose: Any, source: str) -> Any:
        self._streamhouse_format = _is_ours(source)
        return choose(self, source)

    def remembered_schema(self: Any, choose_schema: Any, schema: Any) -> Any:
        self._streamhouse_schema = schema
        return choose_schema(self, schema)

    def planned_load(self: Any, load: Any, *arguments: Any, **options: Any) -> Any:
        format_name = _format_of_load(arguments, options)
        is_ours = (
            getattr(self, "_streamhouse_format", False)
            if format_name is None
            else _is_ours(format_name)
        )
        if is_ours:
            self.options(**session_zone(session_of(self)))
        if not is_ours or not _is_planned_afresh(self):
            return load(self, *arguments, **options)
        schema = arguments[2] if len(arguments) > 2 else options.get("schema")
        schema = getattr(self, "_streamhouse_schema", None) if schema is None else schema
        if schema is not None:
            arguments, options = arguments[:2], {k: v for k, v in options.items() if k != "schema"}
            original_schema(self, _with_planned(schema))
        elif has_jvm(session_of(self)):
            self.option(NUMBERS_MARK, "true")
        self.option(PLANNED_MARK, "true")
        frame: DataFrame = load(self, *arguments, **options)
        return shown(frame.filter(PLANNED_COLUMN))

    wrap_method(reader_class, "format", remembered_format, mark=_MARK)
    wrap_method(reader_class, "schema", remembered_schema, mark=_MARK)
    wrap_method(reader_class, "load", planned_load, mark=_MARK)


def warn_of_stale_reads(spark: Any, name: str) -> None:
    """Warn that readers of an attached name may keep their first rows, if `PUSHDOWN` is off."""
    if ASKS_FOR_FILTERS and not _is_on(spark):
        warnings.warn(
            f"{PUSHDOWN} is off in this session: a stream that joins '{name}', and a DataFrame of"
            " it, keep the rows of their first use; set it to true",
            stacklevel=2,
        )


def _is_on(spark: Any) -> bool:
    return bool((spark.conf.get(PUSHDOWN, "false") or "").lower() == "true")


def _is_planned_afresh(reader: Any) -> bool:
    if not ASKS_FOR_FILTERS or _is_on(session_of(reader)):
        return True
    warnings.warn(
        f"{PUSHDOWN} is off in this session: the DataFrame keeps the rows of its first use, also"
        " where a stream joins it; set it to true, or load again to see newer rows",
        # The levels: this function, the wrapper of `load`, and the caller of `load`.
        stacklevel=4,
    )
    return False


def _with_planned(schema: StructType | str) -> StructType | str:
    if isinstance(schema, str):
        return f"{schema}, {PLANNED_COLUMN} boolean"
    return StructType([*schema.fields, StructField(PLANNED_COLUMN, BooleanType())])


def _mark_stream(reader: Any, source: Any) -> None:
    if _is_ours(source):
        steps = {} if GIVES_READ_LIMITS else named_load()
        reader.options(**{STREAM_MARK: "true"}, **steps, **session_zone(session_of(reader)))


def _format_of_load(arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return arguments[1] if len(arguments) > 1 else options.get("format")


def _is_ours(source: Any) -> bool:
    return isinstance(source, str) and source.lower() == FORMAT
