"""The running fingerprint of a log: 8 bytes that say which frames lie below an offset.

The fingerprint after a frame is a hash of the one before it and of the frame's header, which has
the payload's checksum, the offsets, the time and the writer. So two copies of one log have equal
fingerprints at an offset exactly if they have the same frames below it, however they are cut into
segments. An offset within a frame has one, too: a hash of both and of how far it is in the frame.

A log that an earlier release began has no fingerprint below the offset at which this release first
opened it: it begins there, as one that begins at that offset.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import Final

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.log.segment_format import LogIdentity

__all__ = ["fingerprint_after", "fingerprint_within", "first_fingerprint"]

FINGERPRINT_BYTES: Final = 8
_BEGINNING: Final = struct.Struct("<8sQIQ")
_ROWS: Final = struct.Struct("<Q")


def first_fingerprint(identity: LogIdentity, offset: int) -> bytes:
    """Return the fingerprint at the offset where a log, or what is known of it, begins."""
    beginning = _BEGINNING.pack(b"SHLOGFP1", identity.table_id, identity.bucket, offset)
    return blake2b(beginning, digest_size=FINGERPRINT_BYTES).digest()


def fingerprint_after(before: bytes, header: Buffer) -> bytes:
    """Return the fingerprint after a frame with these 64 bytes of header."""
    return blake2b(before + header, digest_size=FINGERPRINT_BYTES).digest()


def fingerprint_within(before: bytes, header: bytes, row_count: int) -> bytes:
    """Return the fingerprint `row_count` rows behind the first of a frame, before its last."""
    whole = before + header + _ROWS.pack(row_count)
    return blake2b(whole, digest_size=FINGERPRINT_BYTES).digest()
