"""A standby in this process, step by step, beside an owner that writes and takes checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest

from streamhouse.core.errors import StreamhouseError
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.config import ServiceConfig
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.directory.runtime import Runtime
from streamhouse.storage_service.engine.keys._key_copies import key_copier
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.keys.key_table import KeyTable
from streamhouse.storage_service.engine.keys.warm_rows import WarmRows
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import LogTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.log.filesystem import Buffer
from streamhouse.storage_service.ownership.journal.epochs import TakenByOtherError, find_seal
from streamhouse.storage_service.ownership.journal.steps import do, run
from streamhouse.storage_service.ownership.journal.store.object_store import StoreUnavailableError
from streamhouse.storage_service.ownership.roles._owned_shard import OwnedShard
from streamhouse.storage_service.ownership.roles.role import Standing
from streamhouse.storage_service.ownership.roles.shard_start import ShardStart
from streamhouse.storage_service.ownership.roles.standby import Standby, TakenOver
from streamhouse.storage_service.server.status.metrics import ServiceMetrics
from tests.support.in_process_service import EVENTS, event_rows, routed, table_descriptor
from tests.support.kv_world import looked_up
from tests.support.memory_store import MemoryStore

EVENT_LOG = TablePath.parse("default.events")
KEYED = TablePath.parse("default.keyed")


class _FlakyStore(MemoryStore):
    """Is away for so many reads; its journal takes nothing while it is shut."""

    away = 0
    is_shut = False

    def create(self, key: str, buffers: Sequence[Buffer]) -> None:
        if self.is_shut and "/journal/" in key:
            raise StoreUnavailableError(f"{key}: away")
        super().create(key, buffers)

    def get(self, key: str, *, bytes_max: int) -> memoryview:
        if self.away:
            self.away -= 1
            raise StoreUnavailableError(f"{key}: away")
        return super().get(key, bytes_max=bytes_max)


class _Place:
    """One machine: a directory and what its process does with it."""

    def __init__(self, folder: Path, store: MemoryStore, *, ack: str = "journal") -> None:
        # Catalog and warehouse are of no interest here.
        self.config = ServiceConfig(
            data_dir=folder,
            journal_url="file:///not/used",
            lease_ms=3_600_000,
            journal_linger_ms=1,
            journal_ack=ack,
            journal_lag_max_ms=3_600_000,
            is_strict=True,
        )
        self.directory = DataDirectory.open(folder)
        self.start = ShardStart(
            self.config,
            self.directory,
            endpoint=f"http://{folder.name}",
            standing=Standing("0"),
            stop=threading.Event(),
            open_journal=lambda _: store,
        )
        self.start.look()

    def standby(self) -> Standby:
        return Standby(self.config, self.directory, self.start)

    def take(self) -> TakenOver:
        """Take the shard as a plain start does."""
        self.start.prepare()
        shard = self.start.take(after=self.start.newest_epoch)
        return TakenOver(shard, self.start.begin(epoch=shard.epoch, service_id=shard.service_id))

    @contextlib.asynccontextmanager
    async def served(self, taken: TakenOver) -> AsyncIterator[_Owner]:
        """Open the tables; leaving ends the process as if it was killed."""
        with ThreadPoolExecutor(4) as threads:
            manager = await TabletManager.open(
                self.config,
                runtime=Runtime(executor=threads, observer=ServiceMetrics()),
                recovery=KeyRecovery(warm=taken.warm),
                directory=self.directory,
                replication=taken.shard.record(self.directory, taken.begun),
            )
            if taken.warm is not None:
                taken.warm.close()
            copier = key_copier(manager.open_tables, asyncio.get_running_loop())
            taken.shard.begin_checkpoints(self.directory, copier)
            self.start.finish(taken.shard)
            try:
                yield _Owner(manager, taken.shard)
            finally:
                _die(taken.shard)
                with contextlib.suppress(StreamhouseError):
                    await manager.close()


def _die(shard: OwnedShard) -> None:
    """End without a seal, and without ending this process."""
    if shard._checkpoints is not None:
        shard._checkpoints.stop()
    shard._writer.abandon()
    shard._lease.close()


class _Owner:
    """What an owner does, and what its tables must have."""

    def __init__(self, manager: TabletManager, shard: OwnedShard) -> None:
        self.manager = manager
        self.shard = shard

    async def create(self) -> None:
        await self.manager.create_table(
            table_descriptor(str(EVENT_LOG), properties={"table.log.segment-bytes": "1mb"})
        )
        await self.manager.create_table(table_descriptor(str(KEYED), primary_key=("id",)))

    async def append(self, start: int, end: int) -> None:
        table = self.manager.table(EVENT_LOG)
        assert isinstance(table, LogTable)
        await self.manager.append(table, [routed(0, event_rows(start, end))])

    async def upsert(self, ids: list[int], name: str) -> None:
        table = self.manager.table(KEYED)
        assert isinstance(table, KeyTable)
        rows = pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)
        await self.manager.write_keys(table, [KeyWrite(0, rows)], columns=None, writer_id=0)

    async def checkpoint(self) -> None:
        assert self.shard._checkpoints is not None
        await asyncio.to_thread(self.shard._checkpoints._job.take)
        # An epoch that is rolled is left at the next object.
        await self.manager.create_database(f"d{len(self.manager.databases())}")

    def content(self) -> tuple[list[int], dict[int, str]]:
        """Return the ids of the log in order, and the rows by key."""
        log = self.manager.table(EVENT_LOG).tablets[0]
        ids: list[int] = []
        while len(ids) < log.high_watermark:
            for frame in log.read(len(ids), bytes_max=1 << 20):
                batch = pa.ipc.read_record_batch(pa.py_buffer(frame.payload), EVENTS)
                ids += batch.column("id").to_pylist()
        keyed = self.manager.table(KEYED)
        keys = pa.record_batch([pa.array(range(100), pa.int64())], names=["id"])
        rows = looked_up(keyed.key_buckets[0].rows, keys).rows.to_pylist()
        return ids, {row["id"]: row["name"] for row in rows}


@pytest.fixture
def store() -> _FlakyStore:
    return _FlakyStore()


def _follow_all(standby: Standby) -> None:
    """Follow until there is nothing more, whatever has to be begun anew."""
    standby._begins_s = float("-inf")
    standby.start.look()
    while standby.follow() or standby._followed is None:
        standby._begins_s = float("-inf")


async def test_what_a_standby_takes_over_is_what_the_owner_had(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    standby = two.standby()
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
        await owner.upsert([1, 2], "before")
        await asyncio.to_thread(_follow_all, standby)
        await owner.upsert([2, 3], "after")
        had = owner.content()
    two.start.look()

    taken = await asyncio.to_thread(standby.take)

    assert isinstance(taken.warm, WarmRows)
    assert [warm.rows.applied_offset for warm in taken.warm._buckets.values()] == [5]
    async with two.served(taken) as owner:
        assert owner.content() == had
        await owner.append(10, 20)


@pytest.mark.parametrize("seed", range(5))
async def test_whatever_happens_the_next_owner_has_what_was_acknowledged(
    tmp_path: Path, store: _FlakyStore, seed: int
) -> None:
    """Checkpoints, trimming, stores that are away; three owners in turn, always another's rows."""
    random = Random(seed)
    place = _Place(tmp_path / "0", store)
    taken, ids, rows = place.take(), list[int](), dict[int, str]()
    for number in range(4):
        # Whoever was an owner follows again, in the directory that it has.
        other = _Place(tmp_path / str((number + 1) % 3), store)
        standby = other.standby()
        async with place.served(taken) as owner:
            if number == 0:
                await owner.create()
            for step in range(25):
                match random.randint(0, 9):
                    case 0 | 1 | 2:
                        await owner.append(len(ids), len(ids) + 5)
                        ids += range(len(ids), len(ids) + 5)
                    case 3 | 4 | 5:
                        chosen = random.sample(range(100), random.randint(1, 20))
                        name = f"{number}-{step}"
                        await owner.upsert(chosen, name)
                        rows |= dict.fromkeys(chosen, name)
                    case 6:
                        await owner.checkpoint()
                    case 7:
                        store.away = random.randint(1, 3)
                        with contextlib.suppress(StoreUnavailableError):
                            await asyncio.to_thread(standby.follow)
                        store.away = 0
                    case _:
                        await asyncio.to_thread(_follow_all, standby)
            assert owner.content() == (ids, rows)
        other.start.look()
        store.away = random.randint(0, 2)
        taken, place = await _taken(standby), other
        store.away = 0
    async with place.served(taken) as owner:
        assert owner.content() == (ids, rows)


async def _taken(standby: Standby) -> TakenOver:
    """Take, as often as the store is away."""
    while True:
        try:
            return await asyncio.to_thread(standby.take)
        except StoreUnavailableError:
            continue


async def test_a_standby_for_which_too_much_was_trimmed_begins_anew(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    standby = two.standby()
    async with one.served(one.take()) as owner:
        await owner.create()
        two.start.look()
        await asyncio.to_thread(standby.follow)
        for number in range(4):
            await owner.append(10 * number, 10 * number + 10)
            await owner.upsert([number], "row")
            await owner.checkpoint()
        followed = standby._followed

        await asyncio.to_thread(_follow_all, standby)

        assert standby._followed is not followed
        had = owner.content()
    two.start.look()
    async with two.served(await asyncio.to_thread(standby.take)) as owner:
        assert owner.content() == had


async def test_who_is_too_late_follows_the_one_who_was_quicker(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two, three = (_Place(tmp_path / name, store) for name in ("one", "two", "three"))
    quick, late = two.standby(), three.standby()
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
        for standby in (quick, late):
            await asyncio.to_thread(_follow_all, standby)
    for place in (two, three):
        place.start.look()
    taken = await asyncio.to_thread(quick.take)

    with pytest.raises(TakenByOtherError):
        await asyncio.to_thread(late.take)

    async with two.served(taken) as owner:
        await owner.append(10, 20)
        await asyncio.to_thread(_follow_all, late)
        had = owner.content()
    three.start.look()
    async with three.served(await asyncio.to_thread(late.take)) as owner:
        assert owner.content() == had


async def test_a_lag_is_the_objects_that_are_not_applied(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    standby = two.standby()
    async with one.served(one.take()) as owner:
        await owner.create()
        await asyncio.to_thread(_follow_all, standby)
        before = standby.lag()
        await owner.append(0, 10)
        await owner.append(10, 20)

        behind = standby.lag()

        await asyncio.to_thread(_follow_all, standby)
        assert (before.objects, behind.objects, standby.lag().objects) == (0, 2, 0)
    standby.close()


async def test_an_owner_that_is_started_again_as_a_standby_keeps_what_its_disk_acknowledged(
    tmp_path: Path, store: _FlakyStore
) -> None:
    """Nobody has gone on since, and nobody else has the directory: there is nothing to follow."""
    place = _Place(tmp_path / "one", store, ack="disk")
    async with place.served(place.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
        await owner.upsert([1, 2], "stored")
        await asyncio.to_thread(owner.shard._writer.wait_stored, owner.shard._writer._recorded)
        store.is_shut = True
        await owner.append(10, 20)
        await owner.upsert([2, 3], "on the disk")
        had = owner.content()
    store.is_shut = False

    again = _Place(tmp_path / "one", store, ack="disk")
    standby = again.standby()
    assert not await asyncio.to_thread(standby.follow)

    assert standby.may_take_now
    async with again.served(await asyncio.to_thread(standby.take)) as owner:
        assert owner.content() == had


async def test_a_former_owner_that_is_ahead_follows_who_went_on_without_it(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two = (_Place(tmp_path / name, store, ack="disk") for name in ("one", "two"))
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
        await asyncio.to_thread(owner.shard._writer.wait_stored, owner.shard._writer._recorded)
        store.is_shut = True
        await owner.append(10, 20)
    store.is_shut = False
    two.start.look()
    async with two.served(two.take()) as owner:
        await owner.append(10, 15)
        await owner.upsert([1], "two")
        again = _Place(tmp_path / "one", store)
        standby = again.standby()

        await asyncio.to_thread(standby.follow)

        assert standby._followed is not None, "it follows at once"
        await asyncio.to_thread(owner.shard._writer.wait_stored, owner.shard._writer._recorded)
        await asyncio.to_thread(_follow_all, standby)
        assert not standby.may_take_now
        had = owner.content()
    again.start.look()
    async with again.served(await asyncio.to_thread(standby.take)) as owner:
        assert owner.content() == had


async def test_an_owner_that_is_started_again_as_a_standby_does_not_fence_who_was_quicker(
    tmp_path: Path, store: _FlakyStore
) -> None:
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
    again = _Place(tmp_path / "one", store)
    standby = again.standby()
    await asyncio.to_thread(standby.follow)
    two.start.look()
    async with two.served(two.take()) as owner:
        with pytest.raises(TakenByOtherError):
            await asyncio.to_thread(standby.take)
        again.start.look()
        assert not standby.may_take_now

        await asyncio.to_thread(_follow_all, standby)
        await owner.append(10, 20)
        assert not standby.may_take_now


@pytest.mark.parametrize("what", ["*", "service.json", "tables", "tables/*/bucket-0/*.log"])
async def test_a_directory_that_lost_files_while_it_was_followed_is_made_anew(
    tmp_path: Path, store: _FlakyStore, what: str
) -> None:
    """Files that are open can be written although they are gone."""
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    standby = two.standby()
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
        await owner.upsert([1, 2], "before")
        await asyncio.to_thread(_follow_all, standby)
        for path in list((tmp_path / "two").glob(what)):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        await owner.append(10, 20)
        await owner.upsert([2, 3], "after")
        had = owner.content()
    two.start.look()

    async with two.served(await asyncio.to_thread(standby.take)) as owner:
        assert owner.content() == had


async def test_a_restore_ends_when_the_process_is_to_stop(
    tmp_path: Path, store: _FlakyStore
) -> None:
    """And what was taken can still be given back."""
    one, two = _Place(tmp_path / "one", store), _Place(tmp_path / "two", store)
    async with one.served(one.take()) as owner:
        await owner.create()
        await owner.append(0, 10)
    two.start.look()
    standby = two.standby()
    two.start.prepare()
    standby._shard = two.start.take(after=two.start.newest_epoch)

    two.start.reading._stop.set()

    with pytest.raises(StoreUnavailableError, match="stops"):
        await asyncio.to_thread(standby.take)
    standby.close()
    assert run(find_seal(two.start.names, 2), lambda step: do(store, step)) is not None
