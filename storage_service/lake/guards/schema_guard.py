"""Which schema changes of a live table's lake table are refused.

The table's columns and the system columns keep id, name and type, unless the service's own table
was altered that way first. Other engines may add columns that can be null.
"""

from __future__ import annotations

import pyarrow as pa
from pyiceberg.schema import Schema as IcebergSchema
from pyiceberg.types import DecimalType, DoubleType, IcebergType, LongType, NestedField

from streamhouse.storage_service.errors import ForbiddenError
from streamhouse.storage_service.model.lake import LAKE_SYSTEM_FIELDS
from streamhouse.storage_service.model.schema import CHANGE_TYPE_COLUMN, RETRACTS_COLUMN
from streamhouse.storage_service.model.table import TableInfo

__all__ = ["check_schema"]


def check_schema(where: str, base: IcebergSchema, new: IcebergSchema, table: TableInfo) -> None:
    """Refuse a schema that tiering could not write with or union reads could not read by."""
    after = {field.field_id: field for field in new.fields}
    columns = {column.column_id: column for column in table.schema.columns}
    system = {*(field.name for field in LAKE_SYSTEM_FIELDS), CHANGE_TYPE_COLUMN, RETRACTS_COLUMN}
    for field in base.fields:
        column = columns.get(field.field_id)
        if column is None and field.name not in system:
            continue
        found = after.get(field.field_id)
        if found is None:
            raise ForbiddenError(
                f"{where}: column '{field.name}' must stay; drop it from the streamhouse table"
            )
        if found.name != field.name and (column is None or found.name != column.name):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must keep its name, not become '{found.name}';"
                " rename it in the streamhouse table"
            )
        wanted = None if column is None else column.type
        if found.field_type != field.field_type and not _is_that(found.field_type, wanted):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must stay {field.field_type}, not become"
                f" {found.field_type}; alter the streamhouse table"
            )
    _check_added(where, base, new)


def _check_added(where: str, base: IcebergSchema, new: IcebergSchema) -> None:
    before = {field.field_id: field for field in base.fields}
    for field in new.fields:
        if field.required and not _was_required(before.get(field.field_id)):
            raise ForbiddenError(
                f"{where}: column '{field.name}' must be optional, because tiering writes rows"
                " without it"
            )


def _was_required(field: NestedField | None) -> bool:
    return field is not None and field.required


def _is_that(iceberg_type: IcebergType, wanted: pa.DataType | None) -> bool:
    """Whether a column became what the service's table already says: types that Iceberg widens."""
    if wanted is None:
        return False
    if isinstance(iceberg_type, DecimalType):
        return bool(wanted == pa.decimal128(iceberg_type.precision, iceberg_type.scale))
    if isinstance(iceberg_type, LongType):
        return bool(wanted == pa.int64())
    if isinstance(iceberg_type, DoubleType):
        return bool(wanted == pa.float64())
    return False
