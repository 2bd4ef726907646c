"""A description of a table's columns, in any of its forms, converted to an Arrow schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from streamhouse.client.values._ddl import schema_of_ddl
from streamhouse.core.errors import InvalidSchemaError

__all__ = ["SchemaForm", "TypeForm", "arrow_schema", "arrow_type"]

TypeForm: TypeAlias = pa.DataType | str
"""An Arrow type, or Spark's name of one: `bigint`, `array<string>`."""

SchemaForm: TypeAlias = (
    pa.Schema | str | Mapping[str, TypeForm] | Sequence[tuple[str, TypeForm] | pa.Field]
)
"""An Arrow schema, Spark's DDL, or names with their types."""

_FORMS = (
    'an Arrow schema, a text as in "id BIGINT NOT NULL, name STRING", or a list of (name, type)'
)


def arrow_schema(schema: Any, *, not_null: Sequence[str] = ()) -> pa.Schema:
    """Return a schema in any form as Arrow's; the columns `not_null`, a primary key, allow no null.

    Raises `InvalidSchemaError` for any other value.
    """
    fields = _schema(schema)
    return pa.schema(
        [field.with_nullable(False) if field.name in not_null else field for field in fields]
    )


def arrow_type(data_type: Any, *, where: str) -> pa.DataType:
    """Return an Arrow type, also for a type's name in Spark."""
    if isinstance(data_type, pa.DataType):
        return data_type
    if isinstance(data_type, str):
        fields = schema_of_ddl(f"`{where.replace('`', '``')}` {data_type}")
        if len(fields) == 1 and fields.field(0).nullable:
            return fields.field(0).type
        raise InvalidSchemaError(f"column '{where}': '{data_type[:80]}' is no type")
    raise InvalidSchemaError(
        f"column '{where}': its type must be Arrow's, as pa.int64(), or Spark's name of one, as"
        f" 'bigint', not {data_type!r:.80}"
    )


def _schema(schema: Any) -> pa.Schema:
    if isinstance(schema, pa.Schema):
        return schema
    if isinstance(schema, str):
        return schema_of_ddl(schema)
    if hasattr(schema, "__arrow_c_schema__"):
        try:
            return pa.schema(schema)
        except (pa.ArrowException, TypeError) as error:
            raise InvalidSchemaError(f"Arrow cannot read the schema: {error}") from error
    if isinstance(schema, Mapping):
        schema = list(schema.items())
    if isinstance(schema, Iterable) and not isinstance(schema, bytes):
        return pa.schema([_field(item, position) for position, item in enumerate(schema)])
    raise InvalidSchemaError(f"a schema is {_FORMS}, not {schema!r:.80}")


def _field(item: Any, position: int) -> pa.Field:
    if isinstance(item, pa.Field):
        return item
    is_pair = isinstance(item, list | tuple) and len(item) == 2
    if not is_pair or not isinstance(item[0], str):
        raise InvalidSchemaError(
            f"a schema is {_FORMS}; its item {position} is {item!r:.80}, which is no (name, type)"
        )
    return pa.field(item[0], arrow_type(item[1], where=item[0]))
