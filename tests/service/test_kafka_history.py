"""A Kafka consumer reads a table from its first row, in Iceberg, into its log, while both change.

Rounds move rows to the lake, retention takes them out of the log, maintenance rewrites files and
expires snapshots between the fetches of one consumer: no record is missing, none comes twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from streamhouse.api.client import StreamhouseClient
from streamhouse.cli.client_commands.maintain import command as maintain
from streamhouse.client import StorageClient
from streamhouse.core.model.records.record_format import RAW_TOPIC
from tests.support.fetch_world import (
    FetchedRecord,
    fetch,
    list_offsets,
    next_offset_after,
    raw_rows,
    records_in,
)
from tests.support.kafka_world import KafkaClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

pytestmark = pytest.mark.slow

OPTIONS = ("--kafka-port", "0", "--retention-interval-ms", "20")
SHORT = {
    "table.log.ttl": "1ms",
    "table.log.segment-bytes": "64kb",
    "table.datalake.snapshot.max-age": "1ms",
    "table.datalake.snapshot.min-count": "1",
}
BUCKETS = 2
ROUNDS = 12
ORDERS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("note", pa.string()),
    ]
)


class Consumer:
    """Reads all partitions of a topic, a few bytes at a time, and remembers all that came."""

    def __init__(self, client: KafkaClient, topic: str) -> None:
        self.topic = topic
        self.records: dict[int, list[FetchedRecord]] = {bucket: [] for bucket in range(BUCKETS)}
        self.client = client
        self._offsets = dict.fromkeys(range(BUCKETS), 0)

    async def fetch(self, *, each: int = 20_000) -> bool:
        """Fetch once; whether it is not at the end yet."""
        answer = await fetch(
            self.client, {self.topic: self._offsets}, partition_max_bytes=each, wait_ms=10
        )
        is_behind = False
        for found in answer.responses[0].partitions:
            assert found.error_code == 0, found
            if found.records:
                bucket, offset = found.partition_index, self._offsets[found.partition_index]
                self.records[bucket] += records_in(found.records, since=offset)
                self._offsets[bucket] = next_offset_after(found.records)
            is_behind |= self._offsets[found.partition_index] < found.high_watermark
        return is_behind

    async def fetch_all(self) -> None:
        """Fetch up to the end."""
        while await self.fetch(each=1 << 20):
            pass


@contextlib.asynccontextmanager
async def consumers(
    service: ServiceProcess, topic: str
) -> AsyncIterator[tuple[Consumer, Consumer]]:
    """Two consumers of a topic: one for the whole time, one for the end."""
    host, port = service.kafka_address.rsplit(":", 1)
    clients = [KafkaClient(*await asyncio.open_connection(host, int(port))) for _ in range(2)]
    try:
        yield Consumer(clients[0], topic), Consumer(clients[1], topic)
    finally:
        for client in clients:
            await client.close()


@contextlib.contextmanager
def served(data_dir: Path) -> Iterator[tuple[ServiceProcess, StorageClient]]:
    """A service whose log forgets soon, and a client of it."""
    with (
        ServiceProcess(data_dir, *OPTIONS) as service,
        StorageClient(service.endpoint) as client,
    ):
        yield service, client


def orders(number: int, count: int = 500) -> pa.RecordBatch:
    ids = range(number * count, number * count + count)
    # Long enough that a round fills segments, which is when retention can take some.
    lines = [{"id": i, "region": f"r{i % 3}", "note": f"{i}" * 30} for i in ids]
    return pa.RecordBatch.from_pylist(lines, schema=ORDERS)


async def grow(
    client: StorageClient,
    consumer: Consumer,
    write: Callable[[int], object],
) -> None:
    """Write and tier, round after round, and let the consumer read a little between all steps."""
    for number in range(ROUNDS):
        write(number)
        await consumer.fetch()
        tier_once(client, f"default.{consumer.topic}")
        await consumer.fetch()
        if number % 4 == 3:
            done = CliRunner().invoke(maintain, [consumer.topic, "--endpoint", client.endpoint])
            assert done.exit_code == 0, done.output
            await consumer.fetch()
    write(ROUNDS)
    while not all(p.log_start_offset > 0 for p in client.positions(consumer.topic).values()):
        write(ROUNDS)
        tier_once(client, f"default.{consumer.topic}")


def subscribed(endpoint: str, topic: str, ends: Mapping[int, int]) -> dict[int, list[Any]]:
    """(offset, row) of every row that a subscription from the first one on brings."""
    rows: dict[int, list[Any]] = {bucket: [] for bucket in ends}
    with StreamhouseClient(endpoint) as client, client.subscribe(topic, start="full") as batches:
        for batch in batches:
            lines = batch.data.to_pylist()
            rows[batch.bucket] += zip(batch.offsets.to_pylist(), lines, strict=True)
            if all(rows[b] and rows[b][-1][0] + 1 >= end for b, end in ends.items()):
                return rows
    raise AssertionError("a subscription never ends")


async def test_a_raw_topic_is_read_from_its_first_row_while_rows_move(tmp_path: Path) -> None:
    with served(tmp_path) as (service, client):
        client.create_table("clicks", RAW_TOPIC, bucket_count=BUCKETS, properties=SHORT)
        async with consumers(service, "clicks") as (consumer, late):

            def write(number: int) -> None:
                client.append("clicks", raw_rows(number * 500, number * 500 + 500, value_bytes=200))

            await grow(client, consumer, write)
            await late.fetch_all()
            await consumer.fetch_all()

            ends = {b: p.high_watermark for b, p in client.positions("clicks").items()}
            assert late.records == consumer.records
            for bucket, end in ends.items():
                assert [record.offset for record in late.records[bucket]] == [*range(end)]
            rows = subscribed(service.endpoint, "clicks", ends)
            for bucket, found in late.records.items():
                assert [(r.offset, r.key, r.value) for r in found] == [
                    (offset, row["key"], row["value"]) for offset, row in rows[bucket]
                ]
            # Times are found in the lake: the one of the first row is the table's first.
            first = await list_offsets(late.client, "clicks", 0, 0)
            assert isinstance(first, tuple)
            assert first[0] == 0
            assert await list_offsets(late.client, "clicks", 0, -2) == (0, -1)
            first_in_log = client.positions("clicks")[0].log_start_offset
            assert await list_offsets(late.client, "clicks", 0, -4) == (first_in_log, -1)


async def test_a_table_in_partitions_is_read_in_the_order_of_its_offsets(tmp_path: Path) -> None:
    with served(tmp_path) as (service, client):
        client.create_table(
            "orders",
            ORDERS,
            bucket_count=BUCKETS,
            partitioned_by=["region"],
            properties=SHORT,
        )
        async with consumers(service, "orders") as (consumer, late):
            await grow(client, consumer, lambda number: client.append("orders", orders(number)))
            await late.fetch_all()
            await consumer.fetch_all()

            ends = {b: p.high_watermark for b, p in client.positions("orders").items()}
            assert late.records == consumer.records
            rows = subscribed(service.endpoint, "orders", ends)
            for bucket, found in late.records.items():
                assert [(r.offset, json.loads(r.value or b"")) for r in found] == rows[bucket]


async def test_the_full_history_of_a_table_with_a_key_is_read_as_changes(tmp_path: Path) -> None:
    with served(tmp_path) as (service, client):
        client.create_table(
            "orders",
            ORDERS,
            primary_key=["id"],
            bucket_count=BUCKETS,
            properties={**SHORT, "table.datalake.changelog": "true"},
        )
        model: dict[int, dict[str, Any]] = {}

        def write(number: int) -> None:
            rows = orders(number % 3)
            rows = rows.set_column(2, ORDERS.field(2), pa.array([f"{number}" * 90] * rows.num_rows))
            client.upsert("orders", rows)
            client.delete("orders", rows.slice(0, 7).select(["id"]))
            model.update({row["id"]: row for row in rows.to_pylist()})
            for row in rows.slice(0, 7).to_pylist():
                del model[row["id"]]

        async with consumers(service, "orders") as (consumer, late):
            await grow(client, consumer, write)
            await late.fetch_all()
            await consumer.fetch_all()

            assert late.records == consumer.records
            state: dict[int, dict[str, Any]] = {}
            for found in late.records.values():
                assert sorted(r.offset for r in found) == [r.offset for r in found]
                for record in found:
                    key = json.loads(record.key or b"")["id"]
                    if record.value is None:
                        del state[key]
                    else:
                        state[key] = json.loads(record.value)
            assert state == model
