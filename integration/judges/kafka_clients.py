"""Kafka's clients that know nothing of us, each behind the same few calls.

What is read is in the order of each partition.
"""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from confluent_kafka import Consumer, KafkaException, Message, Producer
from kafka import KafkaConsumer, KafkaProducer

from integration.judges.debian_command import DebianCommand

__all__ = [
    "CLIENTS",
    "COMPRESSIONS",
    "AioKafka",
    "Headers",
    "KafkaPython",
    "Kcat",
    "Librdkafka",
    "Read",
    "Record",
    "read_by_librdkafka",
]

COMPRESSIONS: Final = ("none", "gzip", "snappy", "lz4", "zstd")
_PATIENCE_S: Final = 60.0

Headers = tuple[tuple[str, bytes | None], ...]


class Record(NamedTuple):
    """A record to produce; without a timestamp the client says when it was."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int | None = None
    headers: Headers = ()


class Read(NamedTuple):
    """A record as a consumer was given it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers


def read_by_librdkafka(message: Message) -> Read:
    """Return what librdkafka says of a record."""
    return Read(
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        message.timestamp()[1],
        tuple(message.headers() or ()),
    )


def _read(record: Any) -> Read:
    """Return what the clients in Python say of a record."""
    place = record.partition, record.offset
    return Read(*place, record.key, record.value, record.timestamp, tuple(record.headers))


class Librdkafka:
    """confluent-kafka, the binding of librdkafka, as those of C, Go, .NET and Rust are."""

    writes_null_headers = True

    def __init__(self, brokers: str, **settings: Any) -> None:
        self._settings = {"bootstrap.servers": brokers, **settings}

    def produce(
        self, topic: str, records: Sequence[Record], *, compression: str = "none"
    ) -> list[tuple[int, int]]:
        """Send all; return partition and offset of each, as they were acknowledged."""
        places: list[tuple[int, int]] = []

        def delivered(error: Any, message: Any) -> None:
            if error is not None:
                raise KafkaException(error)
            places.append((message.partition(), message.offset()))

        producer = Producer(
            {
                **self._settings,
                "enable.idempotence": True,
                "compression.type": compression,
                "linger.ms": 2,
            }
        )
        for record in records:
            # Zero is now, for this client.
            said = {
                "on_delivery": delivered,
                "timestamp": record.timestamp_ms or 0,
                "headers": list(record.headers),
            }
            while True:
                try:
                    producer.produce(topic, record.value, record.key, **said)
                    break
                except BufferError:
                    producer.poll(0.1)
            producer.poll(0)
        assert producer.flush(_PATIENCE_S) == 0
        return places

    def consume(self, topic: str, count: int, *, group: str = "readers") -> list[Read]:
        """Read so many records from where the group stands, and commit what was read."""
        consumer = Consumer(
            {
                **self._settings,
                "group.id": group,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
            }
        )
        consumer.subscribe([topic])
        found: list[Read] = []
        give_up = time.monotonic() + _PATIENCE_S
        try:
            while len(found) < count and time.monotonic() < give_up:
                for message in consumer.consume(count - len(found), 1.0):
                    if message.error():
                        raise KafkaException(message.error())
                    found.append(read_by_librdkafka(message))
            consumer.commit(asynchronous=False)
        finally:
            consumer.close()
        return found


class KafkaPython:
    """kafka-python, which is Python alone."""

    writes_null_headers = False

    def __init__(self, brokers: str, **settings: Any) -> None:
        self._settings = {"bootstrap_servers": brokers, **settings}

    def produce(
        self, topic: str, records: Sequence[Record], *, compression: str = "none"
    ) -> list[tuple[int, int]]:
        """As `Librdkafka.produce`."""
        producer = KafkaProducer(
            **self._settings, compression_type=None if compression == "none" else compression
        )
        sent = [
            producer.send(
                topic,
                key=record.key,
                value=record.value,
                timestamp_ms=record.timestamp_ms,
                headers=list(record.headers),
            )
            for record in records
        ]
        producer.flush(_PATIENCE_S)
        places = [future.get(_PATIENCE_S) for future in sent]
        producer.close()
        return [(place.partition, place.offset) for place in places]

    def consume(self, topic: str, count: int, *, group: str = "readers") -> list[Read]:
        """As `Librdkafka.consume`."""
        consumer = KafkaConsumer(
            topic,
            **self._settings,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            max_poll_records=count,
        )
        found: list[Read] = []
        give_up = time.monotonic() + _PATIENCE_S
        try:
            while len(found) < count and time.monotonic() < give_up:
                for messages in consumer.poll(
                    timeout_ms=1_000, max_records=count - len(found)
                ).values():
                    found += map(_read, messages)
            consumer.commit()
        finally:
            consumer.close()
        return found


class AioKafka:
    """aiokafka, on an event loop."""

    writes_null_headers = True

    def __init__(self, brokers: str, **settings: Any) -> None:
        self._settings = {"bootstrap_servers": brokers, **settings}

    def produce(
        self, topic: str, records: Sequence[Record], *, compression: str = "none"
    ) -> list[tuple[int, int]]:
        """As `Librdkafka.produce`."""

        async def send() -> list[tuple[int, int]]:
            kind = None if compression == "none" else compression
            producer = AIOKafkaProducer(
                **self._settings, enable_idempotence=True, compression_type=kind
            )
            await producer.start()
            try:
                sent = [
                    await producer.send(
                        topic,
                        record.value,
                        record.key,
                        timestamp_ms=record.timestamp_ms,
                        headers=list(record.headers),
                    )
                    for record in records
                ]
                return [(place.partition, place.offset) for place in await asyncio.gather(*sent)]
            finally:
                await producer.stop()

        return asyncio.run(send())

    def consume(self, topic: str, count: int, *, group: str = "readers") -> list[Read]:
        """As `Librdkafka.consume`."""

        async def read() -> list[Read]:
            consumer = AIOKafkaConsumer(
                topic,
                **self._settings,
                group_id=group,
                auto_offset_reset="earliest",
                enable_auto_commit=False,
            )
            await consumer.start()
            found: list[Read] = []
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    while len(found) < count:
                        read = await consumer.getmany(
                            timeout_ms=1_000, max_records=count - len(found)
                        )
                        for messages in read.values():
                            found += map(_read, messages)
                    await consumer.commit()
            finally:
                await consumer.stop()
            return found

        return asyncio.run(read())


class Kcat:
    """kcat, Debian's command; not everywhere."""

    def __init__(self, command: DebianCommand, brokers: str) -> None:
        self._command = command
        self._brokers = brokers

    def _run(self, *arguments: str, text: str = "") -> str:
        done = subprocess.run(
            [self._command.path, "-b", self._brokers, *arguments],
            env=self._command.environment,
            input=text,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        return done.stdout

    def list_topics(self) -> str:
        """Return what it says of brokers, topics and partitions."""
        return self._run("-L")

    def produce(self, topic: str, lines: Sequence[str]) -> None:
        """Send lines of key:value."""
        self._run("-t", topic, "-P", "-K", ":", text="".join(f"{line}\n" for line in lines))

    def consume(self, topic: str) -> list[str]:
        """Read all there is, as lines of key:value."""
        return self._run(
            *("-t", topic, "-C", "-o", "beginning", "-e", "-q", "-f", "%k:%s\n")
        ).splitlines()


CLIENTS: Final[dict[str, Callable[..., Librdkafka | KafkaPython | AioKafka]]] = {
    "librdkafka": Librdkafka,
    "kafka-python": KafkaPython,
    "aiokafka": AioKafka,
}
