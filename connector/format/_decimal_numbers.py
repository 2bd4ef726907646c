"""Decimals of up to 18 digits on their way to Spark: as bigints, which Spark reads far quicker.

Spark makes a `BigDecimal` of each decimal from a Python source: about 0.3 us of processor time in
every row. A bigint costs next to nothing, and so does Spark's own `MakeDecimal`, which turns an
unscaled number into a decimal. So a load of `read` gets bigints, each with the decimal's type in
the column's metadata, and shows decimals made of the bigints. The meaning of the rows and the
statements allowed on them stay the same.

Only the driver's JVM has `MakeDecimal`. Under Spark Connect, and for a schema of the user's,
decimals stay decimals.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.types import DecimalType, LongType, StructField, StructType

from streamhouse.connector._spark_versions import to_arrow_schema
from streamhouse.connector.names._wrapped_methods import has_jvm
from streamhouse.reading.options.options import PLANNED_COLUMN

__all__ = ["as_numbers", "shown", "stored_schema"]

_PRECISION: Final = "streamhouse.decimal.precision"
_SCALE: Final = "streamhouse.decimal.scale"
_DIGITS_MAX: Final = 18


def as_numbers(schema: StructType) -> StructType:
    """Return `schema` with a bigint for each decimal of up to 18 digits."""
    return StructType([_as_number(field) for field in schema.fields])


def stored_schema(schema: StructType) -> pa.Schema:
    """Return the columns of `schema` in the table's types: decimals in place of the bigints."""
    return to_arrow_schema(StructType([_stored(field) for field in schema.fields]))


def shown(loaded: DataFrame) -> DataFrame:
    """Return a load with the table's own columns: decimals again, without `PLANNED_COLUMN`.

    Columns are taken by position: names that differ only in case may be ambiguous.
    """
    fields = loaded.schema.fields if has_jvm(loaded.sparkSession) else []
    if not any(_PRECISION in field.metadata for field in fields):
        return loaded.drop(PLANNED_COLUMN)
    from pyspark.sql.classic.column import Column  # noqa: PLC0415 - Spark Connect lacks the classic Column

    # Each part of this dotted name is a call to the JVM.
    spark_sql: Any = loaded.sparkSession._jvm.org.apache.spark.sql  # type: ignore[union-attr]
    make_decimal = spark_sql.catalyst.expressions.MakeDecimal
    column_of = spark_sql.classic.ExpressionUtils.column
    classic_frame: Any = loaded
    output = classic_frame._jdf.queryExecution().analyzed().output()
    columns = []
    for place, field in enumerate(fields):
        if field.name == PLANNED_COLUMN:
            continue
        column = output.apply(place)
        if _PRECISION in field.metadata:
            precision, scale = field.metadata[_PRECISION], field.metadata[_SCALE]
            column = column_of(make_decimal(column, precision, scale, False)).alias(field.name)
        else:
            column = column_of(column)
        columns.append(Column(column))
    return loaded.select(*columns)


def _as_number(field: StructField) -> StructField:
    kind = field.dataType
    if not isinstance(kind, DecimalType) or kind.precision > _DIGITS_MAX:
        return field
    metadata = {**field.metadata, _PRECISION: kind.precision, _SCALE: kind.scale}
    return StructField(field.name, LongType(), field.nullable, metadata)


def _stored(field: StructField) -> StructField:
    if _PRECISION not in field.metadata:
        return field
    kind = DecimalType(field.metadata[_PRECISION], field.metadata[_SCALE])
    return StructField(field.name, kind, field.nullable)
