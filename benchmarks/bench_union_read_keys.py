"""Reading a primary key table in Spark, changed since it was tiered, against its lake alone."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.bench_union_read import _PeakMemory
from benchmarks.harness import SCHEMA, make_rows, median, report, timed
from streamhouse.api.client import StreamhouseClient
from streamhouse.client import StorageClient
from streamhouse.reading.options.options import BATCH, read_options
from streamhouse.reading.plan.batch_read import plan_batch_read
from streamhouse.reading.plan.row_form import table_columns
from streamhouse.reading.scan.scan import LakePiece, LogPiece, Split
from tests.support.service_process import ServiceProcess
from tests.support.tier_once import tier_once

os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from pyspark.sql import DataFrame, SparkSession

import streamhouse

ROWS = int(os.environ.get("BENCH_ROWS", "5000000"))
UPDATED = ROWS // 10
DELETED = ROWS // 50
BUCKETS = 4
REPEATS = 5
CHUNK = 250_000
TABLE = "default.union_read_keys"


def main() -> None:
    """Report the union read's time and memory as multiples of `$lake`'s, and its state's size."""
    with tempfile.TemporaryDirectory() as directory, ServiceProcess(directory) as service:
        with StreamhouseClient(service.endpoint) as client:
            _fill(client)
            _report_state(client)
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.driver.memory", "2g")
            .config("spark.ui.showConsoleProgress", "false")
            .getOrCreate()
        )
        streamhouse.register(spark)
        assert _load(spark, service.endpoint, TABLE).count() == ROWS - DELETED
        assert _load(spark, service.endpoint, f"{TABLE}$lake").count() == ROWS
        _compare(spark, service.endpoint)
        spark.stop()


def _fill(client: StreamhouseClient) -> None:
    """Tier all rows, then change some: every change is still in the log."""
    client.create_table(TABLE, SCHEMA, primary_key=["id"], bucket_count=BUCKETS)
    for first in range(0, ROWS, CHUNK):
        client.upsert(TABLE, pa.Table.from_batches([make_rows(CHUNK, first_id=first)]))
    tier_once(client, TABLE)
    changed = np.random.default_rng(3).permutation(ROWS)[: UPDATED + DELETED]
    for first in range(0, ROWS, CHUNK):
        ids = changed[:UPDATED]
        ours = pa.array(np.sort(ids[(first <= ids) & (ids < first + CHUNK)]) - first)
        # Another seed: the same ids with other values.
        news = pa.Table.from_batches([make_rows(CHUNK, first_id=first, seed=10**9)])
        ids = pa.array(np.arange(first, first + CHUNK))
        client.upsert(TABLE, news.set_column(0, SCHEMA.field("id"), ids).take(ours))
    client.delete(TABLE, pa.table({"id": pa.array(changed[UPDATED:])}))


def _report_state(client: StreamhouseClient) -> None:
    state = client.table_state(TABLE)
    options = read_options({"table": TABLE, "endpoint": client.endpoint}, use=BATCH)
    output = table_columns(state.table, columns=None, include_metadata=False, has_change_type=False)
    plan = plan_batch_read(StorageClient.of(client), state, options, output)
    size = sum(map(len, _retracted(plan.splits)))
    shipped = sum(len(pickle.dumps(split)) for split in plan.splits)
    report(
        f"state of a union read, {UPDATED + DELETED:,} rows changed since tiering",
        measured=f"{size / (UPDATED + DELETED):.1f} bytes a changed row",
        limit=f"plan in all: {shipped / 1e6:.1f} MB in {len(plan.splits)} splits",
        ratio=size / (UPDATED + DELETED),
        bar="at most 16",
        reached=size <= 16 * (UPDATED + DELETED),
    )


def _retracted(splits: Iterable[Split]) -> Iterable[bytes]:
    for split in splits:
        for piece in split.pieces:
            if isinstance(piece, LakePiece):
                yield from (part.gaps for part in piece.retracted)
            elif isinstance(piece, LogPiece) and piece.retracted is not None:
                yield piece.retracted.gaps


def _compare(spark: SparkSession, endpoint: str) -> None:
    names = {"lake": f"{TABLE}$lake", "union": TABLE}
    seconds: dict[str, list[float]] = {kind: [] for kind in names}
    memory: dict[str, list[int]] = {kind: [] for kind in names}
    for repeat in range(REPEATS + 1):
        for kind, name in names.items():
            # Planned anew each time: planning is where the changes since tiering are looked at.
            with _PeakMemory() as peak:
                took = timed(lambda name=name: _drain(_load(spark, endpoint, name)))
            if repeat:
                seconds[kind].append(took)
                memory[kind].append(peak.bytes)
    lake, union = median(seconds["lake"]), median(seconds["union"])
    report(
        f"union read of {ROWS / 1e6:.0f} M rows with a primary key, 10% updated and 2% deleted"
        " since tiering",
        measured=f"{union:.2f} s",
        limit=f"$lake alone: {lake:.2f} s",
        ratio=union / lake,
        bar="at most 1.3",
        reached=union / lake <= 1.3,
    )
    most, least = median(memory["union"]), median(memory["lake"])
    report(
        "memory of the Python workers in that read, peak",
        measured=f"{most / 1e6:.0f} MB",
        limit=f"$lake alone: {least / 1e6:.0f} MB",
        ratio=most / least,
        bar="at most 1.25",
        reached=most / least <= 1.25,
    )


def _load(spark: SparkSession, endpoint: str, name: str) -> DataFrame:
    return spark.read.format("streamhouse").option("endpoint", endpoint).load(name)


def _drain(frame: DataFrame) -> Any:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    main()
