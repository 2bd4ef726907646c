"""A log table whose schema changes: old rows, old writers, old readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from streamhouse.core.wire.arrow_body import decode_fetch_body, encode_append_body
from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import (
    EVENTS,
    InProcessService,
    event_rows,
    in_process_service,
)


async def _alter(service: InProcessService, *changes: dict[str, Any]) -> AsgiAnswer:
    return await service.call(
        "PATCH", "/v1/tables/events/schema", json_body={"changes": list(changes)}
    )


async def _append(service: InProcessService, rows: pa.RecordBatch, **query: str) -> int:
    body = encode_append_body(rows.schema, [(0, 0, rows)])
    answer = await service.call("POST", "/v1/tables/events/append", query=query, body=body)
    return answer.status


async def _rows(service: InProcessService, **query: str) -> list[dict[str, Any]]:
    answer = await service.call(
        "GET", "/v1/tables/events/buckets/0/fetch", query={"offset": "0", **query}
    )
    assert answer.status == 200, answer.body
    body = decode_fetch_body(pa.py_buffer(answer.body))
    assert body is not None
    return [row for _, batch in body.batches for row in batch.to_pylist()]


async def _evolved(service: InProcessService) -> pa.Schema:
    """One row of each of two versions; returns the newer one."""
    await service.create_table()
    assert await _append(service, event_rows(0, 1)) == 200
    answer = await _alter(
        service,
        {"add": "size", "type": "int", "after": "id"},
        {"rename": "name", "to": "title"},
    )
    assert answer.status == 200, answer.body
    new = pa.schema([EVENTS.field("id"), ("size", pa.int32()), ("title", pa.string())])
    rows = pa.RecordBatch.from_pylist([{"id": 1, "size": 7, "title": "new"}], schema=new)
    assert await _append(service, rows) == 200
    return new


async def test_rows_of_all_versions_come_in_the_current_one_or_the_one_asked_for(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        await _evolved(service)
        old_name = event_rows(0, 1).to_pylist()[0]["name"]

        assert await _rows(service) == [
            {"id": 0, "size": None, "title": old_name},
            {"id": 1, "size": 7, "title": "new"},
        ]
        assert await _rows(service, schema_id="0") == [
            {"id": 0, "name": old_name},
            {"id": 1, "name": "new"},
        ]
        assert await _rows(service, columns="title") == [{"title": old_name}, {"title": "new"}]
        assert await _rows(service, columns="name", schema_id="0") == [
            {"name": old_name},
            {"name": "new"},
        ]
        answer = await service.call(
            "GET",
            "/v1/tables/events/buckets/0/fetch",
            query={"offset": "0", "schema_id": "5"},
        )
        assert answer.error()[2].endswith("has no schema version 5; it has 0 to 1")


async def test_a_writer_that_does_not_know_of_the_change_goes_on_if_it_says_its_version(
    tmp_path: Path,
) -> None:
    async with in_process_service(tmp_path) as service:
        await _evolved(service)

        assert await _append(service, event_rows(2, 3)) == 400
        assert await _append(service, event_rows(2, 3), schema_id="0") == 200

        assert (await _rows(service))[2] == {
            "id": 2,
            "size": None,
            "title": event_rows(2, 3).to_pylist()[0]["name"],
        }


async def test_versions_survive_a_restart(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _evolved(service)
        before = await _rows(service)
    async with in_process_service(tmp_path) as service:
        assert await _rows(service) == before
        info = (await service.call("GET", "/v1/tables/events")).json()
        assert info["schema_id"] == 1


async def test_a_refused_change_changes_nothing(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        before = (await service.call("GET", "/v1/tables/events")).json()

        answer = await _alter(
            service, {"add": "size", "type": "int"}, {"drop": "name", "confirm": "nmae"}
        )

        assert answer.error()[:2] == (400, "invalid_request")
        assert (await service.call("GET", "/v1/tables/events")).json() == before
