"""The main job on real data: flights through the service, into Iceberg, and back as one table.

Run by `make quickstart`. It starts everything it needs in a temporary directory and stops it again:

1. a storage service
2. Spark writes the flights of January to September into a new table
3. tiering moves them into Iceberg
4. Spark writes the flights of October and November, which stay in the log
5. Spark reads both tiers as one table
6. Spark creates primary key tables: airlines, planes, and the delays of each airline
7. a stream bootstraps from Iceberg, reaches the log, and goes on live while an application appends
   the flights of December; each micro-batch updates planes and delays, exactly once
8. rows are looked up by key, changes are read, and all of it is checked against a full count
9. the primary key tables are tiered too, and DuckDB reads them from Iceberg
10. DuckDB reads a row that was written a moment before, from the live catalog
"""

from __future__ import annotations

import datetime
import tempfile
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from flights import FLIGHT_COUNT, load_flights
from key_tables import (
    AIRLINES,
    DELAYS,
    FLIGHTS,
    PLANES,
    KeyTableUpdater,
    check_delays,
    create_delays,
    look_up,
    read_live_with_duckdb,
    read_with_duckdb,
    show_changes,
    write_airlines_and_planes,
)
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from rich.table import Table
from stage import console, run_command, spark_session, step, storage_service

import streamhouse

LIVE_BATCHES = 8


def main() -> None:
    """Run the steps and print what happened, with times."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="streamhouse-quickstart-") as directory:
        home = Path(directory)
        with storage_service(home / "data"), spark_session(home) as spark:
            streamhouse.register(spark)
            history, recent, live = split_by_month(load_flights())

            with step("Spark writes January to September into a new table"):
                write_with_spark(spark, home, history, creates_table=True)
            with step("Tiering moves the log into Iceberg"):
                run_command("tier", "--once", "--table", FLIGHTS)
            with step("Spark writes October and November; they stay in the log"):
                write_with_spark(spark, home, recent)
            with step("Spark reads Iceberg and the log as one table"):
                read_union(spark, expected_rows=history.num_rows + recent.num_rows)
            with step("Airlines, planes and delays become primary key tables"):
                write_airlines_and_planes(spark)
                create_delays(spark)
            with step("A stream starts in Iceberg, goes on live, and keeps planes and delays"):
                follow_live(spark, home, live, before=history.num_rows + recent.num_rows)
            with step("Rows by key, and what changed"):
                look_up()
                show_changes(spark)
                check_delays(spark)
            with step("Primary key tables are Iceberg tables too"):
                run_command("tier", "--once", *tables_named(AIRLINES, PLANES, DELAYS))
                read_with_duckdb()
            with step("DuckDB sees a row that was written a moment before"):
                read_live_with_duckdb()
            with step("What is where"):
                run_command("tables")
    console.print(f"\n[bold]Everything stopped after {time.perf_counter() - started:.0f} s.[/]")


def split_by_month(flights: pa.Table) -> tuple[pa.Table, pa.Table, pa.Table]:
    """Cut the stream of flights in time: January to September, to November, December."""
    bounds = [
        pc.less(
            flights["event_time"], pa.scalar(datetime.datetime(2013, month, 1, tzinfo=datetime.UTC))
        )
        for month in (10, 12)
    ]
    first, second = (pc.sum(bound).as_py() for bound in bounds)
    return flights.slice(0, first), flights.slice(first, second - first), flights.slice(second)


def write_with_spark(
    spark: SparkSession, home: Path, flights: pa.Table, *, creates_table: bool = False
) -> None:
    """Append flights through Spark; the first write creates the table."""
    source = home / "flights.parquet"
    pq.write_table(flights, source)
    writer = spark.read.parquet(str(source)).write.format("streamhouse").mode("append")
    if creates_table:
        writer = writer.option("bucket.num", "4").option("partitioned.by", "month(event_time)")
    writer.save(FLIGHTS)
    console.print(f"{flights.num_rows:,} flights written to {FLIGHTS}")


def read_union(spark: SparkSession, *, expected_rows: int) -> None:
    """Show the delays per carrier over both tiers, and check the count."""
    flights = spark.read.format("streamhouse").load(FLIGHTS)
    delays = (
        flights.groupBy("carrier")
        .agg(F.count("*").alias("flights"), F.avg("departure_delay").alias("delay"))
        .orderBy(F.desc("delay"))
        .collect()
    )
    shown = Table("carrier", "flights", "mean departure delay", title="Worst five carriers")
    for row in delays[:5]:
        shown.add_row(row.carrier, f"{row.flights:,}", f"{row.delay:.1f} min")
    console.print(shown)
    rows = sum(row.flights for row in delays)
    in_lake = spark.read.format("streamhouse").load(f"{FLIGHTS}$lake").count()
    console.print(f"{rows:,} rows = {in_lake:,} from Iceberg + {rows - in_lake:,} from the log")
    if rows != expected_rows:
        raise SystemExit(f"expected {expected_rows:,} rows: this is a bug")


def follow_live(spark: SparkSession, home: Path, live: pa.Table, *, before: int) -> None:
    """Stream the whole table while an application appends December in small batches."""
    follower = KeyTableUpdater(before=before)
    stream = (
        spark.readStream.format("streamhouse")
        .option("maxOffsetsPerTrigger", "120000")
        .load(FLIGHTS)
        .writeStream.foreachBatch(follower)
        .option("checkpointLocation", str(home / "checkpoint"))
        .start()
    )
    try:
        follower.wait_for_rows(before)
        console.print(f"  caught up with {before:,} rows; December goes live")
        delays = []
        with streamhouse.StreamhouseClient() as application:
            size = -(-live.num_rows // LIVE_BATCHES)
            sent = 0
            for start in range(0, live.num_rows, size):
                batch = live.slice(start, size)
                appended = time.perf_counter()
                application.append(FLIGHTS, batch)
                sent += batch.num_rows
                follower.wait_for_rows(before + sent)
                delays.append(time.perf_counter() - appended)
    finally:
        stream.stop()
    delays.sort()
    console.print(
        f"  {sent:,} live flights in {len(delays)} appends; from append to updated planes and"
        f" delays {1000 * delays[len(delays) // 2]:.0f} ms (median)"
    )
    if follower.rows != FLIGHT_COUNT:
        raise SystemExit(f"{follower.rows:,} rows instead of {FLIGHT_COUNT:,}: this is a bug")
    console.print(f"  {follower.rows:,} rows in all, every flight once")


def tables_named(*tables: str) -> list[str]:
    """Return the command line options that name `tables`."""
    return [part for table in tables for part in ("--table", table)]


if __name__ == "__main__":
    main()
