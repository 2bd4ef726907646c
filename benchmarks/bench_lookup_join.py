"""A lookup join in Spark against an empty `mapInArrow` of the same rows, in the same run.

A third side adds a column to the rows that is the same in each, and looks nothing up: what it takes
more than the empty one is Spark's price for one more column. Where that alone is more than the bar,
no lookup can reach it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import family_cpu_seconds, median, report, timed
from streamhouse.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession

import streamhouse

ROWS: Final = 5_000_000
KEYS: Final = 1_000_000
REPEATS: Final = 4
BAR: Final = 1.25
CASES: Final = (
    ("close integers", "points"),
    ("close integers", "name"),
    ("integers far apart", "points"),
    ("texts", "points"),
)
"""What the keys are, and which column is looked up: a bigint, or a text of 11 characters."""
_SPREAD: Final = 0x9E3779B97F4A7C15
_CHUNK: Final = 100_000


def main() -> None:
    """Report the price of looking rows up, by keys close together, far apart, and texts."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        spark = _session()
        with StreamhouseClient(service.endpoint) as client:
            for kind, column in CASES:
                _compare(spark, client, kind, column)
        spark.stop()


def _session() -> SparkSession:
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.memory", "2g")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session


def _compare(spark: SparkSession, client: StreamhouseClient, kind: str, column: str) -> None:
    key_type = "string" if kind == "texts" else "bigint"
    table = f"default.users_{kind.replace(' ', '_')}_{column}"
    _fill(client, table, kind)
    # A row has a key at random, so nearly all keys of a batch are different ones.
    number = f"pmod(id * 7919 + id DIV 11, {KEYS})"
    key = {
        "close integers": number,
        "integers far apart": f"{number} * {_SPREAD - (1 << 64)}",
        "texts": f"concat('user-', {number})",
    }[kind]
    spark.conf.set("spark.sql.ansi.enabled", "false")
    rows = spark.range(ROWS, numPartitions=2).selectExpr("id", f"{key} AS user")
    assert rows.schema["user"].dataType.simpleString() == key_type

    def looked_up(endpoint: str = client.endpoint) -> DataFrame:
        return streamhouse.lookup_join(
            rows, table, {"user": "k"}, columns=[column], endpoint=endpoint
        )

    empty = rows.mapInArrow(_as_they_are, rows.schema)
    with_one, added_type = (
        (_with_a_text, "string") if column == "name" else (_with_a_number, "bigint")
    )
    grown = rows.mapInArrow(with_one, f"id bigint, user {key_type}, added {added_type}")
    found = looked_up().where(f"{column} IS NOT NULL").count()
    assert found == ROWS, found
    work: dict[str, Callable[[], DataFrame]] = {
        "empty": lambda: empty,
        "grown": lambda: grown,
        "lookup": looked_up,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    processor: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(REPEATS + 1):
        for name, make in work.items() if repeat % 2 else reversed(work.items()):
            before = family_cpu_seconds()
            frame = make()
            took = timed(lambda frame=frame: _run(frame))
            if repeat:
                seconds[name].append(took)
                processor[name].append(family_cpu_seconds() - before)
    cpu = {name: median(values) for name, values in processor.items()}
    wall = {name: median(values) for name, values in seconds.items()}
    ratio = cpu["lookup"] / cpu["empty"]
    report(
        f"lookup join of {ROWS / 1e6:.0f} M rows with {KEYS / 1e6:.0f} M keys, {kind}, a"
        f" {'text' if column == 'name' else 'bigint'} is looked up: processor",
        measured=f"{cpu['lookup']:.1f} s (wall {wall['lookup']:.1f} s)",
        limit=f"empty mapInArrow: {cpu['empty']:.1f} s (wall {wall['empty']:.1f} s); one that adds"
        f" such a column, a constant: {cpu['grown']:.1f} s",
        ratio=ratio,
        bar=f"at most {BAR}",
        reached=ratio <= BAR,
    )


def _fill(client: StreamhouseClient, table: str, kind: str) -> None:
    numbers = np.arange(KEYS, dtype=np.uint64)
    if kind == "texts":
        keys = pa.array([f"user-{number}" for number in range(KEYS)])
    else:
        factor = np.uint64(_SPREAD if kind == "integers far apart" else 1)
        keys = pa.array((numbers * factor).view(np.int64))
    names = pa.array([f"name {number}" for number in range(KEYS)])
    columns = {"name": pa.string(), "points": pa.int64()}
    schema = pa.schema([pa.field("k", keys.type, nullable=False), *columns.items()])
    client.create_table(table, schema, primary_key=["k"], bucket_count=2)
    rows = pa.table([keys, names, pa.array(numbers.view(np.int64))], schema=schema)
    for start in range(0, KEYS, _CHUNK):
        client.upsert(table, rows.slice(start, _CHUNK))


def _as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _with_a_text(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.append_column("added", pa.repeat("name 123456", batch.num_rows))


def _with_a_number(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.append_column("added", pa.repeat(123_456, batch.num_rows))


def _run(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
