"""What test_spark_speculation runs: jobs in which Spark runs one task twice at the same time.

    python -m integration.speculation_program ENDPOINT FOLDER

Spark is told to start a twin of a task that is slow. In each job that is the task of partition 0:
its first attempt has handed over all its rows and then waits. The twin hands over its own only
when some of the first attempt's are in the service. Then either both end, in whichever order, or
the first goes on waiting until Spark kills it. Every attempt leaves files in FOLDER/<table>.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import streamhouse
from integration.attempt_steps import staged_rows
from streamhouse.api.client import StreamhouseClient
from tests.support.waiting import wait_until

ROWS = 200_000
"""Of each of the two partitions, about: several requests."""
APP = "raced"
VERSION = 0
"""Also the number of the stream's only micro-batch."""
TABLES = ("raced.both", "raced.killed", "raced.direct", "raced.stream")
SOURCE = "raced.source"

_OTHER = "the other attempt"


def raced(frame: DataFrame, table: str, *, endpoint: str, folder: Path) -> DataFrame:
    """Return the same rows; the first task waits for its twin."""
    marks = folder / table
    marks.mkdir()
    is_ended_by_spark = table == "raced.killed"
    is_direct = table == "raced.direct"

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != 0:
            yield from batches
            return
        attempt = context.attemptNumber()
        (marks / f"began-{attempt}").touch()
        if attempt == 0:
            yield from batches
            twin_ended = marks / "ended-1"
            wait_until(lambda: twin_ended.exists() and not is_ended_by_spark, _OTHER)
        else:
            rows = list(batches)
            others = 2 * ROWS - sum(batch.num_rows for batch in rows)
            with StreamhouseClient(endpoint) as client:
                wait_until(lambda: _stored(client, table, is_direct=is_direct) > others, _OTHER)
            yield from rows
        (marks / f"ended-{attempt}").touch()

    return frame.mapInArrow(run, frame.schema)


def _stored(client: StreamhouseClient, table: str, *, is_direct: bool) -> int:
    """Return how many rows of the job are in the service, those of all attempts."""
    if is_direct:
        return sum(at.high_watermark for at in client.positions(table).values())
    return staged_rows(client, table, app_id=APP, version=VERSION)


def main(endpoint: str, folder: Path) -> None:
    """Run every job."""
    spark = SparkSession.builder.getOrCreate()
    streamhouse.register(spark)
    for table in TABLES[:3]:
        frame = raced(spark.range(0, 2 * ROWS, 1, 2), table, endpoint=endpoint, folder=folder)
        writer = frame.write.format("streamhouse").option("endpoint", endpoint).mode("append")
        if table == "raced.direct":
            writer = writer.option("write.transactional", "false")
        else:
            writer = writer.option("app.id", APP).option("app.version", VERSION)
        writer.save(table)
    table = TABLES[3]
    source = spark.readStream.format("streamhouse").option("endpoint", endpoint)
    frame = raced(
        source.option("minPartitions", 2).load(SOURCE), table, endpoint=endpoint, folder=folder
    )
    stream = frame.writeStream.format("streamhouse").option("endpoint", endpoint)
    stream = stream.option("app.id", APP).option("checkpointLocation", str(folder / "checkpoint"))
    query = stream.trigger(availableNow=True).start(table)
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
