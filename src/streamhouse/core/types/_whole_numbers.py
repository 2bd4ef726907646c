"""Types whose values are stored as signed integers of 8 to 64 bits: integers, dates, timestamps."""

from __future__ import annotations

import datetime
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from streamhouse.core.errors import SchemaMismatchError
from streamhouse.core.model.hashing._murmur import hashes_of_longs
from streamhouse.core.model.values.calendar import (
    DAY_US,
    FarDate,
    FarTimestamp,
    as_days,
    as_microseconds,
    date_of,
    date_of_text,
    timestamp_of,
    timestamp_of_text,
)
from streamhouse.core.model.values.zone import Zone
from streamhouse.core.types._json_texts import date_texts, timestamp_texts
from streamhouse.core.types._spark_texts import dates_for_spark, times_for_spark
from streamhouse.core.types.logical_type import (
    NULL_KEY,
    ORDERED,
    LogicalType,
    OutsideOfPythonError,
    fixed_width_keys,
    plain_texts,
    raw_values,
    trimmed,
)
from streamhouse.core.types.python_values import UnfitError, wrong_type

__all__ = ["Date", "Integer", "Timestamp"]

_LONG: Final = struct.Struct("<q")
_STORED: Final = {size: np.dtype(f"<i{size}") for size in (1, 2, 4, 8)}
_INTEGER: Final = re.compile(r"[+-]?[0-9]+")
# What Arrow gives timestamps as their zone.
_UTC: Final = pa.lib.string_to_tzinfo("UTC")


class Integer(LogicalType):
    """tinyint, smallint, int and bigint."""

    json_types = frozenset((int,))
    python_types: frozenset[type] = frozenset((int, NoneType))
    transforms = frozenset(("identity", "bucket", "truncate"))
    avro: str | Mapping[str, Any]
    day: int | None = None
    spark_texts: Callable[[pa.Array, Zone], pa.Array] | None = staticmethod(plain_texts)
    json_text: Callable[[Any], str] = staticmethod(repr)
    of_json: Callable[[Any], Any] | None = None

    stored_view: pa.DataType | None = None
    of_stored: Callable[[int], Any] | None = None

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.size: Final[int] = arrow.bit_width // 8
        self.bound: Final[int] = 1 << (arrow.bit_width - 1)
        self.stored_dtype = _STORED[self.size]
        self.arrow_json_type = arrow
        self.iceberg_name = self.avro = "long" if self.size == 8 else "int"
        self.least = -self.bound
        self.aggregates = ORDERED | ({"sum", "count"} if self.size >= 4 else {"sum"})

    def of_bound(self, raw: bytes) -> int:
        return int.from_bytes(raw, "little", signed=True)

    def of_footer(self, raw: Any) -> int | None:
        return int(raw)

    def lower_bound(self, raw: int, _: int | None) -> bytes:
        return raw.to_bytes(self.size, "little", signed=True)

    upper_bound = lower_bound

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return column.cast(pa.large_string())

    def of_python(self, value: Any) -> Any:
        if isinstance(value, float):
            if math.isnan(value):
                raise UnfitError(f"NaN is no {self.name}; give None where there is no value")
            if not value.is_integer():
                raise UnfitError(f"{value!r} is no {self.name} without a loss; round it first")
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            instead = "; convert it with int()" if isinstance(value, str) else ""
            raise wrong_type(value, self, instead)
        if not -self.bound <= value < self.bound:
            raise UnfitError(f"{str(value)[:80]} does not fit {self.name}; widen the column")
        return int(value)

    def value_of_text(self, text: str) -> Any:
        if _INTEGER.fullmatch(text := text.strip()) is None:
            raise ValueError
        number = int(text)
        if not -self.bound <= number < self.bound:
            raise ValueError
        return number

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        # Arrow would take a hexadecimal `0x1f` as a number.
        if pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
            raise SchemaMismatchError("a text is no number")
        return trimmed(texts).cast(self.arrow)

    def url_text(self, value: Any) -> str | None:
        return str(value) if type(value) is int and -self.bound <= value < self.bound else None

    def number(self, value: Any) -> int:
        """Return the stored number of a Python value; raises TypeError for another value."""
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError
        return value

    def key_bytes(self, value: Any) -> bytes:
        return (self.number(value) + self.bound).to_bytes(self.size, "big")

    def stored_key_bytes(self, value: int) -> bytes:
        return b"\x01" + (value + self.bound).to_bytes(self.size, "big")

    def few_keys(self, column: pa.Array) -> list[bytes]:
        numbers = self._stored(column)
        return [NULL_KEY if v is None else self.stored_key_bytes(v) for v in numbers]

    def _stored(self, column: pa.Array) -> list[int | None]:
        numbers = column if self.stored_view is None else column.view(self.stored_view)
        return numbers.to_pylist()  # type: ignore[no-any-return]

    def keys(self, column: pa.Array) -> pa.Array:
        sign = np.array(self.bound, f"u{self.size}")
        return fixed_width_keys(column, raw_values(column, sign.dtype) ^ sign)

    def hashed_bytes(self, value: Any) -> bytes:
        return _LONG.pack(self.number(value))

    def few_hashed(self, column: pa.Array) -> Sequence[bytes | None]:
        return [None if v is None else _LONG.pack(v) for v in self._stored(column)]

    def hashes(self, column: pa.Array) -> npt.NDArray[np.uint32]:
        return hashes_of_longs(raw_values(column, self.stored_dtype))


class Date(Integer):
    """date: days from 1970-01-01."""

    json_types = frozenset()
    python_types = frozenset((datetime.date, NoneType))
    transforms = frozenset(("identity", "bucket", "year", "month", "day"))
    stored_view = pa.int32()
    day = 1

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.arrow_json_type = pa.string()
        self.iceberg_name = "date"
        self.avro = {"type": "int", "logicalType": "date"}
        self.aggregates = ORDERED

    json_texts = staticmethod(date_texts)
    spark_texts = staticmethod(dates_for_spark)

    def json_text(self, value: Any) -> str:
        return f'"{value.isoformat()}"'

    def of_python(self, value: Any) -> Any:
        if isinstance(value, datetime.datetime):
            if value.tzinfo is not None or value.time() != datetime.time():
                raise UnfitError(
                    f"{value} has a time of day, which a date has not; give its .date()"
                )
            return value.date()
        if not isinstance(value, datetime.date):
            raise wrong_type(value, self, "; give a datetime.date")
        return value

    def of_json(self, value: str) -> datetime.date:
        date = date_of_text(value)
        if isinstance(date, FarDate):
            raise OutsideOfPythonError
        return date

    value_of_text = staticmethod(date_of_text)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        return trimmed(texts).cast(self.arrow)

    def url_text(self, value: Any) -> str | None:
        return value.isoformat() if type(value) is datetime.date else None

    def number(self, value: Any) -> int:
        return as_days(value)

    def of_stored(self, value: int) -> datetime.date | FarDate:
        return date_of(value)


class Timestamp(Integer):
    """timestamp and timestamp_ntz: microseconds from 1970."""

    json_types = frozenset()
    python_types = frozenset((datetime.datetime, NoneType))
    transforms = Date.transforms | {"hour"}
    stored_view = pa.int64()
    spark_texts = staticmethod(times_for_spark)
    day = DAY_US

    def __init__(self, arrow: pa.DataType) -> None:
        super().__init__(arrow)
        self.is_utc: Final = arrow.tz is not None
        self.arrow_json_type = pa.string()
        self.iceberg_name = "timestamptz" if self.is_utc else "timestamp"
        logical = "timestamp-micros" if self.is_utc else "local-timestamp-micros"
        self.avro = {"type": "long", "logicalType": logical}
        self.aggregates = ORDERED

    def are_plain(self, values: Sequence[Any]) -> bool:
        return super().are_plain(values) and all(
            value is None or (value.tzinfo is not None) == self.is_utc for value in values
        )

    def json_texts(self, column: pa.Array) -> pa.LargeStringArray:
        return timestamp_texts(column, is_utc=self.is_utc)

    def json_text(self, value: Any) -> str:
        return f'"{value.isoformat()}"'

    def of_python(self, value: Any) -> Any:
        if not isinstance(value, datetime.datetime):
            raise wrong_type(value, self, "; give a datetime.datetime")
        if self.is_utc and value.tzinfo is None:
            raise UnfitError(
                f"{value} has no time zone, so it is no moment; give it one, as in"
                " value.replace(tzinfo=datetime.UTC), or make the column timestamp_ntz"
            )
        if not self.is_utc and value.tzinfo is not None:
            raise UnfitError(
                f"{value} has a time zone, which the column's type timestamp_ntz has not; remove it"
                " with value.replace(tzinfo=None)"
            )
        return value

    def of_json(self, value: str) -> datetime.datetime:
        moment = timestamp_of_text(value, is_utc=self.is_utc)
        if isinstance(moment, FarTimestamp):
            raise OutsideOfPythonError
        return moment.replace(tzinfo=_UTC) if self.is_utc else moment

    def value_of_text(self, text: str) -> Any:
        return timestamp_of_text(text, is_utc=self.is_utc)

    def values_of_texts(self, texts: pa.Array) -> pa.Array:
        try:
            return trimmed(texts).cast(self.arrow)
        except pa.ArrowInvalid:
            if not self.is_utc:
                raise
            # A text without a zone is a time of UTC.
            return (
                trimmed(texts).cast(pa.timestamp(self.arrow.unit)).cast(pa.int64()).cast(self.arrow)
            )

    def url_text(self, value: Any) -> str | None:
        # Of other zones Arrow says which moment a value is.
        zones = (_UTC, datetime.UTC) if self.is_utc else (None,)
        is_plain = type(value) is datetime.datetime and value.tzinfo in zones
        return value.isoformat() if is_plain else None

    def number(self, value: Any) -> int:
        return as_microseconds(value, is_utc=self.is_utc)

    def of_stored(self, value: int) -> datetime.datetime | FarTimestamp:
        return timestamp_of(value, is_utc=self.is_utc)
