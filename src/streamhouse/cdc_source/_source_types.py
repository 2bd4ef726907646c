"""PostgreSQL's types as Streamhouse types, and values of Debezium's JSON in these types.

A column's type is taken from the type's name; the encoding of its values comes from the event's
schema, because Debezium writes a type in several ways. Values of unknown types become text.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa

from streamhouse.cdc_source._array_texts import (
    BIT_TYPES,
    array_items,
    bits,
    element_decoder,
)
from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.schema import type_from_json, type_name
from streamhouse.core.model.values.calendar import DAY_US, MICROSECONDS
from streamhouse.core.model.values.decimals import as_decimal
from streamhouse.core.types.registry import type_of

__all__ = ["SourceColumn", "WireType", "is_key", "is_known_type", "to_array"]

_DECIMAL_DIGITS_MAX: Final = 38
_INSTANT: Final = pa.timestamp("us", tz="UTC")
_MICROS_MIN, _MICROS_MAX = MICROSECONDS
_MISFITS: Final = (pa.ArrowException, ValueError, TypeError, ArithmeticError)
_Decode = Callable[[Any], Any]
_Fit = Callable[[int], int]
# PostgreSQL's first timestamp: anything below is infinity, or a number after an overflow.
_PG_MICROS_MIN: Final = -210_866_803_200_000_000
_MINUS_INFINITY: Final = -9_223_372_036_832_400_000
_INFINITE_DAYS: Final = -2_147_472_692
# Debezium's names of special floating-point values -> PostgreSQL's.
_SPECIAL: Final = {"NAN": "NaN", "POSITIVE_INFINITY": "Infinity", "NEGATIVE_INFINITY": "-Infinity"}
# PostgreSQL encodes the negative scale of numeric(3,-2) as 2,046.
_SCALE_MAX: Final = 1_000
_INSTANT_MIN: Final = "0001-01-01T00:00:00Z"
_INSTANT_MAX: Final = "9999-12-31T23:59:59.999999Z"


def _types(**names: str) -> dict[str, pa.DataType]:
    """Return our types by the names of another system, from its names by our types."""
    return {
        name: type_from_json(ours, where=name)
        for ours, their_names in names.items()
        for name in their_names.split()
    }


_PLAIN: Final = _types(
    boolean="bool",
    smallint="int2 smallserial serial2",
    int="int4 serial serial4",
    bigint="int8 bigserial serial8 oid",
    float="float4",
    double="float8",
    date="date",
    timestamp_ntz="timestamp",
    timestamp="timestamptz",
    binary="bytea bit varbit",
) | {"money": pa.decimal128(19, 2)}
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
# Zeros before the first 1, and zones, are lost.
_AMBIGUOUS: Final = frozenset({"varbit", "timetz"})
# Debezium's encodings of values without a type name, as of domains.
_BY_WIRE: Final = _types(
    boolean="BOOLEAN",
    smallint="INT16",
    int="INT32",
    bigint="INT64",
    float="FLOAT32",
    double="FLOAT64",
)


@dataclass(frozen=True, slots=True)
class WireType:
    """How an event writes a value: Connect's type and its logical name; PostgreSQL's type name, and
    the scale of `numeric`."""

    kind: str
    name: str = ""
    type_name: str = ""
    scale: int = 0


@dataclass(frozen=True, slots=True)
class SourceColumn:
    """A column as described by the database, or by an event's schema.

    `type_name` is PostgreSQL's, arrays with a leading underscore; `length` and `scale` come from
    `numeric(length, scale)`. Only the database tells `is_enum`.
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
            element = SourceColumn(self.name, name[1:], self.length, self.scale)
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


def is_key(column: SourceColumn) -> bool:
    """Return whether distinct values of a column stay distinct in the target, as a key requires."""
    t = column.arrow_type()
    # An array, and the nearest float, have no transform.
    return bool(type_of(t).transforms) and column.type_name.lower() not in _AMBIGUOUS


def to_array(
    values: Sequence[Any],
    data_type: pa.DataType,
    wire: WireType | None,
    *,
    where: str,
    is_key: bool = False,
) -> pa.Array:
    """Return a column of Debezium's JSON values as an Arrow array of `data_type`.

    A time outside the target's calendar becomes its first or last time, except in a key, where the
    time would belong to another row. Raises `SchemaMismatchError` with `where` and the first unfit
    value.
    """
    decode = _decoder(data_type, wire or WireType(""), _exact if is_key else _clip)
    try:
        return _build(values, data_type, decode)
    except _MISFITS:
        for value in values:
            try:
                _build([value], data_type, decode)
            except _MISFITS as error:
                raise SchemaMismatchError(
                    f"{where}: the value {str(value)[:80]!r} does not fit type"
                    f" {type_name(data_type)}"
                    " and is not changed silently; give the source column a type that has a"
                    " form here, or leave the table out with --exclude"
                ) from error
        raise


def _build(values: Sequence[Any], data_type: pa.DataType, decode: _Decode | None) -> pa.Array:
    if decode is not None:
        values = [None if value is None else decode(value) for value in values]
    if data_type != _INSTANT:
        return pa.array(values, data_type)
    # Arrow reads the texts of instants much faster than Python does.
    return pa.array(values, pa.string()).cast(data_type)


def _decoder(data_type: pa.DataType, wire: WireType, fit: _Fit) -> _Decode | None:
    """Return the conversion of a JSON value for Arrow; None if Arrow takes the value as is."""
    t = data_type
    logical = type_of(t)
    if pa.types.is_list(t):
        name = wire.type_name
        element = element_decoder(t.value_type, name.removeprefix("_"), fit)
        return lambda text: [
            None if item is None else element(item) for item in array_items(text, name)
        ]
    if pa.types.is_string(t):
        return _text_decoder(wire)
    if pa.types.is_decimal(t):
        return lambda value: as_decimal(Decimal(str(value)), t)
    if pa.types.is_binary(t):
        return bits if wire.type_name in BIT_TYPES else _from_base64
    if logical.day == 1:
        return lambda days: fit(_micros_of_days(int(days))) // DAY_US
    if logical.day is not None:
        return _timestamp_decoder(t, wire, fit)
    return logical.of_json


def _from_base64(value: Any) -> bytes:
    return base64.b64decode(value, validate=True)


def _micros_of_days(days: int) -> int:
    return _MICROS_MAX + 1 if days == _INFINITE_DAYS else days * DAY_US


def _timestamp_decoder(data_type: pa.DataType, wire: WireType, fit: _Fit) -> _Decode:
    if wire.name.endswith(".ZonedTimestamp") or data_type.tz is not None:
        return lambda text: _instant(text, fit)
    per_unit = 1_000 if wire.name.rpartition(".")[2] == "Timestamp" else 1

    def micros(value: Any) -> int:
        count = int(value) * per_unit
        # Debezium's number of a year after 294246 went round.
        is_round = count < _PG_MICROS_MIN and count != _MINUS_INFINITY
        return fit(_MICROS_MAX + 1 if is_round else count)

    return micros


def _instant(text: str, fit: _Fit) -> str:
    """Return an ISO instant; infinity, and times outside the calendar, become the first or last
    instant.
    """
    if text.startswith("-"):
        fit(_MICROS_MIN - 1)
        return _INSTANT_MIN
    # The year 0 is 1 BC.
    if text.startswith("0000-"):
        fit(_MICROS_MIN - 1)
        return _INSTANT_MIN
    if text[4:5] == "-":
        return text
    fit(_MICROS_MAX + 1)
    return _INSTANT_MAX


def _clip(micros: int) -> int:
    return min(max(micros, _MICROS_MIN), _MICROS_MAX)


def _exact(micros: int) -> int:
    if not _MICROS_MIN <= micros <= _MICROS_MAX:
        raise ValueError("a time before the year 1, or after 9999")
    return micros


def _text_decoder(wire: WireType) -> _Decode:
    short = wire.name.rpartition(".")[2]
    if short in ("MicroTime", "Time", "NanoTime"):
        per_second = {"MicroTime": 1_000_000, "Time": 1_000, "NanoTime": 1_000_000_000}[short]
        return lambda value: _time_of_day(int(value) * 1_000_000 // per_second)
    if wire.kind == "BYTES":
        return lambda value: base64.b64decode(value).decode(errors="replace")
    if wire.type_name == "numeric":
        return lambda value: _numeric(str(value), wire.scale)
    return _as_text


def _numeric(text: str, scale: int) -> str:
    """Return a number as PostgreSQL prints it."""
    return _SPECIAL.get(text) or (text.partition(".")[0] if scale > _SCALE_MAX else text)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _time_of_day(micros: int) -> str:
    seconds, fraction = divmod(micros, 1_000_000)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{text}.{fraction:06}".rstrip("0") if fraction else text
