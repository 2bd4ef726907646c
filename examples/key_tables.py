"""The quickstart's primary key tables: airlines, planes, and the delays of each airline.

`nyc.delays` is kept by an aggregation merge engine: whoever upserts adds to sums, and the service
does the adding. `nyc.planes` gets partial updates: the day a plane was last seen.
"""

from __future__ import annotations

import os
import threading
import time

from flights import load_airlines, load_planes
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.table import Table
from stage import console

import streamhouse
from streamhouse.connector import write_batch

FLIGHTS = "nyc.flights"
AIRLINES = "nyc.airlines"
PLANES = "nyc.planes"
DELAYS = "nyc.delays"


def write_airlines_and_planes(spark: SparkSession) -> None:
    """Create two primary key tables by writing to them: an append to them is an upsert."""
    for table, rows, key in (
        (AIRLINES, load_airlines(), "carrier"),
        (PLANES, load_planes(), "tail_number"),
    ):
        frame = spark.createDataFrame(rows.to_pylist(), schema=_spark_schema(rows))
        writer = frame.write.format("streamhouse").mode("append")
        writer.option("primary.key", key).option("bucket.num", "2").save(table)
        console.print(f"{rows.num_rows:,} rows in {table}, primary key {key}")


def create_delays(spark: SparkSession) -> None:
    """Create the table whose rows add up by themselves."""
    empty = spark.createDataFrame(
        [], "carrier string not null, flights bigint, delay_minutes double, worst_delay double"
    )
    (
        empty.write.format("streamhouse")
        .mode("append")
        .option("primary.key", "carrier")
        .option("table.merge-engine", "aggregation")
        .option("fields.flights.agg", "sum")
        .option("fields.delay_minutes.agg", "sum")
        .option("fields.worst_delay.agg", "max")
        .save(DELAYS)
    )


class KeyTableUpdater:
    """foreachBatch: each micro-batch of flights updates planes and delays, exactly once.

    A micro-batch that Spark repeats after a crash finds its transactions committed and writes
    nothing.
    """

    def __init__(self, *, before: int) -> None:
        self.before = before
        self.rows = 0
        self.changed = threading.Condition()

    def __call__(self, flights: DataFrame, batch_id: int) -> None:
        flights = flights.persist()
        per_carrier = flights.groupBy("carrier").agg(
            F.count("*").alias("flights"),
            F.sum("arrival_delay").alias("delay_minutes"),
            F.max("arrival_delay").alias("worst_delay"),
        )
        write_batch(per_carrier, batch_id, table=DELAYS, app_id="quickstart-delays")
        last_seen = (
            flights.where("tail_number is not null")
            .groupBy("tail_number")
            .agg(F.max("event_time").alias("last_seen"))
        )
        options = {"write.mode": "partial"}
        write_batch(last_seen, batch_id, table=PLANES, app_id="quickstart-planes", **options)
        rows = flights.count()
        flights.unpersist()
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


def look_up() -> None:
    """Ask for rows by their keys, as an application does."""
    with streamhouse.StreamhouseClient() as client:
        plane = client.lookup_one(PLANES, tail_number="N14228")
        assert plane is not None, "the first flight of the year has a plane"
        console.print(
            f"plane N14228: {plane['manufacturer']} {plane['model']} of {plane['year']},"
            f" last seen {plane['last_seen']:%Y-%m-%d %H:%M}"
        )
        united = client.lookup_one(DELAYS, carrier="UA")
        assert united is not None
        console.print(
            f"United: {united['flights']:,} flights, {united['delay_minutes']:,.0f} minutes late in"
            f" all, {united['worst_delay']:.0f} at worst"
        )
        console.print(f"{client.count(PLANES):,} planes, {client.count(AIRLINES)} airlines")


def show_changes(spark: SparkSession) -> None:
    """Show the last changes of one row: what a downstream of the table gets."""
    changes = spark.read.format("streamhouse").load(f"{DELAYS}$changelog").where("carrier = 'UA'")
    shown = Table("__offset", "__change_type", "flights", "delay_minutes", title="United, changes")
    for row in changes.orderBy(F.desc("__offset")).limit(5).collect()[::-1]:
        shown.add_row(
            str(row["__offset"]), row["__change_type"], f"{row.flights:,}", f"{row.delay_minutes:,}"
        )
    console.print(shown)


def check_delays(spark: SparkSession) -> None:
    """Compare the table that was kept up to date with a full count over all flights."""
    flights = spark.read.format("streamhouse").load(FLIGHTS)
    counted = flights.groupBy("carrier").agg(
        F.count("*").alias("flights"), F.max("arrival_delay").alias("worst_delay")
    )
    kept = spark.read.format("streamhouse").load(DELAYS)
    columns = ["carrier", "flights", "worst_delay"]
    differing = kept.select(columns).exceptAll(counted.select(columns)).count()
    if differing or kept.count() != counted.count():
        raise SystemExit(f"{differing} carriers differ from a full count: this is a bug")
    console.print(f"{kept.count()} carriers, each equal to a full count over all flights")


def read_with_duckdb() -> None:
    """Read the primary key table's lake table with another engine: plain Iceberg."""
    import duckdb
    from pyiceberg.catalog import load_catalog

    with streamhouse.StreamhouseClient() as client:
        catalog = client.lake_catalog()
    location = load_catalog(catalog.name, **catalog.properties).load_table(DELAYS).metadata_location
    duck = duckdb.connect()
    load_extensions(duck)
    path = location.removeprefix("file://")
    rows = duck.execute(
        "SELECT carrier, flights, round(delay_minutes / flights, 1) FROM iceberg_scan(?)"
        " ORDER BY 3 DESC LIMIT 5",
        [path],
    ).fetchall()
    shown = Table("carrier", "flights", "mean delay", title="DuckDB on Iceberg")
    for carrier, flights, delay in rows:
        shown.add_row(carrier, f"{flights:,}", f"{delay} min")
    console.print(shown)


def read_live_with_duckdb() -> None:
    """Write a row and read it with DuckDB the moment after: no round has moved it into the lake."""
    import duckdb

    duck = duckdb.connect()
    load_extensions(duck)
    endpoint = os.environ["STREAMHOUSE_ENDPOINT"]
    duck.execute(
        f"ATTACH 'live' AS live (TYPE ICEBERG, ENDPOINT '{endpoint}/iceberg',"
        " AUTHORIZATION_TYPE 'none')"
    )
    with streamhouse.StreamhouseClient() as client:
        written = time.perf_counter()
        client.upsert(AIRLINES, {"carrier": "ZZ", "name": "Zeppelin Express"})
    row = duck.execute("SELECT name FROM live.nyc.airlines WHERE carrier = 'ZZ'").fetchone()
    took_ms = 1000 * (time.perf_counter() - written)
    if row != ("Zeppelin Express",):
        raise SystemExit(f"DuckDB reads {row} instead of the row just written: this is a bug")
    console.print(f"DuckDB reads airline {row[0]}, {took_ms:.0f} ms after the write began")


def load_extensions(duck: object) -> None:
    """Load DuckDB's extensions from their wheels; `INSTALL iceberg` does it with internet."""
    import importlib.resources

    import duckdb

    for name in ("avro", "httpfs", "iceberg"):
        files = importlib.resources.files(f"duckdb_extension_{name}")
        path = files / "extensions" / f"v{duckdb.__version__}" / f"{name}.duckdb_extension"
        duck.load_extension(str(path))  # type: ignore[attr-defined]


def _spark_schema(rows: object) -> object:
    from pyspark.sql.pandas.types import from_arrow_schema

    return from_arrow_schema(rows.schema)  # type: ignore[attr-defined]
