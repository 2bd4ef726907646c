"""A small merge into a large key table: rows under its keys against a join with the whole table."""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import family_cpu_seconds, median, report, timed
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import streamhouse

KEYS: Final = 1_000_000
ROWS: Final = 1_000
REPEATS: Final = 3
BAR: Final = 0.6
TABLE: Final = "default.accounts"
_CHUNK: Final = 100_000


def main() -> None:
    """Report the processor time of both, in pairs; a source column of a DataFrame needs a join."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.driver.memory", "2g")
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        with StreamhouseClient(service.endpoint) as client:
            _fill(client)
        _compare(spark, service.endpoint)
        spark.stop()


def _compare(spark: SparkSession, endpoint: str) -> None:
    table = streamhouse.Table(spark, TABLE, endpoint=endpoint)
    seconds: dict[str, list[float]] = {"lookup": [], "join": []}
    wall: dict[str, list[float]] = {"lookup": [], "join": []}
    for repeat in range(REPEATS + 1):
        for kind in ("lookup", "join") if repeat % 2 else ("join", "lookup"):
            source = spark.range(ROWS).selectExpr(
                f"(id * 7919 + {repeat}) % {KEYS} AS k", "1L AS n"
            )
            before = family_cpu_seconds()
            took = timed(lambda kind=kind, source=source: _merge(table, source, kind))
            if repeat:
                seconds[kind].append(family_cpu_seconds() - before)
                wall[kind].append(took)
    cpu = {kind: median(found) for kind, found in seconds.items()}
    ratio = cpu["lookup"] / cpu["join"]
    report(
        f"merge of {ROWS:,} rows into {KEYS / 1e6:.0f} M keys: processor",
        measured=f"{cpu['lookup']:.1f} s (wall {median(wall['lookup']):.1f} s)",
        limit=f"by a join with the table {cpu['join']:.1f} s (wall {median(wall['join']):.1f} s)",
        ratio=ratio,
        bar=f"at most {BAR}",
        reached=ratio <= BAR,
    )


def _merge(table: streamhouse.Table, source: DataFrame, kind: str) -> None:
    added = source["n"] if kind == "join" else F.col("source.n")
    changes = table.merge(source).when_matched_update({"points": F.col("points") + added}).execute()
    assert changes.rows_updated == ROWS, changes


def _fill(client: StreamhouseClient) -> None:
    fields = [
        pa.field("k", pa.int64(), nullable=False),
        ("name", pa.string()),
        ("points", pa.int64()),
    ]
    schema = pa.schema(fields)
    client.create_table(TABLE, schema, primary_key=["k"], bucket_count=2)
    for start in range(0, KEYS, _CHUNK):
        keys = np.arange(start, start + _CHUNK)
        names = pa.array([f"name {key}" for key in keys])
        client.upsert(TABLE, pa.table([pa.array(keys), names, pa.array(keys)], schema=schema))


if __name__ == "__main__":
    main()
