"""The published ends of tables, in memory that the owner writes and readers read.

A slot belongs to one table in one form (its generation): the ends are the high watermarks of the
table's buckets. The owner writes a slot in the step that publishes rows, before any writer of these
rows is answered. So a reader that looks at a slot after a request has arrived sees every write that
was acknowledged before. A table that is altered, dropped or moved loses its slot in the same way.

Each record has a checksum, so a reader notices a record that is just being written, on any
processor, and looks again. One thread writes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final

from crc32c import crc32c

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s

__all__ = ["BUCKETS_MAX", "SLOTS", "Board", "BoardTenure", "SlotView"]

BUCKETS_MAX: Final = 256
"""The most buckets of a table with a slot."""
SLOTS: Final = 512
# checksum of what follows, number of ends, generation; then the ends       (little endian)
_HEAD: Final = struct.Struct("<IIQ")
_CHECKED_FROM: Final = 4
_END_BYTES: Final = 8
_SLOT_BYTES: Final = _HEAD.size + BUCKETS_MAX * _END_BYTES
_LOOKS: Final = 1_000
# The last place is the lease, in nanoseconds of the boot clock.
_LEASE_SLOT: Final = SLOTS
_LEASE: Final = 1


class Board:
    """The memory with all slots."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor: Final = descriptor
        """The file of the memory; children inherit the descriptor."""
        self.memory: Final = mmap.mmap(descriptor, (SLOTS + 1) * _SLOT_BYTES)

    @classmethod
    def create(cls) -> Board:
        """Return a new board without slots in use."""
        descriptor = os.memfd_create("streamhouse-readers")
        os.ftruncate(descriptor, (SLOTS + 1) * _SLOT_BYTES)
        return cls(descriptor)

    def write(self, slot: int, generation: int, ends: Sequence[int]) -> None:
        """Publish ends; generation 0 belongs to no table."""
        body = struct.pack(f"<IQ{len(ends)}Q", len(ends), generation, *ends)
        record = crc32c(body).to_bytes(_CHECKED_FROM, "little") + body
        start = slot * _SLOT_BYTES
        self.memory[start : start + len(record)] = record

    def write_lease(self, until_s: float) -> None:
        """Publish the time of the boot clock up to which this process owns the shard."""
        self.write(_LEASE_SLOT, _LEASE, [max(int(until_s * 1e9), 0)])

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()
        os.close(self.descriptor)


class SlotView:
    """A reader's view of one slot in one generation."""

    def __init__(self, board: Board, slot: int, generation: int, bucket_count: int) -> None:
        start = slot * _SLOT_BYTES
        self._memory = board.memory
        self._place = slice(start, start + _HEAD.size + bucket_count * _END_BYTES)
        self._generation = generation
        self._ends = struct.Struct(f"<{bucket_count}Q")
        self._bucket_count = bucket_count
        self._seen = b""
        self._seen_ends: tuple[int, ...] = ()

    def ends(self) -> tuple[int, ...] | None:
        """Return the published ends; None if the slot is not of this generation any more."""
        record = self._memory[self._place]
        if record == self._seen:
            return self._seen_ends
        for _ in range(_LOOKS):
            checksum, count, generation = _HEAD.unpack_from(record)
            # A record of another generation may be shorter or longer, so its checksum is unknown.
            if generation != self._generation or count != self._bucket_count:
                return None
            if crc32c(record[_CHECKED_FROM:]) == checksum:
                self._seen, self._seen_ends = record, self._ends.unpack_from(record, _HEAD.size)
                return self._seen_ends
            record = self._memory[self._place]
        return None


class BoardTenure:
    """The ownership of the shard as the owner publishes it; see `Tenure`."""

    def __init__(self, board: Board) -> None:
        self._lease = SlotView(board, _LEASE_SLOT, _LEASE, 1)

    @property
    def valid_until_s(self) -> float:
        """See `Tenure`."""
        until = self._lease.ends()
        return 0.0 if until is None else until[0] / 1e9

    def check(self) -> None:
        """Raise `NotOwnerError` unless the owner's lease holds."""
        if boot_clock_s() >= self.valid_until_s:
            raise NotOwnerError("the lease of this shard has run out")

    def check_write(self) -> None:
        """As `check`; readers write nothing."""
        self.check()
