"""The values of Debezium's JSON as those of a table's columns, in Spark's own expressions.

Spark reads some types otherwise than Debezium means them, or changes a value to make it fit. Those
are read as texts, or as wider types, and made here: what does not fit exactly becomes NULL, and
`loses_any` says so. Arrays, maps and structs are made of their parts.
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
    "has_other_key",
    "loses_any",
    "made_row",
    "read_row_type",
    "unavailable_columns",
]

UNITS: Final = {"millis": "timestamp_millis", "micros": "timestamp_micros"}
"""What a timestamp that comes as a number may count, and Spark's function for it."""
# Of more, Spark's function fails.
_MILLIS_MAX: Final = (1 << 63) // 1_000 - 1
_WITH_EXPONENT: Final = r"^\s*[+-]?(\d*)\.?(\d*)[eE]([+-]?\d{1,9})\s*$"


def read_row_type(row_type: StructType) -> StructType:
    """Return what rows of JSON are read as; `made_row` makes rows of `row_type` of them."""
    read_type = _read_type(row_type)
    from pyspark.sql import types as t

    assert isinstance(read_type, t.StructType)
    return read_type


def made_row(row: Column, row_type: StructType, timestamps: str) -> Column:
    """Return a row of the columns' own types."""
    return _value(row, row_type, timestamps, always=True)


def loses_any(row: Column, row_type: StructType, timestamps: str) -> Column:
    """Return whether `made_row` has NULL where the row has a value."""
    from pyspark.sql import functions as f

    if _read_type(row_type) == row_type:
        return f.lit(False)
    # A parameter, since Spark writes out a column of a filter as often as it is named.
    return f.exists(f.array(row), lambda given: _loses(given, row_type, timestamps))


def unavailable_columns(row: Column, row_type: StructType, value: UnavailableValue) -> Column:
    """Return the names of the columns of a row, as it was read, that have the placeholder."""
    from pyspark.sql import functions as f

    names = []
    for x in row_type:
        is_it = _is_unavailable(row[x.name], x.dataType, value)
        if is_it is not None:
            names.append(f.when(is_it, f.lit(x.name)))
    return f.array_compact(f.array(*names)) if names else f.array().cast("array<string>")


def has_other_key(before: Column, after: Column, keys: Sequence[tuple[str, Column]]) -> Column:
    """Return whether a row has another key than before; each column comes with whether it is one.

    False where the old row lacks a part of its key: it does not say which row it was.
    """
    from pyspark.sql import functions as f

    differs, is_whole = f.lit(False), f.lit(True)
    for name, is_key in keys:
        differs |= is_key & (before[name] != after[name])
        is_whole &= ~is_key | before[name].isNotNull()
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
    # Times are numbers or texts, as the source's settings have it. Spark rounds decimals.
    if _is_time(kind) or isinstance(kind, t.DecimalType):
        return t.StringType()
    # Spark reads 200 as the byte -56.
    return t.ShortType() if isinstance(kind, t.ByteType) else kind


def _loses(given: Column, kind: DataType, timestamps: str) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if isinstance(kind, t.StructType):
        changed = [x for x in kind if _read_type(x.dataType) != x.dataType]
        lost = [_loses(given[x.name], x.dataType, timestamps) for x in changed]
        return functools.reduce(operator.or_, lost, f.lit(False))
    if isinstance(kind, t.MapType):
        given, kind = f.map_values(given), t.ArrayType(kind.valueType)
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        any_lost = f.exists(given, lambda item: _loses(item, element, timestamps))
        return f.coalesce(any_lost, f.lit(False))
    return given.isNotNull() & _value(given, kind, timestamps).isNull()


def _value(given: Column, kind: DataType, timestamps: str, *, always: bool = False) -> Column:
    """Return the value of a column, NULL if it cannot have it."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    if _read_type(kind) == kind and not always:
        return given
    if isinstance(kind, t.StructType):
        values = [_value(given[x.name], x.dataType, timestamps).alias(x.name) for x in kind]
        return f.when(given.isNotNull(), f.struct(*values))
    if isinstance(kind, t.ArrayType):
        element = kind.elementType
        return f.transform(given, lambda item: _value(item, element, timestamps))
    if isinstance(kind, t.MapType):
        inner = kind.valueType
        return f.transform_values(given, lambda _, item: _value(item, inner, timestamps))
    if isinstance(kind, t.DecimalType):
        return f.when(_has_places(given, kind.scale), given.try_cast(kind))
    return _time(given, kind, timestamps) if _is_time(kind) else given.try_cast(kind)


def _has_places(number: Column, scale: int) -> Column:
    """Return whether a number, as text, needs no more than `scale` digits behind its point."""
    from pyspark.sql import functions as f

    is_plain = number.rlike(rf"^\s*[+-]?\d*(\.\d{{0,{scale}}}0*)?\s*$")
    whole, fraction, exponent = (f.regexp_extract(number, _WITH_EXPONENT, at) for at in (1, 2, 3))
    digits = f.concat(whole, fraction)
    used = f.rtrim(digits, f.lit("0"))
    unused = f.length(digits) - f.length(used)
    # Null where there is no exponent, or no number.
    places = f.length(fraction) - exponent.try_cast("int") - unused
    is_exact = places.isNotNull() & ((used == "") | (places <= scale))
    return is_plain | is_exact


def _time(given: Column, kind: DataType, timestamps: str) -> Column:
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    number = given.try_cast("bigint")
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
    return f.when(number.isNotNull(), counted).otherwise(given.try_cast(kind))


def _is_unavailable(given: Column, kind: DataType, value: UnavailableValue) -> Column | None:
    """Return whether a column has the placeholder; None if its type takes none."""
    from pyspark.sql import functions as f
    from pyspark.sql import types as t

    raw = value.placeholder.encode()
    if isinstance(kind, t.StringType):
        return given.isin(*value.texts)
    if isinstance(kind, t.BinaryType):
        return given == f.lit(raw)
    if isinstance(kind, t.ArrayType):
        # Only these sizes are written out, as JSON, to be compared.
        return f.size(given).isin(1, len(raw)) & f.to_json(given).isin(*value.texts)
    if isinstance(kind, t.MapType) and isinstance(kind.keyType, t.StringType):
        return f.map_contains_key(given, f.lit(value.placeholder))
    return None
