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

__all__ = ["Condition", "condition_of"]

_COMPARISON: Final = re.compile(r'\(([A-Za-z_]\w*) (==|!=|<=|>=|<|>) ("[^"\\]*"|[^()"]+)\)')
_MEMBER: Final = re.compile(
    r"is_in\(([A-Za-z_]\w*), \{value_set=\w+:\[\n(.*?)\n\], null_matching_behavior=MATCH\}\)", re.S
)
_JOINED: Final = re.compile(r" (and|or) ")
_MEMBER_END: Final = re.compile(r",?\n")
_NAME: Final = re.compile(r"[A-Za-z_]\w*")
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?(e[+-]?\d+)?")
_INTEGER: Final = re.compile(r"-?\d+")
_DATE: Final = re.compile(r"\d{4}-\d\d-\d\d")
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?")
_STRING: Final = re.compile(r'"([^"\\]*)"', re.S)


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
        kind = self._schema.field(name).type
        if pa.types.is_integer(kind) and _INTEGER.fullmatch(value):
            return value
        if pa.types.is_floating(kind) and _NUMBER.fullmatch(value):
            return f"{value}D"
        if pa.types.is_string(kind) and (match := _STRING.fullmatch(value)):
            return "'" + match[1].replace("'", "\\'") + "'"
        if pa.types.is_date32(kind) and _DATE.fullmatch(value):
            return f"DATE'{value}'"
        if pa.types.is_timestamp(kind):
            if kind.tz is None and _TIME.fullmatch(value):
                return f"TIMESTAMP_NTZ'{value}'"
            if kind.tz is not None and value.endswith("Z") and _TIME.fullmatch(value[:-1]):
                return f"TIMESTAMP'{value}'"
        raise _NotUnderstood
