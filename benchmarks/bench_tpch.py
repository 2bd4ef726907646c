"""TPC-H's queries 1, 6 and 12 by `streamhouse.sql`, against `spark.read.parquet` of the same files.

Scale factor 1 has 6 M line items and 1.5 M orders; `TPCH_SCALE=0.1` has a tenth. Both sides run
in one session and take turns. Beside the seconds stands the processor time of Spark and all of its
Python processes, which a busy machine does not move.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness import median, report, timed
from streamhouse.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.tpch import queries, tpch_tables

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession

import streamhouse

SCALE = float(os.environ.get("TPCH_SCALE", "1"))
REPEATS = 5
QUERIES = (1, 6, 12)
TABLES = ("lineitem", "orders")
CHUNK_ROWS = 500_000


def main() -> None:
    """Report the ratio of seconds and of processor time for each query."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            files = _load(client)
        spark = _session()
        for name, paths in files.items():
            spark.read.parquet(*paths).createOrReplaceTempView(name)
        for number in QUERIES:
            _compare(spark, service.endpoint, number)
        spark.stop()


def _load(client: StreamhouseClient) -> dict[str, list[str]]:
    """Write and tier the tables; return the data files of each."""
    made = tpch_tables(SCALE)
    files = {}
    client.create_database("tpch")
    for name in TABLES:
        table = made[name]
        client.create_table(f"tpch.{name}", table.schema, bucket_count=2)
        for first in range(0, table.num_rows, CHUNK_ROWS):
            client.append(f"tpch.{name}", table.slice(first, CHUNK_ROWS))
        tier_once(client, f"tpch.{name}")
        files[name] = client.read(f"tpch.{name}$files")["path"].to_pylist()
    return files


def _compare(spark: SparkSession, endpoint: str, number: int) -> None:
    plain = queries()[number]
    ours = plain
    for name in TABLES:
        ours = ours.replace(f"    {name}", f"    tpch.{name}")

    def by_streamhouse() -> DataFrame:
        return streamhouse.sql(spark, ours, endpoint=endpoint)

    def by_parquet() -> DataFrame:
        return spark.sql(plain)

    assert by_streamhouse().collect() == by_parquet().collect()
    wall: dict[str, list[float]] = {"ours": [], "parquet": []}
    processor: dict[str, list[float]] = {"ours": [], "parquet": []}
    for _ in range(REPEATS):
        for name, query in (("ours", by_streamhouse), ("parquet", by_parquet)):
            before = _processor_seconds()
            wall[name].append(timed(_answered(query)))
            processor[name].append(_processor_seconds() - before)
    for what, found in (("seconds", wall), ("processor seconds", processor)):
        mine, theirs = median(found["ours"]), median(found["parquet"])
        report(
            f"TPC-H query {number} at scale factor {SCALE:g}: {what}, planning included",
            measured=f"{mine:.2f} s",
            limit=f"spark.read.parquet of the same files: {theirs:.2f} s",
            ratio=mine / theirs,
            bar="at most 1.5",
            reached=mine / theirs <= 1.5,
        )


def _answered(query: Callable[[], DataFrame]) -> Callable[[], object]:
    return lambda: query().collect()


def _processor_seconds() -> float:
    """Return the processor time of this process and its children: the JVM and Python workers."""
    children = {os.getpid()}
    parents = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # Those that have ended count too, with their parent.
        parents[int(entry.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    is_found = True
    while is_found:
        found = {pid for pid, (parent, _) in parents.items() if parent in children} - children
        children |= found
        is_found = bool(found)
    ticks = sum(parents[pid][1] for pid in children if pid in parents)
    return ticks / os.sysconf("SC_CLK_TCK")


def _session() -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


if __name__ == "__main__":
    main()
