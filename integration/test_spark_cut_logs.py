"""Spark over a service that showed rows before its journal had them, and lost them (ack disk)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from streamhouse.api.client import StreamhouseClient
from tests.support.journal_machines import JournalHome, Pair

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = pa.schema([("id", pa.int64())])


def _rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": range(start, end)}, schema=ROWS)


def _ids(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


def test_a_stream_that_has_read_what_is_lost_says_so_and_a_batch_reads_what_there_is(
    spark: SparkSession, tmp_path: Path
) -> None:
    with (
        JournalHome("file", folder=tmp_path / "home") as home,
        Pair(home, "--journal-ack", "disk", "--lease-ms", "1500") as pair,
        StreamhouseClient(pair.endpoint) as client,
    ):
        one, two = pair.machines
        journal, stored = home.folder / "journal", home.folder / "stored"

        def start(name: str, checkpoint: str) -> StreamingQuery:
            rows = spark.readStream.format("streamhouse").option("endpoint", pair.endpoint)
            rows = rows.load("source").writeStream.format("memory").queryName(name)
            return rows.option("checkpointLocation", str(tmp_path / checkpoint)).start()

        def batch() -> list[int]:
            read = spark.read.format("streamhouse").option("endpoint", pair.endpoint)
            return _ids(read.load("source"))

        one.start()
        one.wait_until_owner(60)
        client.create_table("source", ROWS)
        client.append("source", _rows(0, 50))
        reading = start("copied", "checkpoint")
        try:
            reading.processAllAvailable()
            # A clean stop stores all of it.
            one.end()
            shutil.copytree(journal, stored)
            one.start()
            one.wait_until_owner(60)
            client.append("source", _rows(50, 100))
            reading.processAllAvailable()
            assert _ids(spark.table("copied")) == list(range(100))
            assert batch() == list(range(100))
            one.lose()
            # As if nothing had arrived there since: the journal is behind in this mode.
            shutil.rmtree(journal)
            stored.rename(journal)
            two.start()
            two.wait_until_owner(60)
            assert client.positions("source")[0].high_watermark == 50
            client.append("source", _rows(1_000, 1_200))
            with pytest.raises(StreamingQueryException, match="other rows"):
                reading.processAllAvailable()
        finally:
            reading.stop()
        assert batch() == [*range(50), *range(1_000, 1_200)]
        again = start("anew", "another")
        try:
            again.processAllAvailable()
            assert _ids(spark.table("anew")) == [*range(50), *range(1_000, 1_200)]
        finally:
            again.stop()
