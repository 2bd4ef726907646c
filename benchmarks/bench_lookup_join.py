"""A lookup join in Spark against an empty `mapInArrow` of the same rows, in the same run.

A third side is what the lookup cannot do without: a function of Spark that returns the same
constant for each key, in the form of a lookup's answer. What the lookup takes more than that is
ours: the table is read, keys are found and values are taken. A row is written before each lookup,
so that none finds the table as an earlier one has read it; one more lookup follows which does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa

from benchmarks.harness import family_cpu_seconds, median, report, timed
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.functions import arrow_udf

import streamhouse

ROWS: Final = 5_000_000
KEYS: Final = 1_000_000
REPEATS: Final = 12
WARM_UPS: Final = 3
"""What Spark compiles meanwhile is nobody's price."""
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
    row = _fill(client, table, kind)
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
    constant = _with_a_constant(rows, column)
    found = looked_up().where(f"{column} IS NOT NULL").count()
    assert found == ROWS, found
    work: dict[str, Callable[[], DataFrame]] = {
        "empty": lambda: empty,
        "lookup": looked_up,
        "again": looked_up,
        "constant": lambda: constant,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    processor: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(WARM_UPS + REPEATS):
        # The empty one stands before the lookup, then behind it, always next to it.
        for name in (
            ("empty", "lookup", "again", "constant")
            if repeat % 2
            else ("constant", "lookup", "empty", "again")
        ):
            make = work[name]
            if name == "lookup":
                client.upsert(table, _changed(row, repeat))
            before = family_cpu_seconds()
            frame = make()
            took = timed(lambda frame=frame: _run(frame))
            if repeat >= WARM_UPS:
                seconds[name].append(took)
                processor[name].append(family_cpu_seconds() - before)
    cpu = {name: median(values) for name, values in processor.items()}
    wall = {name: median(values) for name, values in seconds.items()}
    # Sides of one round ran one after the other: what else the machine does then hits both.
    ratios = {
        name: median([a / b for a, b in zip(values, processor["empty"], strict=True)])
        for name, values in processor.items()
    }
    ratio = ratios["lookup"]
    report(
        f"lookup join of {ROWS / 1e6:.0f} M rows with {KEYS / 1e6:.0f} M keys, {kind}, a"
        f" {'text' if column == 'name' else 'bigint'} is looked up: processor",
        measured=f"{cpu['lookup']:.1f} s (wall {wall['lookup']:.1f} s, load of the machine"
        f" {os.getloadavg()[0]:.0f}); of a table that nobody has changed since:"
        f" {cpu['again']:.1f} s, {ratios['again']:.2f} times",
        limit=f"empty mapInArrow: {cpu['empty']:.1f} s (wall {wall['empty']:.1f} s); a function"
        f" that returns a constant: {cpu['constant']:.1f} s, {ratios['constant']:.2f} times",
        ratio=ratio,
        bar=f"at most {BAR}",
        reached=ratio <= BAR,
    )


def _fill(client: StreamhouseClient, table: str, kind: str) -> pa.Table:
    """Make the table, and return one of its rows."""
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
    return rows.slice(0, 1)


def _changed(row: pa.Table, repeat: int) -> pa.Table:
    """Return the row with a value that it has not had."""
    place = row.schema.get_field_index("points")
    return row.set_column(place, row.schema.field(place), pa.array([-1 - repeat]))


def _as_they_are(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield from batches


def _with_a_constant(rows: DataFrame, column: str) -> DataFrame:
    """Return the rows with a column that a function of the key makes, as a lookup does."""
    value: str | int = "name 123456" if column == "name" else 123_456

    def same(keys: Iterator[pa.Array]) -> Iterator[pa.Array]:
        for array in keys:
            yield pa.repeat(value, len(array))

    function: Any = arrow_udf(same, "string" if column == "name" else "bigint")
    return rows.select("*", function.asNondeterministic()("user").alias(column))


def _run(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
