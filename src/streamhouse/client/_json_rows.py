"""A row by key over `GET .../rows/{key}`: the key as part of the URL, the row as JSON.

The GET costs the service a fraction of a batched lookup. The row has exactly the Python values
which Arrow makes of a batched lookup's answer, type by type, by the table's schema. Keys and rows
are therefore for a single schema version; the answer names its version.

Some keys use the batched lookup instead: keys not plainly of their columns' types (Arrow judges the
values), and keys with characters which proxies may alter: a slash, a backslash, a percent sign, a
control character, only dots, or great length.
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
_Parser = Callable[[Any], Any]
# The zone that Arrow puts into timestamps.
_UTC: Final = pa.lib.string_to_tzinfo("UTC")


class OutsideOfPythonError(ValueError):
    """A date or timestamp that Python cannot hold."""


class JsonRows:
    """The keys and rows of one schema version of a table. Thread-safe."""

    def __init__(self, table: TableInfo) -> None:
        self.table: Final = table
        columns = table.schema.columns
        self._key_texts: Final = [
            (name, _key_text(table.schema.column(name, table=str(table.path)).type))
            for name in table.descriptor.primary_key
        ]
        # Most values are right as they are in JSON.
        self._parsers: Final = [
            (column.name, parse)
            for column in columns
            if (parse := _parser(column.type)) is not None
        ]

    def url_part(self, key: Mapping[str, Any]) -> str | None:
        """Return the URL's part for the row with this key; None: use a batched lookup."""
        parts = []
        for name, key_text in self._key_texts:
            text = key_text(key[name])
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
        """Return the URL's part for a key in Arrow's form."""
        try:
            return self.url_part(keys.to_pylist()[0])
        except (OverflowError, ValueError):
            # A date or timestamp that Python cannot hold.
            return None

    def row(self, data: bytes | bytearray) -> dict[str, Any]:
        """Return the row of an answer in this schema version.

        Raises `OutsideOfPythonError`, and `ValueError` or `TypeError` for an answer without such a
        row.
        """
        row = json.loads(data)
        if not isinstance(row, dict) or len(row) != len(self.table.schema.columns):
            raise ValueError("the answer is no row of the table")
        try:
            for name, parse in self._parsers:
                value = row[name]
                if value is not None:
                    row[name] = parse(value)
        except (KeyError, ArithmeticError) as error:
            raise ValueError(f"the answer is no row of the table: {error!r}") from error
        return row


def _key_text(t: pa.DataType) -> Callable[[Any], str | None]:
    """Return a function: the text of a key's value for a URL, None for a value of another type."""
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
        # Arrow decides which moment a value with another zone is.
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


def _parser(t: pa.DataType) -> _Parser | None:
    """Return a function: the value that Arrow gives for a JSON value; None: the value itself."""
    if pa.types.is_integer(t) or pa.types.is_string(t) or pa.types.is_boolean(t):
        return None
    if pa.types.is_floating(t):
        # NaN and infinity are texts in JSON.
        return float
    if pa.types.is_decimal(t):
        return Decimal
    if pa.types.is_binary(t):
        return bytes.fromhex
    if pa.types.is_date(t):
        return lambda text: _in_python(date_of_text(text))
    if pa.types.is_timestamp(t):
        return _utc_moment if t.tz is not None else _local_moment
    return _nested_parser(t)


def _nested_parser(t: pa.DataType) -> _Parser | None:
    if pa.types.is_list(t):
        parse = _parser(t.value_type)
        if parse is None:
            return None
        return lambda items: [None if item is None else parse(item) for item in items]
    if pa.types.is_map(t):
        key = _parser(t.key_type) or _unchanged
        item = _parser(t.item_type) or _unchanged
        return lambda pairs: [(key(k), None if v is None else item(v)) for k, v in pairs]
    assert pa.types.is_struct(t), t
    fields = [(f.name, _parser(f.type) or _unchanged) for f in t]
    return lambda value: {
        name: None if value[name] is None else parse(value[name]) for name, parse in fields
    }


def _unchanged(value: Any) -> Any:
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
