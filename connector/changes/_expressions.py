"""What callers give for conditions and values: Spark columns, SQL text, plain values."""

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


def condition(given: Column | str | None) -> Column:
    """Return a condition; no condition is always true."""
    if given is None:
        return F.lit(True)
    return F.expr(given) if isinstance(given, str) else given


def _value(given: Any) -> Column:
    """Return a value: text is SQL, a column is itself, anything else is a literal."""
    if isinstance(given, str):
        return F.expr(given)
    return given if isinstance(given, Column) else F.lit(given)


def named(alias: str, column: str) -> Column:
    """Return a column of one side of a join."""
    return F.col(f"{alias}.{quoted(column)}")


def assignments(
    given: Mapping[str, Any], *, columns: Sequence[str], table: str, what: str
) -> dict[str, Column]:
    """Return the values by the table's own column names; case does not matter."""
    if not given:
        raise InvalidRequestError(
            f"table '{table}': {what} takes a mapping from column to value, as in"
            ' {"balance": "balance + 1"}'
        )
    own = {column.lower(): column for column in columns}
    found: dict[str, Column] = {}
    for name, given_value in given.items():
        column = own.get(str(name).strip("`").lower())
        if column is None:
            raise UnknownColumnError(
                f"table '{table}': {what} names column '{name}', which the table has not (columns:"
                f" {', '.join(columns)}){suggestion(str(name), list(columns))}"
            )
        if column in found:
            raise InvalidRequestError(f"table '{table}': {what} names column '{column}' twice")
        found[column] = _value(given_value)
    return found


def key_equalities(text: str, *, target_alias: str, source_alias: str) -> dict[str, str] | None:
    """Return target column -> source column of `t.a = s.b AND t.c = s.d`; else None."""
    found: dict[str, str] = {}
    for part in re.split(r"\s+and\s+", text, flags=re.IGNORECASE):
        match = _EQUALITY.fullmatch(part)
        if match is None:
            return None
        sides = {match[1].lower(): match[2], match[3].lower(): match[4]}
        if set(sides) != {target_alias.lower(), source_alias.lower()}:
            return None
        own = sides[target_alias.lower()]
        if own in found:
            return None
        found[own] = sides[source_alias.lower()]
    return found


def all_of(conditions: Sequence[Column]) -> Column:
    """Return that all conditions are true."""
    return functools.reduce(lambda left, right: left & right, conditions)


def first_of(cases: Sequence[tuple[Column, Column]], otherwise: Column) -> Column:
    """Return the value of the first case whose condition is true."""
    if not cases:
        return otherwise
    chain = F.when(*cases[0])
    for case in cases[1:]:
        chain = chain.when(*case)
    return chain.otherwise(otherwise)


def column_of(schema: StructType, name: str) -> str | None:
    """Return the name of a column as the schema has it; case does not matter."""
    found = [field.name for field in schema if field.name.lower() == name.lower()]
    if name in found:
        return name
    return found[0] if found else None
