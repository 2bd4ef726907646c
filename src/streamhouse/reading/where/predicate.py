"""A `where` predicate as plain data: a small typed tree, picklable, without a parser.

Invariants:
- every literal is already a value of its column's type, so evaluation, pruning and the lake
  expression never convert literals and cannot disagree
- the tree speaks SQL's three-valued logic; the order of values is Spark's (NaN equals NaN and is
  greater than every number, -0.0 equals 0.0, strings compare by their UTF-8 bytes)
- this module imports no other module of its room, and neither sqlglot nor pyiceberg: executors have
  it

Plain values: boolean bool; integers int; decimal Decimal with the column's scale; float and double
float; string str; binary bytes; date int (days since 1970-01-01); both timestamps int (microseconds
since 1970-01-01).

Text becomes a predicate by `parse_predicate` in parser.py; _evaluation.py decides which rows a
predicate keeps.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from streamhouse.core.model.nested_fields import statistics_key
from streamhouse.core.model.values.zone import UTC, Zone
from streamhouse.core.types.logical_type import PlainValue

__all__ = [
    "COMPARISONS",
    "And",
    "Compare",
    "CompareColumns",
    "Constant",
    "In",
    "IsNull",
    "Like",
    "Node",
    "Not",
    "Or",
    "Predicate",
    "PredicateColumn",
    "comparison_type",
    "decimal_shape",
]

Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

COMPARISONS: Final[dict[Operator, Callable[[Any, Any], bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
"""Python's comparisons of two values of one kind."""

NEGATED_OPERATOR: Final[dict[Operator, Operator]] = {
    "=": "!=",
    "!=": "=",
    "<": ">=",
    ">=": "<",
    ">": "<=",
    "<=": ">",
}
FLIPPED_OPERATOR: Final[dict[Operator, Operator]] = {
    "=": "=",
    "!=": "!=",
    "<": ">",
    ">": "<",
    "<=": ">=",
    ">=": "<=",
}


@dataclass(frozen=True, slots=True)
class PredicateColumn:
    """A column, or a field of a struct column, with its canonical Arrow type."""

    path: tuple[str, ...]
    type: pa.DataType

    @property
    def key(self) -> str:
        """The name statistics are kept under: `a.b`, with parts that hold a dot in backticks."""
        return statistics_key(self.path)

    def __str__(self) -> str:
        return self.key


@dataclass(frozen=True, slots=True)
class Constant:
    """TRUE, FALSE or NULL."""

    value: bool | None


@dataclass(frozen=True, slots=True)
class Compare:
    """`column operator value`; NULL where the column is NULL."""

    column: PredicateColumn
    operator: Operator
    value: PlainValue


@dataclass(frozen=True, slots=True)
class CompareColumns:
    """`left operator right`, both cast to `comparison_type`; NULL where either side is NULL.

    `zone` is the zone of a date or a timestamp_ntz compared with a timestamp.
    """

    left: PredicateColumn
    operator: Operator
    right: PredicateColumn
    zone: Zone = UTC

    @property
    def needs_zone(self) -> bool:
        """Whether one side is a moment and the other side a wall clock time or a date."""
        types = (self.left.type, self.right.type)
        if self.zone.is_utc or not any(map(pa.types.is_timestamp, types)):
            return False
        moments = [t for t in types if pa.types.is_timestamp(t) and t.tz is not None]
        return len(moments) == 1


@dataclass(frozen=True, slots=True)
class In:
    """The column equals one of `values`; NULL where it is NULL. With no values it is never TRUE."""

    column: PredicateColumn
    values: tuple[PlainValue, ...]


@dataclass(frozen=True, slots=True)
class IsNull:
    """The column is NULL; never NULL itself."""

    column: PredicateColumn


@dataclass(frozen=True, slots=True)
class Like:
    """The whole string matches `parts`: literal text, `None` for `%`, and an int n for n times `_`.

    Texts are not empty and two texts are never neighbours.
    """

    column: PredicateColumn
    parts: tuple[str | int | None, ...]

    @property
    def prefix(self) -> str:
        """The text every matching string starts with, possibly empty."""
        first = self.parts[0] if self.parts else ""
        return first if isinstance(first, str) else ""


@dataclass(frozen=True, slots=True)
class Not:
    """Negation; NULL stays NULL."""

    child: Node


@dataclass(frozen=True, slots=True)
class And:
    """FALSE if any child is, else NULL if any child is, else TRUE."""

    children: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Or:
    """TRUE if any child is, else NULL if any child is, else FALSE."""

    children: tuple[Node, ...]


Node: TypeAlias = Constant | Compare | CompareColumns | In | IsNull | Like | Not | And | Or


@dataclass(frozen=True, slots=True)
class Predicate:
    """A checked and typed `where` expression."""

    root: Node

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level columns it reads, each once, in order of appearance."""
        return tuple(dict.fromkeys(column.path[0] for column in _columns(self.root)))


def comparison_type(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    """Return the type in which Spark compares two columns exactly, or None if there is none.

    Decimals that need more than 38 digits have none: Spark would round them. Nor have decimals of
    more than 15 digits beside floats: Arrow's conversion to double may differ in the last bit.
    """
    is_float, is_int = pa.types.is_floating, pa.types.is_signed_integer
    is_decimal, is_timestamp = pa.types.is_decimal, pa.types.is_timestamp
    if left == right:
        return None if pa.types.is_nested(left) else left
    if is_int(left) and is_int(right):
        return pa.int64()
    for first, second in ((left, right), (right, left)):
        if is_float(first) and is_decimal(second):
            return pa.float64() if second.precision <= 15 else None
        if is_float(first) and (is_float(second) or is_int(second)):
            return pa.float64()
        if is_decimal(first) and (is_decimal(second) or is_int(second)):
            shapes = (decimal_shape(first), decimal_shape(second))
            scale = max(scale_digits for _, scale_digits in shapes)
            precision = max(integer_digits for integer_digits, _ in shapes) + scale
            return pa.decimal128(precision, scale) if precision <= 38 else None
        if is_timestamp(first) and (is_timestamp(second) or pa.types.is_date32(second)):
            return pa.timestamp("us", tz="UTC")
    return None


def decimal_shape(t: pa.DataType) -> tuple[int, int]:
    """Return (digits before, digits after the point) of an integer or decimal type in Spark."""
    if pa.types.is_decimal(t):
        return t.precision - t.scale, t.scale
    return {8: 3, 16: 5, 32: 10, 64: 20}[t.bit_width], 0


def _columns(node: Node) -> Iterator[PredicateColumn]:
    match node:
        case And(children) | Or(children):
            for child in children:
                yield from _columns(child)
        case Not(child):
            yield from _columns(child)
        case CompareColumns(left, _, right):
            yield left
            yield right
        case Compare() | In() | IsNull() | Like():
            yield node.column
        case Constant():
            pass
