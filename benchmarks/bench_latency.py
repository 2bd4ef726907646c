"""How long an appended row takes to a subscriber, and to a Spark `foreachBatch`.

Spark's own floor is measured in the same run: a Python stream source that makes its rows in memory
by the clock, so that nothing but the micro-batch engine lies between a row and `foreachBatch`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, percentile, report, timed
from streamhouse.client import StorageClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    InputPartition,
)

SUBSCRIBER_EVENTS = 1_000
SPARK_EVENTS = 60
SPARK_EVENT_SPACING_S = 0.3
TIMES = pa.schema([pa.field("sent", pa.float64())])


def main() -> None:
    """Report both latencies."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        _report_subscriber(service.endpoint, directory)
        if "--subscriber-only" not in sys.argv:
            _report_spark(service.endpoint, directory)


def _report_subscriber(endpoint: str, directory: str) -> None:
    """Writer and subscriber are two processes, as they are two applications in life."""
    latencies: list[float] = []
    with StorageClient(endpoint) as reader:
        floor_ms = 1_000 * _floor_of_a_write_seconds(reader, f"{directory}/floor")
        reader.create_table("latency", SCHEMA)
        events = reader.subscribe("latency", start="earliest")
        writer = multiprocessing.get_context("spawn").Process(
            target=_append_in_turn, args=(endpoint, SUBSCRIBER_EVENTS)
        )
        writer.start()
        for batch in events:
            # Every row carries the clock of its append; CLOCK_MONOTONIC is one for all processes.
            latencies.append(time.perf_counter() - batch.data.column("amount")[0].as_py())
            if len(latencies) >= SUBSCRIBER_EVENTS:
                break
        events.close()
        writer.join()
    measured = [1_000 * s for s in latencies[SUBSCRIBER_EVENTS // 10 :]]
    p50, p99 = percentile(measured, 0.5), percentile(measured, 0.99)
    for name, value, bar in (("p50", p50, 2.0), ("p99", p99, 10.0)):
        report(
            f"append to subscriber, 100 rows, {name}",
            measured=f"{value:.2f} ms",
            limit=f"an empty request and an fdatasync, p50: {floor_ms:.2f} ms",
            ratio=value / floor_ms,
            bar=f"under {bar:g} ms",
            reached=value < bar,
        )


def _floor_of_a_write_seconds(client: StorageClient, path: str) -> float:
    """Return what one round trip and one fdatasync of 6 kB take here and now, p50 of each."""
    trips, syncs = [], []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for _ in range(300):
        trips.append(timed(client.list_databases))
        os.write(fd, b"x" * 6_000)
        syncs.append(timed(lambda: os.fdatasync(fd)))
    os.close(fd)
    return median(trips) + median(syncs)


def _append_in_turn(endpoint: str, count: int) -> None:
    """Append `count` batches of 100 rows, each when the one before it was acknowledged."""
    rows = make_rows(100)
    position = SCHEMA.get_field_index("amount")
    with StorageClient(endpoint) as client:
        for _ in range(count):
            sent = pa.repeat(pa.scalar(time.perf_counter()), rows.num_rows)
            client.append("latency", rows.set_column(position, SCHEMA.field("amount"), sent))


class ClockPartition(InputPartition):
    """Events `start` to `end` of the clock source."""

    def __init__(self, start: int, end: int, origin: float) -> None:
        self.start, self.end, self.origin = start, end, origin


class ClockReader(DataSourceStreamReader):
    """One event every SPARK_EVENT_SPACING_S seconds since `origin`, each with its own due time."""

    def __init__(self, origin: float) -> None:
        self.origin = origin

    def initialOffset(self) -> dict[str, int]:
        return {"event": 0}

    def latestOffset(self, start: Any = None, limit: Any = None) -> dict[str, int]:
        return {"event": max(0, int((time.time() - self.origin) / SPARK_EVENT_SPACING_S))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        return [ClockPartition(start["event"], end["event"], self.origin)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ClockPartition)
        due = [
            partition.origin + (i + 1) * SPARK_EVENT_SPACING_S
            for i in range(partition.start, partition.end)
        ]
        yield pa.RecordBatch.from_arrays([pa.array(due, pa.float64())], schema=TIMES)


class ClockSource(DataSource):
    """The engine's floor: rows made in memory by the clock."""

    @classmethod
    def name(cls) -> str:
        return "clock"

    def schema(self) -> str:
        return "sent double"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return ClockReader(float(self.options["origin"]))


def _report_spark(endpoint: str, directory: str) -> None:
    import streamhouse

    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.driver.extraJavaOptions", "-Xss16m")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(ClockSource)
    streamhouse.register(spark)
    floors, ours = [], []
    with StorageClient(endpoint) as client:
        client.create_table("spark_latency", TIMES)
        for repeat in range(3):
            floors.append(_floor_seconds(spark, f"{directory}/floor-{repeat}"))
            ours.append(_our_seconds(spark, client, f"{directory}/ours-{repeat}"))
    spark.stop()
    floor, our = median([median(f) for f in floors]), median([median(o) for o in ours])
    report(
        "append to Spark foreachBatch, p50",
        measured=f"{1_000 * our:.0f} ms",
        limit=f"the engine's floor (rows made in memory): {1_000 * floor:.0f} ms",
        ratio=our / floor,
        bar="at most 1.3",
        reached=our / floor <= 1.3,
    )


class _Arrivals:
    """Collects, in foreachBatch, how long each row took from `sent`."""

    def __init__(self, wanted: int) -> None:
        self.seconds: list[float] = []
        self.wanted = wanted
        self.done = threading.Event()
        self.started = threading.Event()

    def __call__(self, batch: DataFrame, _batch_id: int) -> None:
        rows = batch.collect()
        now = time.time()
        self.seconds += [now - row.sent for row in rows]
        if rows:
            self.started.set()
        if len(self.seconds) >= self.wanted:
            self.done.set()


def _floor_seconds(spark: SparkSession, checkpoint: str) -> list[float]:
    arrivals = _Arrivals(SPARK_EVENTS)
    stream = spark.readStream.format("clock").option("origin", str(time.time())).load()
    query = stream.writeStream.foreachBatch(arrivals).option("checkpointLocation", checkpoint)
    running = query.start()
    arrivals.done.wait(timeout=120)
    running.stop()
    return arrivals.seconds[SPARK_EVENTS // 4 :]


def _our_seconds(spark: SparkSession, client: StorageClient, checkpoint: str) -> list[float]:
    arrivals = _Arrivals(SPARK_EVENTS)
    stream = (
        spark.readStream.format("streamhouse")
        .option("endpoint", client.endpoint)
        .option("startingOffsets", "latest")
        .load("spark_latency")
    )
    query = stream.writeStream.foreachBatch(arrivals).option("checkpointLocation", checkpoint)
    running = query.start()
    # Rows count from the first batch on; until the query listens, appends would be lost to it.
    while not arrivals.started.is_set():
        _append_now(client)
        arrivals.started.wait(timeout=1.0)
    while not arrivals.done.is_set():
        _append_now(client)
        time.sleep(SPARK_EVENT_SPACING_S * random.uniform(0.8, 1.2))
    running.stop()
    return arrivals.seconds[SPARK_EVENTS // 4 :]


def _append_now(client: StorageClient) -> None:
    client.append("spark_latency", pa.record_batch([[time.time()]], schema=TIMES))


if __name__ == "__main__":
    main()
