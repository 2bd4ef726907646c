"""The values of Debezium's JSON in the types of a table's columns, by Spark's own expressions.

Spark reads some types differently from Debezium, or changes a value until it fits. Such values are
read as texts or as wider types, and converted here: a value without an exact conversion becomes
NULL, and `loses_any` returns true. Arrays, maps and structs are converted part by part.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from streamhouse.core.model.records.unavailable_value import UnavailableValue

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType, StructType

__all__ = [
    "UNITS",
    "converted_row",
    "has_changed_key",
    "loses_any",
    "read_row_type",
    "unavailable_columns",
]

UNITS: Final = {"millis": "timestamp_millis", "micros": "timestamp_micros"}
"""The units of a timestamp that comes as a number, and Spark's function for each."""
# Spark's function fails above this number.
_MILLIS_MAX: Final = (1 << 63) // 1_000 - 1
_WITH_EXPONENT: Final = r"^\s*[+-]?(\d*)\.?(\d*)[eE]([+-]?\d{1,9})\s*$"


def read_row_type(row_type: StructType) -> StructType:
    """Return the type for reading rows of JSON; `converted_row` converts to `row_type`."""
    read_type = _read_type(row_type)
    from pyspark.sql import types as t

    assert isinstance(read_type, t.StructType)
    return read_type


def converted_row(row: Column, row_type: StructType, timestamps: str) -> Column:
    """Return a row in the types of its columns."""
    return _value(row, row_type, timestamps, always=True)


def loses_any(row: Column, row_type: StructType, timestamps: str) -> Column:
    """Return whether `converted_row` has NULL where the row has a value."""
    from pyspark.sql import functions as f

    if _read_type(row_type) == row_type:
        return f.lit(False)
    # A lambda's parameter is evaluated once; Spark repeats a named column at each use.
    return f.exists(f.array(row), lambda item: _loses(item, row_type, timestamps))


def unavailable_columns(row: Column, row_type: StructType, value: UnavailableValue) -> Column:
    """Return the names of a row's columns with the placeholder; the row is as read from JSON."""
    from pyspark.sql import functions as f

    names = []
    for x in row_type:
        is_placeholder = _is_unavailable(row[x.name], x.dataType, value)
        if is_placeholder is not None:
            names.append(f.when(is_placeholder, f.lit(x.name)))
    return f.array_compact(f.array(*names)) if names else f.array().cast("array<string>")


def has_changed_key(old_row: Column, new_row: Column, keys: Sequence[tuple[str, Column]]) -> Column:
    """Return whether two versions of a row have different keys; a flag tells the key columns.

    Return False if the old version lacks a part of its key and therefore does not identify a row.
    """
    from pyspark.sql import functions as f

    differs, is_whole = f.lit(False), f.lit(True)
    for name, is_key in keys:
        differs |= is_key & (old_row[name] != new_row[name])
        is_whole &= ~is_key | old_row[name].isNotNull()
    return f.coalesce(differs & is_whole, f.lit(False))


def _is_time(kind: DataType) -> bool:
    from pyspark.sql import types as t

    return isinstance(kind, t.DateType | t.TimestampType | t.TimestampNTZType)


def _read_type(kind: DataType) -> DataType:
    from pyspark.sql import types as t

    if isinstance(kind, t.StructType):
        fields = [t.StructField(x.name, _read_type(x.dataType), x.nullable) for x in kind]
        return t.StructType(fields)
    if isinstance(kind, t.ArrayType):
        return t.ArrayType(_read_type(kind.elementType), kind.containsNull)
    if isinstance(kind, t.MapType):
        return t.MapType(kind.keyType, _read_type(kind.valueType), kind.valueContainsNull)
    # Times are numbers or texts, depending on the source's settings. Spark rounds decimals.
    if _is_time(kind) or isinstance(kind, t.DecimalType):
        return t.StringType()
    # Spark reads 200 as the byte -56.
    return t.ShortType() if isinstance(kind, t.ByteType) else kind


def _loses(value: Column, kind: DataType, timestamps: str) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if isinstance(kind, t.StructType):
        changed = [x for x in kind if _read_type(x.dataType) != x.dataType]
        lost = [_loses(value[x.name], x.dataType, timestamps) for x in changed]
        return functools.reduce(operator.or_, lost, f.lit(False))
    if isinstance(kind, t.MapType):
        value, kind = f.map_values(value), t.ArrayType(kind.valueType)
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        any_lost = f.exists(value, lambda item: _loses(item, element, timestamps))
        return f.coalesce(any_lost, f.lit(False))
    return value.isNotNull() & _value(value, kind, timestamps).isNull()


def _value(value: Column, kind: DataType, timestamps: str, *, always: bool = False) -> Column:
    """Return the value of a column, NULL for a value that does not fit."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if _read_type(kind) == kind and not always:
        return value
    if isinstance(kind, t.StructType):
        values = [_value(value[x.name], x.dataType, timestamps).alias(x.name) for x in kind]
        return f.when(value.isNotNull(), f.struct(*values))
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        return f.transform(value, lambda item: _value(item, element, timestamps))
    if isinstance(kind, t.MapType):
        inner = kind.valueType
        return f.transform_values(value, lambda _, item: _value(item, inner, timestamps))
    if isinstance(kind, t.DecimalType):
        return f.when(_has_places(value, kind.scale), value.try_cast(kind))
    return _time(value, kind, timestamps) if _is_time(kind) else value.try_cast(kind)


def _has_places(number: Column, scale: int) -> Column:
    """Return whether a number, as text, needs no more than `scale` digits behind its point."""
    from pyspark.sql import functions as f

    is_plain = number.rlike(rf"^\s*[+-]?\d*(\.\d{{0,{scale}}}0*)?\s*$")
    whole, fraction, exponent = (f.regexp_extract(number, _WITH_EXPONENT, at) for at in (1, 2, 3))
    digits = f.concat(whole, fraction)
    used = f.rtrim(digits, f.lit("0"))
    unused = f.length(digits) - f.length(used)
    # Null without an exponent, and for a text that is no number.
    places = f.length(fraction) - exponent.try_cast("int") - unused
    is_exact = places.isNotNull() & ((used == "") | (places <= scale))
    return is_plain | is_exact


def _time(value: Column, kind: DataType, timestamps: str) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    number = value.try_cast("bigint")
    if isinstance(kind, t.DateType):
        counted = f.date_from_unix_date(number.try_cast("int"))
    elif isinstance(kind, t.TimestampType):
        counted = f.call_function(UNITS[timestamps], number)
        if timestamps == "millis":
            counted = f.when(number.between(-_MILLIS_MAX, _MILLIS_MAX), counted)
    else:
        # Debezium counts a time without a zone as if it were UTC's.
        per_second = {"millis": 1_000, "micros": 1_000_000}[timestamps]
        seconds = (number.cast("decimal(20,0)") / per_second).try_cast("decimal(18,6)")
        epoch = f.lit("1970-01-01 00:00:00").cast("timestamp_ntz")
        counted = epoch + f.make_dt_interval(secs=seconds)
    return f.when(number.isNotNull(), counted).otherwise(value.try_cast(kind))


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
