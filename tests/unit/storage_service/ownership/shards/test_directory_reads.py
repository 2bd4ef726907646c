"""What a shard reads of the directory does not grow with the tables of other shards."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory, ShardRecord
from tests.support.directory_world import MemoryStore


class _CountingStore(MemoryStore):
    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self.gets = 0

    def get(self, key: str) -> bytes | None:
        self.gets += 1
        return super().get(key)


class _TogetherStore(MemoryStore):
    """Answers a read when eight are asked at once."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__()
        self.objects = objects
        self._together = threading.Barrier(8)

    def get(self, key: str) -> bytes | None:
        self._together.wait(timeout=60)
        return super().get(key)


def _path(shard: str, number: int) -> TablePath:
    return TablePath(f"of_{shard}", f"t{number}")


def _filled() -> MemoryStore:
    store = MemoryStore()
    for shard_number in range(20):
        shard = f"s{shard_number}"
        directory = ShardDirectory(store, shard=shard)
        directory.create_database(f"of_{shard}")
        for number in range(10):
            directory.hold(_path(shard, number), 1_000 * shard_number + number + 1)
    return store


def test_a_start_reads_the_names_of_its_own_shard() -> None:
    filled = _filled()
    # Table 3 was dropped, and its process killed before the name was free.
    tables = {_path("s7", number): 7_001 + number for number in range(10) if number != 3}
    store = _CountingStore(filled.objects)

    assert ShardDirectory(store, shard="s7").clear(tables, confirm=lambda: None) == {}

    assert store.gets <= 12
    held = ShardDirectory(filled, shard="s7").entries("of_s7")
    assert set(held) == set(tables)


def test_a_start_finds_a_name_that_another_shard_has() -> None:
    store = _filled()

    taken = ShardDirectory(store, shard="s7").clear({_path("s8", 0): 7_001}, confirm=lambda: None)

    assert list(taken) == [_path("s8", 0)]
    assert "'s8'" in taken[_path("s8", 0)]


def test_whether_there_is_a_database_is_asked_of_its_own_tables() -> None:
    store = _CountingStore(_filled().objects)
    directory = ShardDirectory(store, shard="s7")

    assert directory.has_database("of_s3")
    assert not directory.has_database("of_s")
    assert store.gets <= 10


def test_what_other_shards_have_is_read_side_by_side() -> None:
    filled = MemoryStore()
    for number in range(8):
        directory = ShardDirectory(filled, shard=f"s{number}")
        directory.record(ShardRecord(shard=f"s{number}"))
        directory.hold(TablePath("default", f"t{number}"), 1_000 * number + 1)
    with ThreadPoolExecutor(8) as reads:
        store = _TogetherStore(filled.objects)
        directory = ShardDirectory(store, shard="s0", each=reads.map)

        assert list(directory.records()) == [f"s{number}" for number in range(8)]
        assert [path.table for path in directory.entries()] == [f"t{n}" for n in range(8)]
