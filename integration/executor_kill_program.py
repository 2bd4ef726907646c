"""What test_spark_executor_kill runs: jobs whose tasks kill -9 their executor, or the driver.

    python -m integration.executor_kill_program ENDPOINT FOLDER (executor | driver) (batch | stream)

Of both partitions the first attempt that finds no mark in FOLDER leaves one, waits until rows of it
are staged in the service, and kills. Partition 0 has then handed over all its rows, partition 1
half of them. The stream has several micro-batches, and kills in its second one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession

import streamhouse
from integration.attempt_steps import staged_rows
from streamhouse.api.client import StreamhouseClient
from tests.support.forked_python import FORKED_FOR_PID
from tests.support.waiting import wait_until

ROWS = 200_000
"""Of a partition: several requests."""
BATCHES = 3
APP = "killed"
SOURCE = "killed.source"
KILLED_BATCH = 1
"""The micro-batch in which the stream kills, and the version of the batch job."""


def killing(
    frame: DataFrame, table: str, *, endpoint: str, folder: Path, driver_pid: int | None
) -> DataFrame:
    """Return the same rows; reading them kills a process once a partition."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        mark = folder / f"partition-{context.partitionId()}"
        version = int(context.getLocalProperty("streaming.sql.batchId") or KILLED_BATCH)
        if version != KILLED_BATCH or mark.exists():
            yield from batches
            return
        rows = list(batches)
        yield from rows if context.partitionId() == 0 else rows[: len(rows) // 2]
        with StreamhouseClient(endpoint) as client:
            wait_until(
                lambda: staged_rows(client, table, app_id=APP, version=version) > 0,
                "a row is staged",
            )
        mark.touch()
        os.kill(driver_pid or _executor_pid(), signal.SIGKILL)
        wait_until(lambda: False, "the end of this executor")

    return frame.mapInArrow(run, frame.schema)


def _executor_pid() -> int:
    """Return the JVM's: it has started the daemon that has forked this process."""
    return int(os.environ[FORKED_FOR_PID])


def main(endpoint: str, folder: Path, what: str, how: str) -> None:
    """Write `killed.<what>_<how>`."""
    spark = SparkSession.builder.getOrCreate()
    streamhouse.register(spark)
    table = f"killed.{what}_{how}"
    driver_pid = os.getpid() if what == "driver" else None
    if how == "batch":
        source = spark.range(0, 2 * ROWS, 1, 2)
    else:
        stream = spark.readStream.format("streamhouse").option("endpoint", endpoint)
        stream = stream.option("minPartitions", 2).option("maxOffsetsPerTrigger", 2 * ROWS)
        source = stream.load(SOURCE)
    frame = killing(source, table, endpoint=endpoint, folder=folder, driver_pid=driver_pid)
    options = {"endpoint": endpoint, "app.id": APP}
    if how == "batch":
        writer = frame.write.format("streamhouse").options(**options).mode("append")
        writer.option("app.version", KILLED_BATCH).save(table)
    else:
        sink = frame.writeStream.format("streamhouse").options(**options)
        sink = sink.option("checkpointLocation", str(folder / "checkpoint"))
        sink.trigger(availableNow=True).start(table).awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4])
