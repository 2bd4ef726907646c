"""Subscriptions: pushed rows, heartbeats, slow readers, and how they end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pyarrow as pa
import pytest

from streamhouse.core.wire.arrow_body import FetchBody, decode_fetch_body
from tests.support.asgi_call import AsgiAnswer, AsgiCall
from tests.support.in_process_service import InProcessService, event_rows, in_process_service

SUBSCRIBE = "/v1/tables/events/subscribe"


def _answers(call: AsgiCall) -> list[FetchBody]:
    """The complete Arrow streams sent so far."""
    source = pa.BufferReader(call.answer.body)
    answers = []
    while (body := decode_fetch_body(source)) is not None:
        answers.append(body)
    return answers


def _rows(call: AsgiCall) -> list[tuple[int, int, int]]:
    """(bucket, base offset, rows) of every batch sent so far."""
    return [
        (address.bucket, address.base_offset, batch.num_rows)
        for answer in _answers(call)
        for address, batch in answer.batches
    ]


async def _stalled(service: InProcessService) -> tuple[AsgiCall, asyncio.Task[AsgiAnswer]]:
    """A subscription whose reader takes nothing more after the first answer."""
    call, following = service.start("GET", SUBSCRIBE)
    await call.sent(0)
    call.takes_more.clear()
    return call, following


async def test_the_first_thing_sent_is_an_empty_answer(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        call, following = service.start("GET", SUBSCRIBE)

        await asyncio.wait_for(call.sent(0), 60)

        (answer,) = _answers(call)
        assert (answer.batches, answer.positions) == ([], {0: (0, 0), 1: (0, 0)})
        call.disconnect()
        await asyncio.wait_for(following, 60)
        assert not service.service.subscriptions


async def test_rows_are_pushed_as_they_are_appended(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        await service.append([(0, 0, event_rows(0, 3))])
        call, following = service.start("GET", SUBSCRIBE)
        await call.sent(0)

        for bucket in (1, 0):
            seen = len(call.answer.body)
            await service.append([(bucket, 0, event_rows(0, 2))])
            await asyncio.wait_for(call.sent(seen), 60)

        assert _rows(call) == [(1, 0, 2), (0, 3, 2)], "latest: not what was there before"
        call.disconnect()
        await following


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("earliest", {(0, 0, 3), (0, 3, 3), (1, 0, 3)}),
        ('{"0": 3}', {(0, 3, 3)}),
        # Whole batches: the client drops the rows before its offset.
        ('{"0": 4, "1": 3}', {(0, 3, 3)}),
    ],
)
async def test_a_subscription_starts_where_it_is_told(
    tmp_path: Path, start: str, expected: set[tuple[int, int, int]]
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table(bucket_count=2)
        for bucket in (0, 0, 1):
            await service.append([(bucket, 0, event_rows(0, 3))])
        call, following = service.start("GET", SUBSCRIBE, query={"start": start, "table_id": "1"})
        while len(_rows(call)) < len(expected):
            await asyncio.wait_for(call.sent(len(call.answer.body)), 60)

        assert set(_rows(call)) == expected
        call.disconnect()
        await following


async def test_a_silent_table_sends_heartbeats(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, subscription_heartbeat_ms=5) as service:
        await service.create_table()
        call, following = service.start("GET", SUBSCRIBE)
        while len(_answers(call)) < 4:
            await asyncio.wait_for(call.sent(len(call.answer.body)), 60)

        assert _rows(call) == []
        call.disconnect()
        await following


async def test_a_reader_that_fell_behind_gets_everything_from_the_log(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, subscription_page_bytes_max=4_096) as service:
        await service.create_table()
        call, following = await _stalled(service)
        for start in range(0, 1_000, 10):
            await service.append([(0, 0, event_rows(start, start + 10))])

        call.takes_more.set()
        while sum(rows for _, _, rows in _rows(call)) < 1_000:
            await asyncio.wait_for(call.sent(len(call.answer.body)), 60)

        ids = [
            id_
            for answer in _answers(call)
            for _, batch in answer.batches
            for id_ in batch.column("id").to_pylist()
        ]
        assert ids == list(range(1_000))
        assert max(len(answer.batches) for answer in _answers(call)) < 20, "pages are bounded"
        call.disconnect()
        await following


async def test_a_reader_that_stalls_for_too_long_is_cut_off(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, answer_stall_timeout_ms=5) as service:
        await service.create_table()
        call, following = await _stalled(service)
        await service.append([(0, 0, event_rows(0, 3))])

        await asyncio.wait_for(following, 60)

        assert call.is_aborted
        assert not service.service.subscriptions


async def test_columns_are_projected(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        await service.append([(0, 0, event_rows(0, 3))])
        call, following = service.start(
            "GET", SUBSCRIBE, query={"start": "earliest", "columns": "name"}
        )
        while not _rows(call):
            await asyncio.wait_for(call.sent(len(call.answer.body)), 60)

        assert [b.schema.names for a in _answers(call) for _, b in a.batches] == [["name"]]
        call.disconnect()
        await following


async def test_a_dropped_table_ends_its_subscriptions_cleanly(tmp_path: Path) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        call, following = service.start("GET", SUBSCRIBE)
        await call.sent(0)

        await service.call("DELETE", "/v1/tables/events")

        assert (await asyncio.wait_for(following, 60)).is_complete


@pytest.mark.parametrize(
    ("query", "code", "message"),
    [
        ({"start": "now"}, "invalid_request", "must be a JSON object of bucket to offset"),
        ({"start": '{"1": 0}'}, "invalid_request", "table 'default.events' has no bucket 1"),
        ({"start": '{"0": 9}', "table_id": "1"}, "offset_out_of_range", "which has offsets 0 to 0"),
        ({"columns": "x"}, "unknown_column", "has no column 'x'"),
        ({"from": "0"}, "invalid_request", "unknown parameter 'from'"),
    ],
)
async def test_a_bad_subscription_is_refused_in_one_sentence(
    tmp_path: Path, query: dict[str, str], code: str, message: str
) -> None:
    async with in_process_service(tmp_path) as service:
        await service.create_table()
        answer = await service.call("GET", SUBSCRIBE, query=query)
        assert answer.error()[1] == code
        assert message in answer.error()[2]


async def test_too_many_subscriptions_are_refused(tmp_path: Path) -> None:
    async with in_process_service(tmp_path, subscriptions_max=1) as service:
        await service.create_table()
        call, following = service.start("GET", SUBSCRIBE)
        await call.sent(0)

        answer = await service.call("GET", SUBSCRIBE)

        assert answer.error()[:2] == (503, "overloaded")
        assert "(subscriptions_max)" in answer.error()[2]
        call.disconnect()
        await following
