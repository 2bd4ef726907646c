"""Spark over a service whose owner is killed -9: streams and jobs go on at the standby."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from streamhouse import Producer
from streamhouse.api.client import StreamhouseClient
from tests.support.moved_service import OwnedService
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = pa.schema([("id", pa.int64())])


def _rows(start: int, end: int) -> pa.Table:
    return pa.table({"id": range(start, end)}, schema=ROWS)


def _gated(folder: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return what makes tasks wait in their middle until there is a file `killed`.

    Spark's workers cannot import this module: it uses nothing of ours.
    """
    started, killed = folder / "started", folder / "killed"

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            started.touch()
            while not killed.exists():
                time.sleep(0.05)  # sleep: what it waits for is in another process than Spark's
            yield batch

    return run


def _ids(frame: DataFrame) -> list[int]:
    return sorted(row.id for row in frame.select("id").collect())


def test_a_stream_and_a_job_survive_the_death_of_the_owner(
    spark: SparkSession, tmp_path: Path
) -> None:
    with OwnedService(tmp_path) as service, StreamhouseClient(service.endpoint) as client:
        for name in ("source", "copy", "made"):
            client.create_table(name, ROWS, bucket_count=2)

        def table(name: str) -> DataFrame:
            return spark.read.format("streamhouse").option("endpoint", service.endpoint).load(name)

        stream = spark.readStream.format("streamhouse").option("endpoint", service.endpoint)
        sink = stream.load("source").writeStream.format("streamhouse")
        sink = sink.option("endpoint", service.endpoint)
        copying = sink.option("checkpointLocation", str(tmp_path / "checkpoint")).start("copy")
        made = spark.range(0, 40_000, numPartitions=2).mapInArrow(_gated(tmp_path), "id long")
        writing = made.write.format("streamhouse").option("endpoint", service.endpoint)
        failures: list[BaseException] = []

        def fail_over() -> None:
            """Kill the owner in the middle of the job, and write on meanwhile."""
            try:
                with Producer(client, "source", linger_ms=0, batch_rows=50) as producer:
                    wait_until((tmp_path / "started").exists, "a task of the job runs")
                    service.kill()
                    (tmp_path / "killed").touch()
                    for start in range(1_000, 2_000, 100):
                        producer.send(_rows(start, start + 100))
                    service.start()
            except BaseException as error:
                failures.append(error)
                raise

        client.append("source", _rows(0, 1_000))
        killer = threading.Thread(target=fail_over)
        try:
            copying.processAllAvailable()
            killer.start()
            writing.mode("append").save("made")
            killer.join()
            copying.processAllAvailable()
            assert copying.exception() is None
            # The other way round, between two micro-batches.
            service.move()
            client.append("source", _rows(2_000, 2_100))
            copying.processAllAvailable()
        finally:
            copying.stop()
            (tmp_path / "killed").touch()

        assert not failures
        assert _ids(table("copy")) == list(range(2_100))
        assert _ids(table("made")) == list(range(40_000))
