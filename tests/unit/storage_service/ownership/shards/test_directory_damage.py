"""What is in the directory and is not the directory's: damage and foreign objects."""

from __future__ import annotations

import pytest

from streamhouse.core.errors import CorruptDataError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.ownership.shards.directory import ShardDirectory, ShardRecord
from tests.support.directory_world import MemoryStore

_X = TablePath("default", "x")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def _directory(store: MemoryStore, shard: str = "a") -> ShardDirectory:
    directory = ShardDirectory(store, shard=shard, sleep=lambda _: None)
    directory.join(None)
    return directory


def test_objects_of_no_name_are_passed_over(store: MemoryStore) -> None:
    _directory(store).hold(_X, 1)
    for key in ("tables/README", "tables/default/not a name/00000001", "tables/a/b/c/00000001"):
        store.objects[key] = b"what somebody has put there"

    assert list(_directory(store, "b").entries()) == [_X]


def test_a_damaged_name_is_not_taken_for_a_free_one(store: MemoryStore) -> None:
    _directory(store).hold(_X, 1)
    store.objects["tables/default/x/00000001"] = b"{}"
    other = _directory(store, "b")
    for ask in (other.entries, lambda: other.check_free(_X), lambda: other.hold(_X, 1_000)):
        with pytest.raises(CorruptDataError, match=r"tables/default/x/00000001"):
            ask()


def test_an_object_under_another_name_is_not_believed(store: MemoryStore) -> None:
    _directory(store).hold(_X, 1)
    store.objects["tables/default/y/00000001"] = store.objects["tables/default/x/00000001"]
    with pytest.raises(CorruptDataError, match="was made under another name"):
        _directory(store, "b").entries()


def test_a_damaged_record_is_passed_over(store: MemoryStore) -> None:
    for shard in ("a", "b"):
        _directory(store, shard).record(ShardRecord(shard=shard))
    store.objects["shards/a"] = store.objects["shards/a"][:-5]
    assert list(_directory(store).records()) == ["b"]
