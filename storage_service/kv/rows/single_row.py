"""A single key or row as Python values, for lookups of one key: microseconds, no Arrow, no arrays.

The bytes equal `model.bucketing.encode_key` and `row_layout`; tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any, Final

import pyarrow as pa

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.values.calendar import (
    as_days,
    as_microseconds,
    date_of,
    python_value,
    timestamp_of,
)
from streamhouse.storage_service.kv.rows._plain_rows import PlainRows
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.table_rules import TableRules

__all__ = ["SingleRows"]

# Without a largest exponent, `1E+999999` would become a number of a million digits.
_EXACT: Final = Context(prec=80, Emax=80, traps=[Inexact, InvalidOperation])

Convert = Callable[[Any], Any]


class SingleRows:
    """Encodes keys and decodes rows of one table, one at a time."""

    def __init__(self, rules: TableRules, codec: RowCodec) -> None:
        self._rules: Final = rules
        self._codec: Final = codec
        types = {column.name: column.type for column in rules.schema.columns}
        self._keys: Final = {
            name: (types[name], _key_encoder(types[name])) for name in rules.primary_key
        }
        is_plain = not any(map(pa.types.is_nested, types.values()))
        self.plain: Final = (
            PlainRows(
                codec.arrow_schema.types,
                schema_id=codec.schema_id,
                value_bytes_min=codec.value_bytes_min,
            )
            if is_plain
            else None
        )
        """Reads values of this schema; None if it has nested columns."""
        self._converters: Final = [
            (i, convert)
            for i, t in enumerate(types.values())
            if (convert := _from_plain(t)) is not None
        ]

    def encode_key(self, key: Mapping[str, Any]) -> bytes:
        """Return the encoded key; raises unless each key column has exactly one valid value."""
        names = self._rules.primary_key
        if key.keys() != self._keys.keys():
            raise SchemaMismatchError(
                f"table '{self._rules.table}': a lookup takes the key columns"
                f" ({', '.join(names)}), not ({', '.join(key)})"
            )
        return self.encode_columns(key, names)

    def encode_columns(self, key: Mapping[str, Any], names: Sequence[str]) -> bytes:
        """Return some key columns, in this order, encoded as in a key."""
        parts = []
        for name in names:
            t, encode = self._keys[name]
            try:
                parts.append(b"\x01" + encode(key[name]))
            except (TypeError, ValueError, OverflowError, Inexact, InvalidOperation) as error:
                raise SchemaMismatchError(
                    f"table '{self._rules.table}': key column '{name}' is {t}, and"
                    f" {key[name]!r} is no such value"
                ) from error
        return b"".join(parts)

    def decode_values(self, value: bytes) -> list[Any]:
        """Return the row of a stored value, as Python values (see `calendar`) by column."""
        plain = self.plain
        if plain is None or not plain.is_own(value):
            decoded = self._codec.decode(pa.array([value], pa.binary()))
            return [python_value(column[0]) for column in decoded.columns]
        values = list(plain.decode(value))
        for i, convert in self._converters:
            if values[i] is not None:
                values[i] = convert(values[i])
        return values


def _from_plain(t: pa.DataType) -> Convert | None:
    """Return the conversion of a plain value to Python; None for the identity."""
    if pa.types.is_string(t):
        return bytes.decode
    if pa.types.is_floating(t):
        codes = ("<i", "<f") if t.bit_width == 32 else ("<q", "<d")
        pack, unpack = struct.Struct(codes[0]).pack, struct.Struct(codes[1]).unpack
        return lambda value: unpack(pack(value))[0]
    if pa.types.is_date(t):
        return date_of
    if pa.types.is_timestamp(t):
        return partial(timestamp_of, is_utc=t.tz is not None)
    if pa.types.is_decimal(t):
        return lambda raw: _EXACT.scaleb(
            Decimal(int.from_bytes(raw, "little", signed=True)), -t.scale
        )
    return None


def _key_encoder(t: pa.DataType) -> Callable[[Any], bytes]:
    """Return the encoder of one key column, without the marker for non-null values.

    The encoder raises TypeError, ValueError, OverflowError or a decimal signal for an invalid
    value.
    """
    if pa.types.is_string(t):
        return _encoded_text
    if pa.types.is_binary(t):
        return lambda value: _terminated(bytes(memoryview(value)))
    if pa.types.is_boolean(t):
        return _encoded_boolean
    if pa.types.is_decimal(t):
        return lambda value: _encoded_decimal(value, t)
    whole_number = _whole_number_of(t)
    byte_count, bias = t.bit_width // 8, 1 << (t.bit_width - 1)
    return lambda value: (whole_number(value) + bias).to_bytes(byte_count, "big")


def _encoded_text(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError
    return _terminated(value.encode())


def _terminated(value: bytes) -> bytes:
    return value.replace(b"\x00", b"\x00\xff") + b"\x00\x00"


def _encoded_boolean(value: Any) -> bytes:
    if not isinstance(value, bool):
        raise TypeError
    return b"\x01" if value else b"\x00"


def _encoded_decimal(value: Any, t: pa.DataType) -> bytes:
    # An integer first: `abs` of a Decimal rounds to 28 digits.
    unscaled = int(_EXACT.to_integral_exact(_EXACT.scaleb(Decimal(value), t.scale)))
    if abs(unscaled) >= 10**t.precision:
        raise OverflowError
    return (unscaled + (1 << 127)).to_bytes(16, "big")


def _whole_number_of(t: pa.DataType) -> Callable[[Any], int]:
    if pa.types.is_date(t):
        return as_days
    if pa.types.is_timestamp(t):
        return partial(as_microseconds, is_utc=t.tz is not None)
    return _integer


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError
    return value
