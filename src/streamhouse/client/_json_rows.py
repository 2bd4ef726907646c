"""One row by its key over `GET .../rows/{key}`: the key as a URL has it, the row out of JSON.

The GET costs the service a fraction of a batched lookup. What it answers becomes exactly the Python
values that Arrow makes of the batched lookup's answer, type by type, as the table's schema has
them. So keys and rows are written and read for one version of it; the answer names the one it has.

A key goes by the batched lookup when it is not plainly a value of its column (Arrow says what it
is, or why it is none), or has what servers in between treat as they like: a slash, a backslash, a
percent sign, a control character, nothing but dots, or great length.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Final
from urllib.parse import quote

import pyarrow as pa

from streamhouse.core.model.table import TableInfo
from streamhouse.core.model.values.calendar import (
    FarDate,
    FarTimestamp,
    date_of_text,
    timestamp_of_text,
)

__all__ = ["JsonRows", "OutsideOfPythonError"]

_KEY_CHARACTERS_MAX: Final = 500
_UNROUTED: Final = re.compile(r"[/\\%\x00-\x1f\x7f-\x9f]")
_Reader = Callable[[Any], Any]
# What Arrow gives timestamps as their zone.
_UTC: Final = pa.lib.string_to_tzinfo("UTC")


class OutsideOfPythonError(ValueError):
    """A date or timestamp that Python cannot hold."""


class JsonRows:
    """Keys and rows of one version of a table's schema. Thread-safe."""

    def __init__(self, table: TableInfo) -> None:
        self.table: Final = table
        columns = table.schema.columns
        self._key_texts: Final = [
            (name, _key_text(table.schema.column(name, table=str(table.path)).type))
            for name in table.descriptor.primary_key
        ]
        # Most values are right as JSON has them.
        self._readers: Final = [
            (column.name, read) for column in columns if (read := _reader(column.type)) is not None
        ]

    def url_part(self, key: Mapping[str, Any]) -> str | None:
        """Return the part of a URL that names the row with this key; None: ask in another way."""
        parts = []
        for name, text_of in self._key_texts:
            text = text_of(key[name])
            if not text or len(text) > _KEY_CHARACTERS_MAX:
                return None
            if not text.isalnum() or not text.isascii():
                if _UNROUTED.search(text) or not text.strip("."):
                    return None
                try:
                    text = quote(text, safe="")
                except UnicodeEncodeError:
                    return None
            parts.append(text)
        return "/".join(parts)

    def url_part_of_plain(self, keys: pa.RecordBatch) -> str | None:
        """Return the same for a key that Arrow holds, which knows more values of a type."""
        try:
            return self.url_part(keys.to_pylist()[0])
        except (OverflowError, ValueError):
            # A date or timestamp that Python cannot hold.
            return None

    def row(self, data: bytes | bytearray) -> dict[str, Any]:
        """Return the row of an answer that has this version of the schema.

        Raises `OutsideOfPythonError`, and `ValueError` or `TypeError` for what is no such answer.
        """
        row = json.loads(data)
        if not isinstance(row, dict) or len(row) != len(self.table.schema.columns):
            raise ValueError("it is no row of the table")
        try:
            for name, read in self._readers:
                value = row[name]
                if value is not None:
                    row[name] = read(value)
        except (KeyError, ArithmeticError) as error:
            raise ValueError(f"it is no row of the table: {error!r}") from error
        return row


def _key_text(t: pa.DataType) -> Callable[[Any], str | None]:
    """Return what writes a key's value as URLs have it, or None for what is not plainly one."""
    if pa.types.is_integer(t):
        bound = 1 << (t.bit_width - 1)
        return lambda value: str(value) if type(value) is int and -bound <= value < bound else None
    if pa.types.is_string(t):
        return lambda value: value if type(value) is str else None
    if pa.types.is_binary(t):
        return lambda value: value.hex() if type(value) is bytes else None
    if pa.types.is_boolean(t):
        return lambda value: str(value).lower() if type(value) is bool else None
    if pa.types.is_date(t):
        return lambda value: value.isoformat() if type(value) is datetime.date else None
    if pa.types.is_timestamp(t):
        # Of others than these Arrow says which moment they are.
        zones = (None,) if t.tz is None else (_UTC, datetime.UTC)
        return lambda value: (
            value.isoformat()
            if type(value) is datetime.datetime and value.tzinfo in zones
            else None
        )
    assert pa.types.is_decimal(t), t
    return lambda value: _decimal_text(value, t.precision, t.scale)


def _decimal_text(value: Any, precision: int, scale: int) -> str | None:
    if type(value) is not Decimal:
        return None
    _, digits, exponent = value.as_tuple()
    if exponent != -scale or len(digits) > precision:
        return None
    return f"{value:f}"


def _reader(t: pa.DataType) -> _Reader | None:
    """Return what makes a value of JSON the one that Arrow gives; None: it is that already."""
    if pa.types.is_integer(t) or pa.types.is_string(t) or pa.types.is_boolean(t):
        return None
    if pa.types.is_floating(t):
        # What JSON does not have is a text.
        return float
    if pa.types.is_decimal(t):
        return Decimal
    if pa.types.is_binary(t):
        return bytes.fromhex
    if pa.types.is_date(t):
        return lambda text: _in_python(date_of_text(text))
    if pa.types.is_timestamp(t):
        return _utc_moment if t.tz is not None else _local_moment
    return _nested_reader(t)


def _nested_reader(t: pa.DataType) -> _Reader | None:
    if pa.types.is_list(t):
        read = _reader(t.value_type)
        if read is None:
            return None
        return lambda items: [None if item is None else read(item) for item in items]
    if pa.types.is_map(t):
        key = _reader(t.key_type) or _as_it_is
        item = _reader(t.item_type) or _as_it_is
        return lambda pairs: [(key(k), None if v is None else item(v)) for k, v in pairs]
    assert pa.types.is_struct(t), t
    fields = [(f.name, _reader(f.type) or _as_it_is) for f in t]
    return lambda value: {
        name: None if value[name] is None else read(value[name]) for name, read in fields
    }


def _as_it_is(value: Any) -> Any:
    return value


def _utc_moment(text: str) -> datetime.datetime:
    moment: datetime.datetime = _in_python(timestamp_of_text(text, is_utc=True))
    return moment.replace(tzinfo=_UTC)


def _local_moment(text: str) -> datetime.datetime:
    moment: datetime.datetime = _in_python(timestamp_of_text(text, is_utc=False))
    return moment


def _in_python(value: Any) -> Any:
    if isinstance(value, FarDate | FarTimestamp):
        raise OutsideOfPythonError
    return value
