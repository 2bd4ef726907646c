"""What the Spark tests share: a session in this process, a real service, real tiering rounds."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.streaming import DataStreamReader

import streamhouse
from streamhouse.api.client import StreamhouseClient
from tests.support.expired_log import EXPIRING, expire_log
from tests.support.python_process import python_for_spark
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

__all__ = [
    "EVENTS",
    "EXPIRING",
    "SentRows",
    "SparkWorld",
    "event_rows",
    "last_line",
    "spark_session",
    "world",
]

EVENTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("region", pa.string()),
        pa.field("small", pa.int8()),
        pa.field("price", pa.decimal128(12, 2)),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("zone", pa.int16()), ("name", pa.string())])),
    ]
)


def event_rows(start: int, end: int) -> pa.Table:
    """Return rows of EVENTS with ids [start, end)."""
    ids = range(start, end)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "region": [("eu", "us", None)[i % 3] for i in ids],
            "small": pa.array([i % 100 for i in ids], pa.int8()),
            "price": pa.array([Decimal(i) for i in ids], pa.decimal128(12, 2)),
            "at": pa.array([i * 1_000_000 for i in ids], pa.timestamp("us", tz="UTC")),
            "tags": [[f"t{i % 5}"] * (i % 3) for i in ids],
            "place": [{"zone": i % 7, "name": f"n{i}"} for i in ids],
        },
        schema=EVENTS,
    )


class SparkWorld:
    """A service with its client, and Spark with the format registered."""

    def __init__(self, service: ServiceProcess, spark: SparkSession) -> None:
        self.service = service
        self.endpoint = service.endpoint
        self.spark = spark
        self.client = StreamhouseClient(service.endpoint)
        self._tables = 0
        streamhouse.register(spark)

    def table(self, *, rows: int = 0, **options: Any) -> str:
        """Create a table of EVENTS under a name of its own, with that many rows in the log."""
        self._tables += 1
        path = f"default.events_{self._tables}"
        self.client.create_table(path, EVENTS, **options)
        if rows:
            self.client.append(path, event_rows(0, rows))
        return path

    def append(self, path: str, start: int, end: int) -> None:
        """Append rows with ids [start, end)."""
        self.client.append(path, event_rows(start, end))

    def tier(self, path: str) -> int:
        """Move everything in the log to the lake; the log keeps its rows until they expire."""
        return tier_once(self.client, path)

    def expire_log(self, path: str) -> dict[int, int]:
        """Wait until retention took rows of every bucket; return where the log starts then.

        The table needs EXPIRING, and one with a lake must be tiered first.
        """
        return expire_log(self.client, path)

    def reader(self, **options: Any) -> DataFrameReader:
        reader = self.spark.read.format("streamhouse").option("endpoint", self.endpoint)
        return reader.options(**options)

    def load(self, name: str, **options: Any) -> DataFrame:
        return self.reader(**options).load(name)

    def stream(self, path: str, **options: Any) -> DataFrame:
        reader: DataStreamReader = self.spark.readStream.format("streamhouse")
        return reader.option("endpoint", self.endpoint).options(**options).load(path)

    def write(self, frame: DataFrame, path: str, *, mode: str = "append", **options: Any) -> None:
        writer = frame.write.format("streamhouse").option("endpoint", self.endpoint)
        writer.options(**options).mode(mode).save(path)

    def ids(self, frame: DataFrame) -> list[int]:
        """Return the ids of a frame, sorted; a row twice is there twice."""
        return sorted(row.id for row in frame.select("id").collect())


class SentRows:
    """How many rows the service sent in a `with` block, those that were looked up, too."""

    def __init__(self, world: SparkWorld) -> None:
        self._world = world

    def __enter__(self) -> SentRows:
        self._before = self._sent()
        return self

    def __exit__(self, *_: object) -> None:
        self.rows = self._sent() - self._before

    def _sent(self) -> int:
        with urllib.request.urlopen(f"{self._world.endpoint}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(r"^streamhouse_sent_rows_total\S* (\S+)$", text, re.M)
        return sum(int(float(value)) for value in found)


def last_line(error: BaseException) -> str:
    """Return the last line of an error as a user sees it, without Spark's SQLSTATE line."""
    lines: Sequence[str] = [
        line.strip()
        for line in str(error).splitlines()
        if line.strip() and not line.strip().startswith("SQLSTATE")
    ]
    return lines[-1]


@contextlib.contextmanager
def spark_session(master: str = "local[2]") -> Iterator[SparkSession]:
    """A session in this process; stopped at the end, so that another module may have its own."""
    warehouse = tempfile.mkdtemp(prefix="spark-warehouse-")
    os.environ["PYSPARK_PYTHON"] = python_for_spark()
    session = (
        SparkSession.builder.master(master)
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.session.timeZone", "America/New_York")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", warehouse)
        .config("spark.driver.memory", "1g")
        # PySpark 4.0 has scripts, but not as its default.
        .config("spark.sql.scripting.enabled", "true")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()
        shutil.rmtree(warehouse, ignore_errors=True)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkWorld]:
    """One service and one session for a module; each test has tables of its own."""
    with (
        ServiceProcess(
            tmp_path_factory.mktemp("service"), "--retention-interval-ms", "100"
        ) as service,
        spark_session() as session,
    ):
        opened = SparkWorld(service, session)
        yield opened
        opened.client.close()
