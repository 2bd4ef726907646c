"""Debezium's envelope unwrapped: rows with `__change_type`, as a write of the format takes them.

An envelope is `{op, before, after, source}`, alone or as the payload beside its schema. The same
reader as the Kafka door's reads JSON on the executors (`core/text/debezium_rows.py`), in batches,
in streams and in Spark Connect; Spark's own expressions do the rest.

- `c`, `r` and `u` give a row of `after`; `d` gives a row of `before`, or of the record's key.
- A tombstone, the empty record behind a delete, gives no row.
- A `u` whose `before` and `after` have different keys gives two rows: the old row is deleted.
- A placeholder for a value unchanged by an update is no value: the record is malformed.
- `t` (truncate) and a record without an envelope fail the query, unless the caller skips them.
- A value of JSON never becomes NULL because the value does not fit its column: the record is
  malformed. Names match in any case, as in a table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import pyarrow as pa

from streamhouse.connector._partition_reader import spark_iterator_errors
from streamhouse.connector.cdc._json_envelopes import JsonEnvelopes
from streamhouse.connector.write._spark_types import check_spark_types
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
from streamhouse.core.text.debezium_rows import SOURCE, WRITES
from streamhouse.reading.options.quoted_names import quoted

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

__all__ = ["ORDER_COLUMN", "debezium"]

ORDER_COLUMN: Final = "__source_order"
"""The position of a change in the source: among changes of one key the greatest is the last."""

_UNITS: Final = {"micros": "us", "millis": "ms"}
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
        ("timestamps", timestamps, tuple(_UNITS)),
        ("truncates", truncates, ("fail", "skip")),
        ("malformed", malformed, ("fail", "skip")),
    ):
        if choice not in choices:
            raise InvalidRequestError(
                f"debezium: {name} = '{choice}' is not one of {', '.join(choices)}"
            )
    rows, row_type = _opened(
        df, schema, value=value, key=key, unit=_UNITS[timestamps],
        has_keys=keys is not None, placeholder=UnavailableValue(unavailable),
    )  # fmt: skip
    op = f.coalesce(f.col("e.op"), f.lit("?"))
    is_bad = op.isin(*WRITES, "d") & f.col("e.misfit").isNotNull()
    rows = rows.where(op != "m")
    if truncates == "skip":
        rows = rows.where(op != "t")
    if malformed == "skip":
        rows = rows.where(op.isin(*WRITES, "d", "t") & ~is_bad)
    change = f.when(op == "d", f.lit("-D")).when(op == "u", f.lit("+U")).otherwise(f.lit("+I"))
    new = f.struct(
        _row(op, is_bad, row_type).alias("row"),
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


def _is_moved(row_type: StructType, keys: Sequence[str] | str | None) -> Column:
    """Return whether an update changes the key of the row.

    Return False if the old version lacks a part of its key and therefore does not identify a row.
    """
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    names = [keys] if isinstance(keys, str) else keys
    if names is None:
        names = [x.name for x in row_type if isinstance(x.dataType, t.AtomicType)]
    unknown = [name for name in names if name not in row_type.names]
    if unknown:
        raise UnknownColumnError(
            f"debezium: keys has '{unknown[0]}', which is no column"
            f" (columns: {', '.join(row_type.names)})"
        )
    old_row, new_row, key_row = f.col("e.before"), f.col("e.after"), f.col("k")
    differs, is_whole = f.lit(False), f.lit(True)
    for name in names:
        # A key column has a value in the record's key, and is not nested.
        is_key = key_row[name].isNotNull() if keys is None else f.lit(True)
        differs |= is_key & (old_row[name] != new_row[name])
        is_whole &= ~is_key | old_row[name].isNotNull()
    return f.coalesce(differs & is_whole, f.lit(False))


def _row(op: Column, is_bad: Column, row_type: StructType) -> Column:
    """Return the row of a change, or fail with a sentence, as of a bad record."""
    from pyspark.sql import functions as f

    def failing(text: str | Column) -> Column:
        return f.raise_error(text).cast(row_type)

    deleted = f.coalesce(
        f.col("e.before"),
        f.col("k"),
        failing(f.lit("debezium: a delete has neither 'before' nor a key; name the key's column")),
    )
    written = f.coalesce(
        f.col("e.after"), failing(f.concat(f.lit("debezium: no 'after' in a change "), op))
    )
    return (
        f.when(is_bad, failing(f.col("e.misfit")))
        .when(op.isin(*WRITES), written)
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
        .otherwise(
            failing(f.concat(f.lit("debezium: this record is no envelope: "), f.col("e.shown")))
        )
    )


class _Opened(NamedTuple):
    """`rows` has columns `e`, the parsed envelope, and `k`, the key's row.

    `e` has op, before, after, order, `misfit`, why a change is malformed, and `shown`, the begin of
    a record without an envelope.
    """

    rows: DataFrame
    row_type: StructType


def _opened(
    df: DataFrame,
    schema: str | StructType | None,
    *,
    value: str,
    key: str | None,
    unit: str,
    has_keys: bool,
    placeholder: UnavailableValue,
) -> _Opened:
    """Return the parts of a record of any form."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    from streamhouse.connector._spark_versions import to_arrow_schema

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
    check_spark_types(row_type, table="the schema of debezium")
    keys = f.col(quoted(key or "")) if key in df.columns else f.lit(None)
    texts = df.select(
        f.col(quoted(value)).cast("binary").alias("v"),
        keys.cast("string").cast("binary").alias("kt"),
    ).where(f.col("v").isNotNull())
    envelopes = JsonEnvelopes(
        schema=to_arrow_schema(row_type),
        unit=unit,
        unavailable=placeholder,
        has_keys=has_keys,
    )
    return _of_json(texts, row_type, envelopes)


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
        f.when(
            f.col(f"{prefix}op").isin(*WRITES),
            _unavailable_text(f.col(f"{prefix}after"), row_type, placeholder),
        ).alias("misfit"),
        f.substring(whole.cast("string"), 1, 200).alias("shown"),
    )
    rows = df.where(whole.isNotNull()).select(envelope.alias("e"), nothing.alias("k"))
    return _Opened(rows, row_type)


def _of_json(df: DataFrame, row_type: StructType, envelopes: JsonEnvelopes) -> _Opened:
    """Return the parts of a JSON envelope, in column `v`; column `kt` has the record's key."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    from streamhouse.connector._spark_versions import from_arrow_schema

    parts = {
        "op": t.StringType(),
        "before": row_type,
        "after": row_type,
        "source": from_arrow_schema(pa.schema(list(SOURCE.items()))),
        "k": row_type,
        "misfit": t.StringType(),
        "shown": t.StringType(),
    }
    rows = df.mapInArrow(
        spark_iterator_errors(envelopes.read),
        t.StructType([t.StructField(name, kind) for name, kind in parts.items()]),
    )
    envelope = f.struct(
        "op",
        "before",
        "after",
        _order(lambda name: f.col("source")[name]).alias("order"),
        "misfit",
        "shown",
    )
    return _Opened(rows.select(envelope.alias("e"), "k"), row_type)


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


def _unavailable_text(row: Column, row_type: StructType, value: UnavailableValue) -> Column:
    """Return the reason why a write with unavailable values is malformed, else null."""
    from pyspark.sql import functions as f

    names = []
    for x in row_type:
        is_placeholder = _is_unavailable(row[x.name], x.dataType, value)
        if is_placeholder is not None:
            names.append(f.when(is_placeholder, f.lit(x.name)))
    shown = f.array_join(f.array(f.lit(None).cast("string"), *names), ", ")
    text = f.concat(f.lit("debezium: column "), shown, f.lit(f": {value.reason}"))
    return f.when(shown != "", text)


def _is_unavailable(column: Column, kind: DataType, value: UnavailableValue) -> Column | None:
    """Return whether a column has the placeholder; None for a type without placeholders."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    raw = value.placeholder.encode()
    if isinstance(kind, t.StringType):
        return column.isin(*value.texts)
    if isinstance(kind, t.BinaryType):
        return column == f.lit(raw)
    if isinstance(kind, t.ArrayType):
        # Only arrays of these sizes are turned into JSON for the comparison.
        return f.size(column).isin(1, len(raw)) & f.to_json(column).isin(*value.texts)
    if isinstance(kind, t.MapType) and isinstance(kind.keyType, t.StringType):
        return f.map_contains_key(column, f.lit(value.placeholder))
    return None
