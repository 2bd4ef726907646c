"""Tables as they run: appending, visibility, restarts, dropping under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import pytest

from streamhouse.core.errors import (
    BucketNotFoundError,
    CorruptDataError,
    OutOfOrderSequenceError,
    StorageFailedError,
    StreamhouseError,
    TableNotFoundError,
    UnavailableError,
)
from streamhouse.core.model.offsets import BucketPositions
from streamhouse.core.model.table_state import TieringReport
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.directory.data_directory import DataDirectory
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import OpenTable
from tests.support.held_step import around
from tests.support.in_process_service import (
    begin,
    event_rows,
    open_manager,
    routed,
    table_descriptor,
)


def _watermarks(table: OpenTable) -> list[int]:
    return [tablet.high_watermark for tablet in table.tablets]


async def _table(manager: TabletManager, bucket_count: int = 1) -> OpenTable:
    return await manager.create_table(table_descriptor(bucket_count=bucket_count))


async def test_an_append_is_visible_in_all_its_buckets_and_says_where(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 3)

        appended = await manager.append(
            table,
            [
                routed(0, event_rows(0, 5)),
                routed(2, event_rows(5, 7)),
                routed(0, event_rows(7, 8)),
            ],
        )

        assert appended.ranges == {0: (0, 6), 2: (0, 2)}
        assert _watermarks(table) == [6, 0, 2]
        stored = table.tablet(0).read(0, bytes_max=1 << 20)
        assert [(b.base_offset, b.row_count) for b in stored] == [(0, 5), (5, 1)]
        assert appended.timestamp_us >= max(b.timestamp_us for b in stored)


async def test_an_append_of_nothing_changes_nothing(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)

        assert (await manager.append(table, [])).ranges == {}
        assert _watermarks(table) == [0]


async def test_an_append_with_one_bad_part_stores_none_of_it(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        good = routed(0, event_rows(0, 5), writer_id=7, sequence=1)
        out_of_order = routed(1, event_rows(0, 5), writer_id=7, sequence=9)

        with pytest.raises(OutOfOrderSequenceError):
            await manager.append(table, [good, out_of_order])
        with pytest.raises(BucketNotFoundError, match=r"no bucket 2; its buckets are 0\.\.1"):
            await manager.append(table, [good, routed(2, event_rows(0, 5))])

        assert _watermarks(table) == [0, 0]


async def test_a_repeated_sequence_is_answered_with_its_first_offsets_also_after_a_restart(
    tmp_path: Path,
) -> None:
    batch = routed(0, event_rows(0, 5), writer_id=7, sequence=1)

    async def append() -> dict[int, tuple[int, int]]:
        async with open_manager(tmp_path) as manager:
            tables = list(manager.open_tables())
            table = tables[0] if tables else await _table(manager)
            return dict((await manager.append(table, [batch])).ranges)

    assert [await append() for _ in range(2)] == [{0: (0, 5)}, {0: (0, 5)}]


async def test_the_rest_of_a_request_that_a_crash_cut_has_a_version_of_its_own(
    tmp_path: Path,
) -> None:
    """Decision 37: a visible version gets no more rows, so the rest is a later one."""
    parts = [
        routed(bucket, event_rows(10 * bucket, 10 * bucket + 5))._replace(writer_id=7, sequence=1)
        for bucket in (0, 1)
    ]
    async with open_manager(tmp_path) as manager:
        table = await manager.create_table(table_descriptor(bucket_count=2))
        # What a crash leaves between the syncs of two logs: one log has its rows.
        first = await manager.append(table, parts[:1])
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        repeated = await manager.append(table, parts)
        assert repeated.ranges == {0: (0, 5), 1: (0, 5)}
        times = [tablet.read(0, bytes_max=1)[0].timestamp_us for tablet in table.tablets]
        assert times == [first.timestamp_us, repeated.timestamp_us]
        assert first.timestamp_us < repeated.timestamp_us
        # Complete, it is repeated without another version.
        again = await manager.append(table, parts)
        assert (again.ranges, again.timestamp_us) == (repeated.ranges, repeated.timestamp_us)


async def test_the_time_of_an_overwrite_without_rows_is_not_had_again(tmp_path: Path) -> None:
    now_us = 5_000
    async with open_manager(tmp_path, clock_us=lambda: now_us) as manager:
        table = await manager.create_table(table_descriptor(bucket_count=2))
        transactions = manager.transactions.of(table)
        now_us = 8_000
        begun = await begin(transactions, operation=TransactionOperation.OVERWRITE)
        result = await transactions.commit(begun, [], wait_s=60)
        assert result is not None
    now_us = 1_000
    async with open_manager(tmp_path, clock_us=lambda: now_us) as manager:
        (table,) = manager.open_tables()
        appended = await manager.append(table, [routed(0, event_rows(0, 1))])
        assert appended.timestamp_us > result.timestamp_us >= 8_000


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        await manager.create_database("sales")
        table = await _table(manager, 2)
        await manager.append(table, [routed(1, event_rows(0, 5))])
    async with open_manager(tmp_path) as manager:
        (table,) = manager.open_tables()
        assert manager.databases() == ["default", "sales"]
        assert table.positions()[1] == BucketPositions(
            log_start_offset=0, high_watermark=5, tiered_offset=0
        )
        appended = await manager.append(table, [routed(1, event_rows(5, 6))])
        assert appended.ranges == {1: (5, 6)}


async def test_a_log_that_lost_tiered_rows_is_not_opened(tmp_path: Path) -> None:
    """New rows would get offsets that the lake has given to others."""

    async def tier() -> int:
        async with open_manager(tmp_path) as manager:
            table = await _table(manager)
            await manager.append(table, [routed(0, event_rows(0, 5))])
            claim = await manager.tiering.claim("w", tables=None, force=True)
            assert claim.assignment is not None
            await manager.tiering.complete(
                table,
                TieringReport(
                    table_id=table.info.table_id,
                    epoch=claim.assignment.epoch,
                    snapshot_id=1,
                    table_uuid="u",
                    tiered_offsets={0: 5},
                ),
            )
            return table.info.table_id

    async def start() -> None:
        async with open_manager(tmp_path, is_strict=True):
            pass

    table_id = await tier()
    for file in (tmp_path / "tables" / str(table_id) / "bucket-0").iterdir():
        file.unlink()

    with pytest.raises(CorruptDataError):
        await start()


async def test_who_waits_is_woken_by_an_append_to_that_bucket(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        woken = table.wakeups.waiter(1, timeout_s=None)
        asleep = table.wakeups.waiter(0, timeout_s=None)

        await manager.append(table, [routed(1, event_rows(0, 1))])

        assert (woken.done(), asleep.done()) == (True, False)
        asleep.cancel()


@pytest.mark.parametrize(("readers", "first"), [(1, "reader"), (100, "writer")])
async def test_few_readers_have_their_turn_before_the_writer(
    tmp_path: Path, readers: int, first: str
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 1)
        turns: list[str] = []
        for _ in range(readers):
            waiter = table.wakeups.waiter(0, timeout_s=None)
            waiter.add_done_callback(lambda _: turns.append("reader"))

        await manager.append(table, [routed(0, event_rows(0, 1))])
        turns.append("writer")
        await asyncio.sleep(0)

        assert turns[0] == first
        assert sorted(turns) == ["reader"] * readers + ["writer"]
        assert table.wakeups.count == 0


async def test_every_cut_has_all_of_an_append_or_none(tmp_path: Path) -> None:
    """Appends touch both buckets alike: a cut with unequal watermarks is half an append."""

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)

        async def write(start: int) -> None:
            for i in range(start, start + 20):
                rows = event_rows(i, i + 3)
                await manager.append(table, [routed(0, rows), routed(1, rows)])

        writers = [asyncio.ensure_future(write(i)) for i in range(5)]
        cuts = set()
        while not all(writer.done() for writer in writers):
            cuts.add(tuple(p.high_watermark for p in table.state().positions.values()))
            await asyncio.sleep(0)

        assert all(first == second for first, second in cuts)
        assert len(cuts) > 5
        assert _watermarks(table) == [300, 300]


async def test_a_dropped_table_is_gone_at_once_and_for_good(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        old = await _table(manager, 2)
        await manager.append(old, [routed(0, event_rows(0, 5))])
        waiter = old.wakeups.waiter(0, timeout_s=None)

        await manager.drop_table(old.path)

        assert waiter.done()
        with pytest.raises(TableNotFoundError):
            manager.table(old.path)
        with pytest.raises(TableNotFoundError, match=r"'default\.events' does not exist"):
            await manager.append(old, [routed(0, event_rows(0, 5))])
        new = await _table(manager, 2)
        assert new.info.table_id > old.info.table_id
        assert _watermarks(new) == [0, 0]
        assert [p.name for p in (tmp_path / "tables").iterdir()] == [str(new.info.table_id)]


async def test_dropping_under_load_answers_every_append(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)

        async def write() -> str:
            try:
                for i in range(100):
                    await manager.append(table, [routed(0, event_rows(i, i + 1))])
            except StreamhouseError as error:
                return error.code
            return "none"

        writers = [asyncio.ensure_future(write()) for _ in range(4)]
        await manager.append(table, [routed(0, event_rows(0, 1))])
        await manager.drop_table(table.path)

        assert set(await asyncio.gather(*writers)) == {"table_not_found"}


async def test_a_new_segment_size_holds_from_the_next_append_on(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        rows = event_rows(0, 3_000)

        await manager.append(table, [routed(0, rows)])
        await manager.alter_properties(
            table.path, updates={"table.log.segment-bytes": "64kb"}, removals=[]
        )
        await manager.append(table, [routed(0, rows)])

        directory = tmp_path / "tables" / str(table.info.table_id) / "bucket-0"
        assert len(list(directory.glob("*.log"))) == 2
        assert manager.table(table.path).info.properties().log_segment_bytes == 64 << 10


async def test_closing_commits_what_was_submitted_and_refuses_more(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        appends = [
            asyncio.ensure_future(manager.append(table, [routed(0, event_rows(i, i + 1))]))
            for i in range(50)
        ]
        await asyncio.sleep(0)

        await manager.close()

        assert len({(await append).ranges[0] for append in appends}) == 50
        with pytest.raises(UnavailableError):
            await manager.append(table, [routed(0, event_rows(0, 1))])


async def test_a_close_that_fails_at_a_log_closes_all_the_rest(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as opened:
        manager = await opened.enter_async_context(open_manager(tmp_path))
        table = await _table(manager, 2)
        # The system reports an error when a file is closed, as after a failed write.
        os.close(table.tablets[0]._active._file._descriptor)

        with pytest.raises(OSError, match="Bad file descriptor"):
            await opened.aclose()

    assert table.tablets[1]._closed
    DataDirectory.open(tmp_path).close()


async def test_the_oldest_row_outside_the_lake_is_known(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        assert table.oldest_untiered_us() is None

        first = await manager.append(table, [routed(1, event_rows(0, 5))])
        await manager.append(table, [routed(0, event_rows(0, 5))])

        assert table.oldest_untiered_us() == first.timestamp_us
        assert table.untiered_rows == 10


async def test_a_table_whose_logs_cannot_be_made_does_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No disk space, or no file descriptors left, after the table was registered."""
    make_directory = os.mkdir

    def full(directory: Path, *more: Any) -> None:
        if Path(directory).name == "bucket-1":
            raise OSError(28, "No space left on device")
        make_directory(directory, *more)

    async with open_manager(tmp_path) as manager:
        monkeypatch.setattr(os, "mkdir", full)
        with pytest.raises(
            StorageFailedError, match=r"'default\.events' cannot be opened: .*No space left"
        ):
            await _table(manager, 2)
        assert manager.list_tables(None) == []
        assert list((tmp_path / "tables").iterdir()) == []

        monkeypatch.undo()
        assert (await _table(manager, 2)).info.table_id == 2


@pytest.mark.parametrize("step", ["table-adding", "history-checking"])
async def test_a_bug_while_a_table_is_made_leaves_nobody_working_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    async with open_manager(tmp_path) as manager:
        before = asyncio.all_tasks()
        around(monkeypatch, step, failing)
        with pytest.raises(MemoryError):
            await manager.create_table(table_descriptor(primary_key=("id",)))

        assert asyncio.all_tasks() == before


async def test_a_damaged_log_is_named_when_the_service_starts(tmp_path: Path) -> None:
    async def start() -> None:
        async with open_manager(tmp_path, is_strict=True):
            pass

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        for _ in range(3):
            await manager.append(table, [routed(0, event_rows(0, 100))])
    (log,) = (tmp_path / "tables" / "1" / "bucket-0").glob("*.log")
    content = bytearray(log.read_bytes())
    content[64 + 200] ^= 1
    log.write_bytes(content)

    with pytest.raises(CorruptDataError, match=r"table 'default\.events' cannot be opened"):
        await start()
