"""A topic is made again under consumers that stay open: they read all of the new table."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import pyarrow as pa
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer
from kafka import KafkaConsumer

from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

pytestmark = pytest.mark.slow

_SCHEMA: Final = pa.schema([pa.field("value", pa.binary())])
_PATIENCE_S: Final = 60.0


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    directory = tmp_path_factory.mktemp("kafka")
    # Else clients make the topic again by asking for it.
    arguments = ("--kafka-port", "0", "--kafka-auto-create", "false")
    with ServiceProcess(directory, *arguments) as opened:
        yield opened


def _make(client: StreamhouseClient, table: str, first: int, count: int) -> list[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    client.create_table(table, _SCHEMA, bucket_count=1)
    client.append(table, pa.table({"value": values}, schema=_SCHEMA))
    return values


def _read_all(poll: Callable[[], list[bytes]], count: int) -> list[bytes]:
    found: list[bytes] = []
    give_up = time.monotonic() + _PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < give_up, found
        found += poll()
    return found


def _librdkafka(brokers: str, topic: str) -> tuple[Callable[[], list[bytes]], Callable[[], Any]]:
    settings = {"bootstrap.servers": brokers, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "auto.commit.interval.ms": 100})
    consumer.subscribe([topic])

    def poll() -> list[bytes]:
        return [m.value() or b"" for m in consumer.consume(100, 0.2) if m.error() is None]

    return poll, consumer.close


def _kafka_python(brokers: str, topic: str) -> tuple[Callable[[], list[bytes]], Callable[[], Any]]:
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=brokers,
        group_id=topic,
        auto_offset_reset="earliest",
        auto_commit_interval_ms=100,
    )

    def poll() -> list[bytes]:
        return [r.value for of_one in consumer.poll(200).values() for r in of_one]

    return poll, consumer.close


def _aiokafka(brokers: str, topic: str) -> tuple[Callable[[], list[bytes]], Callable[[], Any]]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(made: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(made, loop).result(_PATIENCE_S)

    async def opened() -> Any:
        consumer = AIOKafkaConsumer(
            topic,
            bootstrap_servers=brokers,
            group_id=topic,
            auto_offset_reset="earliest",
            auto_commit_interval_ms=100,
        )
        await consumer.start()
        return consumer

    consumer = run(opened())

    def poll() -> list[bytes]:
        found = run(consumer.getmany(timeout_ms=200))
        return [r.value for of_one in found.values() for r in of_one]

    def close() -> None:
        run(consumer.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    return poll, close


_KINDS: Final = {"librdkafka": _librdkafka, "kafka-python": _kafka_python, "aiokafka": _aiokafka}


@pytest.mark.end_to_end
@pytest.mark.parametrize("count", [3, 8])
@pytest.mark.parametrize("kind", _KINDS)
def test_an_open_consumer_reads_all_of_a_topic_that_was_made_again(
    service: ServiceProcess, kind: str, count: int
) -> None:
    table = f"again_{kind.replace('-', '_')}_{count}"
    with StreamhouseClient(service.endpoint) as client:
        before = _make(client, table, 0, count)
        poll, close = _KINDS[kind](service.kafka_address, table)
        try:
            assert _read_all(poll, count) == before
            client.drop_table(table)
            after = _make(client, table, 100, 8)
            assert _read_all(poll, 8) == after
        finally:
            close()
