"""Reading 10 M tiered rows in Spark, against a minimal Python data source on the same files."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks.harness import SCHEMA, make_rows, median, report, timed
from streamhouse.api.client import StreamhouseClient
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

import streamhouse

ROWS = 10_000_000
BUCKETS = 4
REPEATS = 5
TABLE = "default.union_read"


def main() -> None:
    """Report speed and memory of the union read, and the gain of reading one column of five."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            client.create_table(TABLE, SCHEMA, bucket_count=BUCKETS)
            for first in range(0, ROWS, 500_000):
                client.append(TABLE, make_rows(500_000, first_id=first))
            tier_once(client, TABLE)
            files = client.read(f"{TABLE}$files")["path"].to_pylist()
        spark = _session()
        spark.dataSource.register(_minimal_source(files))
        streamhouse.register(spark)
        minimal = spark.read.format("minimal").load()
        union = _union(spark, service.endpoint)
        one_column = _union(spark, service.endpoint, columns="amount")
        assert union.count() == ROWS == minimal.count()
        _compare(minimal, union, one_column)
        spark.stop()


def _compare(minimal: DataFrame, union: DataFrame, one_column: DataFrame) -> None:
    seconds: dict[str, list[float]] = {"minimal": [], "union": [], "one column": []}
    memory: dict[str, list[int]] = {"minimal": [], "union": [], "one column": []}
    frames = {"minimal": minimal, "union": union, "one column": one_column}
    for repeat in range(REPEATS + 1):
        for name, frame in frames.items():
            with _PeakMemory() as peak:
                took = timed(_drain(frame))
            # The first run warms up the JVM and the workers.
            if repeat:
                seconds[name].append(took)
                memory[name].append(peak.bytes)
    floor, ours = median(seconds["minimal"]), median(seconds["union"])
    report(
        f"union read of {ROWS / 1e6:.0f} M tiered rows, 5 columns",
        measured=f"{ROWS / ours / 1e6:.2f} M rows/s",
        limit=f"minimal Python data source, same files: {ROWS / floor / 1e6:.2f} M rows/s",
        ratio=floor / ours,
        bar="at least 0.6",
        reached=floor / ours >= 0.6,
    )
    least, most = median(memory["minimal"]), median(memory["union"])
    report(
        "memory of the Python workers in that read, peak",
        measured=f"{most / 1e6:.0f} MB",
        limit=f"minimal Python data source: {least / 1e6:.0f} MB",
        ratio=most / least,
        bar="at most 1.25",
        reached=most / least <= 1.25,
    )
    column = median(seconds["one column"])
    report(
        "option columns: 1 of 5 columns",
        measured=f"{column:.2f} s",
        limit=f"all five: {ours:.2f} s",
        ratio=ours / column,
        bar="at least 2",
        reached=ours / column >= 2,
    )


def _session() -> SparkSession:
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )


def _union(spark: SparkSession, endpoint: str, **options: str) -> DataFrame:
    reader = spark.read.format("streamhouse").option("endpoint", endpoint)
    return reader.options(**options).load(TABLE)


def _drain(frame: DataFrame) -> Any:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def _minimal_source(files: list[str]) -> type[DataSource]:
    """Return a source that does nothing but yield the files' user columns as Arrow batches."""
    paths = [path.removeprefix("file://") for path in files]
    names = SCHEMA.names

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(path) for path in paths]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            # Pickled by value: a worker knows nothing of this module.
            import pyarrow.parquet as parquet

            file = parquet.ParquetFile(partition.value)
            for batch in file.iter_batches(65_536, columns=names):
                yield batch.replace_schema_metadata(None)

    class Minimal(DataSource):
        @classmethod
        def name(cls) -> str:
            return "minimal"

        def schema(self) -> StructType:
            return from_arrow_schema(SCHEMA)

        def reader(self, schema: StructType) -> DataSourceReader:
            return Reader()

    return Minimal


class _PeakMemory:
    """Samples the memory of Spark's Python workers: private and shared pages, each counted once."""

    def __enter__(self) -> _PeakMemory:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(0.02):
            self.bytes = max(self.bytes, sum(map(_resident_bytes, _worker_ids())))


def _worker_ids() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"pyspark.daemon" in command and b"pyspark.worker" in command:
                found.append(int(entry.name))
    return found


def _resident_bytes(process_id: int) -> int:
    try:
        text = Path(f"/proc/{process_id}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
