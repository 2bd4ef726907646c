"""The answer to a Produce without errors, written by hand because of the frequency.

Versions 3 to 11; from 9 on lengths are varints of one more, and tagged fields end every part.

    topics: i32 times
        name: i16 length, UTF-8 | partitions: i32 times
            index: i32 | error code: i16 | base offset: i64 | append time: i64, none
            | from 5: log start offset: i64 | from 8: record errors: i32, none
            | from 8: error message: i16, none
    throttle time: i32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from streamhouse.storage_service.kafka.messages.answers import varint_bytes

__all__ = ["PRODUCE_VERSIONS", "StoredPartition", "produce_answer"]

PRODUCE_VERSIONS: Final = (3, 11)
"""Version 12 may begin transactions, and version 13 names topics by id."""

_FIRST_FLEXIBLE: Final = 9
_STORED: Final = struct.Struct(">ihqq")
_NO_ERROR: Final = 0
_NONE: Final = -1
_NO_THROTTLE: Final = bytes(4)
_NO_TAGS: Final = b"\0"


class StoredPartition(NamedTuple):
    """The stored place of one partition's records."""

    partition: int
    base_offset: int
    log_start_offset: int


def produce_answer(version: int, topics: Sequence[tuple[str, Sequence[StoredPartition]]]) -> bytes:
    """Return the body of an answer in one of `PRODUCE_VERSIONS`."""
    if version >= _FIRST_FLEXIBLE:
        return _flexible(topics)
    ends = struct.pack(">ih", 0, _NONE) if version >= 8 else b""
    parts = [struct.pack(">i", len(topics))]
    for topic, partitions in topics:
        name = topic.encode()
        parts.append(struct.pack(f">h{len(name)}si", len(name), name, len(partitions)))
        for number, base_offset, log_start_offset in partitions:
            parts.append(_STORED.pack(number, _NO_ERROR, base_offset, _NONE))
            if version >= 5:
                parts.append(struct.pack(">q", log_start_offset))
            parts.append(ends)
    return b"".join((*parts, _NO_THROTTLE))


def _flexible(topics: Sequence[tuple[str, Sequence[StoredPartition]]]) -> bytes:
    # No record errors and no message.
    ends = varint_bytes(1) + varint_bytes(0) + _NO_TAGS
    parts = [varint_bytes(len(topics) + 1)]
    for topic, partitions in topics:
        name = topic.encode()
        parts += (varint_bytes(len(name) + 1), name, varint_bytes(len(partitions) + 1))
        for number, base_offset, log_start_offset in partitions:
            parts.append(_STORED.pack(number, _NO_ERROR, base_offset, _NONE))
            parts.append(struct.pack(">q", log_start_offset) + ends)
        parts.append(_NO_TAGS)
    return b"".join((*parts, _NO_THROTTLE, _NO_TAGS))
