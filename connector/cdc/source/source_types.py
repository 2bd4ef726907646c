"""PostgreSQL's types as ours, and how a value of Debezium's JSON becomes one.

A column's type is taken from the type's name; how its values are written is taken from the schema
that comes with the event, because Debezium writes one type in several ways. What is not known here
is text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.errors import SchemaMismatchError
from streamhouse.storage_service.model.values.decimals import as_decimal

__all__ = ["SourceColumn", "WireType", "is_known_type", "to_array"]

_DECIMAL_DIGITS_MAX: Final = 38
_MONEY: Final = pa.decimal128(19, 2)
_TIMESTAMP: Final = pa.timestamp("us")
_INSTANT: Final = pa.timestamp("us", tz="UTC")
# 0001-01-01 and the last microsecond of 9999: what Spark, Iceberg and Python can all show.
_MICROS_MIN: Final = -62_135_596_800_000_000
_MICROS_MAX: Final = 253_402_300_799_999_999
_MICROS_A_DAY: Final = 86_400_000_000
_INSTANTS_AS_TEXT: Final = {
    _INSTANT: pa.string(),
    pa.list_(pa.field("element", _INSTANT)): pa.list_(pa.field("element", pa.string())),
}
_MISFITS: Final = (pa.ArrowException, ValueError, TypeError, ArithmeticError)
_Decode = Callable[[Any], Any]
_INSTANT_MIN: Final = "0001-01-01T00:00:00Z"
_INSTANT_MAX: Final = "9999-12-31T23:59:59.999999Z"

_PLAIN: Final[dict[str, pa.DataType]] = {
    "bool": pa.bool_(),
    "int2": pa.int16(),
    "smallserial": pa.int16(),
    "serial2": pa.int16(),
    "int4": pa.int32(),
    "serial": pa.int32(),
    "serial4": pa.int32(),
    "int8": pa.int64(),
    "bigserial": pa.int64(),
    "serial8": pa.int64(),
    "oid": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
    "money": _MONEY,
    "date": pa.date32(),
    "timestamp": _TIMESTAMP,
    "timestamptz": _INSTANT,
    "bytea": pa.binary(),
    "bit": pa.binary(),
    "varbit": pa.binary(),
}
# Text on purpose; any other name is text because it is not known.
# fmt: off
_TEXTS: Final = frozenset(
    {
        "text", "varchar", "bpchar", "char", "name", "citext", "xml", "uuid", "json", "jsonb",
        "hstore", "time", "timetz", "interval", "inet", "cidr", "macaddr", "macaddr8",
        "tsvector", "ltree", "numeric", "int4range", "int8range", "numrange", "tsrange",
        "tstzrange", "daterange", "point", "box", "lseg", "path", "polygon", "circle", "line",
        "geometry", "geography"
    }
)
# fmt: on
# How Debezium writes what has no type name: of domains, for one.
_BY_WIRE: Final[dict[str, pa.DataType]] = {
    "BOOLEAN": pa.bool_(),
    "INT16": pa.int16(),
    "INT32": pa.int32(),
    "INT64": pa.int64(),
    "FLOAT32": pa.float32(),
    "FLOAT64": pa.float64(),
}


@dataclass(frozen=True, slots=True)
class WireType:
    """How an event writes a value: Connect's type, its logical name, and of arrays the element."""

    kind: str
    name: str = ""
    element: WireType | None = None


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column as the database, or an event's schema, describes it.

    `type_name` is PostgreSQL's, arrays with a leading underscore; `length` and `scale` are those of
    `numeric(length, scale)`. `is_enum` is only known from the database.
    """

    name: str
    type_name: str
    length: int | None = None
    scale: int | None = None
    wire: WireType | None = None
    is_enum: bool = False

    def arrow_type(self) -> pa.DataType:
        """Return the type of the column in our table."""
        name = self.type_name.lower()
        if name.startswith("_"):
            element = SourceColumn(
                self.name,
                name[1:],
                self.length,
                self.scale,
                None if self.wire is None else self.wire.element,
            )
            return pa.list_(pa.field("element", element.arrow_type()))
        if name == "numeric" and self.length and self.length <= _DECIMAL_DIGITS_MAX:
            scale = self.scale or 0
            # PostgreSQL takes scales below 0 and above the precision; ours are between.
            return pa.decimal128(self.length, scale) if 0 <= scale <= self.length else pa.string()
        if name in _PLAIN:
            return _PLAIN[name]
        if name not in _TEXTS and self.wire is not None and not self.wire.name:
            return _BY_WIRE.get(self.wire.kind, pa.string())
        return pa.string()


def is_known_type(column: SourceColumn) -> bool:
    """Return whether the column's type has a form here; what has none becomes text."""
    name = column.type_name.lower().removeprefix("_")
    return column.is_enum or name in _PLAIN or name in _TEXTS


def to_array(
    values: Sequence[Any], data_type: pa.DataType, wire: WireType | None, *, where: str
) -> pa.Array:
    """Return a column of Debezium's JSON values as an Arrow array of `data_type`.

    Raises `SchemaMismatchError` that names `where` and the first value that does not fit.
    """
    decode = _decoder(data_type, wire or WireType(""))
    try:
        return _build(values, data_type, decode)
    except _MISFITS:
        for value in values:
            try:
                _build([value], data_type, decode)
            except _MISFITS as error:
                raise SchemaMismatchError(
                    f"{where}: the value {str(value)[:80]!r} does not fit type {data_type}"
                    " and is not changed silently; give the source column a type that has a"
                    " form here, or leave the table out of --tables"
                ) from error
        raise


def _build(values: Sequence[Any], data_type: pa.DataType, decode: _Decode | None) -> pa.Array:
    if decode is not None:
        values = [None if value is None else decode(value) for value in values]
    # Arrow reads the texts of instants much faster than Python does.
    between = _INSTANTS_AS_TEXT.get(data_type)
    if between is None:
        return pa.array(values, data_type)
    return pa.array(values, between).cast(data_type)


def _decoder(data_type: pa.DataType, wire: WireType) -> _Decode | None:
    """Return what turns one JSON value into one that Arrow takes; None if nothing has to."""
    t = data_type
    if pa.types.is_list(t):
        inner = _decoder(t.value_type, wire.element or WireType(""))
        if inner is None:
            return None
        return lambda values: [None if v is None else inner(v) for v in values]
    if pa.types.is_string(t):
        return _text_decoder(wire)
    if pa.types.is_floating(t):
        return float
    if pa.types.is_decimal(t):
        return lambda value: as_decimal(Decimal(str(value)), t)
    if pa.types.is_date(t):
        return lambda days: _clip(int(days) * _MICROS_A_DAY) // _MICROS_A_DAY
    if pa.types.is_binary(t):
        return lambda value: base64.b64decode(value, validate=True)
    if pa.types.is_timestamp(t):
        return _timestamp_decoder(t, wire)
    return None


def _timestamp_decoder(data_type: pa.DataType, wire: WireType) -> _Decode:
    if wire.name.endswith(".ZonedTimestamp") or data_type.tz is not None:
        return _instant
    unit = {"Timestamp": 1_000, "NanoTimestamp": -1_000}.get(wire.name.rpartition(".")[2], 1)
    if unit < 0:
        return lambda value: _clip(int(value) // -unit)
    return lambda value: _clip(int(value) * unit)


def _instant(text: str) -> str:
    """Return an ISO instant; infinity, and what no calendar shows, as the first or the last one."""
    if text.startswith("-"):
        return _INSTANT_MIN
    return text if text[4:5] == "-" else _INSTANT_MAX


def _clip(micros: int) -> int:
    return min(max(micros, _MICROS_MIN), _MICROS_MAX)


def _text_decoder(wire: WireType) -> _Decode:
    short = wire.name.rpartition(".")[2]
    if short in ("MicroTime", "Time", "NanoTime"):
        per_second = {"MicroTime": 1_000_000, "Time": 1_000, "NanoTime": 1_000_000_000}[short]
        return lambda value: _time_of_day(int(value) * 1_000_000 // per_second)
    if wire.kind == "BYTES":
        return lambda value: base64.b64decode(value).decode(errors="replace")
    return _as_text


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _time_of_day(micros: int) -> str:
    seconds, rest = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{rest:06}".rstrip("0") if rest else text
