"""Spark reads whose fetches a standby answers as well: option `read.from`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from streamhouse.client import StorageClient
from tests.support.journal_machines import JournalHome, Pair
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string())])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Return an owner and a standby."""
    with JournalHome("file", folder=tmp_path / "home") as home, Pair(home) as pair:
        owner, standby = pair.machines
        owner.start()
        owner.wait_until_owner(60)
        standby.start("--standby")
        yield pair


def test_batches_and_streams_fetch_from_a_standby_and_plan_with_the_owner(
    spark: SparkSession, pair: Pair, tmp_path: Path
) -> None:
    owner, standby = pair.machines
    with StorageClient(pair.endpoint) as client:
        client.create_table("events", SCHEMA, bucket_count=4)
        ids = range(1_000)
        client.append("events", [{"id": n, "name": f"name {n}"} for n in ids])
    # Twice the standby, by two names: the owner is found by them, and asked for what it plans.
    endpoint = f"{standby.endpoint},{standby.endpoint.replace('127.0.0.1', 'localhost')}"
    options = {"endpoint": endpoint, "read.from": "any"}

    def read() -> list[int]:
        frame = spark.read.format("streamhouse").options(**options).load("events")
        return sorted(row.id for row in frame.collect())

    def is_spared() -> bool:
        before = owner.answers("fetch")
        assert read() == list(ids)
        return owner.answers("fetch") == before

    wait_until(is_spared, "a batch read whose fetches the standby answers all")
    assert standby.answers("fetch")

    before, streamed = standby.answers("fetch"), list[int]()

    def take(batch: DataFrame, _: int) -> None:
        streamed.extend(row.id for row in batch.collect())

    stream = spark.readStream.format("streamhouse").options(**options).load("events")
    query = (
        stream.writeStream.foreachBatch(take)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    assert sorted(streamed) == list(ids)
    assert standby.answers("fetch") > before
