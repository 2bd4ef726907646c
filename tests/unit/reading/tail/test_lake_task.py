"""A task on its own: what it pickles, what it turns rows into, how it stops."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamhouse.client import LogBatch
from streamhouse.core.errors import (
    CorruptDataError,
    InvalidRequestError,
    UnavailableError,
)
from streamhouse.core.model.offsets import OffsetRange
from streamhouse.core.model.schema import Schema
from streamhouse.lake.files._field_ids import assign_nested_ids, lake_arrow_schema
from streamhouse.lake.files.lake_filesystem import LakeFilesystem
from streamhouse.lake.files.parquet_writer import FileFormat
from streamhouse.reading.tail import _log_chunks as log_chunks
from streamhouse.reading.tail._lake_rows import lake_rows
from streamhouse.reading.tail.lake_task import TieringSplit, run_split
from tests.support.held_step import around, lower
from tests.support.tiering_world import SCHEMA, TieringWorld, rows

LAKE_SCHEMA = lake_arrow_schema(Schema.from_arrow(SCHEMA), {})


def _split(folder: Path, *, end: int, secret: str = "s3cr3t") -> TieringSplit:
    return TieringSplit(
        endpoint="memory:",
        token=secret,
        table="db.t",
        table_id=1,
        schema_id=0,
        range=OffsetRange(bucket=0, start=0, end=end),
        lake_schema=LAKE_SCHEMA.serialize().to_pybytes(),
        partitioning=(),
        folder=f"file://{folder}",
        file_format=FileFormat(),
        files=LakeFilesystem({"s3.secret-access-key": secret}),
    )


def _batch(start: int, count: int, *, timestamp_us: int = 1_000) -> LogBatch:
    return LogBatch(bucket=0, base_offset=start, timestamp_us=timestamp_us, data=rows(start, count))


def test_a_split_crosses_processes_and_shows_no_secret(tmp_path: Path) -> None:
    split = _split(tmp_path, end=3)

    copy = pickle.loads(pickle.dumps(split))

    assert (copy.table, copy.range, copy.token) == ("db.t", split.range, "s3cr3t")
    assert "s3cr3t" not in repr(split)


def test_rows_carry_their_bucket_offset_and_time() -> None:
    batches = [_batch(7, 2, timestamp_us=5), _batch(9, 1, timestamp_us=8)]

    table = lake_rows(batches, LAKE_SCHEMA)

    assert table.schema.equals(LAKE_SCHEMA, check_metadata=True)
    assert table["__bucket"].to_pylist() == [0, 0, 0]
    assert table["__offset"].to_pylist() == [7, 8, 9]
    assert table["__timestamp"].cast(pa.int64()).to_pylist() == [5, 5, 8]
    assert table["id"].to_pylist() == [7, 8, 9]


def test_rows_of_other_columns_are_refused() -> None:
    batch = LogBatch(
        bucket=0, base_offset=0, timestamp_us=1, data=pa.record_batch({"other": [1], "name": ["a"]})
    )

    with pytest.raises(CorruptDataError, match=r"\['other', 'name'\] came for a lake table"):
        lake_rows([batch], LAKE_SCHEMA)


def test_small_integers_are_widened_however_deep() -> None:
    schema = pa.schema(
        [
            ("tiny", pa.int8()),
            ("tags", pa.list_(pa.field("element", pa.int16()))),
            ("counts", pa.map_(pa.string(), pa.int8())),
            ("place", pa.struct([("x", pa.int8()), ("y", pa.list_(pa.int8()))])),
        ]
    )
    values = {"tiny": -1, "tags": [1, None], "counts": [("a", 2)], "place": {"x": 3, "y": [4]}}
    batch = pa.RecordBatch.from_pylist([values, dict.fromkeys(values)], schema=schema)
    ours = Schema.from_arrow(schema)
    lake_schema = lake_arrow_schema(ours, assign_nested_ids(ours))

    table = lake_rows([LogBatch(bucket=0, base_offset=0, timestamp_us=1, data=batch)], lake_schema)

    assert table.select(schema.names).to_pylist() == [values, dict.fromkeys(values)]
    assert table.schema.field("place").type.field("x").type == pa.int32()


def test_tiny_batches_are_written_together(
    world: TieringWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.create_table()
    for start in range(300):
        world.service.append("db.t", 0, rows(start, 1))
    calls = []

    def count(real: Any, batches: list[LogBatch], *more: Any, **named: Any) -> Any:
        calls.append(len(batches))
        return real(batches, *more, **named)

    around(monkeypatch, "lake-rows-made", count)

    result = run_split(_split(tmp_path / "out", end=300), open_log=lambda _: world.service)

    assert calls == [300]
    (file,) = result.files
    found = pq.read_table(file.path.removeprefix("file://"))
    assert found["__offset"].to_pylist() == list(range(300))
    # Each row was its own append, at its own time.
    assert len(set(found["__timestamp"].to_pylist())) == 300


def test_progress_counts_every_row_once(world: TieringWorld, tmp_path: Path) -> None:
    world.create_table()
    world.service.append("db.t", 0, rows(0, 70_000))
    world.service.append("db.t", 0, rows(70_000, 10))
    seen: list[int] = []

    run_split(
        _split(tmp_path / "out", end=70_010),
        open_log=lambda _: world.service,
        on_rows=seen.append,
    )

    assert sum(seen) == 70_010
    assert len(seen) == 2


def test_a_cancelled_task_stops_reading_and_leaves_nothing(
    world: TieringWorld, tmp_path: Path
) -> None:
    world.create_table()
    for start in range(0, 1_000_000, 100_000):
        world.service.append("db.t", 0, rows(start, 100_000))
    written: list[int] = []

    with pytest.raises(UnavailableError, match="cancelled"):
        run_split(
            _split(tmp_path / "out", end=1_000_000),
            open_log=lambda _: world.service,
            on_rows=written.append,
            is_cancelled=lambda: len(written) == 2,
        )

    assert sum(written) == 200_000
    assert list((tmp_path / "out").rglob("*")) == []
    assert not any(t.name == "tiering-read" for t in threading.enumerate())


def test_an_error_of_the_reading_thread_is_the_tasks(world: TieringWorld, tmp_path: Path) -> None:
    world.create_table()

    def broken(*_: object) -> Iterator[LogBatch]:
        yield _batch(0, 3)
        raise UnavailableError("gone")

    world.service.on_read = broken

    # A few rows are read without a thread.
    for end in (9, 100_000):
        with pytest.raises(UnavailableError, match="gone"):
            run_split(_split(tmp_path / "out", end=end), open_log=lambda _: world.service)


def test_reading_ahead_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    lower(monkeypatch, "read-page", 500)
    pulled: list[int] = []
    is_waiting = threading.Event()

    def take_and_say(real: Any, budget: Any, size: int) -> Any:
        if budget._used >= budget._size:
            is_waiting.set()
        return real(budget, size)

    around(monkeypatch, "budget-taking", take_and_say)

    def batches() -> Iterator[LogBatch]:
        for start in range(0, 10_000, 100):
            pulled.append(start)
            yield _batch(start, 100)

    reader = log_chunks._ahead(lambda: log_chunks.chunks_of(batches()))
    next(reader)
    assert is_waiting.wait(60)

    # One is consumed, one or two wait within the budget, one is held by the reading thread.
    assert len(pulled) <= 4
    assert sum(chunk.row_count for chunk in reader) == 9_900


def test_the_modules_executors_load_know_neither_spark_nor_pyiceberg() -> None:
    program = (
        "import sys, streamhouse.reading.tail.lake_task;"
        "print([m for m in ('pyspark', 'pyiceberg', 'pandas', 'rich') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )

    assert done.stdout.strip() == "[]", done.stderr


def test_the_default_client_goes_to_the_splits_endpoint(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="endpoint 'memory:' is not a URL"):
        run_split(_split(tmp_path, end=1))
