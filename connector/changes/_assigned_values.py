"""The values assigned by a change: to most columns as by INSERT INTO, to keys without loss.

Values keep Spark's types until a task stages the rows; there `write/_assignment.py` converts the
values, as in every write. If the clauses of a column give several types, the column is a struct
with one field a type; at most one field is set in a row. So no value is converted twice.

Spark converts keys, because a join or lookup matches rows by key. A value that the key column's
type cannot hold exactly is no key: the value matches no row, and a row with this value is not
inserted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    ByteType,
    DataType,
    IntegerType,
    LongType,
    NullType,
    ShortType,
    StructField,
    StructType,
)

from streamhouse.connector._spark_versions import from_arrow_schema, to_arrow_schema
from streamhouse.connector.changes._expressions import first_of
from streamhouse.connector.write._assignment import assigned, can_assign
from streamhouse.connector.write._spark_types import check_spark_types
from streamhouse.connector.write._write_target import not_assigned
from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.zone import Zone

__all__ = ["Assignment", "Case", "converted_schema", "settled", "types_of", "values_of"]

_OF_TYPE: Final = "__of_type_"
"""The prefix of the fields of a column with several types."""
_INTEGERS: Final = (ByteType, ShortType, IntegerType, LongType)


class Case(NamedTuple):
    """A value, its type, and the condition under which the value is assigned."""

    condition: Column
    value: Column
    data_type: DataType


@dataclass(frozen=True, slots=True)
class Assignment:
    """Converts values to the types of a table's columns; times are in `zone`, the session's."""

    info: TableInfo
    zone: Zone | None

    def check(self, name: str, data_type: DataType) -> None:
        """Raise `SchemaMismatchError` unless values of a type can be assigned to a column."""
        if not self._is_assigned(name, data_type):
            (field,) = to_arrow_schema(StructType([StructField(name, data_type)]))
            raise not_assigned(field, self._arrow_type(name), self.info)

    def key(self, name: str, value: Column, data_type: DataType) -> Column | None:
        """Return a value in the type of a key column, null without an exact conversion.

        Return None if values of this type cannot be assigned to the column.
        """
        key_type = self.spark_type(name)
        if data_type == key_type:
            return value
        if not self._is_assigned(name, data_type):
            return None
        key = value.try_cast(key_type)
        if isinstance(data_type, (*_INTEGERS, NullType)) and isinstance(key_type, _INTEGERS):
            return key
        return F.when(key.try_cast(data_type) == value, key)

    def spark_type(self, name: str) -> DataType:
        """Return the Spark type of a table's column."""
        column = self.info.schema.select([name], table=str(self.info.path))
        return from_arrow_schema(column.to_arrow()).fields[0].dataType

    def _is_assigned(self, name: str, data_type: DataType) -> bool:
        if isinstance(data_type, NullType):
            return True
        schema = StructType([StructField(name, data_type)])
        check_spark_types(schema, table=str(self.info.path))
        (field,) = to_arrow_schema(schema)
        return can_assign(field.type, self._arrow_type(name), zone=self.zone)

    def _arrow_type(self, name: str) -> pa.DataType:
        return next(column.type for column in self.info.schema.columns if column.name == name)


def types_of(rows: DataFrame, values: Sequence[Column]) -> list[DataType]:
    """Return the types of values computed from `rows`."""
    named = [value.alias(f"v{number}") for number, value in enumerate(values)]
    return [field.dataType for field in rows.select(*named).schema.fields]


def values_of(cases: Sequence[Case], data_type: DataType) -> Column:
    """Return the value of the first case that is true, for a column of type `data_type`."""
    types: list[DataType] = []
    for case in cases:
        if not isinstance(case.data_type, NullType) and case.data_type not in types:
            types.append(case.data_type)
    if not types:
        return F.lit(None).cast(data_type)
    if len(types) == 1:
        return first_of([case[:2] for case in cases], F.lit(None))
    return F.struct(
        *(
            first_of([case[:2] for case in cases if case.data_type == each], F.lit(None)).alias(
                f"{_OF_TYPE}{number}"
            )
            for number, each in enumerate(types)
        )
    )


def converted_schema(schema: pa.Schema, types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return the schema of the batches that `settled` returns; `types` are the table's."""
    return pa.schema([f.with_type(types[f.name]) if _has_types(f.type) else f for f in schema])


def settled(
    batch: pa.RecordBatch, types: Mapping[str, pa.DataType], *, zone: Zone | None
) -> pa.RecordBatch:
    """Return a batch whose columns have one type each; raise `SchemaMismatchError`."""
    for place, field in enumerate(batch.schema):
        if _has_types(field.type):
            column_type = types[field.name]
            values = [
                assigned(part, column_type, column=field.name, zone=zone)
                for part in batch.column(place).flatten()
            ]
            batch = batch.set_column(place, pa.field(field.name, column_type), pc.coalesce(*values))
    return batch


def _has_types(data_type: pa.DataType) -> bool:
    return bool(pa.types.is_struct(data_type)) and str(data_type.field(0).name).startswith(_OF_TYPE)
