"""Packs: objects with the bytes of many files, or a part of a large file.

A pack's name has the epoch of its writer and a number, so two owners never write the same pack. Its
bytes count only if a manifest's checksums agree.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple, Protocol, Self

from crc32c import crc32c

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.threads import Pool
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal._file_checksum import READ_BYTES
from streamhouse.storage_service.ownership.journal.names import ShardNames
from streamhouse.storage_service.ownership.journal.store.object_store import (
    ObjectNotFoundError,
    ObjectStore,
    ObjectStoreError,
)
from streamhouse.storage_service.ownership.journal.tree import Packed

__all__ = ["PACK_BYTES_MAX", "Added", "PackWriter", "pack_name", "read_packed"]

PACK_BYTES_MAX: Final = 32 << 20
"""The most bytes of a pack, and of a piece."""
_IN_FLIGHT: Final = 3
_DELETED_AT_ONCE: Final = 500


def pack_name(epoch: int, number: int) -> str:
    """Return a pack's name; the names of one owner's packs are in order."""
    return f"{epoch:08d}-{number:012d}"


class _Readable(Protocol):
    def readinto(self, room: memoryview, /) -> int | None: ...


class Added(NamedTuple):
    """The pieces with a file's bytes, their length, and the checksum including them."""

    pieces: list[Packed]
    length: int
    crc32c: int


class PackWriter:
    """Appends bytes to packs and uploads the packs, a few at a time.

    One thread adds. All added bytes are in the store once `finish` has returned. At most
    `_IN_FLIGHT + 1` packs are in memory.
    """

    def __init__(
        self,
        store: ObjectStore,
        names: ShardNames,
        *,
        epoch: int,
        number: int,
        pack_bytes_max: int = PACK_BYTES_MAX,
    ) -> None:
        self._pack_bytes_max = pack_bytes_max
        self._store = store
        self._names = names
        self._epoch = epoch
        self.next_number = number
        """The number of the next pack."""
        self.lengths: dict[str, int] = {}
        """The length of every pack begun."""
        # Files are read into the pack itself. Packs are used again: memory that is new to the
        # process takes longer to get than to fill.
        self._pack: memoryview | None = None
        self._length = 0
        self._spare_packs: list[memoryview] = []
        self._room = threading.Semaphore(_IN_FLIGHT + 1)
        self._threads = Pool("journal-pack", _IN_FLIGHT)
        self._uploads: list[Future[None]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)

    def add(self, data: Buffer) -> Packed:
        """Append `data` to the current pack."""
        assert 0 < len(data) <= self._pack_bytes_max
        self._room_for(len(data))[:] = data
        piece = Packed(self._name, self._length, len(data), crc32c(data))
        self._grow(len(data))
        return piece

    def add_from(self, file: _Readable, length: int, *, crc: int = 0) -> Added:
        """Add the next `length` bytes of a file, or fewer at its end; `crc` continues with them."""
        pieces: list[Packed] = []
        remaining_bytes = length
        while remaining_bytes:
            room = self._room_for(min(remaining_bytes, READ_BYTES, self._pack_bytes_max))
            data = room[: file.readinto(room) or 0]
            if not len(data):
                break
            remaining_bytes -= len(data)
            name = self._name
            is_longer = pieces and pieces[-1].pack == name
            before = pieces.pop() if is_longer else Packed(name, self._length, 0, 0)
            piece_crc = crc32c(data, before.crc32c)
            # The same checksum twice, for the first bytes of a file in their first pack.
            crc = piece_crc if crc == before.crc32c else crc32c(data, crc)
            pieces.append(Packed(name, before.offset, before.length + len(data), piece_crc))
            self._grow(len(data))
        return Added(pieces, length - remaining_bytes, crc)

    @property
    def _name(self) -> str:
        """The name of the current pack."""
        return pack_name(self._epoch, self.next_number)

    def _room_for(self, length: int) -> memoryview:
        """Return room for `length` bytes, in the current pack or in a new one."""
        if self._length + length > self._pack_bytes_max:
            self._upload()
        if self._pack is None:
            self._room.acquire()
            self._pack = self._spare_packs.pop() if self._spare_packs else self._new_pack()
        return self._pack[self._length : self._length + length]

    def _new_pack(self) -> memoryview:
        # Unlike a bytearray this takes no memory before it is filled.
        return memoryview(mmap.mmap(-1, self._pack_bytes_max))

    def _grow(self, length: int) -> None:
        """Note `length` bytes in the room."""
        self._length += length
        self.lengths[self._name] = self._length

    def finish(self) -> None:
        """Return once all packs are in the store; raises the store's error."""
        self._upload()
        for upload in self._uploads:
            upload.result()

    def take_back(self) -> None:
        """Delete the uploaded packs, if the store answers. No manifest names them."""
        keys = [self._names.pack(name) for name in self.lengths]
        with contextlib.suppress(ObjectStoreError):
            for start in range(0, len(keys), _DELETED_AT_ONCE):
                self._store.delete(keys[start : start + _DELETED_AT_ONCE])

    def _upload(self) -> None:
        if self._pack is None or not self._length:
            return
        key = self._names.pack(self._name)
        pack, length = self._pack, self._length
        self._pack, self._length = None, 0
        self.next_number += 1
        self._uploads.append(self._threads.submit(self._put, key, pack, length))

    def _put(self, key: str, pack: memoryview, length: int) -> None:
        try:
            # Only this process writes the pack, so a repeated write is harmless.
            self._store.replace(key, pack[:length].toreadonly())
        finally:
            self._spare_packs.append(pack)
            self._room.release()


def read_packed(store: ObjectStore, names: ShardNames, pieces: Sequence[Packed]) -> list[Buffer]:
    """Return the bytes of consecutive pieces of one pack, each checked.

    Raises `CorruptDataError` for missing or different bytes.
    """
    first, last = pieces[0], pieces[-1]
    key = names.pack(first.pack)
    try:
        data = store.get_range(
            key, start=first.offset, length=last.offset + last.length - first.offset
        )
    except ObjectNotFoundError as error:
        raise CorruptDataError(f"pack {key} is missing, or is shorter than it was") from error
    buffers: list[Buffer] = []
    for piece in pieces:
        start = piece.offset - first.offset
        part = data[start : start + piece.length]
        if crc32c(part) != piece.crc32c:
            raise CorruptDataError(
                f"pack {key} is damaged: its bytes {piece.offset} to {piece.offset + piece.length}"
                " have another checksum"
            )
        buffers.append(part)
    return buffers
