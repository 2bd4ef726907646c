"""A pack's bytes stay what they are until they are stored, and the memory is used again."""

from __future__ import annotations

import io
import random
import threading

import pytest
from crc32c import crc32c

from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.checkpoints.packs import (
    PackWriter,
    read_packed,
)
from streamhouse.storage_service.ownership.journal.names import ShardNames
from tests.support.memory_store import MemoryStore

NAMES = ShardNames()


class _SlowStore(MemoryStore):
    """Stores nothing before three packs are on their way, or the last one is."""

    def __init__(self) -> None:
        super().__init__()
        self.is_going = threading.Event()
        self.under_way = 0

    def replace(self, key: str, data: Buffer) -> None:
        at_first = bytes(data)
        with self.lock:
            self.under_way += 1
            if self.under_way == 3:
                self.is_going.set()
        self.is_going.wait()
        assert bytes(data) == at_first
        super().replace(key, data)


@pytest.mark.parametrize("pack_bytes_max", [1, 7, 100, 1_000])
def test_packs_hold_what_was_added(pack_bytes_max: int) -> None:
    store, rng = _SlowStore(), random.Random(pack_bytes_max)
    contents = [rng.randbytes(rng.choice([1, 3, 99, 100, 101, 1_000, 3_333])) for _ in range(30)]

    with PackWriter(store, NAMES, epoch=1, number=5, pack_bytes_max=pack_bytes_max) as writer:
        all_added = [writer.add_from(io.BytesIO(data), len(data)) for data in contents]
        small = writer.add(b"x")
        writer.finish()

    for data, added in zip(contents, all_added, strict=True):
        read = [buffer for piece in added.pieces for buffer in read_packed(store, NAMES, [piece])]
        assert b"".join(read) == data
        assert (added.length, added.crc32c) == (len(data), crc32c(data))
        assert len({piece.pack for piece in added.pieces}) == len(added.pieces)
    assert read_packed(store, NAMES, [small]) == [b"x"]
    assert {NAMES.pack(name): size for name, size in writer.lengths.items()} == {
        key: len(data) for key, data in store.objects.items()
    }
    assert max(writer.lengths.values()) <= pack_bytes_max


def test_a_file_is_added_up_to_its_end_with_the_checksum_of_all_of_it() -> None:
    store = MemoryStore()
    begin, end = b"packed before", bytes(range(256)) * 3

    with PackWriter(store, NAMES, epoch=1, number=1, pack_bytes_max=100) as writer:
        writer.add(b"another file")
        added = writer.add_from(io.BytesIO(end), 10_000, crc=crc32c(begin))
        empty = writer.add_from(io.BytesIO(b""), 10)
        writer.finish()

    assert (added.length, added.crc32c) == (len(end), crc32c(begin + end))
    assert sum(piece.length for piece in added.pieces) == len(end)
    assert (empty.length, empty.pieces) == (0, [])
