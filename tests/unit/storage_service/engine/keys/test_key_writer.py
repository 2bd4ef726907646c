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
from streamhouse.storage_service.engine.open_table import Appended
from streamhouse.storage_service.kv.plan.write_plan import KeyWrite
from tests.support.held_step import around, lower
from tests.support.in_process_service import (
    EVENTS,
    event_rows,
    open_manager,
    table_descriptor,
    until,
)
from tests.support.key_writes import (
    HeldSyncs,
    keyed_table,
    named,
    names_of,
    watermarks,
    write_to,
)
from tests.support.kv_world import looked_up


async def test_changes_are_durable_then_found_then_visible_in_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager, 2)

        def watching(apply: Any, *planned: Any) -> None:
            seen.append(([t.log_end_offset for t in table.tablets], watermarks(table)))
            apply(*planned)

        around(monkeypatch, "changes-applying", watching)
        await write_to(manager, table, KeyWrite(0, event_rows(0, 3)), KeyWrite(1, event_rows(3, 5)))
        assert seen == [([3, 2], [0, 0]), ([3, 2], [0, 0])]
        assert watermarks(table) == [3, 2]
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
        await write_to(manager, await keyed_table(manager), KeyWrite(0, event_rows(0, 3)))
        assert seen == [""]


async def test_writes_that_wait_together_are_one_round_each_with_its_own_answer(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        wrong = pa.record_batch([pa.array([None], pa.int64()), ["x"]], names=EVENTS.names)
        writes = [named(range(5), f"v{number}") for number in range(20)]
        writes[7] = wrong

        answers = await asyncio.gather(
            *(write_to(manager, table, KeyWrite(0, rows)) for rows in writes),
            return_exceptions=True,
        )

        assert isinstance(answers[7], SchemaMismatchError)
        ends = [a.ranges[0] for a in answers if isinstance(a, Appended)]
        assert ends[0] == (0, 5)
        assert ends[1:] == [(5 + 10 * i, 15 + 10 * i) for i in range(18)]
        assert names_of(table, 0, range(5)) == ["v19"] * 5
        assert table.key_buckets[0].row_count == 5


async def test_a_repeated_batch_waits_for_the_first_and_is_answered_alike(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        write = KeyWrite(0, event_rows(0, 3), sequence=1)

        first, again = await asyncio.gather(
            *(write_to(manager, table, write, writer_id=9) for _ in range(2))
        )

        assert first == again
        with pytest.raises(OutOfOrderSequenceError, match="expected 2"):
            await write_to(manager, table, write._replace(sequence=4), writer_id=9)


async def test_a_write_that_changes_nothing_uses_no_sequence_up(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        write = KeyWrite(0, event_rows(0, 3), sequence=1)
        await write_to(manager, table, write, writer_id=1)

        same = await write_to(manager, table, write, writer_id=2)
        more = await write_to(
            manager, table, KeyWrite(0, named(range(1), "x"), sequence=1), writer_id=2
        )

        assert same.ranges == {0: (3, 3)}
        assert more.ranges == {0: (3, 5)}


async def test_changes_larger_than_a_frame_are_refused_as_a_whole(tmp_path: Path) -> None:
    async with open_manager(tmp_path, batch_bytes_max=4_096) as manager:
        table = await keyed_table(manager, 2)

        with pytest.raises(RequestTooLargeError, match=r"bucket 1: 300 rows make \d+ bytes"):
            await write_to(
                manager, table, KeyWrite(0, event_rows(0, 2)), KeyWrite(1, event_rows(0, 300))
            )

        assert watermarks(table) == [0, 0]
        await write_to(manager, table, KeyWrite(0, event_rows(0, 2)))
        assert watermarks(table) == [2, 0]


async def test_a_full_disk_refuses_writes_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager, 2)
        await write_to(manager, table, KeyWrite(0, event_rows(0, 3)))
        monkeypatch.setattr(os, "pwritev", full)
        lost = [KeyWrite(b, named(range(5), "lost"), sequence=1) for b in (0, 1)]
        with pytest.raises(StorageFailedError):
            await write_to(manager, table, *lost, writer_id=3)
        assert names_of(table, 0, range(5)) == ["n0", "n1", "n2", None, None]
        assert table.key_buckets[0].row_count == 3
        monkeypatch.undo()

        again = await write_to(
            manager, table, KeyWrite(0, named(range(5), "kept"), sequence=1), writer_id=3
        )

        assert again.ranges == {0: (3, 11)}
        assert names_of(table, 0, range(5)) == ["kept"] * 5


async def test_after_a_failed_sync_the_bucket_is_read_only_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {0: range(4), 1: range(10, 14)}

    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager, 2)
        both = [KeyWrite(b, named(ids[b], "first"), sequence=1) for b in (0, 1)]
        await write_to(manager, table, *both, writer_id=5)
        failing = table.tablets[1]._active

        def failing_sync(sync: Any, segment: Any) -> None:
            if segment is failing:
                raise OSError(5, "Input/output error")
            sync(segment)

        around(monkeypatch, "segment-syncing", failing_sync)
        both = [KeyWrite(b, named(ids[b], "second"), sequence=2) for b in (0, 1)]
        with pytest.raises(UnknownOutcomeError):
            await write_to(manager, table, *both, writer_id=5)

        assert watermarks(table) == [12, 4]
        assert names_of(table, 0, ids[0]) == ["second"] * 4
        assert names_of(table, 1, ids[1]) == ["first"] * 4
        with pytest.raises(StorageFailedError, match="bucket 1 is read-only"):
            await write_to(manager, table, KeyWrite(1, event_rows(0, 1)))
        await write_to(manager, table, KeyWrite(0, event_rows(8, 9)))
        assert watermarks(table) == [13, 4]
    monkeypatch.undo()
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        await write_to(manager, table, *both, writer_id=5)
        assert names_of(table, 1, ids[1]) == ["second"] * 4


async def test_rows_that_cannot_be_applied_are_out_of_use_until_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        await write_to(manager, table, KeyWrite(0, event_rows(0, 2)))
        around(monkeypatch, "changes-applying", failing)
        write = KeyWrite(0, named(range(2), "x"), sequence=1)
        with pytest.raises(UnknownOutcomeError, match="could not be applied; restart"):
            await write_to(manager, table, write, writer_id=4)
        monkeypatch.undo()

        # Neither shown nor built upon.
        assert watermarks(table) == [2]
        with pytest.raises(StorageFailedError, match="out of use"):
            await write_to(manager, table, KeyWrite(0, event_rows(5, 6)))
        keys = pa.record_batch([pa.array([0], pa.int64())], names=["id"])
        with pytest.raises(StorageFailedError, match="out of use"):
            table.lookup.find(table.lookup.keys(keys))
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert names_of(table, 0, range(2)) == ["x", "x"]
        assert (await write_to(manager, table, write, writer_id=4)).ranges == {0: (2, 6)}


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
        table = await keyed_table(manager, 2)
        both = [KeyWrite(0, event_rows(0, 3)), KeyWrite(1, event_rows(3, 5))]
        await write_to(manager, table, *both)
        if is_before:
            leave(table.key_buckets[1])
        else:
            around(monkeypatch, "changes-accepting", leaving)
        again = [KeyWrite(0, named(range(3), "x")), KeyWrite(1, named(range(3, 5), "x"))]

        with pytest.raises(InternalError):
            await write_to(manager, table, *again)
        with pytest.raises(StorageFailedError, match="out of use"):
            await write_to(manager, table, *again)

        assert [tablet.log_end_offset for tablet in table.tablets] == [3, 2]
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert (await write_to(manager, table, *again)).ranges == {0: (3, 9), 1: (2, 6)}
        assert names_of(table, 1, range(3, 5)) == ["x", "x"]


async def test_a_clean_stop_leaves_nothing_to_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed: list[int] = []

    def watching(replay: Any, *changes: Any, base_offset: int) -> None:
        replayed.append(base_offset)
        replay(*changes, base_offset=base_offset)

    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        deletes = np.full(1, OPERATION_DELETE, dtype=np.int8)
        await write_to(manager, table, KeyWrite(0, event_rows(0, 5)))
        key = pa.record_batch([pa.array([3], pa.int64())], names=["id"])
        await write_to(manager, table, KeyWrite(0, key, deletes))
    around(monkeypatch, "changes-replaying", watching)
    async with open_manager(tmp_path) as manager:
        table = next(iter(manager.open_tables()))
        assert names_of(table, 0, range(5)) == ["n0", "n1", "n2", None, "n4"]
        assert table.key_buckets[0].row_count == 4
        assert replayed == []


async def test_rows_without_their_log_are_refused_at_the_start(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        await write_to(manager, table, KeyWrite(0, event_rows(0, 5)))
    bucket = tmp_path / "tables" / "1" / "bucket-0"
    for file in bucket.iterdir():
        if file.is_file():
            file.unlink()
    with pytest.raises(CorruptDataError, match=r"'default\.events' cannot be opened"):
        async with open_manager(tmp_path, is_strict=True):
            pass


async def test_dropping_under_load_answers_everybody_and_deletes_everything(tmp_path: Path) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        writes = [
            asyncio.ensure_future(write_to(manager, table, KeyWrite(0, named(range(9), f"{n}"))))
            for n in range(30)
        ]
        await asyncio.sleep(0)

        await manager.drop_table(table.path)

        answers = await asyncio.gather(*writes, return_exceptions=True)
        assert all(isinstance(a, Appended | StreamhouseError) for a in answers)
        with pytest.raises(TableNotFoundError):
            await write_to(manager, table, KeyWrite(0, event_rows(0, 1)))
        assert list((tmp_path / "tables").iterdir()) == []


async def test_a_request_that_was_read_before_the_schema_changed_is_stored_after_it(
    tmp_path: Path,
) -> None:
    async with open_manager(tmp_path) as manager:
        table = await keyed_table(manager)
        rows, keys = named(range(3), "x"), pa.record_batch({"id": pa.array([0], pa.int64())})
        changes = [{"add": "unit", "type": "string"}, {"rename": "name", "to": "title"}]
        await manager.alter_schema(table.path, changes)

        deletes = np.array([OPERATION_DELETE], np.int8)
        await write_to(manager, table, KeyWrite(0, rows, schema_id=0))
        await write_to(manager, table, KeyWrite(0, keys, deletes, schema_id=0))

        found = looked_up(table.key_buckets[0].rows, named(range(3), "").select(["id"]))
        assert found.found.tolist() == [False, True, True]
        assert found.rows.column("title").to_pylist() == ["x", "x"]
        assert found.rows.column("unit").to_pylist() == [None, None]


async def test_small_writes_go_on_while_every_thread_is_busy_elsewhere(tmp_path: Path) -> None:
    may_end = threading.Event()

    async with open_manager(tmp_path, key_threads=1) as manager:
        busy = await manager.create_table(table_descriptor("busy", primary_key=("id",)))
        table = await keyed_table(manager)
        holding = asyncio.ensure_future(busy.key_writer.on_thread(lambda: may_end.wait(60)))
        await asyncio.sleep(0)

        await write_to(manager, table, KeyWrite(0, event_rows(0, 3)))

        assert names_of(table, 0, range(1)) == ["n0"]
        large = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(0, 5_000))))
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
        table = await keyed_table(manager)
        holding = asyncio.ensure_future(table.key_writer.on_thread(hold))
        await until(has_begun.is_set)
        holding.cancel()
        await asyncio.wait([holding])
        writing = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(0, 3))))
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
        table = await keyed_table(manager)
        syncs = HeldSyncs(monkeypatch)
        around(monkeypatch, "rocksdb-writing", handing_over)
        first = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(0, 200))))
        await until(syncs.are_under_way.is_set)
        second = asyncio.ensure_future(write_to(manager, table, KeyWrite(0, event_rows(200, 203))))
        await until(lambda: table.key_writer.waiting_count == 1)
        stopping = asyncio.ensure_future(table.stop(flush=False))
        await asyncio.sleep(0)
        syncs.go()
        await asyncio.gather(first, second)
        assert table.key_writer._runs

        may_hand_over.set()
        await stopping

        assert not table.key_writer._runs
