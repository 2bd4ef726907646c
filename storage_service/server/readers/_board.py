"""The published offsets of tables, in memory that the owner writes and readers read.

A slot belongs to one table in one form (its generation): the ends are the high watermarks of the
table's buckets, the starts are the first offsets of their logs. The owner writes a slot in the step
that publishes rows, before any writer of these rows is answered. So a reader that looks at a slot
after a request has arrived sees every write that was acknowledged before. A table that is altered,
dropped or moved loses its slot in the same way.

Each record has a checksum, so a reader notices a record that is just being written, on any
processor. A slot has two copies of its record, written one after the other: the writer may lose the
processor in the middle of one, and the other is whole meanwhile. One thread writes.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from streamhouse.core.errors import NotOwnerError
from streamhouse.storage_service.ownership.roles.boot_clock import boot_clock_s

__all__ = ["BUCKETS_MAX", "SLOTS", "Board", "BoardTenure", "Published", "SlotView"]

BUCKETS_MAX: Final = 256
"""The most buckets of a table with a slot."""
SLOTS: Final = 512
# checksum of what follows, number of buckets, generation, number of the state; then the starts and
# the ends of all buckets (little endian)
_HEAD: Final = struct.Struct("<IIQQ")
_CHECKED_FROM: Final = 4
_BUCKET_BYTES: Final = 16
_COPY_BYTES: Final = _HEAD.size + BUCKETS_MAX * _BUCKET_BYTES
_SLOT_BYTES: Final = 2 * _COPY_BYTES
_LOOKS: Final = 100
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

    def write(
        self,
        slot: int,
        generation: int,
        starts: Sequence[int],
        ends: Sequence[int],
        state: int = 0,
    ) -> None:
        """Publish the offsets of all buckets; generation 0 belongs to no table."""
        count = len(ends)
        body = struct.pack(f"<IQQ{2 * count}Q", count, generation, state, *starts, *ends)
        record = crc32c(body).to_bytes(_CHECKED_FROM, "little") + body
        for start in _copies(slot):
            self.memory[start : start + len(record)] = record

    def write_lease(self, until_s: float) -> None:
        """Publish the time of the boot clock up to which this process owns the shard."""
        self.write(_LEASE_SLOT, _LEASE, (0,), (max(int(until_s * 1e9), 0),))

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()
        os.close(self.descriptor)


class Published(NamedTuple):
    """The published offsets of all buckets, and the number of the table's lake state.

    A reader gets the same object until the slot changes. The state is too large for the board.
    """

    starts: Sequence[int]
    ends: Sequence[int]
    state: int = 0


class SlotView:
    """A reader's view of one slot in one generation."""

    def __init__(self, board: Board, slot: int, generation: int, bucket_count: int) -> None:
        size = _HEAD.size + bucket_count * _BUCKET_BYTES
        self._memory = board.memory
        places = [slice(start, start + size) for start in _copies(slot)]
        self._first_place = places[0]
        self._looks = places * _LOOKS
        self._generation = generation
        self._offsets = struct.Struct(f"<{2 * bucket_count}Q")
        self._bucket_count = bucket_count
        self._seen = b""
        self._published = Published((), ())

    def published(self) -> Published | None:
        """Return the published offsets; None if the slot is not of this generation any more."""
        if self._memory[self._first_place] == self._seen:
            return self._published
        # The first copy has the newest record, unless that is just being written.
        for place in self._looks:
            record = self._memory[place]
            checksum, count, generation, state = _HEAD.unpack_from(record)
            # A record of another generation may be shorter or longer, so its checksum is unknown.
            if generation != self._generation or count != self._bucket_count:
                return None
            if crc32c(record[_CHECKED_FROM:]) == checksum:
                offsets = self._offsets.unpack_from(record, _HEAD.size)
                self._seen = record
                self._published = Published(offsets[:count], offsets[count:], state)
                return self._published
        return None


def _copies(slot: int) -> tuple[int, int]:
    """Return where the two copies of a slot's record begin."""
    first = slot * _SLOT_BYTES
    return first, first + _COPY_BYTES


class BoardTenure:
    """The ownership of the shard as the owner publishes it; see `Tenure`."""

    def __init__(self, board: Board) -> None:
        self._lease = SlotView(board, _LEASE_SLOT, _LEASE, 1)

    @property
    def valid_until_s(self) -> float:
        """See `Tenure`."""
        until = self._lease.published()
        return 0.0 if until is None else until.ends[0] / 1e9

    def check(self) -> None:
        """Raise `NotOwnerError` unless the owner's lease holds."""
        if boot_clock_s() >= self.valid_until_s:
            raise NotOwnerError("the lease of this shard has run out")

    def check_write(self) -> None:
        """As `check`; readers write nothing."""
        self.check()
