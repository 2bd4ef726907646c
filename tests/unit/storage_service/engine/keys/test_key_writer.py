"""Writing primary key tables: order of effects, disks that fail, bugs, dropping under load."""

from __future__ import annotations

import asyncio
import os
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from streamhouse.core.errors import (
    CorruptDataError,
    InternalError,
    OutOfOrderSequenceError,
    RequestTooLargeError,
    SchemaMismatchError,
    StorageFailedError,
    StreamhouseError,
    TableNotFoundError,
    UnknownOutcomeError,
)
from streamhouse.core.model.changelog import OPERATION_DELETE
from streamhouse.storage_service.engine.manager import TabletManager
from streamhouse.storage_service.engine.open_table import Appended, OpenTable
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite, delete_of
from tests.support.held_step import around, lower
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    open_manager,
    table_descriptor,
    until,
)
from tests.support.kv_world import looked_up


async def _table(manager: TabletManager, bucket_count: int = 1, **fields: Any) -> OpenTable:
    descriptor = table_descriptor(bucket_count=bucket_count, primary_key=("id",), **fields)
    return await manager.create_table(descriptor)


async def _write(
    manager: TabletManager, table: OpenTable, *writes: KeyWrite, writer_id: int = 0
) -> Appended:
    return await manager.write_keys(table, writes, columns=None, writer_id=writer_id)


def _named(ids: range, name: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array(ids, pa.int64()), [name] * len(ids)], schema=EVENTS)


def _names(table: OpenTable, bucket: int, ids: range) -> list[str | None]:
    keys = pa.record_batch([pa.array(ids, pa.int64())], names=["id"])
    found = looked_up(table.key_buckets[bucket].rows, keys)
    names = iter(found.rows.column("name").to_pylist())
    return [next(names) if is_found else None for is_found in found.found.tolist()]


def _watermarks(table: OpenTable) -> list[int]:
    return [tablet.high_watermark for tablet in table.tablets]


async def test_changes_are_durable_then_found_then_visible_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)

        def watching(apply: Any, *planned: Any) -> None:
            seen.append(([t.log_end_offset for t in table.tablets], _watermarks(table)))
            apply(*planned)

        around(monkeypatch, "changes-applying", watching)
        await _write(manager, table, KeyWrite(0, event_rows(0, 3)), KeyWrite(1, event_rows(3, 5)))
        assert seen == [([3, 2], [0, 0]), ([3, 2], [0, 0])]
        assert _watermarks(table) == [3, 2]
        assert [bucket.row_count for bucket in table.key_buckets] == [3, 2]


async def test_a_writer_has_nothing_of_the_request_that_made_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request_id: ContextVar[str] = ContextVar("request_id", default="")
    seen: list[str] = []

    def watching(apply: Any, *planned: Any) -> None:
        seen.append(request_id.get())
        apply(*planned)

    around(monkeypatch, "changes-applying", watching)
    async with open_manager(tmp_path) as manager:
        request_id.set("the one that creates")
        await _write(manager, await _table(manager), KeyWrite(0, event_rows(0, 3)))
        assert seen == [""]


async def test_writes_that_wait_together_are_one_round_each_with_its_own_answer(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        wrong = pa.record_batch([pa.array([None], pa.int64()), ["x"]], names=EVENTS.names)
        writes = [_named(range(5), f"v{number}") for number in range(20)]
        writes[7] = wrong

        answers = await asyncio.gather(
            *(_write(manager, table, KeyWrite(0, rows)) for rows in writes),
            return_exceptions=True,
        )

        assert isinstance(answers[7], SchemaMismatchError)
        ends = [a.ranges[0] for a in answers if isinstance(a, Appended)]
        assert ends[0] == (0, 5)
        assert ends[1:] == [(5 + 10 * i, 15 + 10 * i) for i in range(18)]
        assert _names(table, 0, range(5)) == ["v19"] * 5
        assert table.key_buckets[0].row_count == 5


async def test_a_repeated_batch_waits_for_the_first_and_is_answered_alike(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        write = KeyWrite(0, event_rows(0, 3), sequence=1)

        first, again = await asyncio.gather(
            *(_write(manager, table, write, writer_id=9) for _ in range(2))
        )

        assert first == again
        with pytest.raises(OutOfOrderSequenceError, match="expected 2"):
            await _write(manager, table, write._replace(sequence=4), writer_id=9)


async def test_a_write_that_changes_nothing_uses_no_sequence_up(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        write = KeyWrite(0, event_rows(0, 3), sequence=1)
        await _write(manager, table, write, writer_id=1)

        same = await _write(manager, table, write, writer_id=2)
        more = await _write(
            manager, table, KeyWrite(0, _named(range(1), "x"), sequence=1), writer_id=2
        )

        assert same.ranges == {0: (3, 3)}
        assert more.ranges == {0: (3, 5)}


async def test_changes_larger_than_a_frame_are_refused_as_a_whole(tmp_path: Path) -> None:
    async with open_manager(tmp_path, batch_bytes_max=4_096) as manager:
        table = await _table(manager, 2)

        with pytest.raises(RequestTooLargeError, match=r"bucket 1: 300 rows make \d+ bytes"):
            await _write(
                manager, table, KeyWrite(0, event_rows(0, 2)), KeyWrite(1, event_rows(0, 300))
            )

        assert _watermarks(table) == [0, 0]
        await _write(manager, table, KeyWrite(0, event_rows(0, 2)))
        assert _watermarks(table) == [2, 0]


async def test_a_full_disk_refuses_writes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        await _write(manager, table, KeyWrite(0, event_rows(0, 3)))
        monkeypatch.setattr(os, "pwritev", full)
        lost = [KeyWrite(b, _named(range(5), "lost"), sequence=1) for b in (0, 1)]
        with pytest.raises(StorageFailedError):
            await _write(manager, table, *lost, writer_id=3)
        assert _names(table, 0, range(5)) == ["n0", "n1", "n2", None, None]
        assert table.key_buckets[0].row_count == 3
        monkeypatch.undo()

        again = await _write(
            manager, table, KeyWrite(0, _named(range(5), "kept"), sequence=1), writer_id=3
        )

        assert again.ranges == {0: (3, 11)}
        assert _names(table, 0, range(5)) == ["kept"] * 5


async def test_rows_that_are_there_already_are_refused_with_the_request_that_brought_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second and the fourth change nothing, after the first and the third of their group."""
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        await _write(manager, table, KeyWrite(0, _named(range(4), "old")))
        disk = _FullDisk(monkeypatch)
        new = KeyWrite(0, _named(range(2), "new"))
        gone = delete_of(0, _named(range(2, 4), "").select(["id"]))
        elsewhere = delete_of(1, _named(range(2), "").select(["id"]))
        writes = [
            asyncio.ensure_future(_write(manager, table, write))
            for write in (new, new, gone, gone, elsewhere)
        ]
        await until(disk.is_writing.is_set)

        disk.go()

        *refused, unchanged = await asyncio.gather(*writes, return_exceptions=True)
        assert [type(error) for error in refused] == [StorageFailedError] * 4
        assert unchanged.ranges == {1: (0, 0)}
        assert _names(table, 0, range(4)) == ["old"] * 4
        assert (await _write(manager, table, new)).ranges == {0: (4, 8)}


async def test_after_a_failed_sync_the_bucket_is_read_only_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {0: range(4), 1: range(10, 14)}

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        both = [KeyWrite(b, _named(ids[b], "first"), sequence=1) for b in (0, 1)]
        await _write(manager, table, *both, writer_id=5)
        failing = table.tablets[1]._active

        def failing_sync(sync: Any, segment: Any) -> None:
            if segment is failing:
                raise OSError(5, "Input/output error")
            sync(segment)

        around(monkeypatch, "segment-syncing", failing_sync)
        both = [KeyWrite(b, _named(ids[b], "second"), sequence=2) for b in (0, 1)]
        with pytest.raises(UnknownOutcomeError):
            await _write(manager, table, *both, writer_id=5)

        assert _watermarks(table) == [12, 4]
        assert _names(table, 0, ids[0]) == ["second"] * 4
        assert _names(table, 1, ids[1]) == ["first"] * 4
        with pytest.raises(StorageFailedError, match="bucket 1 is read-only"):
            await _write(manager, table, KeyWrite(1, event_rows(0, 1)))
        await _write(manager, table, KeyWrite(0, event_rows(8, 9)))
        assert _watermarks(table) == [13, 4]
    monkeypatch.undo()
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        await _write(manager, table, *both, writer_id=5)
        assert _names(table, 1, ids[1]) == ["second"] * 4


async def test_rows_that_cannot_be_applied_are_out_of_use_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write(manager, table, KeyWrite(0, event_rows(0, 2)))
        around(monkeypatch, "changes-applying", failing)
        write = KeyWrite(0, _named(range(2), "x"), sequence=1)
        with pytest.raises(UnknownOutcomeError, match="could not be applied; restart"):
            await _write(manager, table, write, writer_id=4)
        monkeypatch.undo()

        # Neither shown nor built upon.
        assert _watermarks(table) == [2]
        with pytest.raises(StorageFailedError, match="out of use"):
            await _write(manager, table, KeyWrite(0, event_rows(5, 6)))
        keys = pa.record_batch([pa.array([0], pa.int64())], names=["id"])
        with pytest.raises(StorageFailedError, match="out of use"):
            table.lookup.find(table.lookup.keys(keys))
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert _names(table, 0, range(2)) == ["x", "x"]
        assert (await _write(manager, table, write, writer_id=4)).ranges == {0: (2, 6)}


@pytest.mark.parametrize("is_before", [True, False])
async def test_changes_that_do_not_continue_the_log_are_never_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_before: bool
) -> None:
    """A bug leaves something planned, before the changes or after them."""

    def leave(bucket: Any) -> None:
        bucket.rows.plan(event_rows(50, 52), base_offset=bucket.rows.planned_offset)

    def leaving(accept: Any, rows: Any, planned: Any) -> None:
        accept(rows, planned)
        monkeypatch.undo()
        leave(table.key_buckets[0])

    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        both = [KeyWrite(0, event_rows(0, 3)), KeyWrite(1, event_rows(3, 5))]
        await _write(manager, table, *both)
        if is_before:
            leave(table.key_buckets[1])
        else:
            around(monkeypatch, "changes-accepting", leaving)
        again = [KeyWrite(0, _named(range(3), "x")), KeyWrite(1, _named(range(3, 5), "x"))]

        with pytest.raises(InternalError):
            await _write(manager, table, *again)
        with pytest.raises(StorageFailedError, match="out of use"):
            await _write(manager, table, *again)

        assert [tablet.log_end_offset for tablet in table.tablets] == [3, 2]
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert (await _write(manager, table, *again)).ranges == {0: (3, 9), 1: (2, 6)}
        assert _names(table, 1, range(3, 5)) == ["x", "x"]


async def test_a_clean_stop_leaves_nothing_to_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []

    def watching(replay: Any, *changes: Any, base_offset: int) -> None:
        replayed.append(base_offset)
        replay(*changes, base_offset=base_offset)

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        deletes = np.full(1, OPERATION_DELETE, dtype=np.int8)
        await _write(manager, table, KeyWrite(0, event_rows(0, 5)))
        key = pa.record_batch([pa.array([3], pa.int64())], names=["id"])
        await _write(manager, table, KeyWrite(0, key, deletes))
    around(monkeypatch, "changes-replaying", watching)
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert _names(table, 0, range(5)) == ["n0", "n1", "n2", None, "n4"]
        assert table.key_buckets[0].row_count == 4
        assert replayed == []


async def test_rows_without_their_log_are_refused_at_the_start(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write(manager, table, KeyWrite(0, event_rows(0, 5)))
    bucket = tmp_path / "tables" / "1" / "bucket-0"
    for file in bucket.iterdir():
        if file.is_file():
            file.unlink()
    with pytest.raises(CorruptDataError, match=r"'default\.events' cannot be opened"):
        async with open_manager(tmp_path, is_strict=True):
            pass


async def test_dropping_under_load_answers_everybody_and_deletes_everything(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        writes = [
            asyncio.ensure_future(_write(manager, table, KeyWrite(0, _named(range(9), f"{n}"))))
            for n in range(30)
        ]
        await asyncio.sleep(0)

        await manager.drop_table(table.path)

        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(a, Appended | StreamhouseError) for a in answers)
        with pytest.raises(TableNotFoundError):
            await _write(manager, table, KeyWrite(0, event_rows(0, 1)))
        assert list((tmp_path / "tables").iterdir()) == []


async def test_a_request_that_was_read_before_the_schema_changed_is_stored_after_it(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        rows, keys = _named(range(3), "x"), pa.record_batch({"id": pa.array([0], pa.int64())})
        changes = [{"add": "unit", "type": "string"}, {"rename": "name", "to": "title"}]
        await manager.alter_schema(table.path, changes)

        deletes = np.array([OPERATION_DELETE], np.int8)
        await _write(manager, table, KeyWrite(0, rows, schema_id=0))
        await _write(manager, table, KeyWrite(0, keys, deletes, schema_id=0))

        found = looked_up(table.key_buckets[0].rows, _named(range(3), "").select(["id"]))
        assert found.found.tolist() == [False, True, True]
        assert found.rows.column("title").to_pylist() == ["x", "x"]
        assert found.rows.column("unit").to_pylist() == [None, None]


class _HeldSyncs:
    """Syncs wait until `go`; that of the segment `failing` fails then."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.are_under_way = threading.Event()
        self.failing: Any = None
        self._may_go = threading.Event()
        around(patch, "segment-syncing", self._sync)

    def _sync(self, sync: Any, segment: Any) -> None:
        self.are_under_way.set()
        assert self._may_go.wait(60)
        if segment is self.failing:
            raise OSError(5, "Input/output error")
        sync(segment)

    def go(self) -> None:
        self._may_go.set()


async def _planned_on_top(manager: TabletManager, table: OpenTable, write: KeyWrite) -> Any:
    """Begin a write, and return when it is planned beside what is being synced."""
    rows = table.key_buckets[write.bucket].rows
    before = rows.planned_offset
    task = asyncio.ensure_future(_write(manager, table, write))
    await until(lambda: rows.planned_offset > before)
    return task


async def test_a_large_write_is_planned_while_another_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        syncs = _HeldSyncs(monkeypatch)
        first = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(0, 3))))
        await until(syncs.are_under_way.is_set)

        second = await _planned_on_top(manager, table, KeyWrite(0, _named(range(2_000), "b")))

        assert not first.done()
        assert _watermarks(table) == [0]
        assert _names(table, 0, range(1)) == [None]
        syncs.go()
        assert (await first).ranges == {0: (0, 3)}
        assert (await second).ranges == {0: (3, 2_006)}
        assert _names(table, 0, range(4)) == ["b"] * 4


async def test_what_was_planned_on_rows_that_were_not_stored_is_planned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager, 2)
        syncs = _HeldSyncs(monkeypatch)
        syncs.failing = table.tablets[0]._active
        both = [KeyWrite(bucket, event_rows(0, 3)) for bucket in (0, 1)]
        first = asyncio.ensure_future(_write(manager, table, *both))
        await until(syncs.are_under_way.is_set)
        rows = _named(range(2_000), "b")
        stored = await _planned_on_top(manager, table, KeyWrite(1, rows))
        refused = asyncio.ensure_future(_write(manager, table, KeyWrite(0, rows)))

        syncs.go()

        with pytest.raises(UnknownOutcomeError):
            await first
        with pytest.raises(StorageFailedError, match="bucket 0 is read-only"):
            await refused
        assert (await stored).ranges == {1: (3, 2_006)}
        assert _watermarks(table) == [0, 2_006]
        assert _names(table, 1, range(3)) == ["b"] * 3
        assert _names(table, 0, range(3)) == [None] * 3


class _FullDisk:
    """The next write waits until `go`, and finds no room then; those after it do."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.is_writing = threading.Event()
        self._may_go = threading.Event()
        self._patch = patch
        patch.setattr(os, "pwritev", self._write)

    def _write(self, *_: Any) -> int:
        self.is_writing.set()
        assert self._may_go.wait(60)
        self._patch.undo()
        raise OSError(28, "No space left on device")

    def go(self) -> None:
        self._may_go.set()


async def test_a_full_disk_takes_back_what_was_planned_on_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        disk = _FullDisk(monkeypatch)
        first = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(0, 3))))
        await until(disk.is_writing.is_set)
        second = await _planned_on_top(manager, table, KeyWrite(0, _named(range(2_000), "b")))

        disk.go()

        with pytest.raises(StorageFailedError):
            await first
        # Nothing of the first is there: these are new rows, at its offsets.
        assert (await second).ranges == {0: (0, 2_000)}
        assert table.key_buckets[0].row_count == 2_000


async def _some_written_while_old(
    manager: TabletManager, table: OpenTable, is_held: threading.Event
) -> tuple[asyncio.Future[Appended], asyncio.Future[Appended]]:
    """Begin to write 400 of 1,000 rows again, and plan on top to delete those that are old."""
    first = asyncio.ensure_future(_write(manager, table, KeyWrite(0, _named(range(400), "b"))))
    await until(is_held.is_set)
    keys = _named(range(1_000), "").select(["id"])
    expired = await _planned_on_top(manager, table, delete_of(0, keys, written_below=1_000))
    return first, expired


async def test_rows_that_are_written_meanwhile_are_not_deleted_for_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write(manager, table, KeyWrite(0, _named(range(1_000), "old")))
        syncs = _HeldSyncs(monkeypatch)
        first, expired = await _some_written_while_old(manager, table, syncs.are_under_way)

        syncs.go()

        assert (await first).ranges == {0: (1_000, 1_800)}
        assert (await expired).ranges == {0: (1_800, 2_400)}
        assert _names(table, 0, range(1_000)) == ["b"] * 400 + [None] * 600


async def test_rows_are_as_old_as_they_were_when_what_was_written_meanwhile_was_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        await _write(manager, table, KeyWrite(0, _named(range(1_000), "old")))
        disk = _FullDisk(monkeypatch)
        first, expired = await _some_written_while_old(manager, table, disk.is_writing)

        disk.go()

        with pytest.raises(StorageFailedError):
            await first
        assert (await expired).ranges == {0: (1_000, 2_000)}
        assert _names(table, 0, range(1_000)) == [None] * 1_000


async def test_small_writes_go_on_while_every_thread_is_busy_elsewhere(tmp_path: Path) -> None:
    may_end = threading.Event()

    async with open_manager(tmp_path, key_threads=1) as manager:
        busy = await manager.create_table(table_descriptor("busy", primary_key=("id",)))
        table = await _table(manager)
        holding = asyncio.ensure_future(busy.key_writer.on_thread(lambda: may_end.wait(60)))
        await asyncio.sleep(0)

        await _write(manager, table, KeyWrite(0, event_rows(0, 3)))

        assert _names(table, 0, range(1)) == ["n0"]
        large = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(0, 5_000))))
        await asyncio.sleep(0)
        assert not large.done()
        may_end.set()
        assert await holding
        assert (await large).ranges == {0: (3, 5_000)}


async def test_who_has_the_rows_has_them_to_the_end_though_nobody_waits(tmp_path: Path) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    order: list[str] = []

    def hold() -> None:
        has_begun.set()
        assert may_end.wait(60)
        order.append("held")

    async with open_manager(tmp_path) as manager:
        table = await _table(manager)
        holding = asyncio.ensure_future(table.key_writer.on_thread(hold))
        await until(has_begun.is_set)
        holding.cancel()
        await asyncio.wait([holding])
        writing = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(0, 3))))
        writing.add_done_callback(lambda _: order.append("written"))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not writing.done()

        may_end.set()
        await writing

        assert order == ["held", "written"]


async def test_nothing_is_being_handed_over_once_a_table_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run begins after the table was told to stop, for a write still waits."""
    may_hand_over = threading.Event()

    def handing_over(write: Any, *arguments: Any, **marker: Any) -> None:
        assert may_hand_over.wait(60)
        write(*arguments, **marker)

    lower(monkeypatch, "run-bytes", 1 << 10)
    async with open_manager(tmp_path, key_memory_bytes_max=1 << 14) as manager:
        table = await _table(manager)
        syncs = _HeldSyncs(monkeypatch)
        around(monkeypatch, "rocksdb-writing", handing_over)
        first = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(0, 200))))
        await until(syncs.are_under_way.is_set)
        second = asyncio.ensure_future(_write(manager, table, KeyWrite(0, event_rows(200, 203))))
        await until(lambda: table.key_writer.waiting_count == 1)
        stopping = asyncio.ensure_future(table.stop(flush=False))
        await asyncio.sleep(0)
        syncs.go()
        await asyncio.gather(first, second)
        assert table.key_writer._runs

        may_hand_over.set()
        await stopping

        assert not table.key_writer._runs
