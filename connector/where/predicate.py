"""A `where` predicate as plain data: a small typed tree, its JSON form, and the door to the parser.

Invariants:
- every literal is already a value of its column's type, so evaluation, pruning and the lake
  expression never convert literals and cannot disagree about them
- the tree speaks SQL's three-valued logic; the order of values is Spark's (NaN equals NaN and is
  greater than every number, -0.0 equals 0.0, strings compare by their UTF-8 bytes)
- importing this module loads neither sqlglot nor pyiceberg, so executors may

Plain values: boolean bool; integers int; decimal Decimal with the column's scale; float and double
float; string str; binary bytes; date int (days since 1970-01-01); both timestamps int
(microseconds since 1970-01-01).

What a predicate keeps is decided in evaluation.py; parsing lives in parser.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final, Literal, TypeAlias

import pyarrow as pa

from streamhouse.storage_service.errors import InvalidPredicateError
from streamhouse.storage_service.model.schema import Schema, type_from_json, type_to_json

__all__ = [
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
    "PlainValue",
    "Predicate",
    "PredicateColumn",
    "comparison_type",
    "decimal_shape",
    "parse_predicate",
    "statistics_key",
]

PREDICATE_JSON_VERSION: Final = 1

PlainValue: TypeAlias = bool | int | float | str | bytes | Decimal
Operator: TypeAlias = Literal["=", "!=", "<", "<=", ">", ">="]

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
    """`left operator right`, both cast to `comparison_type`; NULL where either is NULL."""

    left: PredicateColumn
    operator: Operator
    right: PredicateColumn


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
    """A checked and typed `where` expression; picklable, and JSON-able for splits."""

    text: str
    root: Node

    @property
    def columns(self) -> tuple[str, ...]:
        """The top-level columns it reads, each once, in order of appearance."""
        return tuple(dict.fromkeys(column.path[0] for column in _columns(self.root)))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; it needs no parser and no table schema to be read back."""
        return {
            "version": PREDICATE_JSON_VERSION,
            "text": self.text,
            "root": _node_to_json(self.root),
        }

    @classmethod
    def from_json(cls, value: Any) -> Predicate:
        """Read the JSON form; raises `InvalidPredicateError` if it is not one."""
        if not isinstance(value, Mapping) or value.get("version") != PREDICATE_JSON_VERSION:
            raise InvalidPredicateError(
                f"a predicate in JSON must have version {PREDICATE_JSON_VERSION}; run the same"
                " Streamhouse version on driver and executors"
            )
        try:
            return cls(str(value["text"]), _node_from_json(value["root"]))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise InvalidPredicateError(f"malformed predicate in JSON: {error!r}") from error


def parse_predicate(text: str, schema: Schema, *, table: str) -> Predicate:
    """Parse `text` (Spark SQL) against the columns of `table`.

    Column names are matched without case; times without a zone are UTC. Raises
    `UnknownColumnError`, or `InvalidPredicateError` naming the piece that cannot be pushed down.
    """
    # Only the driver parses: executors must not need, nor wait for, the SQL parser.
    from streamhouse.connector.where.parser import parse

    return Predicate(text, parse(text, schema=schema, table=table))


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
    for one, other in ((left, right), (right, left)):
        if is_float(one) and is_decimal(other):
            return pa.float64() if other.precision <= 15 else None
        if is_float(one) and (is_float(other) or is_int(other)):
            return pa.float64()
        if is_decimal(one) and (is_decimal(other) or is_int(other)):
            shapes = (decimal_shape(one), decimal_shape(other))
            scale = max(after for _, after in shapes)
            precision = max(before for before, _ in shapes) + scale
            return pa.decimal128(precision, scale) if precision <= 38 else None
        if is_timestamp(one) and (is_timestamp(other) or pa.types.is_date32(other)):
            return pa.timestamp("us", tz="UTC")
    return None


def decimal_shape(t: pa.DataType) -> tuple[int, int]:
    """Return (digits before, digits after the point) of an integer or decimal type in Spark."""
    if pa.types.is_decimal(t):
        return t.precision - t.scale, t.scale
    return {8: 3, 16: 5, 32: 10, 64: 20}[t.bit_width], 0


def statistics_key(path: tuple[str, ...]) -> str:
    """Return the name under which statistics of the column at `path` are kept."""
    return ".".join(f"`{p.replace('`', '``')}`" if "." in p or "`" in p else p for p in path)


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


def _node_to_json(node: Node) -> dict[str, Any]:
    match node:
        case Constant(value):
            return {"node": "constant", "value": value}
        case Compare(column, operator, value):
            return {
                "node": "compare",
                "column": _column_to_json(column),
                "operator": operator,
                "value": _value_to_json(value),
            }
        case CompareColumns(left, operator, right):
            return {
                "node": "compare_columns",
                "left": _column_to_json(left),
                "operator": operator,
                "right": _column_to_json(right),
            }
        case In(column, values):
            return {
                "node": "in",
                "column": _column_to_json(column),
                "values": [_value_to_json(value) for value in values],
            }
        case IsNull(column):
            return {"node": "is_null", "column": _column_to_json(column)}
        case Like(column, parts):
            return {"node": "like", "column": _column_to_json(column), "parts": list(parts)}
        case Not(child):
            return {"node": "not", "child": _node_to_json(child)}
        case And(children):
            return {"node": "and", "children": [_node_to_json(child) for child in children]}
        case Or(children):
            return {"node": "or", "children": [_node_to_json(child) for child in children]}


def _node_from_json(value: Mapping[str, Any]) -> Node:
    match value["node"]:
        case "constant":
            return Constant(value["value"])
        case "compare":
            column = _column_from_json(value["column"])
            plain = _value_from_json(value["value"], column.type)
            return Compare(column, _operator_from_json(value["operator"]), plain)
        case "compare_columns":
            return CompareColumns(
                _column_from_json(value["left"]),
                _operator_from_json(value["operator"]),
                _column_from_json(value["right"]),
            )
        case "in":
            column = _column_from_json(value["column"])
            return In(column, tuple(_value_from_json(v, column.type) for v in value["values"]))
        case "is_null":
            return IsNull(_column_from_json(value["column"]))
        case "like":
            return Like(_column_from_json(value["column"]), tuple(value["parts"]))
        case "not":
            return Not(_node_from_json(value["child"]))
        case "and":
            return And(tuple(_node_from_json(child) for child in value["children"]))
        case "or":
            return Or(tuple(_node_from_json(child) for child in value["children"]))
        case other:
            raise ValueError(f"unknown node {other!r}")


def _operator_from_json(value: Any) -> Operator:
    if value not in NEGATED_OPERATOR:
        raise ValueError(f"unknown operator {value!r}")
    operator: Operator = value
    return operator


def _column_to_json(column: PredicateColumn) -> dict[str, Any]:
    return {"path": list(column.path), "type": type_to_json(column.type)}


def _column_from_json(value: Mapping[str, Any]) -> PredicateColumn:
    path = tuple(value["path"])
    return PredicateColumn(path, type_from_json(value["type"], where=".".join(path)))


def _value_to_json(value: PlainValue) -> Any:
    if isinstance(value, bool | int | str):
        return value
    # JSON has no NaN, no exact decimal and no bytes: each travels as text.
    return value.hex() if isinstance(value, float | bytes) else str(value)


def _value_from_json(value: Any, data_type: pa.DataType) -> PlainValue:
    if pa.types.is_floating(data_type):
        return float.fromhex(value)
    if pa.types.is_decimal(data_type):
        return Decimal(value)
    if pa.types.is_binary(data_type):
        return bytes.fromhex(value)
    if pa.types.is_boolean(data_type):
        expected: type[bool | str | int] = bool
    else:
        expected = str if pa.types.is_string(data_type) else int
    if type(value) is not expected:
        raise ValueError(f"{value!r} is not a value of {data_type}")
    plain: PlainValue = expected(value)
    return plain
