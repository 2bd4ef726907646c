"""Rows of any engine as the same JSON, so that answers can be compared with `==`.

Decimals, binary values, dates and times become strings; timestamps with a zone are given in UTC.
Decimals of scale 0 become integers: engines differ in whether a sum of integers is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal

__all__ = ["to_json"]


def to_json(rows: Iterable[Mapping[str, object]]) -> str:
    """`rows` as a JSON list of objects, in their order."""
    return json.dumps([_plain(row) for row in rows])


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, datetime):
        zoned = value.astimezone(UTC) if value.tzinfo else value
        return zoned.isoformat(timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else format(value, "f")
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return value
