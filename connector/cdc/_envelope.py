"""Debezium's envelope unwrapped: rows with `__change_type`, as a write of the format takes them.

An envelope is `{op, before, after, source}`, alone or as the payload beside its schema. Everything
is made of Spark's own expressions: it works in batches and streams, and in Spark Connect.

- `c`, `r` and `u` become their `after`; `d` becomes its `before`, or the record's key.
- A tombstone, the empty record behind a delete, becomes nothing.
- A `u` whose `before` has another key than its `after` becomes two rows: the old one is deleted.
- A placeholder for a value that an update left alone is no value: its record is malformed.
- `t` (truncate) and what is no envelope fail the query, unless it is told to skip them.
- No value of JSON becomes NULL because it does not fit its column: its record is malformed. Names
  match whatever their case, as a table's do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from streamhouse.connector.cdc._envelope_values import (
    UNITS,
    has_other_key,
    loses_any,
    made_row,
    read_row_type,
    unavailable_columns,
)
from streamhouse.core.errors import (
    InvalidRequestError,
    SchemaMismatchError,
    UnknownColumnError,
)
from streamhouse.core.model.records.unavailable_value import (
    UNAVAILABLE_VALUE,
    UnavailableValue,
)
from streamhouse.core.model.schema import CHANGE_TYPE_COLUMN
from streamhouse.reading.options.quoted_names import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructField, StructType

__all__ = ["ORDER_COLUMN", "debezium"]

_WRITES: Final = ("c", "r", "u")
ORDER_COLUMN: Final = "__source_order"
"""Where the source had a change: of several of one key, the greatest is the last."""

# As texts, which JSON always has: a connector that says its place in another way has no order.
_SOURCE: Final = "lsn STRING, ts_us STRING, ts_ms STRING, file STRING, pos STRING, row STRING"
# Where Spark says that it did not understand all of a record.
_UNREAD: Final = "__unread"
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREAD}
_OBJECT: Final = "MAP<STRING, VARIANT>"
# Of MySQL's binary logs: the file's number, the position in it, the row of the event.
_POSITION_BITS: Final = 32
_ROW_BITS: Final = 12


def debezium(
    df: DataFrame,
    schema: str | StructType | None = None,
    *,
    value: str = "value",
    key: str | None = "key",
    timestamps: Literal["micros", "millis"] = "micros",
    truncates: Literal["fail", "skip"] = "fail",
    malformed: Literal["fail", "skip"] = "fail",
    keys: Sequence[str] | str | None = None,
    unavailable: str = UNAVAILABLE_VALUE,
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
        malformed: what a record does that is no envelope, or has a value that its column cannot
            have, or a placeholder instead of one.
        keys: the table's primary key, by which a `u` is known that gives a row another one; None:
            the columns that the record's key has.
        unavailable: Debezium's `unavailable.value.placeholder`, for large values that an update
            left alone.

    Returns:
        the table's columns, `__change_type` (`+I`, `+U` or `-D`) and `__source_order`.
    """
    from pyspark.sql import functions as f

    for name, given, known in (
        ("timestamps", timestamps, tuple(UNITS)),
        ("truncates", truncates, ("fail", "skip")),
        ("malformed", malformed, ("fail", "skip")),
    ):
        if given not in known:
            raise InvalidRequestError(
                f"debezium: {name} = '{given}' is not one of {', '.join(known)}"
            )
    placeholder = UnavailableValue(unavailable)
    rows, row_type = _opened(
        df, schema, value=value, key=key, timestamps=timestamps, placeholder=placeholder
    )
    op = f.coalesce(f.col("e.op"), f.lit("?"))
    needs_key = (op == "d") & f.col("e.before").isNull()
    is_bad = f.col("e.is_bad") | (needs_key & f.col("is_key_bad"))
    is_unavailable = op.isin(*_WRITES) & (f.size("e.unavailable") > 0)
    rows = rows.where(op != "m")
    if truncates == "skip":
        rows = rows.where(op != "t")
    if malformed == "skip":
        rows = rows.where(op.isin(*_WRITES, "d", "t"))
        rows = rows.where(~(is_bad | is_unavailable) | (op == "t"))
    change = f.when(op == "d", f.lit("-D")).when(op == "u", f.lit("+U")).otherwise(f.lit("+I"))
    made = f.struct(
        _row(op, is_bad, _unavailable_text(is_unavailable, placeholder), row_type).alias("row"),
        change.alias("change"),
    )
    old = f.struct(f.col("e.before").alias("row"), f.lit("-D").alias("change"))
    is_moved = (op == "u") & _is_moved(row_type, keys)
    changes = f.when(is_moved, f.array(old, made)).otherwise(f.array(made))
    # In a step of its own: Spark's optimizer loses columns of an expression that it explodes.
    changed = rows.select(changes.alias("changes"), f.col("e.order").alias(ORDER_COLUMN))
    return changed.select(f.explode("changes").alias("made"), ORDER_COLUMN).select(
        "made.row.*", f.col("made.change").alias(CHANGE_TYPE_COLUMN), ORDER_COLUMN
    )


def _unavailable_text(is_unavailable: Column, placeholder: UnavailableValue) -> Column:
    """Return why a record without some values is malformed, null of one that has all."""
    from pyspark.sql import functions as f

    names = f.array_join("e.unavailable", ", ")
    text = f.concat(f.lit("debezium: column "), names, f.lit(f": {placeholder.reason}"))
    return f.when(is_unavailable, text)


def _is_moved(row_type: StructType, keys: Sequence[str] | str | None) -> Column:
    """Return whether the row has another key after an update than before it."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    before, after = f.col("e.before"), f.col("e.after")
    if keys is None:
        # A column of the record's key is there; no such column is nested.
        plain = [x.name for x in row_type if isinstance(x.dataType, t.AtomicType)]
        return has_other_key(
            before, after, [(name, f.col("k")[name].isNotNull()) for name in plain]
        )
    names = [keys] if isinstance(keys, str) else list(keys)
    unknown = [name for name in names if name not in row_type.names]
    if unknown:
        raise UnknownColumnError(
            f"debezium: keys has '{unknown[0]}', which is no column"
            f" (columns: {', '.join(row_type.names)})"
        )
    return has_other_key(before, after, [(name, f.lit(True)) for name in names])


def _row(op: Column, is_bad: Column, lacks_value: Column, row_type: StructType) -> Column:
    """Return the row of a change, or fail with a sentence, as `lacks_value` is one."""
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
    misfit = f.concat(
        f.lit("debezium: a value does not fit its column"),
        _misfits(row_type),
        f.lit(f", in (schema: {row_type.simpleString()[7:-1]}): "),
        shown,
    )
    return (
        f.when(lacks_value.isNotNull(), failing(lacks_value))
        .when(op.isin(*_WRITES, "d") & is_bad, failing(misfit))
        .when(op.isin(*_WRITES), written)
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


def _misfits(row_type: StructType) -> Column:
    """Return the names of the columns whose values in JSON became NULL, for a message."""
    from pyspark.sql import functions as f

    text = f.col("v").cast("string")
    places = ("$.payload.after", "$.after", "$.payload.before", "$.before")
    row = f.coalesce(*[f.get_json_object(text, place) for place in places])
    given = f.map_filter(
        f.from_json(row, "MAP<STRING, STRING>"), lambda _name, value: value.isNotNull()
    )
    made = f.to_json(f.coalesce(f.col("e.after"), f.col("e.before")), {"ignoreNullFields": "true"})
    names = f.array(*[f.lit(x.name) for x in row_type])
    lost = f.array_intersect(names, f.array_except(f.map_keys(given), f.json_object_keys(made)))
    return f.when(f.size(lost) > 0, f.concat(f.lit(" "), f.array_join(lost, ", "))).otherwise("")


class _Opened(NamedTuple):
    """`rows` has columns `v`, an envelope as it came, `e`, what is in it, and `k`, its key's row.

    `e` has op, before, after, order, is_bad and unavailable. What is bad, as `is_key_bad` says of
    the key, has a value that its column cannot have; columns that are unavailable have no value.
    """

    rows: DataFrame
    row_type: StructType


def _opened(
    df: DataFrame,
    schema: str | StructType | None,
    *,
    value: str,
    key: str | None,
    timestamps: str,
    placeholder: UnavailableValue,
) -> _Opened:
    """Return what a record has, whatever form it has."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if value not in df.columns:
        if not {"op", "after"} <= set(df.columns):
            raise UnknownColumnError(
                f"debezium: there is no column '{value}', nor 'op' and 'after' (columns:"
                f" {', '.join(df.columns)}); name the envelope's with value="
            )
        return _of_struct(df, df.schema, "", f.lit(""), placeholder)
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
        return _of_struct(df, given, prefix, f.col(quoted(value)), placeholder)
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
    texts = df.select(
        f.col(quoted(value)).alias("v"),
        (f.col(quoted(key or "")) if key in df.columns else f.lit(None)).cast("string").alias("kt"),
    )
    return _of_json(texts, row_type, timestamps=timestamps, placeholder=placeholder)


def _of_struct(
    df: DataFrame, given: StructType, prefix: str, whole: Column, placeholder: UnavailableValue
) -> _Opened:
    """Return the parts of an envelope that is parsed already."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    row_type = given["after"].dataType
    if not isinstance(row_type, t.StructType):
        raise SchemaMismatchError(
            f"debezium: '{prefix}after' is {row_type.simpleString()}; it must be a struct"
        )
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
        f.lit(False).alias("is_bad"),
        unavailable_columns(f.col(f"{prefix}after"), row_type, placeholder).alias("unavailable"),
    )
    rows = df.select(
        whole.alias("v"),
        envelope.alias("e"),
        nothing.alias("k"),
        f.lit(False).alias("is_key_bad"),
    )
    return _Opened(rows.where(f.col("v").isNotNull()), row_type)


def _of_json(
    df: DataFrame, row_type: StructType, *, timestamps: str, placeholder: UnavailableValue
) -> _Opened:
    """Return the parts of an envelope that is JSON, with its schema beside it or without.

    `df` has it as column `v`, and the record's key as column `kt`.
    """
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    read_type = read_row_type(row_type)
    inner = t.StructType(
        [
            t.StructField("op", t.StringType()),
            t.StructField("before", read_type),
            t.StructField("after", read_type),
            t.StructField("source", t.StructType.fromDDL(_SOURCE)),
        ]
    )
    whole = _with_unread([*inner, t.StructField("payload", inner)])
    beside = _with_unread([t.StructField("payload", read_type)])
    plain = _with_unread([*read_type])
    # One step after another: Spark writes out an expression wherever it is used in the same step.
    rows = df.where(f.col("v").isNotNull()).select(
        "v",
        f.from_json(_with_names_of(f.col("v").cast("string"), row_type), whole, _READING).alias(
            "p"
        ),
        _with_names_of(f.col("kt"), row_type, of_key=True).alias("kt"),
    )
    rows = rows.select(
        "v",
        *[f.coalesce(f"p.payload.{x.name}", f"p.{x.name}").alias(x.name) for x in inner],
        f.col(f"p.{_UNREAD}").alias("unread"),
        f.from_json("kt", beside, _READING).alias("beside"),
        f.from_json("kt", plain, _READING).alias("plain"),
    )
    of_plain = [f.col("plain")[x.name] for x in row_type]
    has_any = f.coalesce(*[value.cast("string") for value in of_plain]).isNotNull()
    row = f.struct(*[value.alias(x.name) for value, x in zip(of_plain, row_type, strict=True)])
    key_unread = f.when(f.col("beside.payload").isNull(), f.col(f"plain.{_UNREAD}")).otherwise(
        f.col(f"beside.{_UNREAD}")
    )
    rows = rows.select(
        "v",
        *inner.names,
        "unread",
        f.coalesce("beside.payload", f.when(has_any, row)).alias("key"),
        key_unread.alias("key_unread"),
    )
    is_bad = f.col("unread").isNotNull()
    for name in ("before", "after"):
        is_bad |= loses_any(f.col(name), row_type, timestamps)
    envelope = f.struct(
        "op",
        made_row(f.col("before"), row_type, timestamps).alias("before"),
        made_row(f.col("after"), row_type, timestamps).alias("after"),
        _order(lambda name: f.col("source")[name]).alias("order"),
        is_bad.alias("is_bad"),
        unavailable_columns(f.col("after"), read_type, placeholder).alias("unavailable"),
    )
    is_key_bad = f.col("key_unread").isNotNull() | loses_any(f.col("key"), row_type, timestamps)
    rows = rows.select(
        "v",
        envelope.alias("e"),
        made_row(f.col("key"), row_type, timestamps).alias("k"),
        is_key_bad.alias("is_key_bad"),
    )
    return _Opened(rows, row_type)


def _with_unread(fields: list[StructField]) -> StructType:
    from pyspark.sql import types as t

    return t.StructType([*fields, t.StructField(_UNREAD, t.StringType())])


def _with_names_of(text: Column, row_type: StructType, *, of_key: bool = False) -> Column:
    """Return JSON of an envelope or a key with the columns' names as the schema has them."""
    from pyspark.sql import functions as f

    names = [x.name for x in row_type]
    either = "|".join(re.escape(name) for name in names)
    # As it is in JSON: any text before a colon is a name. One of elsewhere costs time alone.
    is_other = text.rlike(rf'(?<!\\)"(?!(?:{either})")(?iu:{either})"\s*:')
    own = f.create_map(*[f.lit(part) for name in names for part in (name.lower(), name)])

    def named(row: Column) -> Column:
        def name_of(given: Column) -> Column:
            wanted = f.coalesce(own[f.lower(given)], given)
            return f.when(f.map_contains_key(row, wanted), given).otherwise(wanted)

        return f.transform_keys(row, lambda given, _value: name_of(given))

    def within(whole: Column, members: Sequence[str], change: Callable[[Column], Column]) -> Column:
        def changed(member: Column, value: Column) -> Column:
            made = f.to_variant_object(change(value.try_cast(_OBJECT)))
            return f.when(member.isin(*members), f.coalesce(made, value)).otherwise(value)

        return f.transform_values(whole, changed)

    # Variants, since they become JSON again as they were.
    whole = f.from_json(text, _OBJECT)
    if of_key:
        whole = within(named(whole), ["payload"], named)
    else:
        rows = ["before", "after"]
        whole = within(within(whole, rows, named), ["payload"], lambda m: within(m, rows, named))
    return f.when(is_other, f.coalesce(f.to_json(whole), text)).otherwise(text)


def _order(of_source: Callable[[str], Column]) -> Column:
    """Return where the source had a change: PostgreSQL's LSN, MySQL's position, else its time."""
    from pyspark.sql import functions as f

    def number(name: str) -> Column:
        return of_source(name).try_cast("bigint")

    file = f.regexp_extract(of_source("file").cast("string"), r"(\d+)$", 1)
    position = f.shiftleft(
        f.shiftleft(file.try_cast("bigint"), _POSITION_BITS) + number("pos"),
        _ROW_BITS,
    ) + f.coalesce(number("row"), f.lit(0))
    return f.coalesce(number("lsn"), position, number("ts_us"), number("ts_ms") * 1_000)
