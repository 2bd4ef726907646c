"""The conditions and values of callers: Spark columns, SQL text, plain values."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import Column
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from streamhouse.core.errors import (
    InvalidRequestError,
    UnknownColumnError,
    suggestion,
)
from streamhouse.reading.options.quoted_names import quoted

__all__ = [
    "all_of",
    "assignments",
    "column_of",
    "condition",
    "first_of",
    "key_equalities",
    "named",
]

_EQUALITY: Final = re.compile(r"\s*`?(\w+)`?\.`?(\w+)`?\s*={1,2}\s*`?(\w+)`?\.`?(\w+)`?\s*")


def condition(text_or_column: Column | str | None) -> Column:
    """Return a condition as a Spark column; None is always true."""
    if text_or_column is None:
        return F.lit(True)
    return F.expr(text_or_column) if isinstance(text_or_column, str) else text_or_column


def _value(value: Any) -> Column:
    """Return a value as a Spark column: text is SQL, a plain value is a literal."""
    if isinstance(value, str):
        return F.expr(value)
    return value if isinstance(value, Column) else F.lit(value)


def named(alias: str, column: str) -> Column:
    """Return a column of one side of a join."""
    return F.col(f"{quoted(alias)}.{quoted(column)}")


def assignments(
    values: Mapping[str, Any], *, columns: Sequence[str], table: str, operation: str
) -> dict[str, Column]:
    """Return the values by the table's own column names; case does not matter."""
    if not values:
        raise InvalidRequestError(
            f"table '{table}': {operation} takes a mapping from column to value, as in"
            ' {"balance": "balance + 1"}'
        )
    table_columns = {column.lower(): column for column in columns}
    by_column: dict[str, Column] = {}
    for name, value in values.items():
        column = table_columns.get(str(name).strip("`").lower())
        if column is None:
            raise UnknownColumnError(
                f"table '{table}': {operation} names column '{name}', which the table lacks"
                f" (columns: {', '.join(columns)}){suggestion(str(name), list(columns))}"
            )
        if column in by_column:
            raise InvalidRequestError(f"table '{table}': {operation} names column '{column}' twice")
        by_column[column] = _value(value)
    return by_column


def key_equalities(text: str, *, target_alias: str, source_alias: str) -> dict[str, str] | None:
    """Return target column -> source column of `t.a = s.b AND t.c = s.d`; else None."""
    equalities: dict[str, str] = {}
    for part in re.split(r"\s+and\s+", text, flags=re.IGNORECASE):
        match = _EQUALITY.fullmatch(part)
        if match is None:
            return None
        sides = {match[1].lower(): match[2], match[3].lower(): match[4]}
        if set(sides) != {target_alias.lower(), source_alias.lower()}:
            return None
        target_column = sides[target_alias.lower()]
        if target_column in equalities:
            return None
        equalities[target_column] = sides[source_alias.lower()]
    return equalities


def all_of(conditions: Sequence[Column]) -> Column:
    """Return the conjunction of all conditions."""
    return functools.reduce(lambda first, second: first & second, conditions)


def first_of(cases: Sequence[tuple[Column, Column]], otherwise: Column) -> Column:
    """Return the value of the first case whose condition is true."""
    if not cases:
        return otherwise
    chain = F.when(*cases[0])
    for case in cases[1:]:
        chain = chain.when(*case)
    return chain.otherwise(otherwise)


def column_of(schema: StructType, name: str) -> str | None:
    """Return the name of a column in the schema's spelling; case does not matter."""
    names = [field.name for field in schema if field.name.lower() == name.lower()]
    if name in names:
        return name
    return names[0] if names else None
