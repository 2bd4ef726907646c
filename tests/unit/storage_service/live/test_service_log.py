"""Reads of the log inside the service yield what a client's `read_range` yields."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamhouse.client import LogBatch
from streamhouse.client.http._any_process import AnyProcess
from streamhouse.client.http.endpoint import parse_endpoints
from streamhouse.client.positions._reached_offsets import ReachedOffsets
from streamhouse.client.reads import read_range
from streamhouse.core.errors import (
    CorruptDataError,
    OffsetOutOfRangeError,
    StreamhouseError,
    TableNotFoundError,
)
from streamhouse.core.model.table import TablePath
from streamhouse.storage_service.live._service_log import ServiceLog, StoredRows
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    append_body,
    event_rows,
    in_process_service,
)


class _Transport:
    """A client's requests, straight into the application."""

    any_process = AnyProcess(parse_endpoints("http://127.0.0.1:1"))

    def __init__(self, service: InProcessService) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()

    def fetch_from_any(self, *_: object) -> None:
        """Nobody besides the owner answers."""

    def request(self, method: str, url: str, *, query: dict[str, str], **_: Any) -> Any:
        call = self._service.call(method, url, query=query)
        answer = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        assert answer.status == 200, answer.body
        return SimpleNamespace(data=answer.body, headers=answer.headers)


async def _by_client(
    service: InProcessService, path: str, bucket: int, start: int, end: int, **more: Any
) -> list[LogBatch]:
    transport: Any = _Transport(service)
    table_id = service.service.table(path).info.table_id

    def read() -> list[LogBatch]:
        batches = read_range(
            transport,
            path,
            bucket,
            start,
            end,
            **{"columns": None, "page_bytes": 100, **more},
            reached=ReachedOffsets(),
            table_id=table_id,
        )
        return list(batches)

    return await asyncio.to_thread(read)


def _inside(
    service: InProcessService, path: str, bucket: int, start: int, end: int, **more: Any
) -> list[LogBatch]:
    table = service.service.table(path)
    log = StoredRows(table.info, ServiceLog(table, table.info).page)
    return list(log.read_range(path, bucket, start, end, **{"page_bytes": 100, **more}))


async def _assert_same(
    service: InProcessService,
    path: str,
    bucket: int,
    columns: Sequence[Sequence[str] | None],
) -> None:
    table = service.service.table(path)
    end = table.tablet(bucket).high_watermark
    assert end
    for schema_id in table.info.schema_versions:
        for names in columns:
            for start, stop in ((0, end), (1, end), (0, end - 1), (end // 2, end // 2)):
                more = {"columns": names, "schema_id": schema_id}
                own = _inside(service, path, bucket, start, stop, **more)
                read = await _by_client(service, path, bucket, start, stop, **more)
                assert own == read
                assert [b.data.schema for b in own] == [b.data.schema for b in read]
                assert all(b.data.schema.metadata is None for b in own)


async def _alter(service: InProcessService, path: str) -> None:
    await service.service.manager.alter_schema(
        TablePath.parse(path), [{"add": "more", "type": "bigint"}]
    )


async def test_a_log_table_reads_as_a_client_does(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        for start in range(0, 40, 10):
            await service.append([(0, 0, event_rows(start, start + 10))])
        await _alter(service, "events")
        await service.append([(0, 0, event_rows(40, 45)), (1, 0, event_rows(0, 3))])

        for bucket in (0, 1):
            await _assert_same(service, "events", bucket, [None, ["name"], ["name", "id"]])


async def test_a_changelog_reads_as_a_client_does(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(primary_key=("id",))
        for count in (8, 4):
            body = append_body(EVENTS, [(None, 0, event_rows(0, count))])
            answer = await service.call("POST", "/v1/tables/events/upsert", body=body)
            assert answer.status == 200, answer.body
        await _alter(service, "events")
        keys = event_rows(2, 6).select(["id"])
        body = append_body(keys.schema, [(None, 0, keys)])
        answer = await service.call("POST", "/v1/tables/events/delete", body=body)
        assert answer.status == 200, answer.body

        columns = [None, ["id"], ["__change_type", "__retracts"], ["name", "__change_type"]]
        await _assert_same(service, "events", 0, columns)


async def test_a_read_sees_no_row_that_is_not_published(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        tablet = service.service.table("events").tablet(0)
        tablet.high_watermark = 2

        assert sum(b.data.num_rows for b in _inside(service, "events", 0, 0, 2)) == 2
        with pytest.raises(CorruptDataError, match="no rows at offset"):
            _inside(service, "events", 0, 2, 3)
        with pytest.raises(OffsetOutOfRangeError):
            _inside(service, "events", 0, 3, 4)
        tablet.high_watermark = 3


async def test_the_rows_after_their_fold_come_from_the_same_pages(tmp_path: Path) -> None:
    """A key table's changes are folded by two columns, before its rows are written."""
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        await service.append([(0, 0, event_rows(3, 6))])
        table = service.service.table("events")
        starts = []

        def page(bucket: int, start: int, end: int, page_bytes: int) -> Any:
            starts.append(start)
            return ServiceLog(table, table.info).page(bucket, start, end, page_bytes)

        log = StoredRows(table.info, page)
        for columns in (["id"], None, None):
            batches = list(log.read_range("events", 0, 0, 6, columns=columns, page_bytes=100))
            ids = [row for batch in batches for row in batch.data.column("id").to_pylist()]
            assert ids == list(range(6))
        first, again = starts[: len(starts) // 2], starts[len(starts) // 2 :]
        assert first == again, "the second read of all rows is a read of the log"


async def test_rows_that_left_the_log_and_other_tables_are_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        table = service.service.table("events")
        with pytest.raises(StreamhouseError, match="table"):
            _inside(service, "events", 0, 0, 1, table_id=99)
        table.tablet(0).truncate(2)
        with pytest.raises(OffsetOutOfRangeError, match=r"outside the stored range \[2, 3\]"):
            _inside(service, "events", 0, 0, 3)

        await service.service.manager.drop_table(TablePath.parse("events"))
        log = StoredRows(table.info, ServiceLog(table, table.info).page)
        with pytest.raises(StreamhouseError):
            list(log.read_range("events", 0, 2, 3))
        with pytest.raises(TableNotFoundError):
            service.service.manager.check_readable(table)
