"""The answer to a Fetch, written around record batches, whose buffers are not copied.

Versions 4 to 13; from 12 on lengths are varints of one more, and tagged fields end every part.

    throttle time: i32 | from 7: error code: i16, session id: i32 | topics: i32 times
        name: i16 length, UTF-8; from 13: id of 16 bytes | partitions: i32 times
            index: i32 | error code: i16 | high watermark: i64 | last stable offset: i64
            | from 5: log start offset: i64 | aborted transactions: i32, none
            | from 11: preferred read replica: i32 | records: i32 length, bytes
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import Piece, varint_bytes

__all__ = ["FETCH_VERSIONS", "FetchedPartition", "TopicKey", "fetch_answer"]

FETCH_VERSIONS: Final = (4, 13)
"""Versions from 14 on differ for replicas only."""

TopicKey: TypeAlias = str | uuid.UUID
"""A topic in a Fetch: the name, or from version 13 on the id."""

_FIRST_FLEXIBLE: Final = 12
_NO_TAGS: Final = b"\0"

_NONE: Final = -1
# Without sessions every request names all partitions.
_NO_SESSION: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPartition:
    """The answer for one partition: record batches in `records`, or an error."""

    partition: int
    error: ErrorCode = ErrorCode.none
    high_watermark: int = _NONE
    log_start_offset: int = _NONE
    records: Sequence[Piece] = ()


def fetch_answer(
    version: int,
    topics: Mapping[TopicKey, Sequence[FetchedPartition]],
    *,
    error: ErrorCode = ErrorCode.none,
    throttle_ms: int = 0,
) -> list[Piece]:
    """Return the body of an answer in one of `FETCH_VERSIONS`, in pieces."""
    is_flexible = version >= _FIRST_FLEXIBLE
    tags = _NO_TAGS if is_flexible else b""
    head = bytearray(struct.pack(">i", throttle_ms))
    if version >= 7:
        head += struct.pack(">hi", error, _NO_SESSION)
    head += _length(len(topics), is_flexible=is_flexible)
    pieces: list[Piece] = []
    for topic, partitions in topics.items():
        head += _topic(topic, is_flexible=is_flexible)
        head += _length(len(partitions), is_flexible=is_flexible)
        for fetched in partitions:
            head += _partition_head(version, fetched)
            if fetched.records:
                pieces += (head, *fetched.records)
                head = bytearray()
            head += tags
        head += tags
    head += tags
    if head:
        pieces.append(head)
    return pieces


def _length(count: int, *, is_flexible: bool) -> bytes:
    return varint_bytes(count + 1) if is_flexible else struct.pack(">i", count)


def _topic(topic: TopicKey, *, is_flexible: bool) -> bytes:
    if isinstance(topic, uuid.UUID):
        return topic.bytes
    name = topic.encode()
    size = varint_bytes(len(name) + 1) if is_flexible else struct.pack(">h", len(name))
    return size + name


def _partition_head(version: int, fetched: FetchedPartition) -> bytes:
    """Return the bytes before the records of a partition, with the records' size."""
    is_flexible = version >= _FIRST_FLEXIBLE
    watermark = fetched.high_watermark
    parts = [struct.pack(">ihqq", fetched.partition, fetched.error, watermark, watermark)]
    if version >= 5:
        parts.append(struct.pack(">q", fetched.log_start_offset))
    parts.append(_length(0, is_flexible=is_flexible))
    if version >= 11:
        parts.append(struct.pack(">i", _NONE))
    parts.append(_length(sum(map(len, fetched.records)), is_flexible=is_flexible))
    return b"".join(parts)
