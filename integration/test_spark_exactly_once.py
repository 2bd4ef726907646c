"""Writes of real Spark happen once or not at all: retries, failures, replays, kills."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext
from pyspark.sql import DataFrame

from integration.spark_world import SparkWorld, spark_session
from streamhouse.connector import write_batch
from tests.support.service_process import ServiceProcess

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 200_000
"""Enough for several requests a task."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkWorld]:
    """Spark that gives each task two more attempts, which its local mode does not by default."""
    with (
        ServiceProcess(tmp_path_factory.mktemp("service")) as service,
        spark_session("local[2,3]") as session,
    ):
        opened = SparkWorld(service, session)
        opened.client.create_database("once")
        yield opened
        opened.client.close()


def log_table(world: SparkWorld, path: str) -> str:
    world.client.create_table(path, pa.schema([("id", pa.int64())]), bucket_count=2)
    return path


def failing(frame: DataFrame, *, attempts: int) -> DataFrame:
    """Return the same rows; after the last row of partition 1 its first attempts fail."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() == 1 and context.attemptNumber() < attempts:
            raise RuntimeError("as planned")

    return frame.mapInArrow(run, frame.schema)


def end_offsets(world: SparkWorld, path: str) -> int:
    return sum(p.high_watermark for p in world.client.positions(path).values())


@pytest.mark.end_to_end
def test_rows_of_attempts_that_failed_are_not_in_the_table(world: SparkWorld) -> None:
    path = log_table(world, "once.retried")

    world.write(failing(world.spark.range(0, ROWS, 1, 2), attempts=2), path)

    assert world.ids(world.load(path)) == list(range(ROWS))
    assert end_offsets(world, path) == ROWS


@pytest.mark.end_to_end
def test_a_job_that_fails_leaves_nothing(world: SparkWorld) -> None:
    path = log_table(world, "once.failed")
    frame = failing(world.spark.range(0, ROWS, 1, 2), attempts=9)

    with pytest.raises(Exception, match="as planned"):
        world.write(frame, path)

    assert end_offsets(world, path) == 0
    # What is sent straight to the table stays there: a request of each attempt of partition 1,
    # together more rows than it has. How far partition 0 came is chance.
    with pytest.raises(Exception, match="as planned"):
        world.write(frame, path, **{"write.transactional": "false"})
    assert end_offsets(world, path) > ROWS // 2


def test_a_version_of_an_application_is_written_once(world: SparkWorld) -> None:
    path = log_table(world, "once.versions")
    frame = world.spark.range(10)

    for version in (1, 2, 2, 1, 3):
        world.write(frame, path, **{"app.id": "nightly", "app.version": version})

    assert world.load(path).count() == 30


@pytest.mark.end_to_end
def test_the_frames_order_decides_across_tasks(world: SparkWorld) -> None:
    """Eight tasks have rows of every key: the last row in the frame's order is the one kept."""
    path = "once.ordered"
    frame = world.spark.range(0, 40_000, 1, 8).selectExpr("id % 20 as key", "id as at")

    world.write(frame, path, **{"primary.key": "key", "bucket.num": "2"})

    found = world.client.lookup(path, pa.table({"key": pa.array(range(20), pa.int64())}))
    assert found["at"].to_pylist() == list(range(39_980, 40_000))


def test_the_greater_sequence_wins_if_the_frame_is_in_its_order(world: SparkWorld) -> None:
    path = "once.sequence"
    frame = world.spark.range(0, 40_000, 1, 8).selectExpr(
        "id % 20 as key", "(id * 7919) % 40000 as at"
    )
    options = {"primary.key": "key", "sequence.column": "at"}

    with pytest.raises(Exception, match=r"write df\.orderBy\('at'\)"):
        world.write(frame, path, **options)
    assert world.client.count(path) == 0
    world.write(frame.orderBy("at"), path, **options)

    newest = {r.key: r.at for r in frame.groupBy("key").agg({"at": "max"}).toDF("key", "at")
              .collect()}  # fmt: skip
    found = world.client.lookup(path, pa.table({"key": pa.array(range(20), pa.int64())}))
    assert dict(zip(found["key"].to_pylist(), found["at"].to_pylist(), strict=True)) == newest


def sink_writer(world: SparkWorld, path: str) -> Callable[[DataFrame, Path], Any]:
    def start(frame: DataFrame, checkpoint: Path) -> Any:
        writer = frame.writeStream.format("streamhouse").option("endpoint", world.endpoint)
        return writer.option("checkpointLocation", str(checkpoint)).trigger(
            availableNow=True
        ).start(path)  # fmt: skip

    return start


def foreach_writer(world: SparkWorld, path: str) -> Callable[[DataFrame, Path], Any]:
    def write(rows: DataFrame, batch_id: int) -> None:
        write_batch(rows, batch_id, table=path, endpoint=world.endpoint)

    def start(frame: DataFrame, checkpoint: Path) -> Any:
        writer = frame.writeStream.foreachBatch(write)
        return writer.option("checkpointLocation", str(checkpoint)).trigger(
            availableNow=True
        ).start()  # fmt: skip

    return start


@pytest.mark.end_to_end
@pytest.mark.parametrize("writer", [sink_writer, foreach_writer])
def test_a_micro_batch_committed_but_not_checkpointed_is_replayed_to_nothing(
    world: SparkWorld, tmp_path: Path, writer: Callable[..., Any]
) -> None:
    """As a kill leaves it between the sink's commit and Spark's own: no commit of the batch."""
    source, path = world.table(rows=2_000, bucket_count=2), f"once.replayed_{writer.__name__}"
    log_table(world, path)
    start = writer(world, path)

    def run() -> None:
        frame = world.stream(source, maxOffsetsPerTrigger=600, columns="id")
        start(frame, tmp_path).awaitTermination()

    run()
    commits = sorted((int(p.name), p) for p in (tmp_path / "commits").iterdir()
                     if p.name.isdigit())  # fmt: skip
    last = commits[-1][1]
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    world.append(source, 2_000, 2_500)
    run()

    assert len(commits) >= 4
    assert last.exists(), "the batch was run again"
    assert world.ids(world.load(path)) == list(range(2_500))


@pytest.mark.end_to_end
@pytest.mark.parametrize("is_made_again", [False, True])
@pytest.mark.parametrize("writer", [sink_writer, foreach_writer])
def test_a_stream_does_not_go_on_in_a_table_made_again(
    world: SparkWorld, tmp_path: Path, writer: Callable[..., Any], is_made_again: bool
) -> None:
    source = world.table(rows=10)
    path = log_table(world, f"once.made_again_{writer.__name__}_{is_made_again}")
    start = writer(world, path)
    start(world.stream(source, columns="id"), tmp_path / "first").awaitTermination()
    world.client.drop_table(path)
    if is_made_again:
        log_table(world, path)
    world.append(source, 10, 15)

    for _ in range(2):
        with pytest.raises(Exception, match=f"table '{path}' was dropped after stream .*new check"):
            start(world.stream(source, columns="id"), tmp_path / "first").awaitTermination()
        assert world.ids(world.load(path)) == []
    start(world.stream(source, columns="id"), tmp_path / "second").awaitTermination()
    assert world.ids(world.load(path)) == list(range(15))


@pytest.mark.end_to_end
def test_tasks_of_a_micro_batch_that_are_retried_write_once(
    world: SparkWorld, tmp_path: Path
) -> None:
    source, path = world.table(rows=2_000, bucket_count=2), log_table(world, "once.stream_retries")
    frame = failing(world.stream(source, maxOffsetsPerTrigger=600, columns="id"), attempts=1)

    sink_writer(world, path)(frame, tmp_path).awaitTermination()

    assert world.ids(world.load(path)) == list(range(2_000))


@pytest.mark.parametrize("how", ["sink", "foreach_batch"])
def test_a_stream_killed_again_and_again_copies_every_row_once(
    world: SparkWorld, tmp_path: Path, how: str
) -> None:
    """kill -9 of the whole driver while it writes; Spark restarts it from its checkpoint."""
    source, path = world.table(rows=6_000, bucket_count=2), f"once.killed_{how}"
    world.client.create_table(path, world.client.describe_table(source).schema.to_arrow())
    program = [sys.executable, "-m", "integration.stream_copy_program"]
    arguments = [world.endpoint, source, path, str(tmp_path / "checkpoint"), how]
    log = tmp_path / "program.log"
    for wanted_rows in (1, 2_500, None):
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*program, *arguments],
                cwd=Path(__file__).parents[1],
                env={**os.environ, "PYSPARK_PYTHON": sys.executable},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            if wanted_rows is None:
                assert process.wait(240) == 0, log.read_text()[-4_000:]
            else:
                _wait_for_rows(world, path, wanted_rows, process, log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    assert (tmp_path / "checkpoint" / "done").exists()
    assert world.ids(world.load(path)) == list(range(6_000))
    assert end_offsets(world, path) == 6_000


def _wait_for_rows(
    world: SparkWorld, path: str, row_count: int, process: subprocess.Popen[bytes], log: Path
) -> None:
    """Return right after the commit that made the rows visible."""
    ends = dict.fromkeys(world.client.positions(path), 0)
    while sum(ends.values()) < row_count:
        world.client.table_state(path, after=ends, max_wait_ms=10_000)
        ends = {b: p.high_watermark for b, p in world.client.positions(path).items()}
        assert process.poll() is None, log.read_text()[-4_000:]
