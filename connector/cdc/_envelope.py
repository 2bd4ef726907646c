"""Debezium's envelope unwrapped: rows with `__change_type`, as a write of the format takes them.

An envelope is `{op, before, after, source}`, alone or as the payload beside its schema. The module
uses only Spark's own expressions, and works in batches, in streams and in Spark Connect.

- `c`, `r` and `u` give a row of `after`; `d` gives a row of `before`, or of the record's key.
- A tombstone, the empty record behind a delete, gives no row.
- A `u` whose `before` and `after` have different keys gives two rows: the old row is deleted.
- A placeholder for a value unchanged by an update is no value: the record is malformed.
- `t` (truncate) and a record without an envelope fail the query, unless the caller skips them.
- A value of JSON never becomes NULL because the value does not fit its column: the record is
  malformed. Names match in any case, as in a table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from streamhouse.connector.cdc._envelope_values import (
    UNITS,
    converted_row,
    has_changed_key,
    loses_any,
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
"""The position of a change in the source: among changes of one key the greatest is the last."""

# Texts, because every JSON value is also a text. A connector with other fields has no order.
_SOURCE: Final = "lsn STRING, ts_us STRING, ts_ms STRING, file STRING, pos STRING, row STRING"
# Spark's column for a record with a part that Spark could not parse.
_UNREAD: Final = "__unread"
_READING: Final = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": _UNREAD}
_OBJECT: Final = "MAP<STRING, VARIANT>"
# The bits of MySQL's binary log: the position in a file, and the row of an event.
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
        df: records of Kafka's source or of a file (`value` is JSON, text or binary), or with
            `value` parsed into a struct, or with `op`, `before`, `after` as columns of their own.
        schema: columns of the table, as DDL or a struct; only for JSON.
        value: the column with the envelope.
        key: the column with the record's key, for deletes without a `before`; None: no such column.
        timestamps: the unit of a timestamp that comes as a number.
        truncates: fail on a truncate, which no row can express, or skip it.
        malformed: fail on or skip a record without an envelope, with a value that does not fit its
            column, or with a placeholder instead of a value.
        keys: the table's primary key, which shows whether a `u` changes the key of a row; None:
            the columns of the record's key.
        unavailable: Debezium's `unavailable.value.placeholder`, for large values unchanged by an
            update.

    Returns:
        the table's columns, `__change_type` (`+I`, `+U` or `-D`) and `__source_order`.
    """
    from pyspark.sql import functions as f

    for name, choice, choices in (
        ("timestamps", timestamps, tuple(UNITS)),
        ("truncates", truncates, ("fail", "skip")),
        ("malformed", malformed, ("fail", "skip")),
    ):
        if choice not in choices:
            raise InvalidRequestError(
                f"debezium: {name} = '{choice}' is not one of {', '.join(choices)}"
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
    new = f.struct(
        _row(op, is_bad, _unavailable_text(is_unavailable, placeholder), row_type).alias("row"),
        change.alias("change"),
    )
    old = f.struct(f.col("e.before").alias("row"), f.lit("-D").alias("change"))
    is_moved = (op == "u") & _is_moved(row_type, keys)
    changes = f.when(is_moved, f.array(old, new)).otherwise(f.array(new))
    # A separate step: Spark's optimizer loses columns of an exploded expression.
    changed = rows.select(changes.alias("changes"), f.col("e.order").alias(ORDER_COLUMN))
    return changed.select(f.explode("changes").alias("exploded"), ORDER_COLUMN).select(
        "exploded.row.*", f.col("exploded.change").alias(CHANGE_TYPE_COLUMN), ORDER_COLUMN
    )


def _unavailable_text(is_unavailable: Column, placeholder: UnavailableValue) -> Column:
    """Return the reason why a record with unavailable values is malformed, else null."""
    from pyspark.sql import functions as f

    names = f.array_join("e.unavailable", ", ")
    text = f.concat(f.lit("debezium: column "), names, f.lit(f": {placeholder.reason}"))
    return f.when(is_unavailable, text)


def _is_moved(row_type: StructType, keys: Sequence[str] | str | None) -> Column:
    """Return whether an update changes the key of the row."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    old_row, new_row = f.col("e.before"), f.col("e.after")
    if keys is None:
        # A key column has a value in the record's key, and is not nested.
        plain = [x.name for x in row_type if isinstance(x.dataType, t.AtomicType)]
        return has_changed_key(
            old_row, new_row, [(name, f.col("k")[name].isNotNull()) for name in plain]
        )
    names = [keys] if isinstance(keys, str) else list(keys)
    unknown = [name for name in names if name not in row_type.names]
    if unknown:
        raise UnknownColumnError(
            f"debezium: keys has '{unknown[0]}', which is no column"
            f" (columns: {', '.join(row_type.names)})"
        )
    return has_changed_key(old_row, new_row, [(name, f.lit(True)) for name in names])


def _row(op: Column, is_bad: Column, lacks_value: Column, row_type: StructType) -> Column:
    """Return the row of a change, or fail with a sentence, such as `lacks_value`."""
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
                    "debezium: the source's table was truncated, which no row can express; empty"
                    " the table yourself, and continue with truncates='skip'"
                )
            ),
        )
        .otherwise(failing(f.concat(f.lit("debezium: this record is no envelope: "), shown)))
    )


def _misfits(row_type: StructType) -> Column:
    """Return the names of the columns whose JSON values became NULL, for a message."""
    from pyspark.sql import functions as f

    text = f.col("v").cast("string")
    places = ("$.payload.after", "$.after", "$.payload.before", "$.before")
    row = f.coalesce(*[f.get_json_object(text, place) for place in places])
    json_values = f.map_filter(
        f.from_json(row, "MAP<STRING, STRING>"), lambda _name, value: value.isNotNull()
    )
    row_json = f.to_json(
        f.coalesce(f.col("e.after"), f.col("e.before")), {"ignoreNullFields": "true"}
    )
    names = f.array(*[f.lit(x.name) for x in row_type])
    lost = f.array_intersect(
        names, f.array_except(f.map_keys(json_values), f.json_object_keys(row_json))
    )
    return f.when(f.size(lost) > 0, f.concat(f.lit(" "), f.array_join(lost, ", "))).otherwise("")


class _Opened(NamedTuple):
    """`rows` has columns `v`, the raw envelope, `e`, the parsed envelope, and `k`, the key's row.

    `e` has op, before, after, order, is_bad and unavailable. A bad envelope, or a key with
    `is_key_bad`, has a value unfit for the column. `unavailable` has the columns without a value.
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
    """Return the parts of a record of any form."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if value not in df.columns:
        if not {"op", "after"} <= set(df.columns):
            raise UnknownColumnError(
                f"debezium: there is no column '{value}', nor 'op' and 'after' (columns:"
                f" {', '.join(df.columns)}); name the envelope's with value="
            )
        return _of_struct(df, df.schema, "", f.lit(""), placeholder)
    value_type = df.schema[value].dataType
    if isinstance(value_type, t.StructType):
        prefix = f"{quoted(value)}."
        payload = value_type["payload"].dataType if "payload" in value_type.names else None
        if isinstance(payload, t.StructType):
            value_type, prefix = payload, f"{prefix}payload."
        if not {"op", "after"} <= set(value_type.names):
            raise SchemaMismatchError(
                f"debezium: struct '{value}' has no fields 'op' and 'after'"
                f" (fields: {', '.join(value_type.names)})"
            )
        return _of_struct(df, value_type, prefix, f.col(quoted(value)), placeholder)
    if not isinstance(value_type, t.StringType | t.BinaryType):
        raise SchemaMismatchError(
            f"debezium: column '{value}' is {value_type.simpleString()}; it must be JSON or a"
            " struct"
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
    df: DataFrame,
    envelope_type: StructType,
    prefix: str,
    whole: Column,
    placeholder: UnavailableValue,
) -> _Opened:
    """Return the parts of a parsed envelope."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    row_type = envelope_type["after"].dataType
    if not isinstance(row_type, t.StructType):
        raise SchemaMismatchError(
            f"debezium: '{prefix}after' is {row_type.simpleString()}; it must be a struct"
        )
    nothing = f.lit(None).cast(row_type)
    source = envelope_type["source"].dataType if "source" in envelope_type.names else None
    source_names = source.names if isinstance(source, t.StructType) else []

    def of_source(name: str) -> Column:
        return f.col(f"{prefix}source.{name}") if name in source_names else f.lit(None)

    envelope = f.struct(
        f.col(f"{prefix}op").cast("string").alias("op"),
        (f.col(f"{prefix}before") if "before" in envelope_type.names else nothing).alias("before"),
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
    """Return the parts of a JSON envelope, with or without its schema.

    `df` has the envelope as column `v`, and the record's key as column `kt`.
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
    payload_type = _with_unread([t.StructField("payload", read_type)])
    plain = _with_unread([*read_type])
    # Several steps: within one step Spark repeats an expression at each of its uses.
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
        f.from_json("kt", payload_type, _READING).alias("wrapped"),
        f.from_json("kt", plain, _READING).alias("plain"),
    )
    of_plain = [f.col("plain")[x.name] for x in row_type]
    has_any = f.coalesce(*[value.cast("string") for value in of_plain]).isNotNull()
    row = f.struct(*[value.alias(x.name) for value, x in zip(of_plain, row_type, strict=True)])
    key_unread = f.when(f.col("wrapped.payload").isNull(), f.col(f"plain.{_UNREAD}")).otherwise(
        f.col(f"wrapped.{_UNREAD}")
    )
    rows = rows.select(
        "v",
        *inner.names,
        "unread",
        f.coalesce("wrapped.payload", f.when(has_any, row)).alias("key"),
        key_unread.alias("key_unread"),
    )
    is_bad = f.col("unread").isNotNull()
    for name in ("before", "after"):
        is_bad |= loses_any(f.col(name), row_type, timestamps)
    envelope = f.struct(
        "op",
        converted_row(f.col("before"), row_type, timestamps).alias("before"),
        converted_row(f.col("after"), row_type, timestamps).alias("after"),
        _order(lambda name: f.col("source")[name]).alias("order"),
        is_bad.alias("is_bad"),
        unavailable_columns(f.col("after"), read_type, placeholder).alias("unavailable"),
    )
    is_key_bad = f.col("key_unread").isNotNull() | loses_any(f.col("key"), row_type, timestamps)
    rows = rows.select(
        "v",
        envelope.alias("e"),
        converted_row(f.col("key"), row_type, timestamps).alias("k"),
        is_key_bad.alias("is_key_bad"),
    )
    return _Opened(rows, row_type)


def _with_unread(fields: list[StructField]) -> StructType:
    from pyspark.sql import types as t

    return t.StructType([*fields, t.StructField(_UNREAD, t.StringType())])


def _with_names_of(text: Column, row_type: StructType, *, of_key: bool = False) -> Column:
    """Return JSON of an envelope or a key with the column names in the schema's spelling."""
    from pyspark.sql import functions as f

    names = [x.name for x in row_type]
    either = "|".join(re.escape(name) for name in names)
    # In JSON any text before a colon is a name. A match outside of names costs only time.
    has_different_case = text.rlike(rf'(?<!\\)"(?!(?:{either})")(?iu:{either})"\s*:')
    schema_names = f.create_map(*[f.lit(part) for name in names for part in (name.lower(), name)])

    def named(row: Column) -> Column:
        def name_of(name: Column) -> Column:
            schema_name = f.coalesce(schema_names[f.lower(name)], name)
            return f.when(f.map_contains_key(row, schema_name), name).otherwise(schema_name)

        return f.transform_keys(row, lambda name, _value: name_of(name))

    def within(whole: Column, members: Sequence[str], change: Callable[[Column], Column]) -> Column:
        def changed(member: Column, value: Column) -> Column:
            changed_value = f.to_variant_object(change(value.try_cast(_OBJECT)))
            return f.when(member.isin(*members), f.coalesce(changed_value, value)).otherwise(value)

        return f.transform_values(whole, changed)

    # Variants become the same JSON again.
    whole = f.from_json(text, _OBJECT)
    if of_key:
        whole = within(named(whole), ["payload"], named)
    else:
        rows = ["before", "after"]
        whole = within(within(whole, rows, named), ["payload"], lambda m: within(m, rows, named))
    return f.when(has_different_case, f.coalesce(f.to_json(whole), text)).otherwise(text)


def _order(of_source: Callable[[str], Column]) -> Column:
    """Return the position of a change in the source, from LSN, binary log or time."""
    from pyspark.sql import functions as f

    def number(name: str) -> Column:
        return of_source(name).try_cast("bigint")

    file = f.regexp_extract(of_source("file").cast("string"), r"(\d+)$", 1)
    position = f.shiftleft(
        f.shiftleft(file.try_cast("bigint"), _POSITION_BITS) + number("pos"),
        _ROW_BITS,
    ) + f.coalesce(number("row"), f.lit(0))
    return f.coalesce(number("lsn"), position, number("ts_us"), number("ts_ms") * 1_000)
