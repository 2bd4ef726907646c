"""One key and one row as Python values, for lookups of one key: no Arrow, no arrays, microseconds.

The bytes are those of `model.bucketing.encode_key` and of `row_layout`; tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from functools import partial
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.errors import SchemaMismatchError
from streamhouse.storage_service.kv.rows.row_codec import RowCodec
from streamhouse.storage_service.kv.rows.row_layout import fixed_dtype
from streamhouse.storage_service.kv.table_rules import TableRules
from streamhouse.storage_service.model.calendar import (
    as_days,
    as_microseconds,
    date_of,
    python_value,
    timestamp_of,
)

__all__ = ["SingleRows"]

_EXACT: Final = Context(prec=80, traps=[Inexact, InvalidOperation])
_LENGTH: Final = struct.Struct("<I")
_SCHEMA_ID_AT: Final = 8

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
        self._types: Final = list(types.values())
        self._has_nested: Final = any(pa.types.is_nested(t) for t in self._types)
        fixed = [(i, dtype) for i, t in enumerate(self._types) if (dtype := fixed_dtype(t))]
        varying = [i for i, t in enumerate(self._types) if fixed_dtype(t) is None]
        null_bytes = (len(self._types) + 7) // 8
        codes = "".join(_CODES[dtype.str] for _, dtype in fixed) + "I" * len(varying)
        prefix_bytes = codec.value_bytes_min - struct.calcsize(f"<{null_bytes}s{codes}")
        self._header: Final = struct.Struct(f"<{prefix_bytes}x{null_bytes}s{codes}")
        self._fixed: Final = [(i, _from_fixed(self._types[i])) for i, _ in fixed]
        self._varying: Final = [(i, pa.types.is_string(self._types[i])) for i in varying]

    def encode_key(self, key: Mapping[str, Any]) -> bytes:
        """Return the encoded key; raises for anything but one fitting value a key column."""
        names = self._rules.primary_key
        if len(key) != len(names) or not all(name in key for name in names):
            raise SchemaMismatchError(
                f"table '{self._rules.table}': a lookup takes the key columns"
                f" ({', '.join(names)}), not ({', '.join(key)})"
            )
        return self.encode_columns(key, names)

    def encode_columns(self, key: Mapping[str, Any], names: Sequence[str]) -> bytes:
        """Return some key columns, in this order, encoded as a key is."""
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
        if self._has_nested or value[_SCHEMA_ID_AT] != self._codec.schema_id:
            decoded = self._codec.decode(pa.array([value], pa.binary()))
            return [python_value(column[0]) for column in decoded.columns]
        nulls, *numbers = self._header.unpack_from(value)
        null_bits = int.from_bytes(nulls, "little")
        values: list[Any] = [None] * len(self._types)
        for (i, convert), number in zip(self._fixed, numbers, strict=False):
            if not null_bits >> i & 1:
                values[i] = convert(number)
        position = self._header.size
        lengths = numbers[len(self._fixed) :]
        for (i, is_text), length in zip(self._varying, lengths, strict=True):
            if not null_bits >> i & 1:
                piece = value[position : position + length]
                values[i] = piece.decode() if is_text else piece
            position += length
        return values


_CODES: Final = {
    "|u1": "B",
    "|i1": "b",
    "<i2": "h",
    "<i4": "i",
    "<i8": "q",
    "<f4": "f",
    "<f8": "d",
    "|V16": "16s",
}


def _from_fixed(t: pa.DataType) -> Convert:
    """Return what makes a Python value of the number that `struct` reads."""
    if pa.types.is_boolean(t):
        return bool
    if pa.types.is_date(t):
        return date_of
    if pa.types.is_timestamp(t):
        return partial(timestamp_of, is_utc=t.tz is not None)
    if pa.types.is_decimal(t):
        return lambda raw: _EXACT.scaleb(
            Decimal(int.from_bytes(raw, "little", signed=True)), -t.scale
        )
    return lambda number: number


def _key_encoder(t: pa.DataType) -> Callable[[Any], bytes]:
    """Return what makes one key column's bytes after the marker that it is not null.

    It raises TypeError, ValueError, OverflowError or a decimal signal for no value of `t`.
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
