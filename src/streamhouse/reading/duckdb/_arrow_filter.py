"""Conditions of DuckDB for an Arrow dataset, in the form of the option `where`.

DuckDB hands over a `pyarrow.compute.Expression`, of which only the text can be read. The condition
made from the text keeps exactly DuckDB's rows, and rules out files of the lake. NaN is the greatest
number for DuckDB and for `where`, but not for Arrow: Arrow's own filter would lose rows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from streamhouse.core.types.registry import type_of

__all__ = ["Condition", "condition_of"]

_COMPARISON: Final = re.compile(r'\(([A-Za-z_]\w*) (==|!=|<=|>=|<|>) ("[^"\\]*"|[^()"]+)\)')
_MEMBER: Final = re.compile(
    r"is_in\(([A-Za-z_]\w*), \{value_set=\w+:\[\n(.*?)\n\], null_matching_behavior=MATCH\}\)", re.S
)
_JOINED: Final = re.compile(r" (and|or) ")
_MEMBER_END: Final = re.compile(r",?\n")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_INTEGER: Final = re.compile(r"-?\d+")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_TIME: Final = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?"
_LITERALS: Final = {
    "int": (_INTEGER, "{}"),
    "long": (_INTEGER, "{}"),
    "float": (_NUMBER, "{}D"),
    "double": (_NUMBER, "{}D"),
    "string": (re.compile(r'"[^"\\]*"', re.S), "'{}'"),
    "date": (re.compile(r"\d{4}-\d\d-\d\d"), "DATE'{}'"),
    "timestamp": (re.compile(_TIME), "TIMESTAMP_NTZ'{}'"),
    "timestamptz": (re.compile(_TIME + "Z"), "TIMESTAMP'{}'"),
}
"""Arrow's text of a value, and the literal of `where`, by Iceberg's name of a simple type."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition for `where`, or None; without `is_exact` it keeps too many rows."""

    where: str | None
    is_exact: bool


def condition_of(text: str, schema: pa.Schema) -> Condition:
    """Return the condition of an expression's text, over columns of `schema`."""
    if not all(_NAME.fullmatch(name) for name in schema.names):
        # Such a name could be read as more than a name.
        return Condition(None, is_exact=False)
    reader = _Reader(text, schema)
    try:
        where = reader.condition()
    except _NotUnderstood:
        return Condition(None, is_exact=False)
    is_whole = reader.position == len(text)
    return Condition(where, is_exact=True) if is_whole else Condition(None, is_exact=False)


class _NotUnderstood(Exception):
    """The text has a part without a counterpart of the same meaning in `where`."""


class _Reader:
    def __init__(self, text: str, schema: pa.Schema) -> None:
        self._text = text
        self._schema = schema
        self.position = 0

    def condition(self) -> str:
        """Read a condition at the position, and move the position behind the condition."""
        if match := _COMPARISON.match(self._text, self.position):
            self.position = match.end()
            name, operator, value = match.groups()
            return f"`{name}` {operator.replace('==', '=')} {self._literal(name, value)}"
        if match := _MEMBER.match(self._text, self.position):
            self.position = match.end()
            name, values = match.groups()
            literals = [self._literal(name, value.strip()) for value in _MEMBER_END.split(values)]
            return f"`{name}` IN ({', '.join(literals)})"
        self._pass("(")
        first = self.condition()
        joined = _JOINED.match(self._text, self.position)
        if joined is None:
            raise _NotUnderstood
        self.position = joined.end()
        right = self.condition()
        self._pass(")")
        return f"({first} {joined[1].upper()} {right})"

    def _pass(self, expected: str) -> None:
        if not self._text.startswith(expected, self.position):
            raise _NotUnderstood
        self.position += len(expected)

    def _literal(self, name: str, value: str) -> str:
        if name not in self._schema.names:
            raise _NotUnderstood
        pattern, literal = _LITERALS.get(
            type_of(self._schema.field(name).type).iceberg_name or "", (None, "")
        )
        if pattern is None or not pattern.fullmatch(value):
            raise _NotUnderstood
        return literal.format(value.strip('"').replace("'", "\\'"))
