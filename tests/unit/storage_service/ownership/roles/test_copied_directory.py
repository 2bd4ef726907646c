"""A copy of an owner's directory is not the owner's: whoever starts on it waits for the lease."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal.restore._start import JournalStart
from streamhouse.storage_service.ownership.journal.restore.journal_file import JournalFile
from streamhouse.storage_service.ownership.roles._owned_shard import OwnedShard
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from streamhouse.storage_service.ownership.roles.standby import Standby
from tests.support.memory_store import MemoryStore


class _Process:
    """One process on a directory, which has looked who owns the shard."""

    def __init__(self, folder: Path, store: MemoryStore) -> None:
        self.directory = DataDirectory.open(folder)
        self.config = ServiceConfig(
            data_dir=folder, journal_url="file:///not/used", lease_ms=3_600_000
        )
        self.start = ShardStart(
            self.config,
            self.directory,
            endpoint=f"http://{folder.name}",
            standing=Standing("0"),
            stop=threading.Event(),
            open_journal=lambda _: store,
        )
        self.start.look()

    def serve(self) -> OwnedShard:
        self.start.prepare()
        shard = self.start.take(after=self.start.newest_epoch)
        self.start.begin(epoch=shard.epoch, service_id=shard.service_id)
        self.start.finish(shard)
        return shard

    def close(self) -> None:
        self.directory.close()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def owner(tmp_path: Path, store: MemoryStore) -> Iterator[OwnedShard]:
    """Own the directory `owner`, without having its lock: it is copied, too."""
    with closing(_Process(tmp_path / "owner", store)) as process:
        shard = process.serve()
    yield shard
    shard._writer.abandon()
    shard._lease.close()


def test_the_owners_own_directory_is_not_waited_for(
    tmp_path: Path, store: MemoryStore, owner: OwnedShard
) -> None:
    with closing(_Process(tmp_path / "owner", store)) as again:
        assert again.start.may_take_now()


def test_a_copy_of_the_owners_directory_waits_for_its_lease(
    tmp_path: Path, store: MemoryStore, owner: OwnedShard
) -> None:
    shutil.copytree(tmp_path / "owner", tmp_path / "copy")

    with closing(_Process(tmp_path / "copy", store)) as copy:
        assert copy.start.was_last, "what its disk has beyond the journal stays"
        assert not copy.start.may_take_now()


def test_a_start_that_was_broken_off_on_a_copy_waits_again(
    tmp_path: Path, store: MemoryStore, owner: OwnedShard
) -> None:
    """It had noted that it may take the shard, after the lease had run out, and took nothing."""
    shutil.copytree(tmp_path / "owner", tmp_path / "copy")
    with closing(_Process(tmp_path / "copy", store)) as copy:
        copy.start.prepare()

    with closing(_Process(tmp_path / "copy", store)) as again:
        assert not again.start.may_take_now()


@pytest.mark.parametrize("place", ["", "another-boot 1 2"])
def test_a_disk_in_another_machine_waits_for_the_lease(
    tmp_path: Path, store: MemoryStore, owner: OwnedShard, place: str
) -> None:
    """Inode and device of the lock may be the same there; or nothing is known at all."""
    start = JournalStart(tmp_path / "owner", store, place=place)

    assert start.was_last(owner.epoch)
    assert not start.was_last_here(owner.epoch)


def test_a_place_that_was_not_known_is_never_the_same(tmp_path: Path) -> None:
    known = JournalFile(
        service_id="s", shard="0", epoch=1, nonces=("0" * 32,), places=("",), phase="ready"
    )

    assert not known.was_opened_at("0" * 32, "")


def test_a_lock_that_was_made_again_is_another_place(tmp_path: Path) -> None:
    """Who removes the lock of a live service lets a second one in: it has to wait."""
    with closing(DataDirectory.open(tmp_path / "one")) as one:
        (tmp_path / "one" / "LOCK").unlink()
        with closing(DataDirectory.open(tmp_path / "one")) as two:
            assert one.place != two.place
            assert one.place.split()[0] == two.place.split()[0]


def test_a_standby_on_a_copy_fences_nobody_and_follows_an_owner_that_is_alive(
    tmp_path: Path, store: MemoryStore, owner: OwnedShard
) -> None:
    shutil.copytree(tmp_path / "owner", tmp_path / "copy")
    with closing(_Process(tmp_path / "copy", store)) as copy:
        standby = Standby(copy.config, copy.directory, copy.start)
        for _ in range(4):
            assert standby._followed is None, "the owner may be gone, and the rows here alone"
            standby.follow()
            assert not standby.may_take_now
            owner._lease.renew()
            copy.start.look()

        assert standby._followed is not None
        assert not copy.start.was_last
        standby.close()
