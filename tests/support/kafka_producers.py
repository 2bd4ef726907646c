"""Idempotent Kafka producers and a consumer group that outlive their service, and a judgement.

The producers do what Kafka's clients do: number their records per partition, have five batches in
flight, and on a broken connection or an error that may pass send again what was not answered, in
order. They judge more strictly: a batch that is the next one is never refused for its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

import pyarrow as pa
from kio.schema.errors import ErrorCode

from streamhouse.client import StorageClient
from streamhouse.core.model.changelog import INSERT, UPDATE_AFTER
from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.kafka_batches import produced, records
from tests.support.kafka_world import KafkaClient

__all__ = [
    "Batch",
    "BrokerPlace",
    "IdempotentProducer",
    "ShardedPlace",
    "StandingGroup",
    "create_topics",
    "judge_topics",
    "topic_producers",
]

PRODUCE: Final = 0
METADATA: Final = 3
OFFSET_COMMIT: Final = 8
OFFSET_FETCH: Final = 9
COORDINATOR: Final = 10
# Between two attempts, as every client waits.
_BACKOFF_S: Final = 0.01
_IN_FLIGHT: Final = 5
_MAY_PASS: Final = {
    ErrorCode.kafka_storage_error,
    ErrorCode.not_enough_replicas_after_append,
    ErrorCode.not_leader_or_follower,
    ErrorCode.request_timed_out,
}
_MAY_PASS_WHILE_MOVED: Final = {
    ErrorCode.leader_not_available,
    ErrorCode.not_leader_or_follower,
    ErrorCode.unknown_topic_or_partition,
}
_MAY_PASS_FOR_GROUPS: Final = {
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.coordinator_not_available,
    ErrorCode.not_coordinator,
}
_BROKEN: Final = (OSError, asyncio.IncompleteReadError, TimeoutError)
_TEXTS: Final = pa.schema([pa.field("value", pa.string())])
_KEYED: Final = pa.schema(
    [pa.field("key", pa.binary(), nullable=False), pa.field("value", pa.binary())]
)
_RAW_PARTITIONS: Final = 2
_KEYED_PARTITIONS: Final = 3

Batch = list[tuple[bytes | None, bytes]]


class BrokerPlace:
    """Where the broker is, while it is there."""

    def __init__(self) -> None:
        self._address = ""
        self._is_known = asyncio.Event()

    def is_at(self, address: str) -> None:
        """Say where it is from now on."""
        self._address = address
        self._is_known.set()

    def is_gone(self) -> None:
        """Let who connects wait."""
        self._is_known.clear()

    async def connect_to_leader(self, topic: str) -> KafkaClient:
        """Connect to who has a topic, once it is there."""
        return await self._connect()

    async def connect_to_coordinator(self, group_id: str) -> KafkaClient:
        """Connect to who has a group, once it is there."""
        return await self._connect()

    async def _connect(self) -> KafkaClient:
        await self._is_known.wait()
        return await KafkaClient.connect(self._address)


class ShardedPlace(BrokerPlace):
    """Several brokers, of which any tells who has a topic or a group; they may die, too."""

    def __init__(self, addresses: str, *, seed: int = 0) -> None:
        super().__init__()
        self._addresses = addresses.split(",")
        self._random = random.Random(f"place {seed}")

    async def connect_to_leader(self, topic: str) -> KafkaClient:
        async with self._anyone() as asked:
            told = await asked.call(
                METADATA, 9, topics=[{"name": topic}], allow_auto_topic_creation=False
            )
        (found,) = told.topics
        assert found.error_code in (ErrorCode.none, *_MAY_PASS_WHILE_MOVED), found
        if found.error_code is not ErrorCode.none:
            raise ConnectionResetError(str(found.error_code))
        if found.partitions[0].error_code in _MAY_PASS_WHILE_MOVED:
            raise ConnectionResetError("nobody leads it now")
        leader = found.partitions[0].leader_id
        (at,) = (f"{b.host}:{b.port}" for b in told.brokers if b.node_id == leader)
        return await KafkaClient.connect(at)

    async def connect_to_coordinator(self, group_id: str) -> KafkaClient:
        async with self._anyone() as asked:
            found = await asked.call(COORDINATOR, 3, key=group_id, key_type=0)
        if found.error_code is not ErrorCode.none:
            assert found.error_code in _MAY_PASS_FOR_GROUPS, found
            raise ConnectionResetError(str(found.error_code))
        return await KafkaClient.connect(f"{found.host}:{found.port}")

    @contextlib.asynccontextmanager
    async def _anyone(self) -> AsyncIterator[KafkaClient]:
        asked = await KafkaClient.connect(self._random.choice(self._addresses))
        try:
            yield asked
        finally:
            asked.writer.close()


class IdempotentProducer:
    """Sends batches to one partition, again until each is acknowledged."""

    def __init__(
        self, place: BrokerPlace, topic: str, partition: int, batches: Sequence[Batch]
    ) -> None:
        self.place, self.topic, self.partition = place, topic, partition
        self.batches = batches
        self.may_move = isinstance(place, ShardedPlace)
        self.acknowledged = 0
        """How many batches."""
        self._limit = len(batches)
        self._is_raised = asyncio.Event()
        self.producer_id = random.Random(f"{topic} {partition}").getrandbits(63)
        self.starts = [0]
        for batch in batches:
            self.starts.append(self.starts[-1] + len(batch))

    @property
    def values(self) -> list[bytes]:
        """All values, in the order in which they are sent."""
        return [value for batch in self.batches for _, value in batch]

    def may_send(self, batch_count: int) -> None:
        """Let it send so many batches, and wait then until it may send more."""
        self._limit = min(batch_count, len(self.batches))
        self._is_raised.set()

    async def run(self, on_acknowledged: Callable[[], None] = lambda: None) -> None:
        """Return once every batch is acknowledged."""
        while self.acknowledged < len(self.batches):
            with contextlib.suppress(*_BROKEN):
                client = await self.place.connect_to_leader(self.topic)
                try:
                    await self._send_all(client, on_acknowledged)
                finally:
                    client.writer.close()
            await asyncio.sleep(_BACKOFF_S)

    async def _send_all(self, client: KafkaClient, on_acknowledged: Callable[[], None]) -> None:
        """Send what is not acknowledged until all is, or something is to be sent again."""
        flying: list[int] = []
        sent = self.acknowledged
        while self.acknowledged < len(self.batches):
            while sent < self._limit and len(flying) < _IN_FLIGHT:
                flying.append(client.send(PRODUCE, 9, **self._request(sent)))
                sent += 1
            if not flying:
                self._is_raised.clear()
                await self._is_raised.wait()
                continue
            answer = await client.answer(PRODUCE, 9, flying.pop(0))
            error = answer.responses[0].partition_responses[0].error_code
            if error in _MAY_PASS or (self.may_move and error in _MAY_PASS_WHILE_MOVED):
                return
            assert error is ErrorCode.none, (self.topic, self.acknowledged, error)
            self.acknowledged += 1
            on_acknowledged()

    def _request(self, number: int) -> dict[str, Any]:
        keys, values = zip(*self.batches[number], strict=True)
        batch = produced(
            records(values, keys=keys),
            producer_id=self.producer_id,
            epoch=0,
            sequence=self.starts[number],
        )
        data = [{"index": self.partition, "records": batch}]
        return {
            "acks": -1,
            "timeout": timedelta(seconds=10),
            "topic_data": [{"name": self.topic, "partition_data": data}],
        }


class StandingGroup:
    """A group that commits positions in a producer's partition, forward and back, again and again.

    Whenever it connects, the position is the last one that was acknowledged, or the one after that,
    of which the answer was lost.
    """

    def __init__(self, producer: IdempotentProducer, *, seed: int) -> None:
        self._producer = producer
        self._random = random.Random(f"group {seed}")
        # A group that never committed has none.
        self._committed = -1
        self._committing = -1
        self._has_committed = asyncio.Event()

    async def run(self) -> None:
        """Go on until it is cancelled."""
        try:
            while True:
                await self._connected(self._work)
                await asyncio.sleep(_BACKOFF_S)
        finally:
            self._has_committed.set()

    async def end(self, running: asyncio.Future[None]) -> None:
        """End `running` once it has committed, and judge once more; raises what it raised."""
        await self._has_committed.wait()
        running.cancel()
        await asyncio.wait([running])
        if not running.cancelled():
            running.result()
        while not await self._connected(self.judge):
            await asyncio.sleep(_BACKOFF_S)

    async def _connected(self, act: Callable[[KafkaClient], Awaitable[bool]]) -> bool:
        """Do it on a connection of its own; False if that broke."""
        with contextlib.suppress(*_BROKEN):
            client = await self._producer.place.connect_to_coordinator("standing")
            try:
                return await act(client)
            finally:
                client.writer.close()
        return False

    async def _work(self, client: KafkaClient) -> bool:
        if not await self.judge(client):
            return False
        while True:
            producer = self._producer
            self._committing = self._random.randint(0, producer.starts[producer.acknowledged])
            part = {"partition_index": producer.partition, "committed_offset": self._committing}
            answer = await client.call(
                OFFSET_COMMIT,
                7,
                group_id="standing",
                generation_id_or_member_epoch=-1,
                member_id="",
                topics=[{"name": producer.topic, "partitions": [part]}],
            )
            error = answer.topics[0].partitions[0].error_code
            if error in _MAY_PASS_FOR_GROUPS:
                return False
            assert error is ErrorCode.none, error
            self._committed = self._committing
            self._has_committed.set()

    async def judge(self, client: KafkaClient) -> bool:
        """Judge where the group is; whether that was answered."""
        topic = {"name": self._producer.topic, "partition_indexes": [self._producer.partition]}
        answer = await client.call(OFFSET_FETCH, 5, group_id="standing", topics=[topic])
        part = answer.topics[0].partitions[0] if answer.topics else None
        error = answer.error_code if part is None else part.error_code
        if {error, answer.error_code} & _MAY_PASS_FOR_GROUPS:
            return False
        assert part is not None, answer
        assert {part.error_code, answer.error_code} == {ErrorCode.none}, answer
        assert part.committed_offset in (self._committed, self._committing), (
            f"the group is at {part.committed_offset}; {self._committed} was acknowledged, and"
            f" {self._committing} sent last"
        )
        self._committed = part.committed_offset
        return True


# -- three topics, which differ in how a producer's order is kept ---------------------------------


def create_topics(client: StorageClient) -> None:
    """Make a log of records, a table with a primary key, and one that keeps bad records apart."""
    client.create_table("raw", pa.schema(RAW_TOPIC), bucket_count=_RAW_PARTITIONS)
    client.create_table("sifted", _TEXTS, properties={"kafka.on.error": "reject"})
    client.create_table("keyed", _KEYED, primary_key=["key"], bucket_count=_KEYED_PARTITIONS)


def topic_producers(place: BrokerPlace, *, batch_count: int) -> list[IdempotentProducer]:
    """Return a producer for each partition of the three topics."""

    def producer(topic: str, partition: int, batches: Iterator[Batch]) -> IdempotentProducer:
        return IdempotentProducer(place, topic, partition, list(batches))

    return [
        *(producer("raw", p, _logged(p, batch_count)) for p in range(_RAW_PARTITIONS)),
        *(producer("keyed", p, _keyed(p, batch_count)) for p in range(_KEYED_PARTITIONS)),
        producer("sifted", 0, _sifted(batch_count // 2)),
    ]


def _logged(partition: int, batch_count: int) -> Iterator[Batch]:
    drawn = random.Random(partition)
    numbers = iter(range(1_000_000))
    for _ in range(batch_count):
        yield [(None, b"%d" % next(numbers)) for _ in range(drawn.randrange(1, 40))]


def _keyed(partition: int, batch_count: int) -> Iterator[Batch]:
    """Some batches change nothing, most go to several buckets; keys are the partition's own."""
    drawn = random.Random(partition)
    for _ in range(batch_count):
        yield [
            (b"%d-%d" % (partition, key), b"%d" % drawn.randrange(2))
            for key in drawn.sample(range(30), drawn.choice([1, 1, 5, 30]))
        ]


def _sifted(batch_count: int) -> Iterator[Batch]:
    """Some records are no text: they are kept apart, and some batches have no others."""
    drawn = random.Random(5)
    numbers = iter(range(1_000_000))
    for _ in range(batch_count):
        yield [
            (None, drawn.choice([b"", b"", b"\xff"]) + b"%d" % next(numbers))
            for _ in range(drawn.choice([1, 2, 9]))
        ]


def judge_topics(client: StorageClient, producers: Sequence[IdempotentProducer]) -> None:
    """Every record of the producers, all acknowledged, is stored once and in their order."""
    by_topic: dict[str, list[IdempotentProducer]] = {}
    for producer in producers:
        by_topic.setdefault(producer.topic, []).append(producer)
    for producer, rows in zip(by_topic["raw"], _logged_rows(client, "raw"), strict=True):
        assert [row["value"] for row in rows] == producer.values
    changes: dict[bytes, list[bytes]] = {}
    for row in (row for rows in _logged_rows(client, "keyed") for row in rows):
        if row["__change_type"] in (INSERT, UPDATE_AFTER):
            changes.setdefault(row["key"], []).append(row["value"])
    assert changes == _expected_changes(by_topic["keyed"])
    (sifted,) = by_topic["sifted"]
    (rows,) = _logged_rows(client, "sifted")
    is_bad = [value.startswith(b"\xff") for value in sifted.values]
    assert [row["value"].encode() for row in rows] == [
        value for value, bad in zip(sifted.values, is_bad, strict=True) if not bad
    ]
    (kept,) = _logged_rows(client, "sifted$rejected")
    assert sorted(bytes.fromhex(json.loads(row["row"])["value"]) for row in kept) == sorted(
        value for value, bad in zip(sifted.values, is_bad, strict=True) if bad
    )


def _expected_changes(producers: Sequence[IdempotentProducer]) -> dict[bytes, list[bytes]]:
    expected: dict[bytes, list[bytes]] = {}
    for key, value in (row for producer in producers for b in producer.batches for row in b):
        assert key is not None
        before = expected.setdefault(key, [])
        if before[-1:] != [value]:
            before.append(value)
    return expected


def _logged_rows(client: StorageClient, table: str) -> list[list[dict[str, Any]]]:
    """Return what the log of every bucket has."""
    return [
        [
            row
            for batch in client.read_range(table, bucket, 0, positions.high_watermark)
            for row in batch.data.to_pylist()
        ]
        for bucket, positions in sorted(client.positions(table).items())
    ]
