"""Which tables the lake can hold: what is checked of a new table and of each change of one.

A table that is there is not asked: it opens as it is, and a change can mend it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidSchemaError
from streamhouse.storage_service.model.table import TableDescriptor

__all__ = ["NESTED_FIELD_ID_FIRST", "check_lake_schema"]

NESTED_FIELD_ID_FIRST: Final = 10_000
"""Field ids of columns are below, those of what is in nested columns are from here on."""

_PARAMETER_MAX: Final = (1 << 31) - 1


def check_lake_schema(descriptor: TableDescriptor) -> None:
    """Raise `InvalidSchemaError` for a table that no lake table can be made of."""
    table = str(descriptor.path)
    seen: dict[int, str] = {}
    for column in descriptor.schema.columns:
        number = column.column_id
        if number in seen:
            raise InvalidSchemaError(
                f"table '{table}': columns '{seen[number]}' and '{column.name}' have the same id"
                f" {number}; leave ids out, and the service gives them"
            )
        if not 1 <= number < NESTED_FIELD_ID_FIRST:
            raise InvalidSchemaError(
                f"table '{table}': column '{column.name}' has the id {number}; ids are from 1 to"
                f" {NESTED_FIELD_ID_FIRST - 1}, and the service gives them if they are left out"
            )
        seen[number] = column.name
    _check_names(descriptor)
    layout = descriptor.batch_layout()
    fields = (*descriptor.partitioned_by, *(() if layout is None else layout.partitioned_by))
    for field in fields:
        if field.parameter is not None and field.parameter > _PARAMETER_MAX:
            raise InvalidSchemaError(
                f"table '{table}': partition field '{field}' has a parameter above {_PARAMETER_MAX}"
            )


def _check_names(descriptor: TableDescriptor) -> None:
    """Check that no two fields have one name as Iceberg writes it, with dots between the parts."""
    seen: set[str] = set()
    for column in descriptor.schema.columns:
        for name in _full_names(column.name, column.type):
            # Engines find columns without case.
            folded = name.lower()
            if folded in seen:
                raise InvalidSchemaError(
                    f"table '{descriptor.path}': two fields are called '{name}' in the lake, where"
                    " the names of nested fields are joined by dots; rename one"
                )
            seen.add(folded)


def _full_names(name: str, t: pa.DataType) -> Iterator[str]:
    yield name
    if pa.types.is_struct(t):
        children = [(field.name, field.type) for field in t]
    elif pa.types.is_map(t):
        children = [("key", t.key_type), ("value", t.item_type)]
    elif pa.types.is_list(t):
        children = [("element", t.value_type)]
    else:
        return
    for child, kind in children:
        yield from _full_names(f"{name}.{child}", kind)
