"""The answer to a Fetch: laid around record batches, which stay the buffers that they are.

Versions 4 to 11, none of which is flexible: every length is a number of fixed width.

    throttle time: i32 | from 7: error code: i16, session id: i32 | topics: i32 times
        name: i16 length, UTF-8 | partitions: i32 times
            index: i32 | error code: i16 | high watermark: i64 | last stable offset: i64
            | from 5: log start offset: i64 | aborted transactions: i32, none
            | from 11: preferred read replica: i32 | records: i32 length, bytes
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kio.schema.errors import ErrorCode

from streamhouse.storage_service.kafka.messages.answers import Piece

__all__ = ["FETCH_VERSIONS", "FetchedPartition", "fetch_answer"]

FETCH_VERSIONS: Final = (4, 11)
"""Later ones name topics by their ids, or are flexible and say nothing more to a consumer."""

_NONE: Final = -1
# There are no sessions: every request says all that it asks for.
_NO_SESSION: Final = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPartition:
    """What is answered of one partition: record batches in `records`, or what is wrong."""

    partition: int
    error: ErrorCode = ErrorCode.none
    high_watermark: int = _NONE
    log_start_offset: int = _NONE
    records: Sequence[Piece] = ()


def fetch_answer(
    version: int,
    topics: Mapping[str, Sequence[FetchedPartition]],
    *,
    error: ErrorCode = ErrorCode.none,
    throttle_ms: int = 0,
) -> list[Piece]:
    """Return the body of an answer of one of `FETCH_VERSIONS`, in pieces."""
    head = bytearray(struct.pack(">i", throttle_ms))
    if version >= 7:
        head += struct.pack(">hi", error, _NO_SESSION)
    head += struct.pack(">i", len(topics))
    pieces: list[Piece] = []
    for topic, partitions in topics.items():
        name = topic.encode()
        head += struct.pack(f">h{len(name)}si", len(name), name, len(partitions))
        for found in partitions:
            head += _partition_head(version, found)
            if found.records:
                pieces += (head, *found.records)
                head = bytearray()
    if head:
        pieces.append(head)
    return pieces


def _partition_head(version: int, found: FetchedPartition) -> bytes:
    watermark = found.high_watermark
    parts = [struct.pack(">ihqq", found.partition, found.error, watermark, watermark)]
    if version >= 5:
        parts.append(struct.pack(">q", found.log_start_offset))
    parts.append(struct.pack(">i", 0))
    if version >= 11:
        parts.append(struct.pack(">i", _NONE))
    parts.append(struct.pack(">i", sum(map(len, found.records))))
    return b"".join(parts)
