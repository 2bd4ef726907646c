"""The operands of a comparison: sqlglot nodes to columns of a table and to typed literals.

Like parser.py this knows sqlglot's nodes and runs on the driver only.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Final, TypeAlias

import pyarrow as pa
from sqlglot import exp

from streamhouse.core.errors import InvalidPredicateError, UnknownColumnError, suggestion
from streamhouse.core.model.schema import (
    BUCKET_COLUMN,
    CHANGE_TYPE_COLUMN,
    OFFSET_COLUMN,
    TIMESTAMP_COLUMN,
    Schema,
)
from streamhouse.core.model.values.calendar import DAY_US
from streamhouse.core.model.values.zone import Zone
from streamhouse.core.types.registry import type_of
from streamhouse.reading.where._literal import (
    DECIMAL_DIGITS_MAX,
    DateOf,
    Literal,
    Subject,
    YearOf,
    to_float32,
)
from streamhouse.reading.where._text import (
    parse_date,
    parse_double,
    parse_timestamp,
    refuse,
)
from streamhouse.reading.where.predicate import PredicateColumn

__all__ = ["Operand", "Operands", "check_arguments", "piece"]

PIECE_CHARACTERS_MAX: Final = 80

Operand: TypeAlias = Subject | Literal

_SYSTEM_TYPES: Final = {
    BUCKET_COLUMN: pa.int32(),
    OFFSET_COLUMN: pa.int64(),
    TIMESTAMP_COLUMN: pa.timestamp("us", tz="UTC"),
    CHANGE_TYPE_COLUMN: pa.string(),
}
_INTEGER_BITS: Final = {"TINYINT": 8, "SMALLINT": 16, "INT": 32, "BIGINT": 64}
_NTZ: Final = "TIMESTAMPNTZ"
_TIMESTAMP_KINDS: Final = frozenset({"TIMESTAMP", "TIMESTAMPTZ", "TIMESTAMPLTZ", _NTZ})
_EXACT_TEXT: Final = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?", re.ASCII | re.I)
_NUMBER_TEXT: Final = re.compile(r"(?:\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.I)


class Operands:
    """Resolves names against one table; names are matched without case, as Spark does."""

    def __init__(self, schema: Schema, *, table: str, zone: Zone) -> None:
        self._zone = zone
        self._schema = schema
        self._table = table
        self._types = {column.name.lower(): (column.name, column.type) for column in schema.columns}
        self._types |= {name: (name, data_type) for name, data_type in _SYSTEM_TYPES.items()}

    def operand(self, node: exp.Expr) -> Operand:
        """Return the literal, column, `date(column)` or `year(column)` that `node` is."""
        node = node.unnest()
        if isinstance(node, exp.Column | exp.Dot):
            return self.column(node)
        if isinstance(node, exp.Year):
            check_arguments(node, "this")
            inner = node.this
            if isinstance(inner, exp.TsOrDsToDate):
                check_arguments(inner, "this", "safe")
                inner = inner.this
            return self._year(node, self.operand(inner))
        if isinstance(node, exp.TsOrDsToDate):
            check_arguments(node, "this", "safe")
            return self._date(node, self.operand(node.this))
        if isinstance(node, exp.Cast) and not _is_literal(node.this):
            check_arguments(node, "this", "to")
            if _type_name(node) == "DATE":
                return self._date(node, self.operand(node.this))
        return literal_of(node, self._zone)

    def check_no_column_is_meant(self, *literals: Literal) -> None:
        """Refuse a comparison of literals, one of which is a column's name in quotes."""
        for literal in literals:
            if isinstance(literal.value, str) and literal.value.lower() in self._types:
                name = self._types[literal.value.lower()][0]
                raise InvalidPredicateError(
                    f"where: {literal.text} is a text, as in Spark, and is compared with a"
                    f" constant; the column is {name} or `{name}`, without quotes"
                )

    def column(self, node: exp.Expr) -> PredicateColumn:
        """Return the column or struct field that `node` names; raises `UnknownColumnError`."""
        path = _path(node)
        if path[0].lower() not in self._types:
            self._schema.column(path[0], table=self._table)
        name, data_type = self._types[path[0].lower()]
        names = [name]
        for part in path[1:]:
            shown = ".".join(names)
            if not pa.types.is_struct(data_type):
                raise UnknownColumnError(
                    f"column '{shown}' of table '{self._table}' is not a struct,"
                    f" so it has no field '{part}'"
                )
            fields = {field.name: field.type for field in data_type}
            close = [key for key in fields if key.lower() == part.lower()]
            if not close:
                raise UnknownColumnError(
                    f"column '{shown}' of table '{self._table}' has no field"
                    f" '{part}'{suggestion(part, list(fields))} (fields: {', '.join(fields)})"
                )
            names.append(close[0])
            data_type = fields[close[0]]
        return PredicateColumn(tuple(names), data_type)

    def _date(self, node: exp.Expr, operand: Operand) -> Operand:
        if isinstance(operand, PredicateColumn):
            day = type_of(operand.type).day
            if day is not None:
                return operand if day == 1 else DateOf(operand)
        if isinstance(operand, Literal) and isinstance(operand.value, str):
            return Literal("date", parse_date(operand.value), piece(node))
        raise refuse(f"{piece(node)} is not supported")

    def _year(self, node: exp.Expr, operand: Operand) -> Operand:
        column = operand.column if isinstance(operand, DateOf) else operand
        if isinstance(column, PredicateColumn) and type_of(column.type).day is not None:
            return YearOf(column)
        raise refuse(f"{piece(node)} is not supported")


def piece(node: exp.Expr) -> str:
    """Return the SQL of `node`, shortened, for an error message."""
    text = node.sql(dialect="spark", comments=False)
    return text if len(text) <= PIECE_CHARACTERS_MAX else text[: PIECE_CHARACTERS_MAX - 3] + "..."


def check_arguments(node: exp.Expr, *translated: str) -> None:
    """Refuse `node` if it has anything that the caller does not translate."""
    for name, value in node.args.items():
        if name not in translated and value not in (None, False, []):
            raise refuse(f"{piece(node)} is not supported")


def literal_of(node: exp.Expr, zone: Zone) -> Literal:
    """Return the literal that `node` is; raises `InvalidPredicateError` naming it if it is none."""
    node = node.unnest()
    text = piece(node)
    if isinstance(node, exp.Null):
        return Literal("null", None, "NULL")
    if isinstance(node, exp.Boolean):
        return Literal("boolean", bool(node.this), text)
    if isinstance(node, exp.HexString):
        digits = str(node.this)
        return Literal("binary", bytes.fromhex("0" * (len(digits) % 2) + digits), text)
    if isinstance(node, exp.Literal):
        return Literal("string", str(node.this), text) if node.is_string else _number(node, text)
    if isinstance(node, exp.Neg) and _is_literal(node.this):
        inner = literal_of(node.this, zone)
        if inner.kind in ("exact", "double"):
            assert isinstance(inner.value, Decimal | float)
            negative = (
                inner.value.copy_negate() if isinstance(inner.value, Decimal) else -inner.value
            )
            return Literal(inner.kind, negative, text)
        if inner.kind == "null":
            return inner
    if isinstance(node, exp.Cast) and _is_literal(node.this):
        check_arguments(node, "this", "to")
        return _cast(literal_of(node.this, zone), node, text, zone)
    raise refuse(f"{text} as an operand is not supported")


def _is_literal(node: exp.Expr) -> bool:
    node = node.unnest()
    if isinstance(node, exp.Neg | exp.Cast):
        return _is_literal(node.this)
    return isinstance(node, exp.Literal | exp.Null | exp.Boolean | exp.HexString)


def _path(node: exp.Expr) -> list[str]:
    if isinstance(node, exp.Dot) and isinstance(node.expression, exp.Identifier):
        return [*_path(node.this), str(node.expression.this)]
    if isinstance(node, exp.Column) and isinstance(node.this, exp.Identifier):
        check_arguments(node, "this", "table", "db", "catalog")
        return [str(part.this) for part in node.parts]
    raise refuse(f"{piece(node)} is not supported")


def _type_name(node: exp.Cast) -> str:
    return str(node.to.this.name) if isinstance(node.to.this, exp.DType) else ""


def _number(node: exp.Literal, text: str) -> Literal:
    match = _NUMBER_TEXT.fullmatch(str(node.this))
    if match is None:
        raise refuse(f"{text} is not a number")
    if match[1] is None:
        exact = Decimal(match[0])
        if len(exact.as_tuple().digits) > DECIMAL_DIGITS_MAX:
            raise refuse(f"{text} has more than {DECIMAL_DIGITS_MAX} digits")
        return Literal("exact", exact, text)
    value = float(match[0])
    if math.isinf(value):
        raise refuse(f"{text} is too large for a double")
    return Literal("double", value, text)


def _cast(literal: Literal, node: exp.Cast, text: str, zone: Zone) -> Literal:
    """Cast as Spark's ANSI mode does; whatever would lose digits or fail is refused."""
    name, value = _type_name(node), literal.value
    if value is None:
        return literal
    cast: Literal | None = None
    if name in ("DOUBLE", "FLOAT") and literal.kind in ("string", "exact", "double"):
        cast = _cast_to_double(literal, text, is_float32=name == "FLOAT")
    elif isinstance(value, Decimal) or (name == "DECIMAL" or name in _INTEGER_BITS):
        cast = _cast_to_exact(literal, node, text)
    elif isinstance(value, str):
        cast = _cast_text(value, text, to=name, zone=zone)
    elif literal.kind == "date" and name in _TIMESTAMP_KINDS and isinstance(value, int):
        has_zone = name != _NTZ
        midnight = zone.midnight(value) if has_zone else value * DAY_US
        cast = Literal("timestamp" if has_zone else "timestamp_ntz", midnight, text)
    if cast is None:
        raise refuse(f"{text} is not supported")
    return cast


def _cast_to_double(literal: Literal, text: str, *, is_float32: bool) -> Literal:
    value = literal.value
    assert isinstance(value, str | Decimal | float)
    double = parse_double(value) if isinstance(value, str) else float(value)
    rounded = to_float32(double) if is_float32 else double
    if math.isinf(rounded) and not isinstance(value, str):
        raise refuse(f"{text} is too large")
    return Literal("double", rounded, text)


def _cast_to_exact(literal: Literal, node: exp.Cast, text: str) -> Literal | None:
    name, value = _type_name(node), literal.value
    if isinstance(value, str) and _EXACT_TEXT.fullmatch(value.strip()):
        value = Decimal(value.strip())
    if not isinstance(value, Decimal):
        return None
    _, digits, exponent = value.as_tuple()
    assert isinstance(exponent, int)
    if name in _INTEGER_BITS:
        # The sign of -128Y is applied later, so the largest magnitude is allowed.
        fits = exponent >= 0 and abs(int(value)) <= 1 << (_INTEGER_BITS[name] - 1)
    else:
        shape = [int(param.name) for param in node.to.expressions]
        precision, scale = (shape + [10, 0][len(shape) :])[:2]
        fits = -exponent <= scale and len(digits) + exponent <= precision - scale
    return Literal("exact", value, text) if fits else None


def _cast_text(value: str, text: str, *, to: str, zone: Zone) -> Literal | None:
    if to == "TEXT":
        return Literal("string", value, text)
    if to == "DATE":
        return Literal("date", parse_date(value), text)
    if to in _TIMESTAMP_KINDS:
        has_zone = to != _NTZ
        micros = parse_timestamp(value, zone=zone if has_zone else None)
        return Literal("timestamp" if has_zone else "timestamp_ntz", micros, text)
    return None
