"""A start on a store that fails often: each object is asked for again, and no other."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal.store.object_store import StoreUnavailableError
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from tests.support.memory_store import MemoryStore
from tests.support.restore_world import Owner, files

_LOG = "tables/1/bucket-0/00000000000000000000.log"
_APPENDS = 12


class _FlakyStore(MemoryStore):
    """Fails the first time that a key is read, or always."""

    def __init__(self) -> None:
        super().__init__()
        self.is_flaky = self.is_away = False
        self.reads: Counter[str] = Counter()

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        with self.lock:
            self.reads[key] += 1
            if self.is_away or (self.is_flaky and self.reads[key] == 1):
                raise StoreUnavailableError(f"{key}: no answer")
            return super().get(key, bytes_max=bytes_max)


@pytest.fixture
def store() -> _FlakyStore:
    return _FlakyStore()


def _written(folder: Path, store: _FlakyStore) -> dict[str, bytes]:
    """Write a journal of some objects; return the files that it says."""
    owner = Owner(folder, store)
    owner.filesystem.make_directory(folder / "tables/1/bucket-0")
    owner.replace(_LOG, b"")
    for number in range(_APPENDS):
        owner.append(_LOG, b"%d" % number)
        owner.wait_stored()
    owner.stop()
    return files(folder)


def _start(folder: Path, store: _FlakyStore, stop: threading.Event) -> ShardStart:
    config = ServiceConfig(data_dir=folder, journal_url="file:///not/used", lease_ms=3_600_000)
    return ShardStart(
        config,
        DataDirectory.open(folder),
        endpoint="http://here",
        standing=Standing("0"),
        stop=stop,
        open_journal=lambda _: store,
    )


def test_a_start_asks_again_for_the_object_that_failed_only(
    tmp_path: Path, store: _FlakyStore
) -> None:
    written = _written(tmp_path / "one", store)
    start = _start(tmp_path / "two", store, threading.Event())
    start.look()
    store.reads.clear()
    store.is_flaky = True

    start.prepare()
    shard = start.take(after=start.newest_epoch)
    start.begin(epoch=shard.epoch, service_id=shard.service_id)

    shard.close(timeout_s=60)
    assert files(tmp_path / "two") == written
    appended = [f"shards/0/journal/{1:08d}/{seq:012d}" for seq in range(1, _APPENDS)]
    # Read to know what there is, and to have its bytes; once more for the failure.
    assert {store.reads[key] for key in appended} <= {2, 3}


def test_a_stop_ends_a_start_whose_store_is_away(tmp_path: Path, store: _FlakyStore) -> None:
    _written(tmp_path / "one", store)
    stop = threading.Event()
    start = _start(tmp_path / "two", store, stop)
    start.look()
    store.is_away = True
    stop.set()

    with pytest.raises(StoreUnavailableError):
        start.prepare()
