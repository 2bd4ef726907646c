"""Debezium's envelope unwrapped: rows with `__change_type`, as a write of the format takes them.

An envelope is `{op, before, after, source}`, alone or as the payload beside its schema. Everything
is made of Spark's own expressions: it works in batches and streams, and in Spark Connect.

- `c`, `r` and `u` become their `after`; `d` becomes its `before`, or the record's key.
- A tombstone, the empty record behind a delete, becomes nothing.
- `t` (truncate) and what is no envelope fail the query, unless it is told to skip them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from streamhouse.connector.options.quoted_names import quoted
from streamhouse.storage_service.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
)
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = ["ORDER_COLUMN", "debezium"]

ORDER_COLUMN: Final = "__source_order"
"""Where the source had a change: of several of one key, the greatest is the last."""

_SOURCE: Final = (
    "lsn BIGINT, ts_ns BIGINT, ts_us BIGINT, ts_ms BIGINT, file STRING, pos BIGINT, row BIGINT"
)
# Of MySQL's binary logs: the file's number, the position in it, the row of the event.
_POSITION_BITS: Final = 32
_ROW_BITS: Final = 12
_UNITS: Final = {"millis": "timestamp_millis", "micros": "timestamp_micros"}


def debezium(
    df: DataFrame,
    schema: str | StructType | None = None,
    *,
    value: str = "value",
    key: str | None = "key",
    timestamps: Literal["micros", "millis"] = "micros",
    truncates: Literal["fail", "skip"] = "fail",
    malformed: Literal["fail", "skip"] = "fail",
) -> DataFrame:
    """Return the changes of Debezium's records, in the order of `df`.

    Args:
        df: records as Kafka's source or a file has them (`value` is JSON, text or binary), or with
            `value` parsed into a struct, or with `op`, `before`, `after` as columns of their own.
        schema: columns of the table, as DDL or a struct; only for JSON.
        value: the column with the envelope.
        key: the column with the record's key, for deletes that have no `before`; None: none.
        timestamps: what a timestamp that comes as a number counts.
        truncates: what a truncate does; a stream of rows cannot say it.
        malformed: what a record does that is no envelope.

    Returns:
        the table's columns, `__change_type` (`+I`, `+U` or `-D`) and `__source_order`.
    """
    from pyspark.sql import functions as f

    for name, given, known in (
        ("timestamps", timestamps, tuple(_UNITS)),
        ("truncates", truncates, ("fail", "skip")),
        ("malformed", malformed, ("fail", "skip")),
    ):
        if given not in known:
            raise InvalidRequestError(
                f"debezium: {name} = '{given}' is not one of {', '.join(known)}"
            )
    opened = _opened(df, schema, value=value, key=key, timestamps=timestamps)
    is_apart = value not in df.columns
    rows = df.select(
        opened.envelope.alias("e"),
        opened.key.alias("k"),
        (f.lit("") if is_apart else f.col(quoted(value))).alias("v"),
    ).where(f.col("v").isNotNull())
    op = f.coalesce(f.col("e.op"), f.lit("?"))
    dropped = [op == "m"]
    if truncates == "skip":
        dropped.append(op == "t")
    if malformed == "skip":
        dropped.append(~op.isin("c", "r", "u", "d", "t", "m"))
    for condition in dropped:
        rows = rows.where(~condition)
    change = f.when(op == "d", f.lit("-D")).when(op == "u", f.lit("+U")).otherwise(f.lit("+I"))
    return rows.select(
        _row(op, opened.row_type).alias("row"),
        change.alias(CHANGE_TYPE_COLUMN),
        f.col("e.order").alias(ORDER_COLUMN),
    ).select("row.*", CHANGE_TYPE_COLUMN, ORDER_COLUMN)


def _row(op: Column, row_type: DataType) -> Column:
    """Return the row of a change, or fail with a sentence."""
    from pyspark.sql import functions as f

    def failing(text: Column) -> Column:
        return f.raise_error(text).cast(row_type)

    deleted = f.coalesce(
        f.col("e.before"),
        f.col("k"),
        failing(f.lit("debezium: a delete has neither 'before' nor a key; name the key's column")),
    )
    written = f.coalesce(
        f.col("e.after"), failing(f.concat(f.lit("debezium: no 'after' in a change "), op))
    )
    shown = f.substring(f.col("v").cast("string"), 1, 200)
    return (
        f.when(op.isin("c", "r", "u"), written)
        .when(op == "d", deleted)
        .when(
            op == "t",
            failing(
                f.lit(
                    "debezium: the source's table was truncated, which no row says; empty the table"
                    " yourself, then go on with truncates='skip'"
                )
            ),
        )
        .otherwise(failing(f.concat(f.lit("debezium: this record is no envelope: "), shown)))
    )


class _Opened(NamedTuple):
    """`envelope` has op, before, after and order; `key` is a row with the key's columns alone."""

    envelope: Column
    key: Column
    row_type: DataType


def _opened(
    df: DataFrame,
    schema: str | StructType | None,
    *,
    value: str,
    key: str | None,
    timestamps: str,
) -> _Opened:
    """Return what a record has, whatever form it has."""
    from pyspark.sql import types as t

    if value not in df.columns:
        if not {"op", "after"} <= set(df.columns):
            raise UnknownColumnError(
                f"debezium: there is no column '{value}', nor 'op' and 'after' (columns:"
                f" {', '.join(df.columns)}); name the envelope's with value="
            )
        return _of_struct(df.schema, "")
    given = df.schema[value].dataType
    if isinstance(given, t.StructType):
        prefix = f"{quoted(value)}."
        payload = given["payload"].dataType if "payload" in given.names else None
        if isinstance(payload, t.StructType):
            given, prefix = payload, f"{prefix}payload."
        if not {"op", "after"} <= set(given.names):
            raise SchemaMismatchError(
                f"debezium: struct '{value}' has no fields 'op' and 'after'"
                f" (fields: {', '.join(given.names)})"
            )
        return _of_struct(given, prefix)
    if not isinstance(given, t.StringType | t.BinaryType):
        raise SchemaMismatchError(
            f"debezium: column '{value}' is {given.simpleString()}; it must be JSON or a struct"
        )
    if schema is None:
        raise InvalidRequestError(
            "debezium: JSON needs the table's columns, as in schema='id BIGINT, name STRING'"
        )
    columns = t.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(columns, t.StructType)
    row_type = t.StructType([t.StructField(x.name, x.dataType, True) for x in columns])
    return _of_json(df, row_type, value=value, key=key, timestamps=timestamps)


def _of_struct(given: StructType, prefix: str) -> _Opened:
    """Return the parts of an envelope that is parsed already."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    row_type = given["after"].dataType
    nothing = f.lit(None).cast(row_type)
    source = given["source"].dataType if "source" in given.names else None
    known = source.names if isinstance(source, t.StructType) else []

    def of_source(name: str) -> Column:
        return f.col(f"{prefix}source.{name}") if name in known else f.lit(None)

    envelope = f.struct(
        f.col(f"{prefix}op").cast("string").alias("op"),
        (f.col(f"{prefix}before") if "before" in given.names else nothing).alias("before"),
        f.col(f"{prefix}after").alias("after"),
        _order(of_source).alias("order"),
    )
    return _Opened(envelope, nothing, row_type)


def _of_json(
    df: DataFrame, row_type: StructType, *, value: str, key: str | None, timestamps: str
) -> _Opened:
    """Return the parts of an envelope that is JSON, with its schema beside it or without."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    # Numbers or texts, as the source's settings have it: values are made of them below.
    read_type = t.StructType(
        [
            t.StructField(x.name, t.StringType() if _is_time(x.dataType) else x.dataType, True)
            for x in row_type
        ]
    )
    inner = t.StructType(
        [
            t.StructField("op", t.StringType(), True),
            t.StructField("before", read_type, True),
            t.StructField("after", read_type, True),
            t.StructField("source", t.StructType.fromDDL(_SOURCE), True),
        ]
    )
    whole = t.StructType([*inner, t.StructField("payload", inner, True)])
    parsed = f.from_json(f.col(quoted(value)).cast("string"), whole)

    def part(name: str) -> Column:
        return f.coalesce(parsed["payload"][name], parsed[name])

    envelope = f.struct(
        part("op").alias("op"),
        _made(part("before"), row_type, timestamps).alias("before"),
        _made(part("after"), row_type, timestamps).alias("after"),
        _order(lambda name: part("source")[name]).alias("order"),
    )
    keyed = f.lit(None).cast(row_type)
    if key is not None and key in df.columns:
        text = f.col(quoted(key)).cast("string")
        beside = t.StructType([t.StructField("payload", read_type, True)])
        plain = f.from_json(text, read_type)
        has_any = f.coalesce(*[plain[x.name].cast("string") for x in row_type]).isNotNull()
        found = f.coalesce(f.from_json(text, beside)["payload"], f.when(has_any, plain))
        keyed = _made(found, row_type, timestamps)
    return _Opened(envelope, keyed, row_type)


def _order(of_source: Callable[[str], Column]) -> Column:
    """Return where the source had a change: PostgreSQL's LSN, MySQL's position, else its time."""
    from pyspark.sql import functions as f

    def number(name: str) -> Column:
        return of_source(name).cast("bigint")

    file = f.regexp_extract(of_source("file").cast("string"), r"(\d+)$", 1)
    position = f.shiftleft(
        f.shiftleft(file.try_cast("bigint"), _POSITION_BITS) + number("pos"),
        _ROW_BITS,
    ) + f.coalesce(number("row"), f.lit(0))
    return f.coalesce(number("lsn"), position, number("ts_us"), number("ts_ms") * 1_000)


def _is_time(kind: DataType) -> bool:
    from pyspark.sql import types as t

    return isinstance(kind, t.DateType | t.TimestampType | t.TimestampNTZType)


def _made(row: Column, row_type: StructType, timestamps: str) -> Column:
    """Return a row with dates and timestamps made of what JSON has."""
    from pyspark.sql import functions as f

    columns = [_value(row[x.name], x.dataType, timestamps).alias(x.name) for x in row_type]
    return f.when(row.isNotNull(), f.struct(*columns))


def _value(text: Column, kind: DataType, timestamps: str) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if not _is_time(kind):
        return text
    number = text.try_cast("bigint")
    if isinstance(kind, t.DateType):
        counted = f.date_from_unix_date(number.cast("int"))
    elif isinstance(kind, t.TimestampType):
        counted = f.call_function(_UNITS[timestamps], number)
    else:
        # Debezium counts a time without a zone as if it were UTC's.
        per_second = {"millis": 1_000, "micros": 1_000_000}[timestamps]
        seconds = (number.cast("decimal(20,0)") / per_second).cast("decimal(18,6)")
        epoch = f.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
        counted = epoch + f.make_dt_interval(secs=seconds)
    return f.when(number.isNotNull(), counted).otherwise(text.cast(kind))
