"""How large a new schema may be. Tables that are there keep what they have.

What one caller makes, all have to live with: it is in every description of the table, in each of
its versions, and somebody's reader walks it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidSchemaError
from streamhouse.storage_service.model.schema import Schema

__all__ = ["check_new_schema"]

TYPE_DEPTH_MAX: Final = 32
"""Levels of a nested type; a map is two. Parquet's and Arrow's readers end soon after."""
NESTED_FIELDS_MAX: Final = 10_000
COMMENT_CHARACTERS_MAX: Final = 4_000
COMMENTS_CHARACTERS_MAX: Final = 400_000


def check_new_schema(schema: Schema, *, table: str) -> None:
    """Raise `InvalidSchemaError` for a schema that is larger than a new one may be."""
    fields = comments = 0
    for column in schema.columns:
        depth, count = _extent(column.type)
        if depth > TYPE_DEPTH_MAX:
            raise InvalidSchemaError(
                f"table '{table}': column '{column.name}' is nested {depth} deep; at most"
                f" {TYPE_DEPTH_MAX}, a map counting as two"
            )
        fields += count
        if len(column.comment) > COMMENT_CHARACTERS_MAX:
            raise InvalidSchemaError(
                f"table '{table}': the comment of column '{column.name}' has"
                f" {len(column.comment)} characters; at most {COMMENT_CHARACTERS_MAX}"
            )
        comments += len(column.comment)
    if comments > COMMENTS_CHARACTERS_MAX:
        raise InvalidSchemaError(
            f"table '{table}': its comments have {comments} characters; at most"
            f" {COMMENTS_CHARACTERS_MAX} together"
        )
    if fields > NESTED_FIELDS_MAX:
        raise InvalidSchemaError(
            f"table '{table}': its columns have {fields} nested fields; at most"
            f" {NESTED_FIELDS_MAX} together"
        )


def _extent(t: pa.DataType) -> tuple[int, int]:
    """Return how deep a type is nested, and how many fields are in it."""
    if not pa.types.is_nested(t):
        return 0, 0
    # To Arrow a map is a list of structs: two levels.
    children = [_extent(t.field(i).type) for i in range(t.num_fields)]
    return 1 + max((d for d, _ in children), default=0), sum(1 + c for _, c in children)
