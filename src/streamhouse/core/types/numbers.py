"""Booleans, floats and decimals."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from decimal import Context, Decimal, Inexact, InvalidOperation
from types import NoneType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.hashing._murmur import hashes_of_decimals
from streamhouse.core.model.values.decimals import (
    NUMBER,
    as_decimal,
    castable_texts,
    decimal_of,
    decimal_of_text,
    is_near,
)
from streamhouse.core.model.values.json_values import as_float
from streamhouse.core.types._json_texts import float_texts, quoted
from streamhouse.core.types._spark_texts import decimals_for_spark, floats_for_spark
from streamhouse.core.types.logical_type import (
    ORDERED,
    LogicalType,
    any_json_text,
    fixed_width_keys,
    no_form,
    plain_texts,
    raw_values,
    trimmed,
)
from streamhouse.core.types.python_values import UnfitError, wrong_type

__all__ = ["Boolean", "DecimalNumber", "Float", "least_bytes"]

_FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
_NO_NUMBER: Final = re.compile(r"[+-]?(?:nan|inf|infinity)", re.IGNORECASE)
# Without a largest exponent, `1E+999999` would become a number of a million digits.
_EXACT: Final = Context(prec=80, Emax=80, traps=[Inexact, InvalidOperation])


class Boolean(LogicalType):
    """boolean."""

    json_types = frozenset((bool,))
    python_types = frozenset((bool, NoneType))
    iceberg_name = avro = "boolean"
    spark_texts = staticmethod(plain_texts)
    transforms = frozenset(("identity",))
    aggregates = ORDERED | {"bool_and", "bool_or"}
    day = least = None
    of_footer = bool
    json_text = staticmethod(any_json_text)
    of_json = None
    arrow_json_type = pa.bool_()

    def of_bound(self, raw: bytes) -> bool:
        return raw != b"\x00"

    def lower_bound(self, raw: bool, _: int | None) -> bytes:
        return b"\x01" if raw else b"\x00"

    upper_bound = lower_bound

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return column.cast(pa.large_string())

    def of_python(self, value: Any) -> Any:
        if not isinstance(value, bool):
            raise wrong_type(value, self, "; give True or False")
        return value

    def value_of_text(self, text: str) -> bool:
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        return trimmed(texts).cast(self.arrow)

    def url_text(self, value: Any) -> str | None:
        return str(value).lower() if type(value) is bool else None

    hashed_bytes = few_hashed = hashes = few_keys = None
    stored_dtype = np.dtype("u1")
    stored_view = of_stored = None

    def key_bytes(self, value: Any) -> bytes:
        if not isinstance(value, bool):
            raise TypeError
        return b"\x01" if value else b"\x00"

    def stored_key_bytes(self, value: bool) -> bytes:
        return b"\x01\x01" if value else b"\x01\x00"

    def keys(self, column: pa.Array) -> pa.Array:
        return fixed_width_keys(column, np.asarray(column.cast(pa.uint8()).fill_null(0).to_numpy()))


class Float(LogicalType):
    """float and double: no keys of tables, but parts of the keys that divide rows."""

    json_types = frozenset((int, float))
    transforms = frozenset()
    aggregates = ORDERED | {"sum"}
    day = least = None
    json_texts = staticmethod(float_texts)
    spark_texts = staticmethod(floats_for_spark)
    # What JSON does not have is a text.
    of_json = float
    url_text = key_bytes = staticmethod(no_form)
    hashed_bytes = few_hashed = hashes = few_keys = stored_key_bytes = None

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        is_single = arrow.bit_width == 32
        self.arrow_json_type = arrow
        self.stored_dtype = np.dtype("<f4" if is_single else "<f8")
        self.stored_view = pa.int32() if is_single else pa.int64()
        self._codes: Final = ("<i", "<f") if is_single else ("<q", "<d")
        # Arrow makes a number too large for a single infinite.
        self.python_types = frozenset(() if is_single else (float, int, NoneType))
        self.iceberg_name = self.avro = "float" if is_single else "double"

    def of_bound(self, raw: bytes) -> float | None:
        number: float = struct.unpack("<d" if len(raw) == 8 else "<f", raw)[0]
        return self.of_footer(number)

    def of_footer(self, raw: Any) -> float | None:
        return None if math.isnan(raw) else float(raw)

    def lower_bound(self, raw: float, _: int | None) -> bytes:
        return struct.pack(self._codes[1], raw)

    upper_bound = lower_bound

    def json_text(self, value: float) -> str:
        return repr(value) if math.isfinite(value) else any_json_text(value)

    def of_python(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(value, self, "; convert it with float()")
        try:
            number = float(value)
        except OverflowError:
            number = math.nan
        if isinstance(value, int) and number != value:
            raise UnfitError(f"{str(value)[:80]} is no {self.name} without a loss")
        if self.arrow.bit_width == 32 and _FLOAT32_MAX < abs(number) < math.inf:
            raise UnfitError(f"{value!r} does not fit float; use a double")
        return number

    def value_of_text(self, text: str) -> float:
        text = text.strip()
        if _NO_NUMBER.fullmatch(text):
            return float(text)
        if NUMBER.fullmatch(text) is None:
            raise ValueError
        return as_float(text, self.arrow)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        texts = trimmed(texts)
        numbers = texts.cast(self.arrow)
        # A text of a finite number is not infinite.
        infinite = texts.filter(pc.is_inf(numbers))
        if len(infinite) and pc.any(pc.match_substring_regex(infinite, "[0-9]")).as_py():
            raise SchemaMismatchError("a number is too large")
        return numbers

    def keys(self, column: pa.Array) -> pa.Array:
        floats = raw_values(column, self.stored_dtype)
        size = floats.itemsize
        sign = np.array(1 << (size * 8 - 1), f"u{size}")
        # -0.0 and 0.0 are the same key, and all NaNs are the same key.
        floats = np.where(floats == 0, np.zeros_like(floats), floats)
        bits = np.where(np.isnan(floats), np.full_like(floats, np.nan), floats).view(sign.dtype)
        return fixed_width_keys(column, np.where(bits & sign, ~bits, bits ^ sign))

    def of_stored(self, value: int) -> float:
        number: float = struct.unpack(self._codes[1], struct.pack(self._codes[0], value))[0]
        return number


class DecimalNumber(LogicalType):
    """decimal: an unscaled number of 128 bits."""

    json_types = frozenset()
    spark_texts = staticmethod(decimals_for_spark)
    json_text = staticmethod(any_json_text)
    of_json = Decimal
    python_types = frozenset((Decimal, int, NoneType))
    iceberg_name = None
    transforms = frozenset(("identity", "bucket", "truncate"))
    aggregates = ORDERED | {"sum"}
    day = None
    few_keys = few_hashed = None
    stored_dtype = np.dtype("V16")
    stored_view = pa.binary(16)

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.arrow_json_type = arrow
        self.least = decimal_of(1 - 10**arrow.precision, arrow.scale)
        shape = {"precision": arrow.precision, "scale": arrow.scale}
        self.avro = {"type": "bytes", "logicalType": "decimal", **shape}

    def are_plain(self, values: Sequence[Any]) -> bool:
        return super().are_plain(values) and all(
            is_near(value) for value in values if type(value) is Decimal
        )

    def of_bound(self, raw: bytes) -> Decimal:
        return decimal_of(int.from_bytes(raw, "big", signed=True), self.arrow.scale)

    def of_footer(self, raw: Any) -> Decimal:
        return self.of_bound(raw) if isinstance(raw, bytes) else decimal_of(raw, self.arrow.scale)

    def lower_bound(self, raw: int, _: int | None) -> bytes:
        return least_bytes(raw)

    upper_bound = lower_bound

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return quoted(column.cast(pa.string()))

    def of_python(self, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | Decimal):
            instead = f"; give Decimal('{value}')" if isinstance(value, int | float | str) else ""
            raise wrong_type(value, self, instead)
        number = Decimal(value)
        if not number.is_finite():
            raise UnfitError(f"{number} is no {self.name}; give None where there is no value")
        try:
            return as_decimal(number, self.arrow)
        except (ValueError, ArithmeticError):
            raise UnfitError(f"{str(value)[:80]!r} does not fit {self.name}") from None

    def value_of_text(self, text: str) -> Decimal:
        return decimal_of_text(text, self.arrow)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        return castable_texts(trimmed(texts), self.arrow).cast(self.arrow)

    def url_text(self, value: Any) -> str | None:
        if type(value) is not Decimal:
            return None
        _, digits, exponent = value.as_tuple()
        is_plain = exponent == -self.arrow.scale and len(digits) <= self.arrow.precision
        return f"{value:f}" if is_plain else None

    def _unscaled(self, value: Any) -> int:
        return int(_EXACT.to_integral_exact(_EXACT.scaleb(Decimal(value), self.arrow.scale)))

    def key_bytes(self, value: Any) -> bytes:
        # An integer first: `abs` of a Decimal rounds to 28 digits.
        unscaled = self._unscaled(value)
        if abs(unscaled) >= 10**self.arrow.precision:
            raise OverflowError
        return (unscaled + (1 << 127)).to_bytes(16, "big")

    def stored_key_bytes(self, value: bytes) -> bytes:
        return bytes((1, value[15] ^ 0x80)) + value[14::-1]

    def keys(self, column: pa.Array) -> pa.Array:
        raw = raw_values(column, self.stored_dtype).view(np.uint8).reshape(-1, 16)
        big_endian = raw[:, ::-1].copy()
        big_endian[:, 0] ^= 0x80
        return fixed_width_keys(column, big_endian)

    def hashed_bytes(self, value: Any) -> bytes:
        return least_bytes(self._unscaled(value))

    def hashes(self, column: pa.Array) -> npt.NDArray[np.uint32]:
        return hashes_of_decimals(raw_values(column, self.stored_dtype))

    def of_stored(self, value: bytes) -> Decimal:
        unscaled = int.from_bytes(value, "little", signed=True)
        return _EXACT.scaleb(Decimal(unscaled), -self.arrow.scale)


def least_bytes(number: int) -> bytes:
    """Return the shortest big-endian two's complement of a number."""
    bits = (number if number >= 0 else ~number).bit_length() + 1
    return number.to_bytes((bits + 7) // 8, "big", signed=True)
