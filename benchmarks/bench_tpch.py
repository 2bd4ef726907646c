"""TPC-H's queries 1, 6 and 12 by `streamhouse.sql`, against `spark.read.parquet` of the same files.

Scale factor 1 has 6 M line items and 1.5 M orders; `TPCH_SCALE=0.1` has a tenth. All sides run
in one session and take turns. Beside the seconds stands the processor time of Spark and all of its
Python processes, which a busy machine does not move.

The floor is a Python data source that does nothing but read the same columns of the same files
with pyarrow, drop the rows that the query drops, and hand over the rest, decimals as decimals. We
hand over bigints for them, of which Spark makes decimals, and may so take less than the floor.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import family_cpu_seconds, median, report, timed
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once
from tests.support.tpch import queries, tpch_tables

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

import streamhouse

SCALE = float(os.environ.get("TPCH_SCALE", "1"))
REPEATS = 5
QUERIES = (1, 6, 12)
TABLES = ("lineitem", "orders")
CHUNK_ROWS = 500_000
BATCH_ROWS = 65_536
CORES = 2

NEEDS = {
    1: {
        "lineitem": (
            "l_quantity l_extendedprice l_discount l_tax l_returnflag l_linestatus l_shipdate",
            [("l_shipdate", "less_equal", "1998-09-02")],
        )
    },
    6: {
        "lineitem": (
            "l_quantity l_extendedprice l_discount l_shipdate",
            [
                ("l_shipdate", "greater_equal", "1994-01-01"),
                ("l_shipdate", "less", "1995-01-01"),
                ("l_discount", "greater_equal", "0.05"),
                ("l_discount", "less_equal", "0.07"),
                ("l_quantity", "less", "24.00"),
            ],
        )
    },
    12: {
        "lineitem": (
            "l_orderkey l_shipdate l_commitdate l_receiptdate l_shipmode",
            [
                ("l_receiptdate", "greater_equal", "1994-01-01"),
                ("l_receiptdate", "less", "1995-01-01"),
                ("l_commitdate", "less", "l_receiptdate"),
                ("l_shipdate", "less", "l_commitdate"),
                ("l_shipmode", "is_in", "MAIL SHIP"),
            ],
        ),
        "orders": ("o_orderkey o_orderpriority", []),
    },
}
"""What each query needs of a table: columns, and comparisons that all have to be true."""


def main() -> None:
    """Report the ratio of seconds and of processor time for each query."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            files = _load(client)
        spark = _session()
        spark.dataSource.register(Floor)
        for name, paths in files.items():
            spark.read.parquet(*paths).createOrReplaceTempView(name)
        for number in QUERIES:
            for name, (columns, tests) in NEEDS[number].items():
                _floor(spark, name, files[name], columns.split(), tests)
            _compare(spark, service.endpoint, number)
        spark.stop()


def _floor(
    spark: SparkSession,
    name: str,
    paths: list[str],
    columns: list[str],
    tests: list[tuple[str, str, str]],
) -> None:
    """Make the view `floor_NAME`."""
    reader = spark.read.format("tpch_floor").schema(spark.table(name).select(*columns).schema)
    given = {"files": json.dumps(paths), "tests": json.dumps(tests)}
    reader.options(**given).load().createOrReplaceTempView(f"floor_{name}")


class _Groups(InputPartition):
    """Row groups of files."""

    def __init__(self, groups: list[tuple[str, int]]) -> None:
        super().__init__(None)
        self.groups = groups


class Floor(DataSource):
    """The least that a Python source can do."""

    @classmethod
    def name(cls) -> str:
        """The format's name."""
        return "tpch_floor"

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return what reads the files in the option `files`."""
        files, tests = (json.loads(self.options[key]) for key in ("files", "tests"))
        return FloorReader(files, tests, to_arrow_schema(schema, timezone="UTC"))


class FloorReader(DataSourceReader):
    """Reads the columns of `schema`, and keeps the rows that pass all tests."""

    def __init__(
        self, files: list[str], tests: list[tuple[str, str, str]], schema: pa.Schema
    ) -> None:
        self._files = [path.removeprefix("file://") for path in files]
        self._tests = tests
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        """Return two partitions a core, as ours has them."""
        groups = [
            (path, group)
            for path in self._files
            for group in range(pq.read_metadata(path).num_row_groups)
        ]
        count = 2 * CORES
        return [_Groups(groups[first::count]) for first in range(min(count, len(groups)))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition."""
        assert isinstance(partition, _Groups)
        for path, group in partition.groups:
            with pq.ParquetFile(path) as file:
                for batch in file.iter_batches(
                    BATCH_ROWS,
                    row_groups=[group],
                    columns=self._schema.names,
                    use_threads=False,
                ):
                    arrays = [batch.column(name) for name in self._schema.names]
                    mask = self._mask(batch)
                    if mask is not None:
                        arrays = [array.filter(mask) for array in arrays]
                    yield pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _mask(self, batch: pa.RecordBatch) -> pa.BooleanArray | None:
        mask = None
        for name, function, given in self._tests:
            column = batch.column(name)
            if given in batch.schema.names:
                other = batch.column(given)
            elif function == "is_in":
                other = pa.array(given.split())
            else:
                other = pa.scalar(given).cast(column.type)
            found = getattr(pc, function)(column, other)
            mask = found if mask is None else pc.and_(mask, found)
        return mask


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
    plain, ours = queries()[number], queries("tpch")[number]

    def by_streamhouse() -> DataFrame:
        return streamhouse.sql(spark, ours, endpoint=endpoint)

    def by_parquet() -> DataFrame:
        return spark.sql(plain)

    def by_floor() -> DataFrame:
        text = plain
        for name in NEEDS[number]:
            text = text.replace(f"    {name}", f"    floor_{name}")
        return spark.sql(text)

    sides = {"ours": by_streamhouse, "parquet": by_parquet, "floor": by_floor}
    ours_answer, *others = [query().collect() for query in sides.values()]
    assert all(ours_answer == other for other in others)
    wall: dict[str, list[float]] = {name: [] for name in sides}
    processor: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(REPEATS):
        for name, query in sides.items():
            before = family_cpu_seconds()
            wall[name].append(timed(_answered(query)))
            processor[name].append(family_cpu_seconds() - before)
    for what, found in (("seconds", wall), ("processor seconds", processor)):
        mine, theirs, least = (median(found[name]) for name in sides)
        report(
            f"TPC-H query {number} at scale factor {SCALE:g}: {what}, planning included",
            measured=f"{mine:.2f} s",
            limit=f"spark.read.parquet of the same files: {theirs:.2f} s; the least that a Python"
            f" source takes: {least:.2f} s, {least / theirs:.2f} of it",
            ratio=mine / theirs,
            bar="at most 1.5",
            reached=mine / theirs <= 1.5,
        )


def _answered(query: Callable[[], DataFrame]) -> Callable[[], object]:
    return lambda: query().collect()


def _session() -> SparkSession:
    return (
        SparkSession.builder.master(f"local[{CORES}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


if __name__ == "__main__":
    main()
