"""The bucket of one key given as Python values: what `bucketing.buckets_for_rows` says of its row.

Without Arrow, because making a row of one key and asking for its bucket takes longer than all the
rest of looking it up.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any, Final

import pyarrow as pa

from streamhouse.storage_service.model.far_times import as_days, as_microseconds
from streamhouse.storage_service.model.partitioning import is_bucketable

__all__ = ["bytes_to_hash", "least_bytes", "murmur3"]

_MASK: Final = 0xFFFFFFFF
_LONG: Final = struct.Struct("<q")
_EXACT: Final = Context(prec=80)


def bytes_to_hash(t: pa.DataType) -> Callable[[Any], bytes] | None:
    """Return what makes the bytes that Iceberg hashes of a value of `t`; None if it hashes none.

    The bucket is `(murmur3(bytes) & 0x7FFFFFFF) % N`.
    """
    if not is_bucketable(t):
        return None
    if pa.types.is_string(t):
        return str.encode
    if pa.types.is_binary(t):
        return bytes
    if pa.types.is_decimal(t):
        return lambda value: least_bytes(int(_EXACT.scaleb(Decimal(value), t.scale)))
    if pa.types.is_date(t):
        return lambda value: _LONG.pack(as_days(value))
    if pa.types.is_timestamp(t):
        is_utc = t.tz is not None
        return lambda value: _LONG.pack(as_microseconds(value, is_utc=is_utc))
    return _LONG.pack


def least_bytes(number: int) -> bytes:
    """Return the shortest big-endian two's complement of a number."""
    bits = (number if number >= 0 else ~number).bit_length() + 1
    return number.to_bytes((bits + 7) // 8, "big", signed=True)


def murmur3(data: bytes) -> int:
    """Return the 32-bit Murmur3 hash with seed 0."""
    whole = len(data) >> 2
    hash_ = 0
    for word in struct.unpack_from(f"<{whole}I", data):
        word = word * 0xCC9E2D51 & _MASK
        word = (word << 15 | word >> 17) * 0x1B873593 & _MASK
        hash_ ^= word
        hash_ = ((hash_ << 13 | hash_ >> 19) & _MASK) * 5 + 0xE6546B64 & _MASK
    word = int.from_bytes(data[whole << 2 :], "little")
    if word:
        word = word * 0xCC9E2D51 & _MASK
        hash_ ^= (word << 15 | word >> 17) * 0x1B873593 & _MASK
    hash_ ^= len(data)
    hash_ = (hash_ ^ hash_ >> 16) * 0x85EBCA6B & _MASK
    hash_ = (hash_ ^ hash_ >> 13) * 0xC2B2AE35 & _MASK
    return hash_ ^ hash_ >> 16
