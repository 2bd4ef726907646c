"""A table that never had a row gets other columns: crashes, failing disks, rows made before."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from streamhouse.core.errors import (
    InvalidRequestError,
    StorageFailedError,
    UnavailableError,
)
from streamhouse.core.model.records.record_format import RAW_TOPIC
from streamhouse.core.model.transaction import TransactionOperation
from streamhouse.storage_service.engine.column_replacement import is_untouched
from streamhouse.storage_service.engine.open_table import LogTable
from streamhouse.storage_service.log.append_queue import RoutedBatch
from streamhouse.storage_service.log.filesystem import LocalFilesystem, WritableFile
from streamhouse.storage_service.operations.check_directory import check_directory
from tests.support.fetch_world import raw_rows
from tests.support.in_process_service import InProcessService, in_process_service, routed
from tests.support.registry_world import ORDER, ask, register

RAW = {"kafka.value.format": "raw", "kafka.on.schema": "replace"}


class _Steps(LocalFilesystem):
    """A disk that calls `before` in front of every step that changes names."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def create(self, path: Path) -> WritableFile:
        self._before()
        return super().create(path)

    def rename(self, source: Path, target: Path) -> None:
        self._before()
        super().rename(source, target)

    def sync_directory(self, directory: Path) -> None:
        self._before()
        super().sync_directory(directory)


async def _made(service: InProcessService) -> LogTable:
    await service.create_table("orders", RAW_TOPIC, bucket_count=2, properties=RAW)
    table = service.service.table("orders")
    assert isinstance(table, LogTable)
    return table


def _names(table: LogTable) -> list[str]:
    return [column.name for column in table.info.schema.columns]


async def _append(service: InProcessService, batch: RoutedBatch) -> None:
    table = service.service.table("orders")
    assert isinstance(table, LogTable)
    await service.service.manager.append(table, [batch])


async def test_a_crash_leaves_the_former_columns_or_the_new_ones(tmp_path: Path) -> None:
    data, crashed = tmp_path / "data", tmp_path / "crashed"
    count = 0

    def copy() -> None:
        nonlocal count
        count += 1
        shutil.copytree(data, crashed / str(count))

    async with in_process_service(data) as service:
        await _made(service)
        service.service.manager.directory.filesystem = _Steps(copy)
        wanted = await register(service, "orders-value", ORDER)
        assert wanted[0] == 200
    assert count >= 6

    found = []
    for number in range(1, count + 1):
        assert check_directory(crashed / str(number), lake_check=None).is_sound
        async with in_process_service(crashed / str(number)) as service:
            assert not service.service.manager.damaged_tables()
            info = service.service.table("orders").info
            is_raw = info.schema.to_arrow().equals(RAW_TOPIC)
            assert info.descriptor.properties == (RAW if is_raw else {"kafka.value.format": "avro"})
            found.append(is_raw)
            # Its producer asks again.
            assert await register(service, "orders-value", ORDER) == wanted
    assert found == sorted(found, reverse=True)
    assert set(found) == {True, False}


@pytest.mark.parametrize("failing", [1, 2, 3])
async def test_a_disk_that_fails_leaves_the_former_columns_or_takes_no_rows(
    tmp_path: Path, failing: int
) -> None:
    steps = 0

    def fail() -> None:
        nonlocal steps
        steps += 1
        if steps == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with in_process_service(tmp_path) as service:
        table = await _made(service)
        local = service.service.manager.directory.filesystem
        service.service.manager.directory.filesystem = _Steps(fail)
        status, _ = await register(service, "orders-value", ORDER)
        service.service.manager.directory.filesystem = local

        assert table.info.schema.to_arrow().equals(RAW_TOPIC)
        if failing < 3:
            assert status == 503
            assert (await register(service, "orders-value", ORDER))[0] == 200
            assert _names(table) == ["id", "note"]
        else:
            # The file is another one, which a power cut may undo.
            assert status == 500
            with pytest.raises(StorageFailedError, match="is known after a restart"):
                await _append(service, routed(0, raw_rows(0, 2)))
            assert (await register(service, "orders-value", ORDER))[0] == 503
    async with in_process_service(tmp_path) as service:
        assert (await register(service, "orders-value", ORDER))[0] == 200


async def test_rows_that_were_made_before_are_to_be_sent_again(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table = await _made(service)
        assert (await register(service, "orders-value", ORDER))[0] == 200

        with pytest.raises(UnavailableError, match="send the rows again"):
            await _append(service, routed(0, raw_rows(0, 2)))
        transactions = service.service.manager.transactions.of(table)
        begun, _ = await transactions.begin(
            TransactionOperation.APPEND, columns=None, app_id=None, version=None, timeout_ms=None
        )
        rows = [routed(0, raw_rows(0, 2))]
        with pytest.raises(UnavailableError, match="send the rows again"):
            await transactions.stage(begun, RAW_TOPIC, rows, token=None)
        assert [tablet.log_end_offset for tablet in table.tablets] == [0, 0]
        with pytest.raises(InvalidRequestError, match="no schema version 0; it has 1 to 1"):
            table.info.schema_version(0)


async def test_a_schema_waits_for_the_rows_that_are_under_way(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        table = await _made(service)
        await table.gate.enter()
        registering = asyncio.create_task(register(service, "orders-value", ORDER))
        while not table.gate._waiting:
            await asyncio.sleep(0)
        assert is_untouched(service.service.manager, table)
        # As a write does that has come before.
        service.service.manager._committer.submit(
            [(table.tablets[1], routed(1, raw_rows(0, 2)))], lambda _: table.gate.leave()
        )
        status, answer = await registering

        assert table.tablets[1].high_watermark == 2
        assert (status, answer["error_code"]) == (409, 409)
        assert table.info.schema.to_arrow().equals(RAW_TOPIC)
        assert (await ask(service, "GET", "/subjects"))[1] == []
