"""Of two who wait for the same end of an epoch one takes over; the other never fences it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.ownership.journal.epochs import (
    SealReason,
    TakenByOtherError,
    seal_epoch,
)
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store._file_store import FileObjectStore
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from streamhouse.storage_service.ownership.roles.standby import Standby
from tests.support.journal_world import NAMES, taken


def test_a_standby_that_read_a_clean_stop_does_not_fence_who_took_over_since(
    tmp_path: Path,
) -> None:
    store = FileObjectStore(tmp_path / "journal")
    owner = taken(store)
    run(
        seal_epoch(NAMES, owner.epoch, nonce=owner.nonce, reason=SealReason.STOPPED),
        lambda step: do(store, step),
    )
    directory = DataDirectory.open(tmp_path / "standby")
    config = ServiceConfig(
        data_dir=directory.path, journal_url=f"file://{tmp_path}/journal", is_standby=True
    )
    start = ShardStart(
        config, directory, endpoint="http://b", standing=Standing("0"), stop=threading.Event()
    )
    standby = Standby(config, directory, start)
    start.look()
    while standby.follow():
        pass
    other = taken(store)

    start.look()

    assert start.newest_epoch == other.epoch == 2
    assert standby.may_take_now
    with pytest.raises(TakenByOtherError):
        standby.take()
    standby.close()
    directory.close()
