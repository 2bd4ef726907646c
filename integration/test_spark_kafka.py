"""Spark reads what a Kafka client writes while it writes: every acknowledged record, once."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from pyspark.sql import DataFrame
from pyspark.sql.streaming import StreamingQuery

from integration.spark_world import EXPIRING, SparkWorld, spark_session
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(900)]

READINGS: Final = pa.schema([pa.field("id", pa.int64(), nullable=False), ("number", pa.int64())])
_BUCKETS: Final = 2
_KEYS: Final = 100
_PATIENCE_S: Final = 240.0


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkWorld]:
    arguments = ("--kafka-port", "0", "--retention-interval-ms", "100")
    with (
        ServiceProcess(tmp_path_factory.mktemp("kafka"), *arguments) as service,
        spark_session() as session,
    ):
        opened = SparkWorld(service, session)
        yield opened
        opened.client.close()


class Writer(threading.Thread):
    """An idempotent producer that numbers its records, a few at a time, until it is ended."""

    def __init__(self, brokers: str, topic: str) -> None:
        super().__init__(name="producer", daemon=True)
        self._topic = topic
        self._sent = 0
        self._acknowledged = [0]
        self._refused: list[str] = []
        self._is_over = threading.Event()
        self._producer = Producer(
            {"bootstrap.servers": brokers, "enable.idempotence": True, "linger.ms": 5}
        )

    @property
    def acknowledged(self) -> int:
        """How many records are: those below, for each is sent once the ones before it are."""
        return self._acknowledged[0]

    def run(self) -> None:
        while not self._is_over.wait(0.02):
            for number in range(self._sent, self._sent + 40):
                row = {"id": number % _KEYS, "number": number}
                self._producer.produce(
                    self._topic,
                    json.dumps(row),
                    json.dumps({"id": row["id"]}),
                    partition=number % _BUCKETS,
                    on_delivery=self._delivered,
                )
            self._sent += 40
            left = self._producer.flush(_PATIENCE_S)
            if left or self._refused:
                return
            self._acknowledged[0] = self._sent

    def end(self) -> int:
        """Let it write no more; return how many records were acknowledged, which are all."""
        self._is_over.set()
        self.join(_PATIENCE_S)
        assert not self.is_alive()
        assert self._refused == []
        assert self.acknowledged == self._sent
        return self._sent

    def _delivered(self, error: Any, _: Any) -> None:
        if error is not None:
            self._refused.append(str(error))


@contextlib.contextmanager
def _writing(world: SparkWorld, topic: str) -> Iterator[Writer]:
    writer = Writer(world.service.kafka_address, topic)
    writer.start()
    try:
        yield writer
    finally:
        writer.end()


class Batches:
    """What each micro-batch of a query had; one that is repeated counts once."""

    def __init__(self) -> None:
        self._rows: dict[int, list[tuple[int, int]]] = {}

    def __call__(self, frame: DataFrame, batch_id: int) -> None:
        rows = frame.select("id", "number").collect()
        self._rows[batch_id] = [(row.id, row.number) for row in rows]

    @property
    def numbers(self) -> list[int]:
        return [number for rows in dict(self._rows).values() for _, number in rows]


def _start(world: SparkWorld, path: str, sink: Batches, checkpoint: Path) -> StreamingQuery:
    writer = world.stream(path).writeStream.foreachBatch(sink)
    return writer.option("checkpointLocation", str(checkpoint)).start()


def _has_left_the_log(world: SparkWorld, path: str) -> bool:
    """Tier once more; whether the first rows of every bucket are in the lake alone."""
    world.tier(path)
    return all(p.log_start_offset > 0 for p in world.client.positions(path).values())


def _wait_until(is_so: Callable[[], bool], query: StreamingQuery) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        assert query.exception() is None
        query.awaitTermination(0.1)


def test_a_stream_and_reads_have_every_acknowledged_record_once(
    world: SparkWorld, tmp_path: Path
) -> None:
    path = "default.readings"
    world.client.create_table(path, READINGS, bucket_count=_BUCKETS, properties=EXPIRING)
    sink = Batches()

    def read() -> None:
        """What was acknowledged before is there, once, and nothing that nobody sent."""
        least = writer.acknowledged
        numbers = sorted(row.number for row in world.load(path).select("number").collect())
        assert numbers[:least] == list(range(least))
        assert Counter(numbers).most_common(1)[0][1] == 1

    with _writing(world, path) as writer:
        query = _start(world, path, sink, tmp_path)
        _wait_until(lambda: len(sink.numbers) > 500, query)
        read()
        _wait_until(lambda: _has_left_the_log(world, path), query)
        read()
        _wait_until(lambda: len(sink.numbers) > 1_500, query)
        query.stop()

        while_stopped = writer.acknowledged
        world.tier(path)
        query = _start(world, path, sink, tmp_path)
        _wait_until(lambda: max(sink.numbers) > while_stopped, query)
        read()
        count = writer.end()
    query.processAllAvailable()
    query.stop()

    assert sorted(sink.numbers) == list(range(count))
    assert world.load(path).count() == count
    read()


def test_a_table_by_key_has_the_last_value_of_each_key(world: SparkWorld, tmp_path: Path) -> None:
    path = "default.levels"
    # Its changes stay in the log: those that leave it are gone for a stream that has not read them.
    world.client.create_table(path, READINGS, primary_key=["id"], bucket_count=_BUCKETS)
    newest: dict[int, int] = {}

    def follow(frame: DataFrame, _: int) -> None:
        for row in frame.where("__change_type IN ('+I', '+U')").select("id", "number").collect():
            # A batch may be repeated, but no key ever goes back for good.
            newest[row.id] = max(newest.get(row.id, -1), row.number)

    def read() -> dict[int, int]:
        """No key is older than what was acknowledged of it before."""
        least = writer.acknowledged
        rows = world.load(path).select("id", "number").collect()
        found = {row.id: row.number for row in rows}
        assert len(rows) == len(found)
        for number in range(max(0, least - _KEYS), least):
            assert found[number % _KEYS] >= number
            assert found[number % _KEYS] % _KEYS == number % _KEYS
        return found

    def start() -> StreamingQuery:
        writing = world.stream(path).writeStream.foreachBatch(follow)
        return writing.option("checkpointLocation", str(tmp_path)).start()

    with _writing(world, path) as writer:
        query = start()
        _wait_until(lambda: len(newest) == _KEYS, query)
        read()
        world.tier(path)
        read()
        query.stop()
        while_stopped = writer.acknowledged
        query = start()
        _wait_until(lambda: max(newest.values()) > while_stopped, query)
        world.tier(path)
        read()
        count = writer.end()
    query.processAllAvailable()
    query.stop()

    last = {number % _KEYS: number for number in range(count - _KEYS, count)}
    assert read() == last
    assert newest == last
