"""The async client without a service: cancelled and refused calls, and what comes in batches."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from queue import Queue

import pyarrow as pa
import pytest

from streamhouse.api.async_client import (
    CALLS_MAX,
    AsyncScan,
    AsyncStreamhouseClient,
    AsyncSubscription,
)
from streamhouse.client import Source, StopSignal, Subscription
from streamhouse.core.errors import InvalidRequestError, UnavailableError
from streamhouse.reading.plan.pinned_table import TableScan
from tests.support.scripted_server import Act, ScriptedServer

NOWHERE = "http://127.0.0.1:1"
WAIT_S = 60
NUMBERS = pa.schema([("n", pa.int64())])


async def _until_set(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, WAIT_S)


async def test_a_cancelled_call_frees_its_thread_and_its_connection_is_not_used_again() -> None:
    came = threading.Semaphore(0)
    empty = b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + b'{"databases":[]}'

    def silent(opened: object) -> None:
        came.release()

    with ScriptedServer(*[[Act.LISTEN, silent, Act.STALL]] * CALLS_MAX, [empty]) as server:
        async with AsyncStreamhouseClient(server.endpoint) as client:
            calls = [asyncio.create_task(client.list_databases()) for _ in range(CALLS_MAX)]
            for _ in calls:
                assert await asyncio.to_thread(came.acquire, timeout=WAIT_S)
            for call in calls:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended)

            # All threads waited for an answer that never comes; this one is on another connection.
            assert await asyncio.wait_for(client.list_databases(), WAIT_S) == []
            assert server.connections == CALLS_MAX + 1


async def test_a_closed_client_answers_what_is_under_way_and_refuses_the_rest() -> None:
    client = AsyncStreamhouseClient(NOWHERE)
    begun, may_end = threading.Semaphore(0), threading.Event()

    def call() -> str:
        begun.release()
        assert may_end.wait(WAIT_S)
        return "answered"

    under_way = [asyncio.create_task(client.run(call)) for _ in range(CALLS_MAX)]
    for _ in under_way:
        assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
    waiting = asyncio.create_task(client.run(call))
    await asyncio.sleep(0)
    closing = asyncio.create_task(client.aclose())
    with pytest.raises(InvalidRequestError, match="is closed; make another one"):
        await waiting
    may_end.set()
    assert await asyncio.gather(*under_way) == ["answered"] * CALLS_MAX
    await closing
    with pytest.raises(InvalidRequestError, match="is closed; make another one"):
        await client.count("t")
    await client.aclose()


async def test_a_call_that_waits_for_its_turn_is_cancelled_without_being_made() -> None:
    begun, may_end = threading.Semaphore(0), threading.Event()
    made = []

    def call() -> None:
        begun.release()
        assert may_end.wait(WAIT_S)

    async with AsyncStreamhouseClient(NOWHERE) as client:
        under_way = [asyncio.create_task(client.run(call)) for _ in range(CALLS_MAX)]
        for _ in under_way:
            assert await asyncio.to_thread(begun.acquire, timeout=WAIT_S)
        waiting = asyncio.create_task(client.run(lambda: made.append(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        may_end.set()
        await asyncio.gather(*under_way)
    assert made == []


async def test_a_scan_gives_its_batches_in_order_and_closes() -> None:
    batches = [pa.record_batch({"n": [i]}, schema=NUMBERS) for i in range(5)]
    ended = threading.Event()

    def read() -> Generator[pa.RecordBatch]:
        try:
            yield from batches
        finally:
            ended.set()

    async with AsyncStreamhouseClient(NOWHERE) as client:
        async with AsyncScan(TableScan(NUMBERS, read()), client) as scan:
            assert scan.schema == NUMBERS
            assert [batch async for batch in scan] == batches
        ended.clear()
        async with AsyncScan(TableScan(NUMBERS, read()), client) as scan:
            assert await anext(scan) == batches[0]
        assert ended.is_set()
        with pytest.raises(InvalidRequestError, match="this scan is closed"):
            await anext(scan)


async def test_a_scan_whose_wait_was_cancelled_ends_and_says_so() -> None:
    asked, may_go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def read() -> Generator[pa.RecordBatch]:
        try:
            asked.set()
            assert may_go_on.wait(WAIT_S)
            yield pa.record_batch({"n": [1]}, schema=NUMBERS)
        finally:
            ended.set()

    async with AsyncStreamhouseClient(NOWHERE) as client:
        scan = AsyncScan(TableScan(NUMBERS, read()), client)
        first = asyncio.create_task(anext(scan))
        await _until_set(asked)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        closing = asyncio.create_task(scan.aclose())
        may_go_on.set()
        await closing
        assert ended.is_set()
        with pytest.raises(InvalidRequestError, match="this scan is closed"):
            await anext(scan)


def _source(name: str, batches: Queue[int | Exception]) -> Source[int]:
    stop = StopSignal()

    def pulled() -> Generator[int]:
        while True:
            batch = batches.get(timeout=WAIT_S)
            # What a connection says that is shut down.
            if stop.is_set():
                raise UnavailableError("shut down")
            if isinstance(batch, Exception):
                raise batch
            yield batch

    return Source(name, pulled(), stop=stop)


async def test_a_subscription_loses_no_batch_when_waits_for_it_are_cancelled() -> None:
    tables: list[Queue[int | Exception]] = [Queue(), Queue()]
    followed = Subscription([_source("a", tables[0]), _source("b", tables[1])])
    async with AsyncStreamhouseClient(NOWHERE) as client:
        batches = AsyncSubscription(followed, client)
        found: list[int] = []
        for number in range(100):
            waiting = asyncio.create_task(anext(batches))
            # Cancelled now before it waits, now while it does, now with a batch on its way.
            for _ in range(number % 4):
                await asyncio.sleep(0)
            tables[number % 2].put(number)
            waiting.cancel()
            try:
                found.append(await waiting)
            except asyncio.CancelledError:
                found.append(await asyncio.wait_for(anext(batches), WAIT_S))
        assert found == list(range(100))

        last = asyncio.create_task(anext(batches, None))
        await asyncio.sleep(0)
        closing = asyncio.create_task(batches.aclose())
        assert await asyncio.wait_for(last, WAIT_S) is None
        for table in tables:
            table.put(-1)
        await closing
        assert batches.is_closed


async def test_a_failure_of_a_table_is_raised_once_and_closes_the_subscription() -> None:
    table: Queue[int | Exception] = Queue()
    table.put(1)
    table.put(UnavailableError("gone"))
    async with AsyncStreamhouseClient(NOWHERE) as client:
        batches = AsyncSubscription(Subscription([_source("a", table)]), client)
        assert await anext(batches) == 1
        with pytest.raises(UnavailableError, match="gone"):
            await anext(batches)
        assert batches.is_closed
        assert [batch async for batch in batches] == []
