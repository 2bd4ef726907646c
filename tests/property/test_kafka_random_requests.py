"""Whatever Kafka clients ask, it is answered or their connection ends, and the service goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from tests.support.examples import examples
from tests.support.fetch_world import MemoryHistory, fetch, fetched, tiered_clicks
from tests.support.in_process_service import EVENTS
from tests.support.kafka_world import KafkaClient, KafkaWorld, kafka_world
from tests.support.random_requests import DrawnRequest, RandomRequests

_REQUESTS = 150
_TOPICS = ("clicks", "keyed", "typed", "avro", "sifted")


@contextlib.contextmanager
def _no_bug() -> Iterator[list[str]]:
    """Collect what the log says of bugs."""
    found: list[str] = []

    class Bugs(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "event=bug" in (text := self.format(record)):
                found.append(text)

    handler = Bugs(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger().removeHandler(handler)


async def _make_tables(world: KafkaWorld, history: MemoryHistory) -> None:
    await tiered_clicks(world, history)
    create = world.http.create_table
    changes = {"kafka.changes.format": "debezium-json"}
    await create("keyed", EVENTS, primary_key=("id",), bucket_count=2, properties=changes)
    await create("typed", EVENTS, bucket_count=2)
    await create("avro", EVENTS, bucket_count=2, properties={"kafka.value.format": "avro"})
    await create("sifted", EVENTS, bucket_count=2, properties={"kafka.on.error": "reject"})


async def _ask(world: KafkaWorld, client: KafkaClient, request: DrawnRequest) -> bool:
    """Send a request; whether the connection is there for another one."""
    if request.is_answered and not request.is_damaged:
        client.writer.write(request.data)
        number = struct.unpack_from(">i", request.data, 8)[0]
        try:
            await client.answer(request.api_key, request.version, number)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        return True
    # It may wait for others, or be a part of a longer one: nothing more comes from this client.
    alone = await world.client()
    alone.writer.write(request.data)
    with contextlib.suppress(ConnectionError):
        alone.writer.write_eof()
        async with asyncio.timeout(60):
            await alone.reader.read()
    return True


async def _run(seed: int) -> None:
    drawn = RandomRequests(random.Random(seed), _TOPICS)
    history = MemoryHistory()
    with tempfile.TemporaryDirectory() as folder, _no_bug() as bugs:
        async with kafka_world(Path(folder), history=history) as world:
            await _make_tables(world, history)
            client = await world.client()
            for number in range(1, _REQUESTS):
                request = drawn.draw(number)
                if not await _ask(world, client, request):
                    await client.close()
                    client = await world.client()
                assert not bugs, (request, bugs)

            found = fetched(await fetch(await world.client(), {"clicks": {0: 0}}))["clicks", 0]
            assert not isinstance(found, ErrorCode)
            assert [record.value for record in found[:3]] == [
                b"v0........",
                b"v1........",
                b"v2........",
            ]
    assert not bugs, bugs


@given(seed=st.integers(0, (1 << 32) - 1))
@example(seed=1)
@settings(max_examples=examples(5))
def test_random_requests_end_in_answers_or_closed_connections(seed: int) -> None:
    asyncio.run(_run(seed))
