"""The columns of a table for a schema of Spark's.

A type unknown to tables is refused by name, with the type to write instead. Comments are kept.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    DayTimeIntervalType,
    MapType,
    StringType,
    StructType,
    UserDefinedType,
    YearMonthIntervalType,
)

from streamhouse.connector._spark_versions import to_arrow_schema
from streamhouse.core.errors import InvalidSchemaError

__all__ = ["arrow_columns", "check_spark_types"]

# Keyed by `typeName`, because not every version of PySpark has every class.
_INSTEAD: Final = {
    "variant": "write to_json({0}) as a string, or a struct of the fields you need",
    "time": "write cast({0} AS string), or microseconds of the day as bigint",
    "char": "write STRING, which is neither padded nor limited in length",
    "varchar": "write STRING, which is not limited in length",
    "geometry": "write st_asbinary({0})",
    "geography": "write st_asbinary({0})",
}
_SUPPORTED: Final = frozenset(
    {
        "boolean", "byte", "tinyint", "short", "smallint", "integer", "long", "bigint", "float",
        "double", "decimal", "string", "binary", "date", "timestamp",
        "timestamp_ntz", "void",
    }
)  # fmt: skip


def check_spark_types(schema: StructType, *, table: str) -> None:
    """Raise `InvalidSchemaError` for the first column of a DataFrame with an unsupported type."""
    for field in schema.fields:
        _check(field.dataType, f"`{field.name}`", table=table)


def arrow_columns(schema: StructType, *, table: str) -> pa.Schema:
    """Return a table's columns for a schema, with their comments.

    Raises:
        InvalidSchemaError: as in `check_spark_types`.
    """
    check_spark_types(schema, table=table)
    fields = []
    for spark_field, field in zip(schema.fields, to_arrow_schema(schema), strict=True):
        comment = spark_field.metadata.get("comment")
        metadata = {"comment": comment} if isinstance(comment, str) and comment else None
        fields.append(field.with_metadata(metadata) if metadata else field)
    return pa.schema(fields)


def _check(data_type: DataType, where: str, *, table: str) -> None:
    if isinstance(data_type, StructType):
        for field in data_type.fields:
            _check(field.dataType, f"{where}.`{field.name}`", table=table)
    elif isinstance(data_type, ArrayType):
        _check(data_type.elementType, f"{where}.element", table=table)
    elif isinstance(data_type, MapType):
        _check(data_type.keyType, f"{where}.key", table=table)
        _check(data_type.valueType, f"{where}.value", table=table)
    elif (instead := _instead(data_type)) is not None:
        name = "udt" if isinstance(data_type, UserDefinedType) else data_type.simpleString()
        raise InvalidSchemaError(
            f"table '{table}': column '{where.replace('`', '')}' is {name.upper()}, a type that"
            f" tables do not have; {instead.format(where)}"
        )


def _instead(data_type: DataType) -> str | None:
    """Return the advice for an unsupported type, None for a supported type."""
    if isinstance(data_type, UserDefinedType):
        return "write its fields as a struct or an array"
    if isinstance(data_type, CalendarIntervalType | DayTimeIntervalType):
        return "write its microseconds as bigint, or cast({0} AS string)"
    if isinstance(data_type, YearMonthIntervalType):
        return "write cast({0} AS int), which is months, or cast({0} AS string)"
    if isinstance(data_type, StringType) and not data_type.isUTF8BinaryCollation():
        return "tables compare texts by their bytes: write collate({0}, 'UTF8_BINARY')"
    name = data_type.typeName()
    if name in _SUPPORTED:
        return None
    return _INSTEAD.get(name.partition("(")[0], "cast it to another type")
