"""Fetches: what comes back, waiting, and offsets that are not there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.wire.arrow_body import FetchBody, decode_fetch_body
from tests.support.asgi_call import AsgiAnswer
from tests.support.in_process_service import InProcessService, event_rows, in_process_service

FETCH = "/v1/tables/events/buckets/0/fetch"
OF_TABLE = {"table_id": "1"}
"""Of the first table of a service."""


def _decoded(answer: AsgiAnswer) -> FetchBody:
    assert answer.status == 200, answer.body
    body = decode_fetch_body(pa.py_buffer(answer.body))
    assert body is not None
    return body


async def _fetch(service: InProcessService, **query: str) -> FetchBody:
    return _decoded(await service.call("GET", FETCH, query={**OF_TABLE, **query}))


def _spans(body: FetchBody) -> list[tuple[int, int]]:
    return [(address.base_offset, batch.num_rows) for address, batch in body.batches]


async def _filled(service: InProcessService) -> None:
    """Three batches: offsets 0..9, 10..19, 20..29; the id is the offset."""
    await service.create_table(bucket_count=2)
    for start in (0, 10, 20):
        await service.append([(0, 0, event_rows(start, start + 10))])


async def test_whole_batches_come_from_the_one_that_holds_the_offset(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)

        body = await _fetch(service, offset="15")

        assert _spans(body) == [(10, 10), (20, 10)]
        assert body.positions == {0: (0, 30)}
        assert body.batches[0][1].column("id").to_pylist() == list(range(10, 20))
        address = body.batches[0][0]
        assert (address.bucket, address.schema_id) == (0, 0)


@pytest.mark.parametrize(
    ("query", "spans"),
    [
        ({"offset": "0", "max_bytes": "1"}, [(0, 10)]),
        ({"offset": "0", "end_offset": "11"}, [(0, 10), (10, 10)]),
        ({"offset": "0", "end_offset": "10"}, [(0, 10)]),
        ({"offset": "5", "end_offset": "99"}, [(0, 10), (10, 10), (20, 10)]),
        ({"offset": "12", "end_offset": "12"}, []),
        ({"offset": "30"}, []),
    ],
)
async def test_bytes_and_end_bound_what_comes(
    tmp_path: Path, query: dict[str, str], spans: list[tuple[int, int]]
) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        assert _spans(await _fetch(service, **query)) == spans


@pytest.mark.parametrize("inline_bytes_max", [1, 1 << 20])
async def test_only_the_wanted_columns_come(tmp_path: Path, inline_bytes_max: int) -> None:
    async with in_process_service(tmp_path, inline_bytes_max=inline_bytes_max) as service:
        await _filled(service)

        body = await _fetch(service, offset="0", columns="name")

        assert [batch.schema.names for _, batch in body.batches] == [["name"]] * 3
        assert body.batches[0][1].column("name")[3].as_py() == "n3"


async def test_a_long_poll_is_answered_by_the_append_it_waits_for(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        _, poll = service.start(
            "GET", FETCH, query={**OF_TABLE, "offset": "30", "max_wait_ms": "60000"}
        )
        await asyncio.sleep(0)

        await service.append([(1, 0, event_rows(0, 1))])
        assert not poll.done(), "another bucket's rows are none of its business"
        await service.append([(0, 0, event_rows(30, 31))])

        assert _spans(_decoded(await asyncio.wait_for(poll, 60))) == [(30, 1)]


async def test_a_long_poll_answers_nothing_when_its_time_is_up(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, fetch_wait_ms_max=5) as service:
        await _filled(service)
        for wait in ("1", "3600000"):
            assert _spans(await _fetch(service, offset="30", max_wait_ms=wait)) == []


async def test_at_end_offset_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        call = _fetch(service, offset="30", end_offset="30", max_wait_ms="60000")
        assert _spans(await asyncio.wait_for(call, 60)) == []


async def test_a_client_that_goes_away_stops_waiting(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        call, poll = service.start(
            "GET", FETCH, query={**OF_TABLE, "offset": "30", "max_wait_ms": "60000"}
        )
        await asyncio.sleep(0)

        call.disconnect()

        assert (await asyncio.wait_for(poll, 60)).status == 0
        assert service.service.open_requests == 0
        assert service.service.manager.waiter_limit.count == 0


async def test_dropping_the_table_ends_the_wait_with_the_reason(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        _, poll = service.start(
            "GET", FETCH, query={**OF_TABLE, "offset": "30", "max_wait_ms": "60000"}
        )
        await asyncio.sleep(0)

        await service.call("DELETE", "/v1/tables/events")

        assert (await asyncio.wait_for(poll, 60)).error()[:2] == (404, "table_not_found")


async def test_too_many_waiters_are_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, waiting_fetches_max=1) as service:
        await _filled(service)
        query = {**OF_TABLE, "offset": "30", "max_wait_ms": "60000"}
        call, poll = service.start("GET", FETCH, query=query)
        await asyncio.sleep(0)

        status, code, message = (
            await service.call("GET", FETCH, query={**OF_TABLE, **query})
        ).error()

        assert (status, code) == (503, "overloaded")
        assert "(waiting_fetches_max)" in message
        call.disconnect()
        await poll


@pytest.mark.parametrize(
    ("path", "query", "status", "code", "message"),
    [
        (
            FETCH,
            {**OF_TABLE, "offset": "31"},
            416,
            "offset_out_of_range",
            "bucket 0: offset 31 is outside the log, which has offsets 0 to 30",
        ),
        (FETCH, {}, 400, "invalid_request", "parameter offset is missing"),
        (FETCH, {"offset": "x"}, 400, "invalid_request", "parameter offset = 'x' must be a whole"),
        (FETCH, {"offset": "0", "max_byte": "1"}, 400, "invalid_request", "'max_byte' (known: "),
        (FETCH, {"offset": "0", "columns": "ide"}, 400, "unknown_column", "did you mean 'id'?"),
        (
            "/v1/tables/events/buckets/2/fetch",
            {"offset": "0"},
            404,
            "bucket_not_found",
            "table 'default.events' has no bucket 2; its buckets are 0..1",
        ),
        (
            "/v1/tables/events/buckets/x/fetch",
            {"offset": "0"},
            400,
            "invalid_request",
            "parameter bucket = 'x' must be a whole number",
        ),
    ],
)
async def test_a_bad_fetch_is_refused_in_one_sentence(
    tmp_path: Path, path: str, query: dict[str, str], status: int, code: str, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        answer = await service.call("GET", path, query=query)
        assert answer.error()[:2] == (status, code)
        assert message in answer.error()[2]


async def test_a_flipped_bit_on_disk_is_never_returned_as_data(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await _filled(service)
        (log,) = (tmp_path / "tables" / "1" / "bucket-0").glob("*.log")
        content = bytearray(log.read_bytes())
        content[-100] ^= 1
        with log.open("r+b") as file:
            file.write(content)

        answer = await service.call("GET", FETCH, query={**OF_TABLE, "offset": "25"})

        assert answer.error()[:2] == (500, "corrupt_data")
        assert _spans(await _fetch(service, offset="0")) == [(0, 10), (10, 10)]
