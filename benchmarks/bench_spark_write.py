"""Spark writes as one transaction, against writes straight to the table and against Parquet."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import SCHEMA, make_rows, median, percentile, report, timed
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

import streamhouse

ROWS = 10_000_000
FILES = 8
BUCKETS = 4
REPEATS = 3
MICRO_BATCHES = 40
MICRO_BATCH_ROWS = 1_000
NO_LAKE = {"table.datalake.enabled": "false"}


def main() -> None:
    """Report the price of all-or-nothing for a large job, and for a micro-batch."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        spark = _session()
        streamhouse.register(spark)
        with StreamhouseClient(service.endpoint) as client:
            _job(spark, client, Path(directory))
            _micro_batches(spark, client, Path(directory))
        spark.stop()


def _job(spark: SparkSession, client: StreamhouseClient, directory: Path) -> None:
    source = directory / "source"
    source.mkdir()
    for number in range(FILES):
        rows = make_rows(ROWS // FILES, first_id=number * (ROWS // FILES))
        pq.write_table(
            pa.Table.from_batches([rows]), source / f"{number}.parquet", compression="zstd"
        )
    frame = spark.read.parquet(str(source))
    seconds: dict[str, list[float]] = {"transaction": [], "direct": [], "parquet": []}
    for repeat in range(REPEATS + 1):
        took = {
            "transaction": _write(client, frame, {}),
            "direct": _write(client, frame, {"write.transactional": "false"}),
            "parquet": timed(lambda: _write_parquet(frame, directory / "copy")),
        }
        for name, value in took.items():
            # The first run warms up the JVM and the workers.
            if repeat:
                seconds[name].append(value)
    ours, direct, parquet = (median(values) for values in seconds.values())
    name = f"Spark append of {ROWS / 1e6:.0f} M rows to {BUCKETS} buckets, one transaction"
    for limit, floor, bar in (
        ("write.transactional=false", direct, 1.6),
        ("Spark to Parquet, and fsync", parquet, 2.5),
    ):
        report(
            name,
            measured=f"{ours:.1f} s ({ROWS / ours / 1e6:.2f} M rows/s)",
            limit=f"{limit}: {floor:.1f} s",
            ratio=ours / floor,
            bar=f"at most {bar}",
            reached=ours / floor <= bar,
        )


def _write(client: StreamhouseClient, frame: DataFrame, options: dict[str, str]) -> float:
    table = "default.spark_write"
    client.create_table(table, SCHEMA, bucket_count=BUCKETS, bucket_key=["id"], properties=NO_LAKE)
    writer = frame.write.format("streamhouse").option("endpoint", client.endpoint)
    took = timed(lambda: writer.options(**options).mode("append").save(table))
    stored = sum(p.high_watermark for p in client.positions(table).values())
    assert stored == ROWS, stored
    client.drop_table(table)
    return took


def _write_parquet(frame: DataFrame, path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    frame.write.parquet(str(path))
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def _micro_batches(spark: SparkSession, client: StreamhouseClient, directory: Path) -> None:
    """Two queries at a time would disturb each other: they take turns.

    The JVM gets faster all the while: the first run counts for nobody, then both modes are as often
    early as late.
    """
    triggers: dict[str, list[float]] = {"": [], "direct": []}
    sinks: dict[str, list[float]] = {"": [], "direct": []}
    for number, mode in enumerate(
        ("direct", "", "direct", "direct", "", "direct", "", "", "direct")
    ):
        name, checkpoint = f"{number}_{mode}", directory / f"checkpoint-{number}"
        durations = _durations_ms(spark, client, name, mode, checkpoint)
        if number:
            triggers[mode] += [
                each["triggerExecution"] - each["latestOffset"] for each in durations
            ]
            sinks[mode] += [each["addBatch"] for each in durations]
    for what, took in (("a micro-batch", triggers), ("of addBatch alone", sinks)):
        once, direct = (percentile(values, 0.5) for values in took.values())
        report(
            f"streaming sink, {MICRO_BATCH_ROWS:,}-row micro-batches: what exactly-once adds, p50"
            f" {what}",
            measured=f"{once - direct:.0f} ms ({once:.0f} ms)",
            limit=f"write.transactional=false: {direct:.0f} ms {what}",
            ratio=once / direct,
            bar="at most 20 ms more",
            reached=once - direct <= 20,
        )


def _durations_ms(
    spark: SparkSession, client: StreamhouseClient, name: str, mode: str, checkpoint: Path
) -> list[dict[str, float]]:
    source, sink = f"default.source_{name}", f"default.sink_{name}"
    for table in (source, sink):
        client.create_table(table, SCHEMA, bucket_count=2, bucket_key=["id"], properties=NO_LAKE)
    frame = spark.readStream.format("streamhouse").option("endpoint", client.endpoint).load(source)
    writer = frame.writeStream.format("streamhouse").option("endpoint", client.endpoint)
    if mode:
        writer = writer.option("write.transactional", "false")
    query = writer.option("checkpointLocation", str(checkpoint)).start(sink)
    try:
        for number in range(MICRO_BATCHES):
            client.append(source, make_rows(MICRO_BATCH_ROWS, first_id=number * MICRO_BATCH_ROWS))
            _until_stored(client, sink, (number + 1) * MICRO_BATCH_ROWS)
        query.processAllAvailable()
        return _with_rows(query)[MICRO_BATCHES // 4 :]
    finally:
        query.stop()


def _until_stored(client: StreamhouseClient, table: str, row_count: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        ends = {b: p.high_watermark for b, p in client.positions(table).items()}
        if sum(ends.values()) >= row_count:
            return
        assert time.monotonic() < deadline, "the stream stands still"
        client.table_state(table, after=ends, max_wait_ms=5_000)


def _with_rows(query: StreamingQuery) -> list[dict[str, float]]:
    return [each["durationMs"] for each in query.recentProgress if each["numInputRows"]]


def _session() -> SparkSession:
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.streaming.numRecentProgressUpdates", "1000")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


if __name__ == "__main__":
    main()
