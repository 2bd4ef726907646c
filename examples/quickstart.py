"""The main job on real data: flights through the service, into Iceberg, and back as one table.

Run by `make quickstart`. It starts everything it needs in a temporary directory and stops it again:

1. a storage service
2. Spark writes the flights of January to September into a new table
3. tiering moves them into Iceberg
4. Spark writes the flights of October and November, which stay in the log
5. Spark reads both tiers as one table
6. a stream bootstraps from Iceberg, reaches the log, and goes on live while an application appends
   the flights of December
"""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from flights import FLIGHT_COUNT, load_flights
from rich.console import Console
from rich.table import Table

# Spark's Python workers run what this variable names, not the Python that started them.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
# Without it Spark warns about the address it found for this machine's name.
os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import streamhouse

TABLE = "nyc.flights"
LIVE_BATCHES = 12
LOG4J = Path(__file__).resolve().parents[1] / "spark_conf" / "log4j2.properties"
console = Console(highlight=False, width=100)


def main() -> None:
    """Run the six steps and print what happened, with times."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="streamhouse-quickstart-") as directory:
        home = Path(directory)
        with storage_service(home / "data"), spark_session(home) as spark:
            streamhouse.register(spark)
            history, recent, live = split_by_month(load_flights())

            with step("Spark writes January to September into a new table"):
                write_with_spark(spark, home, history, creates_table=True)
            with step("Tiering moves the log into Iceberg"):
                run_command("tier", "--once", "--table", TABLE)
            with step("Spark writes October and November; they stay in the log"):
                write_with_spark(spark, home, recent)
            with step("Spark reads Iceberg and the log as one table"):
                read_union(spark, expected_rows=history.num_rows + recent.num_rows)
            with step("A stream starts in Iceberg and goes on live"):
                follow_live(spark, home, live, before=history.num_rows + recent.num_rows)
            with step("What is where"):
                run_command("tables")
    console.print(f"\n[bold]Everything stopped after {time.perf_counter() - started:.0f} s.[/]")


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print a heading, and after the work how long it took."""
    console.print(f"\n[bold cyan]{title}[/]")
    started = time.perf_counter()
    yield
    console.print(f"[dim]took {time.perf_counter() - started:.1f} s[/]")


@contextlib.contextmanager
def storage_service(data_dir: Path) -> Iterator[None]:
    """Run `streamhouse serve` on a free port, and name it to everything started after it."""
    arguments = ["serve", "--data-dir", str(data_dir), "--port", "0", "--log-level", "warning"]
    command = [str(streamhouse_command()), *arguments]
    console.print("[dim]$ streamhouse serve --data-dir DIR --port 0[/]")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None
            ready = service.stdout.readline().strip()
            if not ready.startswith("streamhouse listening on "):
                raise SystemExit("the storage service did not start; its message is above")
            console.print(ready)
            os.environ["STREAMHOUSE_ENDPOINT"] = ready.removeprefix("streamhouse listening on ")
            yield
        finally:
            service.terminate()


@contextlib.contextmanager
def spark_session(home: Path) -> Iterator[SparkSession]:
    """Start Spark on both cores, quietly."""
    console.print("[dim]starting Spark ...[/]")
    spark = (
        SparkSession.builder.appName("streamhouse quickstart")
        .master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.warehouse.dir", str(home / "warehouse"))
        # Stopping a stream inside foreachBatch prints a stack overflow with the default stack.
        .config("spark.driver.extraJavaOptions", f"-Xss16m -Dlog4j2.configurationFile={LOG4J}")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


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
    writer.save(TABLE)
    console.print(f"{flights.num_rows:,} flights written to {TABLE}")


def read_union(spark: SparkSession, *, expected_rows: int) -> None:
    """Show the delays per carrier over both tiers, and check the count."""
    flights = spark.read.format("streamhouse").load(TABLE)
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
    in_lake = spark.read.format("streamhouse").load(f"{TABLE}$lake").count()
    console.print(f"{rows:,} rows = {in_lake:,} from Iceberg + {rows - in_lake:,} from the log")
    if rows != expected_rows:
        raise SystemExit(f"expected {expected_rows:,} rows: this is a bug")


class Follower:
    """foreachBatch: counts rows, and tells of each batch until the history is read."""

    def __init__(self, *, before: int) -> None:
        self.before = before
        self.rows = 0
        self.changed = threading.Condition()

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        rows = batch.count()
        if self.rows < self.before:
            console.print(f"  batch {batch_id}: {rows:,} rows of history")
        with self.changed:
            self.rows += rows
            self.changed.notify_all()

    def wait_for_rows(self, wanted: int) -> None:
        """Return when `wanted` rows have come; end the program after a minute without."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.rows >= wanted, timeout=60):
                raise SystemExit(f"the stream stopped at {self.rows:,} of {wanted:,} rows")


def follow_live(spark: SparkSession, home: Path, live: pa.Table, *, before: int) -> None:
    """Stream the whole table while an application appends December in small batches."""
    follower = Follower(before=before)
    stream = (
        spark.readStream.format("streamhouse")
        .option("maxOffsetsPerTrigger", "120000")
        .load(TABLE)
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
                application.append(TABLE, batch)
                sent += batch.num_rows
                follower.wait_for_rows(before + sent)
                delays.append(time.perf_counter() - appended)
    finally:
        stream.stop()
    delays.sort()
    console.print(
        f"  {sent:,} live flights in {len(delays)} appends; from append to foreachBatch"
        f" {1000 * delays[len(delays) // 2]:.0f} ms (median)"
    )
    if follower.rows != FLIGHT_COUNT:
        raise SystemExit(f"{follower.rows:,} rows instead of {FLIGHT_COUNT:,}: this is a bug")
    console.print(f"  {follower.rows:,} rows in all, every flight once")


def run_command(*arguments: str) -> None:
    """Run a `streamhouse` command as a user would."""
    console.print(f"[dim]$ streamhouse {' '.join(arguments)}[/]")
    subprocess.run([str(streamhouse_command()), *arguments], check=True)


def streamhouse_command() -> Path:
    """Return the installed command that belongs to this Python."""
    return Path(sys.executable).with_name("streamhouse")


if __name__ == "__main__":
    main()
