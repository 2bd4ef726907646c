"""Lost rows by key come back: from the changelog, or from the lake and the log after it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    HistoryDivergedError,
    SnapshotNotFoundError,
    StreamhouseError,
    TableNotFoundError,
    UnknownOutcomeError,
    UnsupportedError,
)
from streamhouse.core.model.changelog import DELETE, INSERT, UPDATE_AFTER
from streamhouse.core.model.lake.facts import LakeState
from streamhouse.core.model.lake.older_rows import LakeBucket
from streamhouse.core.model.table import TableInfo, TablePath
from streamhouse.storage_service.engine.keys.key_bucket import mark_damaged
from streamhouse.storage_service.engine.keys.key_recovery import KeyRecovery
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from streamhouse.storage_service.engine.upkeep._retention import apply_retention
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from streamhouse.storage_service.kv.rocksdb_store import Marker, RocksdbStore
from streamhouse.storage_service.log.log_tablet import LogTablet
from tests.support.held_step import around
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    later,
    open_manager,
    table_descriptor,
    until,
)
from tests.support.kv_world import looked_up

PATH = TablePath.parse("events")
YEAR_US = 365 * 86_400_000_000
Rows = dict[int, tuple[int, str]]


class Killed(BaseException):
    """The service's death: nothing catches it."""


def live_rows(table: OpenTable, end: int) -> Rows:
    """Fold the log below `end`: id -> (version offset, name)."""
    rows: Rows = {}
    offset = table.tablet(0).log_start_offset
    assert offset == 0
    for frame in table.tablet(0).read(0, bytes_max=1 << 30):
        batch = pa.ipc.read_record_batch(pa.py_buffer(frame.payload), table.info.log_schema)
        for line in batch.to_pylist():
            if offset < end and line["__change_type"] in (INSERT, UPDATE_AFTER):
                rows[line["id"]] = (offset, line["name"])
            elif offset < end and line["__change_type"] == DELETE:
                del rows[line["id"]]
            offset += 1
    return rows


class FakeLake:
    """Rows as a lake gives them, 700 a batch; dies after `batches_until_death` of them."""

    def __init__(self, rows: Rows, end_offset: int) -> None:
        self.rows = rows
        self.end_offset = end_offset
        self.batches_until_death = -1
        self.error: StreamhouseError | None = None

    def __call__(self, table: TableInfo, lake: LakeState, bucket: int) -> LakeBucket:
        assert (table.path, lake.tiered_offsets[bucket]) == (PATH, self.end_offset)
        if self.error is not None:
            raise self.error
        return LakeBucket(self.end_offset, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        schema = EVENTS.append(pa.field("__offset", pa.int64(), nullable=False))
        lines = [{"id": i, "name": n, "__offset": v} for i, (v, n) in self.rows.items()]
        for start in range(0, len(lines), 700):
            if self.batches_until_death == 0:
                raise Killed
            self.batches_until_death -= 1
            yield pa.RecordBatch.from_pylist(lines[start : start + 700], schema=schema)


async def _filled(manager: TabletManager) -> OpenTable:
    """Three segments: ten rows, changes of all and a delete, then more changes."""
    properties = {"table.log.segment-bytes": "64kb", "table.log.ttl": "1ms"}
    table = await manager.create_table(table_descriptor(primary_key=("id",), properties=properties))
    filler = event_rows(100, 9_100)
    for number in range(3):
        changed = pa.record_batch(
            [pa.array(range(10), pa.int64()), [f"v{number}"] * 10], schema=EVENTS
        )
        for rows in (changed, filler.slice(number * 3_000, 3_000)):
            await manager.write_keys(table, [KeyWrite(0, rows)], columns=None, writer_id=0)
    return table


async def _tier_and_cut(manager: TabletManager, table: OpenTable) -> FakeLake:
    end = table.tablet(0).high_watermark - 3_005
    lake = FakeLake(live_rows(table, end), end)
    table.lake = LakeState(snapshot_id=1, table_uuid="u", tiered_offsets={0: end})
    manager._save_lake_state(table, table.lake)
    await apply_retention(table, later(manager, YEAR_US))
    assert 0 < table.tablet(0).log_start_offset <= end
    return lake


def _state(table: OpenTable) -> Rows:
    """Every row, and its version as deleting it would retract it."""
    bucket = table.key_buckets[0]
    keys = pa.record_batch([pa.array(range(10_000), pa.int64())], names=["id"])
    found = looked_up(bucket.rows, keys)
    assert int(found.found.sum()) == bucket.row_count
    planned = bucket.rows.plan(
        found.rows.set_column(1, EVENTS.field("name"), pa.array(["?"] * found.rows.num_rows)),
        base_offset=bucket.rows.planned_offset,
    )
    after = planned.changelog.filter(
        pa.compute.equal(planned.changelog.column("__change_type"), UPDATE_AFTER)
    )
    bucket.rows.abort(planned)
    versions = after.column("__retracts").to_pylist()
    return {
        row["id"]: (version, row["name"])
        for row, version in zip(found.rows.to_pylist(), versions, strict=True)
    }


def _rows_directory(data_dir: Path) -> Path:
    return data_dir / "tables" / "1" / "bucket-0" / "kv"


async def _prepare(data_dir: Path) -> tuple[Rows, FakeLake]:
    """Return what the table has, and its lake; the log is cut."""
    async with open_manager(data_dir) as manager:
        table = await _filled(manager)
        lake = await _tier_and_cut(manager, table)
        return _state(table), lake


async def _reopened(data_dir: Path, recovery: KeyRecovery) -> Rows:
    async with open_manager(data_dir, recovery=recovery, is_strict=True) as manager:
        return _state(manager.table(PATH))


@pytest.mark.parametrize("on_demand", [False, True])
async def test_lost_rows_come_from_the_lake_and_the_log_after_it(
    tmp_path: Path, on_demand: bool
) -> None:
    before, lake = await _prepare(tmp_path)
    if not on_demand:
        shutil.rmtree(_rows_directory(tmp_path))
    rebuild = frozenset({PATH}) if on_demand else frozenset[TablePath]()

    assert await _reopened(tmp_path, KeyRecovery(lake_rows=lake, rebuild=rebuild)) == before

    # They are as durable as they were: nothing is read from the lake again.
    assert await _reopened(tmp_path, KeyRecovery()) == before


@pytest.mark.parametrize("batches", [0, 1, 5])
async def test_a_rebuild_that_was_killed_starts_again(tmp_path: Path, batches: int) -> None:
    before, lake = await _prepare(tmp_path)
    lake.batches_until_death = batches
    with pytest.raises(Killed):
        await _reopened(tmp_path, KeyRecovery(lake_rows=lake, rebuild=frozenset({PATH})))
    lake.batches_until_death = -1

    assert await _reopened(tmp_path, KeyRecovery(lake_rows=lake)) == before
    assert [p.name for p in _rows_directory(tmp_path).parent.glob("kv*")] == ["kv"]


async def test_a_rebuild_that_was_killed_between_its_moves_has_lost_nothing(tmp_path: Path) -> None:
    before, _ = await _prepare(tmp_path)
    rows = _rows_directory(tmp_path)
    rows.rename(rows.with_name("kv.dropped"))
    (rows.with_name("kv.restored")).mkdir()

    assert await _reopened(tmp_path, KeyRecovery()) == before
    assert [p.name for p in rows.parent.glob("kv*")] == ["kv"]


async def test_rows_ahead_of_the_log_are_not_given_up(tmp_path: Path) -> None:
    """The log is an older copy: the rows show that acknowledged changes are missing from it."""

    async def write(ids: range) -> None:
        async with open_manager(tmp_path) as manager:
            table = manager.table(PATH)
            write = KeyWrite(0, event_rows(ids.start, ids.stop))
            await manager.write_keys(table, [write], columns=None, writer_id=0)

    async with open_manager(tmp_path) as manager:
        await manager.create_table(table_descriptor(primary_key=("id",)))
    await write(range(50))
    rows = _rows_directory(tmp_path)
    shutil.copytree(rows.parent, tmp_path / "older")
    await write(range(20, 90))
    for damaged in (False, True):
        if damaged:
            mark_damaged(rows, "a block", applied_offset=120)
        for path in rows.parent.iterdir():
            if path.is_file():
                shutil.copyfile(tmp_path / "older" / path.name, path)
        with pytest.raises(CorruptDataError, match=r"acknowledged|were durable|is missing"):
            await _reopened(tmp_path, KeyRecovery())
        assert (rows / "CURRENT").exists()


async def test_rows_older_than_the_log_are_replaced(tmp_path: Path) -> None:
    """A backup of the rows from before the log was cut: the lake is newer."""

    async with open_manager(tmp_path) as manager:
        await _filled(manager)
    rows = _rows_directory(tmp_path)
    shutil.copytree(rows, tmp_path / "backup")

    async def cut() -> tuple[Rows, FakeLake]:
        async with open_manager(tmp_path) as manager:
            table = manager.table(PATH)
            for row in (5, 6):
                await manager.write_keys(
                    table, [KeyWrite(0, event_rows(row, 2_000))], columns=None, writer_id=0
                )
            lake = await _tier_and_cut(manager, table)
            return _state(table), lake

    before, lake = await cut()
    shutil.rmtree(rows)
    shutil.copytree(tmp_path / "backup", rows)

    assert await _reopened(tmp_path, KeyRecovery(lake_rows=lake)) == before


@pytest.mark.parametrize("lost", ["missing", "damaged", "CURRENT is missing", "foreign"])
async def test_with_the_whole_log_no_lake_is_needed(tmp_path: Path, lost: str) -> None:
    async def scenario() -> Rows:
        async with open_manager(tmp_path) as manager:
            return _state(await _filled(manager))

    before = await scenario()
    rebuild: frozenset[TablePath] = frozenset()
    rows = _rows_directory(tmp_path)
    if lost == "missing":
        shutil.rmtree(rows)
    elif lost == "damaged":
        (rows / "CURRENT").write_text("MANIFEST-999999\n")
    elif lost == "CURRENT is missing":
        (rows / "CURRENT").unlink()
    else:
        # Whole rows of another table are nothing to be dropped unasked.
        shutil.rmtree(rows)
        RocksdbStore(rows, table_id=77, bucket=0).write(
            pa.array([], pa.binary()), pa.array([], pa.binary()), marker=Marker(1, 0)
        )
        with pytest.raises(CorruptDataError, match=r"of table 77.*--rebuild default\.events"):
            await _reopened(tmp_path, KeyRecovery())
        rebuild = frozenset({PATH})

    assert await _reopened(tmp_path, KeyRecovery(rebuild=rebuild)) == before
    assert await _reopened(tmp_path, KeyRecovery()) == before


def _flip_in_newest_rows(rows: Path) -> None:
    """Damage a block of rows: what is only found by reading them."""
    table = max(rows.glob("*.sst"))
    data = bytearray(table.read_bytes())
    data[100] ^= 1
    table.write_bytes(data)


@pytest.mark.parametrize("source", ["changelog", "lake"])
async def test_damage_that_a_read_meets_is_mended_by_the_next_start(
    tmp_path: Path, source: str
) -> None:
    """Until then the rows are out of use, in memory or not; the changelog is read on."""
    if source == "lake":
        before, lake = await _prepare(tmp_path)
        recovery = KeyRecovery(lake_rows=lake)
    else:
        recovery = KeyRecovery()

        async def fill() -> Rows:
            async with open_manager(tmp_path) as manager:
                return _state(await _filled(manager))

        before = await fill()
    _flip_in_newest_rows(_rows_directory(tmp_path))

    async with open_manager(tmp_path, recovery=recovery) as manager:
        table = manager.table(PATH)
        bucket = table.key_buckets[0]
        ends = table.positions()
        await until(lambda: not bucket.is_usable)
        keys = pa.record_batch([pa.array([3], pa.int64())], names=["id"])
        with pytest.raises(CorruptDataError, match=r"rows by key are damaged .* out of use"):
            table.lookup.find(table.lookup.keys(keys))
        with pytest.raises(CorruptDataError, match="bucket 0: its rows by key are damaged"):
            await manager.write_keys(
                table, [KeyWrite(0, event_rows(3, 4))], columns=None, writer_id=0
            )
        assert table.positions() == ends
        log = bucket.log
        assert log.read(log.log_start_offset, bytes_max=1)
        assert not await apply_retention(table, later(manager, YEAR_US))
    assert (_rows_directory(tmp_path) / "damaged.json").exists()
    if source == "lake":
        # Nothing is given up for what cannot be made again.
        with pytest.raises(CorruptDataError, match=r"damaged .* no lake snapshot to get"):
            await _reopened(tmp_path, KeyRecovery())

    assert await _reopened(tmp_path, recovery) == before
    assert await _reopened(tmp_path, KeyRecovery()) == before


@pytest.mark.parametrize("source", ["changelog", "lake"])
async def test_damage_that_a_read_meets_is_mended_while_the_service_runs(
    tmp_path: Path, source: str
) -> None:
    if source == "lake":
        _, lake = await _prepare(tmp_path)
        recovery = KeyRecovery(lake_rows=lake)
    else:
        recovery = KeyRecovery()

        async def fill() -> None:
            async with open_manager(tmp_path) as manager:
                await _filled(manager)

        await fill()

    async def scenario() -> Rows:
        async with open_manager(tmp_path, recovery=recovery) as manager:
            table = manager.table(PATH)
            bucket = table.key_buckets[0]
            await manager.write_keys(
                table, [KeyWrite(0, event_rows(1, 9))], columns=None, writer_id=0
            )
            before = _state(table)
            _flip_in_newest_rows(_rows_directory(tmp_path))
            with pytest.raises(CorruptDataError):
                list(bucket.rows.rows_written_before(1 << 40, bytes_max=1 << 20))
            assert bucket.is_damaged

            await manager.mending.mend()

            assert bucket.is_usable
            assert _state(table) == before
            await until(lambda: bucket.rows.is_loaded)
            write = KeyWrite(0, event_rows(3, 9_200))
            await manager.write_keys(table, [write], columns=None, writer_id=0)
            assert bucket.row_count == len(_state(table)) > len(before)
            await manager.mending.mend()
            return _state(table)

    after = await scenario()
    assert await _reopened(tmp_path, KeyRecovery()) == after
    assert [p.name for p in _rows_directory(tmp_path).parent.glob("kv*")] == ["kv"]


@pytest.mark.parametrize("is_transaction", [False, True])
async def test_what_becomes_durable_while_rows_are_made_again_is_shown_or_left_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_transaction: bool
) -> None:
    """Damage is met while a write is synced; the log's end moves while it is replayed."""
    may_sync, is_syncing, is_replaying = (threading.Event() for _ in range(3))
    was_stored = threading.Event()

    def syncing(sync: Any, segment: Any) -> None:
        is_syncing.set()
        assert may_sync.wait(60)
        sync(segment)

    def reading(read: Any, log: LogTablet, *args: Any, **kwargs: Any) -> Any:
        is_replaying.set()
        assert was_stored.wait(60)
        return read(log, *args, **kwargs)

    async with open_manager(tmp_path) as manager:
        await _filled(manager)
    async with open_manager(tmp_path) as manager:
        table = manager.table(PATH)
        bucket, log = table.key_buckets[0], table.tablet(0)
        around(monkeypatch, "segment-syncing", syncing)
        write = [KeyWrite(0, event_rows(20_000, 20_007))]
        if is_transaction:
            stored = table.key_writer.write(write, columns=None, timestamp_us=1, writer_id=0)
        else:
            stored = manager.write_keys(table, write, columns=None, writer_id=0)
        writing = asyncio.ensure_future(stored)
        await until(is_syncing.is_set)
        _flip_in_newest_rows(_rows_directory(tmp_path))
        with pytest.raises(CorruptDataError):
            list(bucket.rows.rows_written_before(1 << 40, bytes_max=1 << 20))
        around(monkeypatch, "log-read", reading)
        mending = asyncio.ensure_future(manager.mending.mend())
        await until(is_replaying.is_set)
        end = log.log_end_offset

        may_sync.set()
        (answer,) = await asyncio.gather(writing, return_exceptions=True)
        was_stored.set()
        await mending

        assert log.log_end_offset == end + 7
        if is_transaction:
            assert isinstance(answer, UnknownOutcomeError)
            assert (log.high_watermark, bucket.is_damaged) == (end, True)
        else:
            assert answer.ranges == {0: (end, end + 7)}
            assert (log.high_watermark, bucket.is_damaged) == (end + 7, False)
            assert bucket.row_count == len(live_rows(table, end + 7))
    monkeypatch.undo()
    async with open_manager(tmp_path, is_strict=True) as manager:
        assert manager.table(PATH).key_buckets[0].rows.applied_offset == end + 7


async def test_what_cannot_be_mended_is_left_to_the_operator(tmp_path: Path) -> None:
    """Nor is a table that is being dropped."""
    await _prepare(tmp_path)

    async with open_manager(tmp_path) as manager:
        table = manager.table(PATH)
        bucket = table.key_buckets[0]
        _flip_in_newest_rows(_rows_directory(tmp_path))
        with pytest.raises(CorruptDataError):
            list(bucket.rows.rows_written_before(1 << 40, bytes_max=1 << 20))
        files = sorted(_rows_directory(tmp_path).glob("*.sst"))
        for _ in range(2):
            await manager.mending.mend()
            assert bucket.is_damaged
        assert sorted(_rows_directory(tmp_path).glob("*.sst")) == files
        await manager.drop_table(PATH)
        await manager.mending.mend()
        assert not any((tmp_path / "tables").iterdir())


async def test_rows_that_are_fewer_than_counted_are_damaged(tmp_path: Path) -> None:
    """Whole files that lack rows: only the count can tell."""

    async def fill() -> Rows:
        async with open_manager(tmp_path) as manager:
            return _state(await _filled(manager))

    before = await fill()
    store = RocksdbStore(_rows_directory(tmp_path), table_id=1, bucket=0)
    keys, _ = next(store.scan())
    store.write(keys[:1], pa.nulls(1, pa.binary()), marker=store.written_marker)
    store.flush()
    store.close()

    async with open_manager(tmp_path) as manager:
        table = manager.table(PATH)
        bucket = table.key_buckets[0]
        await until(lambda: not bucket.is_usable)
        with pytest.raises(CorruptDataError, match="has 9009 rows, but counts 9010"):
            bucket.check_usable()
    assert await _reopened(tmp_path, KeyRecovery()) == before


def _nothing(lake: FakeLake) -> KeyRecovery:
    return KeyRecovery()


def _behind(lake: FakeLake) -> KeyRecovery:
    return KeyRecovery(lake_rows=lambda *_: LakeBucket(1, iter(())))


def _ahead(lake: FakeLake) -> KeyRecovery:
    return KeyRecovery(lake_rows=lambda *_: LakeBucket(1 << 40, iter(())))


def _of_another_log(lake: FakeLake) -> KeyRecovery:
    def other(table: TableInfo, state: LakeState, bucket: int) -> LakeBucket:
        return LakeBucket(lake.end_offset, lake._batches(), "0" * 16)

    return KeyRecovery(lake_rows=other)


def _gone(lake: FakeLake) -> KeyRecovery:
    lake.error = SnapshotNotFoundError("the lake table was dropped")
    return KeyRecovery(lake_rows=lake)


def _doubled(lake: FakeLake) -> KeyRecovery:
    def twice(table: TableInfo, state: LakeState, bucket: int) -> LakeBucket:
        return LakeBucket(lake.end_offset, iter([*lake._batches(), *lake._batches()]))

    return KeyRecovery(lake_rows=twice)


@pytest.mark.parametrize(
    ("recovery", "error", "sentence"),
    [
        (_nothing, CorruptDataError, "no lake snapshot to get them from"),
        (_of_another_log, HistoryDivergedError, "the lake has other rows below offset"),
        (_behind, CorruptDataError, "the lake has them up to 1, so"),
        (_ahead, CorruptDataError, "the lake has them up to"),
        (_gone, SnapshotNotFoundError, "cannot be read from the lake: the lake table was dropped"),
        (_doubled, CorruptDataError, "the lake has two rows with the same key"),
    ],
)
async def test_rows_that_cannot_be_got_back_are_refused(
    tmp_path: Path, recovery: Any, error: type[StreamhouseError], sentence: str
) -> None:
    before, lake = await _prepare(tmp_path)
    shutil.rmtree(_rows_directory(tmp_path))

    for _ in range(2):
        with pytest.raises(error, match=sentence) as raised:
            await _reopened(tmp_path, recovery(lake))
        assert raised.value.message.startswith("table 'default.events' cannot be opened: table")

    lake.error = None
    assert await _reopened(tmp_path, KeyRecovery(lake_rows=lake)) == before


async def test_only_tables_with_rows_by_key_are_rebuilt(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        await manager.create_table(table_descriptor())
    with pytest.raises(UnsupportedError, match="has no primary key"):
        await _reopened(tmp_path, KeyRecovery(rebuild=frozenset({PATH})))
    with pytest.raises(TableNotFoundError, match=r"default\.other"):
        await _reopened(
            tmp_path, KeyRecovery(rebuild=frozenset({TablePath.parse("default.other")}))
        )


async def test_the_log_is_cut_only_once_the_rows_are_durable_without_it(tmp_path: Path) -> None:
    async def scenario() -> Rows:
        async with open_manager(tmp_path / "data") as manager:
            table = await _filled(manager)
            await _tier_and_cut(manager, table)
            # What a kill -9 would leave.
            shutil.copytree(tmp_path / "data", tmp_path / "killed")
            return _state(table)

    before = await scenario()

    assert await _reopened(tmp_path / "killed", KeyRecovery()) == before


async def test_without_a_lake_the_changelog_is_kept_whole(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _filled(manager)
        await manager.alter_properties(
            PATH, updates={"table.datalake.enabled": "false"}, removals=[]
        )
        await apply_retention(table, later(manager, YEAR_US))
        assert table.tablet(0).log_start_offset == 0
